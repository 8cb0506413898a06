"""The captured buckets of one traced callable on the slots of one registry.

One :class:`GraphKey` serves capture, look-up and replay alike, so a graph that was captured is
found. What differs between decode, prefill and logits (which sizes, which metadata) is theirs; how
a key is captured, replayed, recaptured after a weight has moved, and accounted for is here.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, fx

from compile_backend.compiled_graph import segment_cuts
from compile_backend.config import GraphbufConfig
from compile_backend.engines import Engine
from compile_backend.errors import CaptureError, FallbackReason, ReplayError
from compile_backend.passes.axes import Refusal
from compile_backend.passes.segment import Segmented, segment
from compile_backend.program import AddressChangedError, CapturedProgram
from compile_backend.registry.registry import CudaGraphBufferRegistry
from compile_backend.runners.output import copied_from
from compile_backend.runners.traced import TracedGraph

__all__ = ["BucketGraphs", "BucketUse", "GraphKey"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What a captured bucket is looked up by.

    ``attention`` are the numbers that attention's plan bakes in, ``lora`` whether adapters are
    applied, ``stream`` the stream of phase-multiplexed decode.
    """

    graph: str
    bs: int
    tokens: int
    attention: tuple[int, ...] = ()
    lora: bool = False
    stream: int = 0

    def label(self, runner: str) -> str:
        """What messages call this bucket of a runner: ``decode bs=8 of model#0``."""
        parts = [runner, f"bs={self.bs}" if self.bs else f"tokens={self.tokens}"]
        parts += [f"attention {list(self.attention)}"] if self.attention else []
        parts += ["lora"] if self.lora else []
        parts += [f"stream {self.stream}"] if self.stream else []
        return f"{' '.join(parts)} of {self.graph}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketUse:
    """One captured bucket, for people."""

    key: GraphKey
    hits: int
    num_rows: int
    num_padded_rows: int
    num_segments: int
    capture_seconds: float
    pool_bytes: int
    refused_whole: str | None


@dataclass(slots=True)
class _Counts:
    hits: int = 0
    num_rows: int = 0
    num_padded_rows: int = 0


