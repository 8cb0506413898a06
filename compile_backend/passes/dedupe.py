"""Which pieces are one and the same computation, so that each kind is compiled once.

The layers of a model differ in their weights, and weights are inputs of a piece, not part of it.
:func:`fingerprint` says everything about a piece that a compiler may build into its code and
nothing else, so pieces with equal fingerprints share one compiled callable: ``backend`` compiles
the first of each kind and puts it in every place.

Inputs go over position by position. A piece takes its inputs in the order of first use
(:func:`passes.partition.partition`), so two pieces of the same nodes take theirs in the same order.

Nothing is proven equal that is not the same to the letter: symbols are compared by name, constant
tensors and modules by identity, and what is not understood equals only itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from compile_backend.passes.aten_trace import op_name, storage_of
from compile_backend.passes.partition import module_attribute, value_of

__all__ = ["SharingPlan", "fingerprint", "share_pieces"]

# Compiled code may rely on its inputs starting at such an address (Inductor's GPU_ALIGN_BYTES).
ALIGNMENT_BYTES = 16

_SCALARS = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range)
_TORCH_CONSTANTS = (torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingPlan:
    """Which piece is compiled in the place of which. A decision; the backend acts on it."""

    representatives: Mapping[str, str]  # piece -> the first piece of its kind, often itself

    @property
    def num_compiled(self) -> int:
        return len(set(self.representatives.values()))


def share_pieces(pieces: Mapping[str, fx.GraphModule]) -> SharingPlan:
    """Find the pieces that may run each other's compiled code; ``pieces`` are in program order.

    A representative comes before the pieces that it stands for.
    """
    first_of_kind: dict[Hashable, str] = {}
    representatives = {
        name: first_of_kind.setdefault(fingerprint(piece), name) for name, piece in pieces.items()
    }
    return SharingPlan(representatives=representatives)


def fingerprint(piece: fx.GraphModule) -> Hashable:
    """All that compiled code of ``piece`` can depend on; names and weights are not part of it.

    Nodes carry their fake value (``example_value``) and, as ``backend`` notes them, ``storages``
    (what a value lies in) and ``writes`` (what a node writes). Comparable between pieces of one
    traced graph, whose symbols are the same. Holds on to objects that it compares by identity.

    Of an input's place in its storage only the alignment counts, so that ``kv[0]`` and ``kv[1]``
    are the same kind of input; the whole offset counts in a piece that asks for it.
    """
    return _Description(piece, whole_offsets=_asks_for_offsets(piece)).graph()


class _Description:
    """One graph (a piece, or a subgraph of a higher-order operator) as a hashable value."""

    def __init__(self, gm: fx.GraphModule, *, whole_offsets: bool) -> None:
        self._gm = gm
        self._whole_offsets = whole_offsets
        self._nodes: Sequence[fx.Node] = list(gm.graph.nodes)
        self._numbers = {node: number for number, node in enumerate(self._nodes)}

    def graph(self) -> Hashable:
        return (*map(self._node, self._nodes), self._memory())

    def _node(self, node: fx.Node) -> Hashable:
        return (
            node.op,
            self._target(node),
            self._argument(node.args),
            self._argument(node.kwargs),
            self._value(value_of(node)),
            self._value(node.meta.get("custom")),  # annotations that reach the compiler
        )

    def _target(self, node: fx.Node) -> Hashable:
        if node.op in ("placeholder", "output"):
            return None  # a name
        if node.op == "call_method":
            return str(node.target)
        if node.op == "call_function":
            return _Same(node.target)
        attribute = module_attribute(self._gm, str(node.target))
        if node.op == "get_attr" and isinstance(attribute, fx.GraphModule):
            return _Description(attribute, whole_offsets=self._whole_offsets).graph()
        return _Same(attribute)

    def _argument(self, value: Any) -> Hashable:
        if isinstance(value, fx.Node):
            return ("node", self._numbers[value])
        return _constant(value, inside=self._argument)

    def _value(self, value: Any) -> Hashable:
        if isinstance(value, Tensor):
            return self._tensor(value)
        return _constant(value, inside=self._value)

    def _tensor(self, tensor: Tensor) -> Hashable:
        if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
            return _Same(tensor)
        place: Any = tensor.storage_offset()
        if not self._whole_offsets:
            place = place * tensor.element_size() % ALIGNMENT_BYTES
        return (
            type(tensor),
            self._value((tensor.shape, tensor.stride(), place, tensor.dtype, tensor.device)),
            tensor.requires_grad,
            tensor.is_conj(),
            tensor.is_neg(),
            tensor.is_inference(),
            getattr(tensor, "_dynamo_static_input_type", None),
        )

    def _memory(self) -> Hashable:
        """Which inputs share memory, or are one tensor, and which of them are written.

        Written memory that two inputs share makes a piece its own kind: AOTAutograd then compiles
        for their places in it.
        """
        number: defaultdict[Hashable, int] = defaultdict(count().__next__)
        writes = frozenset[int]().union(*(node.meta.get("writes", ()) for node in self._nodes))
        inputs: list[Hashable] = []
        holders: Counter[int] = Counter()
        for node in self._gm.graph.find_nodes(op="placeholder"):
            tensor = value_of(node)
            if not isinstance(tensor, Tensor):
                continue
            storages: frozenset[int] = node.meta.get("storages", frozenset())
            holders.update(storages & writes)
            inputs.append(
                (
                    number["tensor", id(tensor)],
                    number["storage", storage_of(tensor)],
                    bool(storages & writes),
                )
            )
        is_own_kind = any(num_inputs > 1 for num_inputs in holders.values())
        return (*inputs, _Same(self._gm) if is_own_kind else None)


def _constant(value: Any, *, inside: Callable[[Any], Hashable]) -> Hashable:
    """A value with its type; ``inside`` describes what containers hold.

    Numbers go by their text: ``1``, ``1.0`` and ``True`` differ, and so do ``0.0`` and ``-0.0``.
    """
    if isinstance(value, SymInt) and value.node.expr.is_number:
        value = int(value.node.expr)  # a size that tracing has fixed
    if isinstance(value, (SymInt, SymFloat, SymBool)):
        return (type(value), value.node.expr)
    if isinstance(value, (tuple, list)):
        return (type(value), *map(inside, value))
    if isinstance(value, dict):
        return (type(value), *((inside(key), inside(item)) for key, item in value.items()))
    if isinstance(value, slice):
        return (slice, inside(value.start), inside(value.stop), inside(value.step))
    if type(value) in _SCALARS:
        return (type(value), repr(value))
    if isinstance(value, _TORCH_CONSTANTS):
        return (type(value), value)
    return _Same(value)


def _asks_for_offsets(gm: fx.GraphModule) -> bool:
    """Whether a graph speaks of places in a storage: ``as_strided``, ``storage_offset``, ..."""
    for node in gm.graph.nodes:
        if node.op in ("call_function", "call_method"):
            name = op_name(node.target)
            if "as_strided" in name or "storage" in name:
                return True
        elif node.op == "get_attr":
            attribute = module_attribute(gm, str(node.target))
            if isinstance(attribute, fx.GraphModule) and _asks_for_offsets(attribute):
                return True
    return False


class _Same:
    """Equal to itself alone. Keeps its object, whose identity could be given to another else."""

    __slots__ = ("_object",)

    def __init__(self, value: object) -> None:
        self._object = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._object is other._object

    def __hash__(self) -> int:
        return id(self._object)
