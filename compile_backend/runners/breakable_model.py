"""What is known of a model that nobody traced: what it looks at in a batch, and what it returns.

Both are observed. The model runs as written on dummy batches of two sizes, which it is shown
through a :class:`_Watched` view: the slots as tensors, plain flags, and nothing else of the batch.
Whatever it looked at is a *fact* of the recording, which then serves batches with equal facts.
Dimensions of what it returns that follow the sizes are the ones to trim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from compile_backend.errors import FallbackReason, PassError
from compile_backend.forward_batch import ForwardBatch, PPProxyTensors
from compile_backend.passes.axes import Refusal
from compile_backend.runners.host_only import traceable_view

__all__ = ["OutputAxes", "Probe", "RecordedGraph", "RecordedModel", "facts_of", "show_batch"]

_FLAGS = (bool, str, Enum, type(None))
_PRESENT = "a tensor or an object"


def show_batch(
    view: ForwardBatch, slots: Mapping[str, Tensor], read: set[str] | None = None
) -> ForwardBatch:
    """``view`` as a model may see it while it is recorded: ``slots`` by name, and plain flags.

    Other fields are :class:`~compile_backend.runners.host_only.HostOnly`, the batch size too. The
    names of fields that are looked at are added to ``read``.
    """
    shown = traceable_view(view, slots.keys())
    for name, value in vars(shown).items():
        if isinstance(value, Tensor):
            setattr(shown, name, slots[name])
        elif isinstance(value, PPProxyTensors):
            items = {key: slots.get(f"{name}.{key}", item) for key, item in value.items()}
            setattr(shown, name, PPProxyTensors(items))
    if read is not None:
        shown.__class__ = _watching(type(shown), read)
    return shown


def _watching(kind: type[ForwardBatch], read: set[str]) -> type[ForwardBatch]:
    def look(self: Any, name: str) -> Any:
        fields = object.__getattribute__(self, "__dict__")
        if name == "__dict__":  # copy.copy, vars: everything
            read.update(fields)
        elif name in fields:
            read.add(name)
        return super(watched, self).__getattribute__(name)

    namespace = {"__getattribute__": look, "__doc__": kind.__doc__}
    watched: type[ForwardBatch] = type(kind.__name__, (kind,), namespace)
    return watched


def facts_of(batch: ForwardBatch, names: set[str]) -> dict[str, Any]:
    """What a model may know of these fields of the batch it is shown: a flag, None, or presence."""
    values = {name: vars(batch).get(name) for name in sorted(names)}
    return {name: v if isinstance(v, _FLAGS) else _PRESENT for name, v in values.items()}


@dataclass(frozen=True, slots=True)
class Probe:
    """One run of the model as written."""

    batch: ForwardBatch
    result: Any
    facts: dict[str, Any]
    slots: Mapping[str, frozenset[str]]  # that the batch has, and the axes of each


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputAxes:
    """What a model returns: for each tensor, the axis or the size of each dimension, if any."""

    spec: Any
    tensors: tuple[tuple[str | int | None, ...] | None, ...]  # None for a leaf that is no tensor
    constants: tuple[Any, ...]  # such leaves: None, strings, bools

    def mismatch(self, result: Any, sizes: Mapping[str, int]) -> str | None:
        """How ``result``, of a run at these sizes, is not what was observed; None where it is."""
        leaves, spec = pytree.tree_flatten(result)
        if spec != self.spec:
            return f"the model returned {spec} and returned {self.spec} at other sizes"
        for position, (leaf, dims) in enumerate(zip(leaves, self.tensors, strict=True)):
            if dims is None or not isinstance(leaf, Tensor):
                if leaf is not self.constants[position]:
                    return f"output {position} is {leaf!r:.80}, and was something else before"
                continue
            expected = [sizes[dim] if isinstance(dim, str) else dim for dim in dims]
            known = [n for n, size in zip(leaf.shape, expected, strict=False) if size is not None]
            if leaf.dim() != len(dims) or known != [size for size in expected if size is not None]:
                return f"output {position} has shape {list(leaf.shape)}, expected {expected}"
        return None

    def rebuild(
        self,
        tensors: Sequence[Tensor],
        padded: Mapping[str, int],
        raw: Mapping[str, int],
        copied: Sequence[bool],
    ) -> Any:
        """The result of the model at the live sizes: views of ``tensors``, or copies of them."""
        leaves = list(self.constants)
        done: dict[int, Tensor] = {}  # a tensor that is returned twice is one
        given = iter(zip(tensors, copied, strict=True))
        for position, dims in enumerate(self.tensors):
            if dims is None:
                continue
            tensor, copy = next(given)
            live = done.get(id(tensor))
            if live is None:
                live = tensor
                for dim, axis in enumerate(dims):
                    if isinstance(axis, str) and raw[axis] != padded[axis]:
                        live = live.narrow(dim, 0, raw[axis])
                live = done[id(tensor)] = live.clone() if copy else live
            leaves[position] = live
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(slots=True, kw_only=True, eq=False)
class RecordedGraph:
    """One way through the model. ``facts`` may grow while buckets are captured."""

    name: str
    template: ForwardBatch  # a dummy batch of this kind
    facts: dict[str, Any]
    outputs: OutputAxes
    unpadded: Refusal | None  # why it runs at exact sizes only
    slot_axes: Mapping[str, frozenset[str]]  # of the slots that the batch has
    min_rows: Mapping[str, int] = field(default_factory=dict)

    @property
    def slots(self) -> Mapping[int, str]:
        """The slots that the model looked at."""
        return dict(enumerate(name for name in self.facts if name in self.slot_axes))

    def reads_axis(self, axis: str) -> bool:
        return any(axis in axes for axes in self.slot_axes.values())

    def torn_weight(self) -> None:
        """Nothing is shared by assumption: every module's own tensors are recorded."""

    def failing_guard(self, sizes: Mapping[str, int]) -> None:
        """There are no guards on sizes; see the module about what the model's owner vouches for."""

    def unlike(self, batch: ForwardBatch) -> str | None:
        """The first fact that ``batch``, as it is shown, does not share; None for a batch that
        this graph serves."""
        kind = type(self.template)
        if type(batch) is not kind:
            return f"it is a {type(batch).__qualname__}, recorded with a {kind.__qualname__}"
        now = facts_of(batch, set(self.facts))
        for name, value in self.facts.items():
            if now[name] != value:
                return f"{name} is {now[name]!r}, recorded with {value!r}"
        return None


