"""The captured buckets of a model that is recorded as written, on the slots of one registry.

The counterpart of :class:`~compile_backend.runners.bucket_graphs.BucketGraphs` where there is no
traced graph: one breakable recording per key. What the recording reads besides the slots it has by
reference or by address, so parameters and buffers are compared before a replay.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compile_backend.attention import ForwardContext, forward_context, get_forward_context
from compile_backend.engines import Engine, Replay, is_in_segment
from compile_backend.errors import CaptureError, ContextError, FallbackReason
from compile_backend.forward_batch import ForwardBatch
from compile_backend.passes.axes import Refusal
from compile_backend.registry.registry import CudaGraphBufferRegistry
from compile_backend.runners.breakable_model import RecordedGraph, facts_of, show_batch
from compile_backend.runners.bucket_graphs import BucketUse, GraphKey

__all__ = ["BreakableGraphs", "slot_views"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Weight:
    """A tensor attribute of a module as it was at the capture."""

    fields: dict[str, Any]
    name: str
    is_registered: bool  # a parameter or buffer
    tensor: Tensor
    address: int

    def may_be_read(self, externals: Set[int]) -> bool:
        """Whether a recording with these externals, by id, reads it.

        An engine that does not know its externals may read any parameter and buffer; plain
        attributes are not assumed to be, since a model may keep what it computes in one.
        """
        return id(self.tensor) in externals if externals else self.is_registered

    def was_replaced(self) -> bool:
        return self.fields.get(self.name) is not self.tensor

    def has_moved(self) -> bool:
        return self.was_replaced() or self.tensor.data_ptr() != self.address


@dataclass(slots=True, kw_only=True)
class _Program:
    """One captured bucket."""

    replay: Replay
    weights: list[_Weight]
    copied: tuple[bool, ...]  # outputs that are cloned for the caller
    capture_seconds: float


@dataclass(slots=True)
class _Counts:
    hits: int = 0
    num_rows: int = 0
    num_padded_rows: int = 0


class BreakableGraphs:
    """Recordings by key. Those of ``roots`` are the parameters and buffers that are compared."""

    mode: Literal["BREAKABLE"] = "BREAKABLE"

    def __init__(
        self,
        registry: CudaGraphBufferRegistry,
        *,
        engine: Engine,
        model: Callable[[ForwardBatch], Any],
        roots: Sequence[nn.Module],
        copy_outputs: bool,
    ) -> None:
        self.registry = registry
        self.num_recaptures = 0
        self._engine = engine
        self._model = model
        self._roots = tuple(roots)
        self._copy_outputs = copy_outputs
        self._programs: dict[GraphKey, _Program] = {}
        self._counts: dict[GraphKey, _Counts] = {}  # outlive a recording that is made again

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._programs

    def __len__(self) -> int:
        return len(self._programs)

    @property
    def engine_name(self) -> str:
        return self._engine.name

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        return tuple(self._programs)

    @property
    def pool_bytes(self) -> int:
        return sum(program.replay.pool_bytes for program in self._programs.values())

    @property
    def capture_seconds(self) -> float:
        return sum(program.capture_seconds for program in self._programs.values())

    @property
    def uses(self) -> tuple[BucketUse, ...]:
        return tuple(
            BucketUse(
                key=key,
                hits=self._counts[key].hits,
                num_rows=self._counts[key].num_rows,
                num_padded_rows=self._counts[key].num_padded_rows,
                num_segments=program.replay.num_segments,
                capture_seconds=program.capture_seconds,
                pool_bytes=program.replay.pool_bytes,
                refused_whole=None,
            )
            for key, program in self._programs.items()
        )

    def capture(self, graph: RecordedGraph, key: GraphKey) -> Refusal | None:
        """Record one bucket on the slots as they are filled, inside the ForwardContext of a batch.

        Returns why it cannot be captured, and then publishes nothing, or None. What the model read
        of the batch for the first time is added to the facts of ``graph``.
        """
        sizes = {"bs": key.bs, "tokens": key.tokens}
        context = get_forward_context()
        slots = slot_views(self.registry, context.forward_batch, sizes)
        read: set[str] = set()
        shown = show_batch(context.forward_batch, slots, read)
        mismatches: list[str] = []

        def run(*_: Tensor) -> list[Tensor]:
            hidden = _SegmentContext(context.attn_backend, context.forward_batch, context.metadata)
            with forward_context(hidden):
                result = self._model(shown)
            if (mismatch := graph.outputs.mismatch(result, sizes)) is not None:
                mismatches.append(mismatch)
                return []
            return [each for each in pytree.tree_leaves(result) if isinstance(each, Tensor)]

        # With late binding the slots are bound by reference, as everything else outside.
        inputs = [] if self._engine.late_binding else list(slots.values())
        weights = list(self._weights())
        started = time.perf_counter()
        try:
            replay = self._engine.capture_breakable(
                run,
                static_inputs=inputs,
                warmups=int(self._engine.needs_warmup),
                label=key.label("prefill"),
            )
        except CaptureError as error:
            return Refusal(error.reason, str(error))
        seconds = time.perf_counter() - started
        if mismatches:
            replay.reset()
            return Refusal(FallbackReason.OUTPUT_NOT_PREFIX, f"at {sizes} {mismatches[0]}")
        externals = {id(tensor) for tensor in replay.externals}
        weights = [weight for weight in weights if weight.may_be_read(externals)]
        if replaced := [weight for weight in weights if weight.was_replaced()]:
            replay.reset()
            for weight in replaced:
                weight.fields[weight.name] = weight.tensor
            return Refusal(
                FallbackReason.CAPTURE_FAILED,
                f"the model replaces its tensor {replaced[0].name!r} while it runs, which a replay "
                "would not; write into it in place",
            )
        graph.facts.update(facts_of(shown, read))
        self._programs[key] = _Program(
            replay=replay,
            weights=weights,
            copied=self._copied(replay.outputs, slots),
            capture_seconds=seconds,
        )
        self._counts.setdefault(key, _Counts())
        self.registry.mark_captured()
        log.info("captured %s in %.3f s", key, seconds)
        return None

    def has_moved(self, key: GraphKey) -> bool:
        """Whether a parameter or buffer that this recording reads was replaced, or has moved."""
        return any(weight.has_moved() for weight in self._programs[key].weights)

    def run(self, graph: RecordedGraph, key: GraphKey, raw: Mapping[str, int]) -> Any:
        """Replay on the slots as they are filled, and trim to the live sizes."""
        program = self._programs[key]
        padded = {"bs": key.bs, "tokens": key.tokens}
        return graph.outputs.rebuild(program.replay(), padded, raw, program.copied)

    def replay(self, graph: RecordedGraph, key: GraphKey, raw: Mapping[str, int]) -> Any:
        """As :meth:`run`, counted."""
        result = self.run(graph, key, raw)
        counts = self._counts[key]
        counts.hits += 1
        counts.num_rows += raw["tokens"]
        counts.num_padded_rows += key.tokens
        return result

    def drop(self, key: GraphKey) -> None:
        self._programs.pop(key).replay.reset()

    def reset(self) -> None:
        """Drop every recording."""
        for key in self.keys:
            self.drop(key)

    # -- inside ----------------------------------------------------------------------------------

    def _weights(self) -> Iterator[_Weight]:
        for root in self._roots:
            for module in root.modules():
                attributes = vars(module)
                for fields in (module._parameters, module._buffers, attributes):
                    for name, value in fields.items():
                        if isinstance(value, Tensor):
                            is_registered = fields is not attributes
                            yield _Weight(fields, name, is_registered, value, value.data_ptr())

    def _copied(self, outputs: Sequence[Tensor], slots: Mapping[str, Tensor]) -> tuple[bool, ...]:
        """Which outputs to clone: those in memory that the next forward writes."""
        shared = {view.untyped_storage().data_ptr() for view in slots.values()}
        return tuple(
            self._copy_outputs
            and (not self._engine.fresh_outputs or output.untyped_storage().data_ptr() in shared)
            for output in outputs
        )


class _SegmentContext(ForwardContext):
    """The context of a forward that is being recorded; segments must not read it."""

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__") and is_in_segment():
            raise ContextError(
                f"a segment of a breakable capture reads {name!r} of the ForwardContext, and would "
                "go on with what it was at the capture; read it in a function marked no_graph"
            )
        return super().__getattribute__(name)


def slot_views(
    registry: CudaGraphBufferRegistry, batch: ForwardBatch, sizes: Mapping[str, int]
) -> dict[str, Tensor]:
    """The slots that ``batch``, a view of the registry, has, at the given sizes."""
    views = {}
    for name in registry.slot_names:
        field_name, _, item = name.partition(".")
        value = getattr(batch, field_name, None)
        is_present = value is not None and (not item or item in value)
        if is_present and registry.get_slot(name).enabled:
            views[name] = registry.view(name, sizes)
    return views