class BucketGraphs:
    """Programs by key. ``mode`` FULL captures one graph, PIECEWISE the segments between break ops.

    ``copy_outputs`` False hands out views of graph memory where the engine has such. ``runner`` is
    whose they are, for messages.
    """

    def __init__(
        self,
        registry: CudaGraphBufferRegistry,
        *,
        engine: Engine,
        mode: Literal["FULL", "PIECEWISE"],
        config: GraphbufConfig,
        copy_outputs: bool,
        runner: str,
    ) -> None:
        self._runner = runner
        self.registry = registry
        self.mode = mode
        self.num_recaptures = 0
        self._engine = engine
        self._config = dataclasses.replace(config, cudagraph_mode=mode)
        self._copy_outputs = copy_outputs
        self._programs: dict[GraphKey, CapturedProgram] = {}
        self._counts: dict[GraphKey, _Counts] = {}  # outlive a recording that is made again
        self._views: dict[GraphKey, dict[str, Tensor]] = {}
        self._segmented: dict[tuple[str, frozenset[str]], Segmented] = {}
        self._level: dict[GraphKey, int] = {}  # of the segment cuts that the engine took

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
        return sum(program.pool_bytes for program in self._programs.values())

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
                num_segments=program.num_segments,
                capture_seconds=program.capture_seconds,
                pool_bytes=program.pool_bytes,
                refused_whole=program.refused_whole,
            )
            for key, program in self._programs.items()
        )

    def capture(self, graph: TracedGraph, key: GraphKey) -> Refusal | None:
        """Record one bucket on the slots as they are filled; publishes nothing where it fails.

        Returns why it cannot be captured, or None. What the model raises refuses this bucket alone.
        """
        sizes = {"bs": key.bs, "tokens": key.tokens}
        if graph.refusal is not None:
            return graph.refusal
        if failing := graph.failing_guard(sizes):
            return Refusal(
                FallbackReason.GUARD_FAILED,
                f"the graph was traced under a guard that does not hold at {sizes}: {failing}",
            )
        views = {name: self.registry.view(name, sizes) for name in graph.slots.values()}
        written = graph.written_tensors(views)
        before = [tensor.clone() for tensor in written]
        try:
            program, _ = self._capture(graph, key, views)
        except CaptureError as error:
            return Refusal(error.reason, str(error))
        except Exception as error:  # noqa: BLE001 - the model's own, or an operator's of it
            return Refusal(FallbackReason.CAPTURE_FAILED, f"{type(error).__name__}: {error}")
        finally:
            for tensor, value in zip(written, before, strict=True):
                tensor.copy_(value)
        self._programs[key], self._views[key] = program, views
        self._counts.setdefault(key, _Counts())
        return None

    def replay(
        self,
        graph: TracedGraph,
        key: GraphKey,
        raw: Mapping[str, int],
    ) -> Any:
        """Run a captured bucket on the slots as they are filled and trim to the live sizes.

        A weight that moved has the bucket captured again first, which is the run.
        """
        program, views = self._programs[key], self._views[key]
        tensors = graph.tensors(views)
        try:
            results = program.replay(tensors)
        except AddressChangedError:
            # Replaced at once: a failed capture must not leave the stale one to be replayed.
            del self._programs[key]
            program, results = self._capture(graph, key, views, like=program)
            self._programs[key] = program
            self.num_recaptures += 1
        except ReplayError as error:
            raise ReplayError(
                f"{key.label(self._runner)} cannot be replayed: a weight has another dtype, shape "
                f"or strides than when it was captured ({error}); make a new ModelRunner"
            ) from error
        counts = self._counts[key]
        counts.hits += 1
        counts.num_rows += raw["tokens"]
        counts.num_padded_rows += key.tokens

        def args() -> list[Any]:
            """The graph's arguments at the live sizes; an output may be one of them."""
            live = {name: self.registry.view(name, raw) for name in graph.slots.values()}
            return _arguments(graph, raw, graph.tensors(live))

        copy = self._copy_outputs and not self._engine.fresh_outputs
        result = graph.finish(results, args, raw, copy=copy)
        if self._copy_outputs and graph.returns_inputs:
            return copied_from(self.registry.buffers(), result)
        return result

    def reset(self) -> None:
        """Drop every recording."""
        for program in self._programs.values():
            program.reset()
        self._programs.clear()
        self._views.clear()
        self._level.clear()

    # -- inside ----------------------------------------------------------------------------------

    def _capture(
        self,
        graph: TracedGraph,
        key: GraphKey,
        views: Mapping[str, Tensor],
        *,
        like: CapturedProgram | None = None,
    ) -> tuple[CapturedProgram, Sequence[Any]]:
        sizes = {"bs": key.bs, "tokens": key.tokens}
        program = CapturedProgram(
            engine=self._engine,
            template=graph.template(sizes),
            positions=graph.tensor_positions,
            staged=frozenset(),
            label=key.label(self._runner),
            warmups=int(self._engine.needs_warmup and like is None),
        )
        if like is not None:
            like.reset()
        tensors = graph.tensors(views)
        started = time.perf_counter()
        results = self._capture_in_segments(graph, key, program, tensors)
        program.capture_seconds = time.perf_counter() - started
        self.registry.mark_captured()
        log.info("captured %s in %.3f s", key, program.capture_seconds)
        return program, results

    def _capture_in_segments(
        self,
        graph: TracedGraph,
        key: GraphKey,
        program: CapturedProgram,
        tensors: Sequence[Tensor],
    ) -> Sequence[Any]:
        """Record in the largest segments that the engine takes.

        Only while warming up is more than one size tried: the batch writes nothing but scratch
        then. Later the size that worked is the only one, so that nothing is run twice.
        """
        outer = graph.compiled.outer
        levels = segment_cuts(graph.compiled.plan, self._config)
        first = self._level.get(key, 0)
        last = first if key in self._level else len(levels) - 1
        for level in range(first, last + 1):
            cuts = levels[level]
            try:
                if not cuts:
                    results = program.capture_full(outer, tensors)
                else:
                    cut = self._segments(graph.name, outer, cuts)
                    results = program.capture_segments(cut, tensors)
            except CaptureError as error:
                program.reset()
                program.refused_whole = str(error)
                if level == last:
                    raise
            else:
                self._level[key] = level
                return results
        raise AssertionError("unreachable: the last level returns or raises")

    def _segments(self, name: str, outer: fx.GraphModule, cuts: frozenset[str]) -> Segmented:
        cut = self._segmented.get((name, cuts))
        if cut is None:
            cut = self._segmented[name, cuts] = segment(outer, cuts)
        return cut


def _arguments(
    graph: TracedGraph, sizes: Mapping[str, int], tensors: Sequence[Tensor]
) -> list[Any]:
    arguments = list(graph.template(sizes))
    for position, tensor in zip(graph.tensor_positions, tensors, strict=True):
        arguments[position] = tensor
    return arguments