class RecordedModel:
    """The graphs of a model that is recorded as written. ``probe`` runs it on a dummy batch."""

    name = "model"

    def __init__(self, probe: Callable[[ForwardBatch], Probe]) -> None:
        self.graphs: list[RecordedGraph] = []
        self._probe = probe

    def trace(
        self, batches: Sequence[ForwardBatch], at_buckets: Sequence[ForwardBatch] = ()
    ) -> None:
        """Add a graph for batches of this kind, which differ in every size that varies.

        ``at_buckets`` are batches of the sizes that are captured: a model may look at more there.
        Raises PassError for a result that is more than tensors, None and flags, or has another
        structure at another size; and what the model raises.
        """
        probes = [self._probe(batch) for batch in batches]
        outputs, unpadded = _output_axes(probes)
        for batch in at_buckets:
            with suppress(Exception):  # its capture fails in the same way, and says so
                probes.append(self._probe(batch))
        graph = RecordedGraph(
            name=f"recorded#{len(self.graphs)}",
            template=batches[0],
            facts={name: value for probe in probes for name, value in probe.facts.items()},
            outputs=outputs,
            unpadded=unpadded,
            slot_axes=probes[0].slots,
        )
        self.graphs.append(graph)

    def find(self, batch: ForwardBatch) -> RecordedGraph | str:
        """The graph that serves ``batch`` as it is shown, or why there is none."""
        reasons = []
        for graph in self.graphs:
            reason = graph.unlike(batch)
            if reason is None:
                return graph
            reasons.append(reason)
        return "; ".join(reasons) or "nothing was recorded"


def _output_axes(probes: Sequence[Probe]) -> tuple[OutputAxes, Refusal | None]:
    flat = [pytree.tree_flatten(probe.result) for probe in probes]
    leaves, spec = flat[0]
    if any(other != spec for _, other in flat):
        raise PassError(
            f"the model returns {spec} for one number of tokens and another structure for another; "
            "return the same, with None where something is missing"
        )
    for leaf in (leaf for each, _ in flat for leaf in each):
        if not isinstance(leaf, (Tensor, str, bool, type(None))):
            raise PassError(
                f"the model returns a {type(leaf).__name__} ({leaf!r:.80}); a recording returns "
                "tensors, in tuples, lists or dicts"
            )
    unpadded = None
    tensors: list[tuple[str | int | None, ...] | None] = []
    for position, values in enumerate(zip(*(each for each, _ in flat), strict=True)):
        if not isinstance(values[0], Tensor):
            tensors.append(None)
            continue
        dims, reason = _axes_of_output(position, values, probes)
        tensors.append(dims)
        unpadded = unpadded or reason
    constants = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return OutputAxes(spec=spec, tensors=tuple(tensors), constants=constants), unpadded


def _axes_of_output(
    position: int, values: Sequence[Tensor], probes: Sequence[Probe]
) -> tuple[tuple[str | int | None, ...], Refusal | None]:
    shapes = [list(value.shape) for value in values]
    if len({len(shape) for shape in shapes}) > 1:
        raise PassError(
            f"output {position} of the model has shapes {shapes}, of different ranks for different "
            "numbers of tokens; return the same rank"
        )
    axes = {
        "tokens": [probe.batch.num_tokens for probe in probes],
        "bs": [probe.batch.batch_size for probe in probes],
    }
    dims: list[str | int | None] = []
    for lengths in zip(*shapes, strict=True):
        names = [name for name, sizes in axes.items() if list(lengths) == sizes]
        dims.append(names[0] if names else lengths[0] if len(set(lengths)) == 1 else None)
    if None not in dims:
        return tuple(dims), None
    refusal = Refusal(
        FallbackReason.OUTPUT_NOT_PREFIX,
        f"output {position} of the model has shapes {shapes} for {axes['tokens']} tokens, so its "
        "live rows are not the first of a dimension as long as the tokens; return one row per "
        "token, or capture the sizes that arrive",
    )
    return tuple(dims), refusal
