"""What decode and prefill have in common: find the captured bucket of a batch, fill, plan, replay.

A subclass says which sizes it captures and which bucket a batch belongs to. All the rest is one
path: :meth:`GraphRunner.find` decides, from host numbers alone and without writing anything, and
capture, look-up and replay use the key that it builds.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from compile_backend.attention import ForwardContext, forward_context
from compile_backend.errors import FallbackReason
from compile_backend.forward_batch import ForwardBatch, ForwardMode
from compile_backend.passes.axes import Refusal
from compile_backend.registry.registry import CudaGraphBufferRegistry
from compile_backend.runners.base import BaseRunner, ServedModel
from compile_backend.runners.bucket_graphs import BucketGraphs, GraphKey
from compile_backend.runners.host_only import traceable_view, variant_of
from compile_backend.runners.traced import TracedCallable, TracedGraph

__all__ = ["Bucket", "GraphRunner", "Match"]

MAX_VARIANTS = 256  # kinds of batches whose graph is remembered


@dataclass(frozen=True, slots=True)
class Bucket:
    """A size that is captured: rows on each axis. ``bs`` is 0 where graphs do not depend on it."""

    bs: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Match:
    """The captured graph that serves a batch."""

    graph: TracedGraph
    key: GraphKey
    raw_bs: int
    raw_tokens: int


class GraphRunner(BaseRunner):
    """Serves batches by replaying captured buckets. ``traced`` may be shared between runners."""

    unit: ClassVar[Literal["bs", "tokens"]]  # what a bucket is named after
    graphs_mode: Literal["FULL", "PIECEWISE"]

    def __init__(
        self,
        served: ServedModel,
        registry: CudaGraphBufferRegistry,
        traced: TracedCallable,
        *,
        mode: Literal["FULL", "PIECEWISE"],
        modes: Sequence[ForwardMode],
    ) -> None:
        super().__init__(served, registry)
        config = served.config
        self.traced = traced
        self.modes = tuple(modes)  # the forward modes it serves; captured in the first
        self.graphs = BucketGraphs(
            registry,
            engine=served.engine,
            mode=mode,
            config=config.graphbuf_config(splitting_ops=("graphbuf::attention",)),
            copy_outputs=config.copy_outputs,
        )
        self.refusals: dict[GraphKey, Refusal] = {}  # buckets that could not be captured
        self.is_warm = False
        self._variants: dict[Any, TracedGraph | str] = {}
        self._metadata: dict[GraphKey, Any] = {}
        self._addresses: list[int] = []

    # -- what a subclass says --------------------------------------------------------------------

    @property
    @abstractmethod
    def buckets(self) -> Sequence[Bucket]:
        """Every captured size, the smallest first."""

    @abstractmethod
    def bucket_for(self, batch: ForwardBatch) -> Bucket | Refusal:
        """The bucket that a batch of a mode in ``modes`` runs in, or why there is none."""

    def bucket_of(self, graph: TracedGraph, bucket: Bucket) -> Bucket:
        """The bucket as this graph needs it."""
        return bucket

    @abstractmethod
    def attention_keys(self, bucket: Bucket) -> Sequence[tuple[int, ...]]:
        """Every key that the attention backend can ask for at this bucket."""

    @abstractmethod
    def attention_key(self, batch: ForwardBatch) -> tuple[int, ...]:
        """The key that it asks for now."""

    # -- look-up ---------------------------------------------------------------------------------

    def refuse(self, batch: ForwardBatch) -> Refusal | None:
        found = self.find(batch)
        return found if isinstance(found, Refusal) else None

    def find(self, batch: ForwardBatch) -> Match | Refusal:
        """The captured graph for ``batch``, or why there is none. Writes nothing."""
        if batch.forward_mode not in self.modes:
            return Refusal(
                FallbackReason.MODE_NOT_CAPTURED,
                f"{batch.forward_mode.name} is not served by the {self.name} graphs, which serve "
                f"{', '.join(mode.name for mode in self.modes)}",
            )
        bucket = self.bucket_for(batch)
        if isinstance(bucket, Refusal):
            return bucket
        graph = self._graph_for(batch)
        if isinstance(graph, Refusal):
            return graph
        key = self.key(graph, self.bucket_of(graph, bucket), self.attention_key(batch))
        if key not in self.graphs:
            return self.refusals.get(key) or Refusal(
                FallbackReason.NOT_CAPTURED,
                f"no graph was captured for {key}; call warmup() first",
            )
        if refusal := self._refuse_padding(graph, batch, key):
            return refusal
        return Match(graph, key, batch.batch_size, batch.num_tokens)

    def key(self, graph: TracedGraph, bucket: Bucket, attention: tuple[int, ...]) -> GraphKey:
        """The one place where a key is built."""
        return GraphKey(graph.name, bucket.bs, bucket.tokens, attention)

    def _graph_for(self, batch: ForwardBatch) -> TracedGraph | Refusal:
        variant = variant_of(batch)
        graph = self._variants.get(variant)
        if graph is None:
            if not self.is_warm:
                return Refusal(FallbackReason.NOT_CAPTURED, "warmup() has not been called")
            if len(self._variants) >= MAX_VARIANTS:
                self._variants.clear()
            # Asks Dynamo's guards, on views that nothing reads; compiles nothing.
            view = self._view(batch, self.buckets[-1])
            graph = self._variants[variant] = self.traced.find(self._traceable(view))
        if isinstance(graph, str):
            return Refusal(
                FallbackReason.VARIANT_NOT_TRACED,
                f"no traced graph serves a {batch.forward_mode.name} batch with these optional "
                f"fields and flags ({graph}); warm up with such a batch (warmup(examples=[...]))",
            )
        return graph

    def _refuse_padding(
        self, graph: TracedGraph, batch: ForwardBatch, key: GraphKey
    ) -> Refusal | None:
        raw = {"bs": batch.batch_size, "tokens": batch.num_tokens}
        padded = {"bs": key.bs or raw["bs"], "tokens": key.tokens}
        if raw == padded:
            return None
        if graph.unpadded is not None:
            return graph.unpadded
        for axis, least in graph.min_rows.items():
            if raw[axis] < least:
                return Refusal(
                    FallbackReason.PADDING_UNSAFE,
                    f"the model reads row {least - 1} of {axis}, which would be a padded row at "
                    f"{raw[axis]} live rows",
                )
        return None

    # -- running ---------------------------------------------------------------------------------

    def load_batch(self, batch: ForwardBatch) -> ForwardBatch:
        match = self.find(batch)
        if isinstance(match, Refusal):
            raise match.error(f"the {self.name} runner")
        return self._load(batch, Bucket(match.key.bs, match.key.tokens))

    def execute(self, batch: ForwardBatch) -> Any:
        match = self.find(batch)
        if isinstance(match, Refusal):
            raise match.error(f"the {self.name} runner")
        return self.run(batch, match)

    def run(self, batch: ForwardBatch, match: Match) -> Any:
        """Fill, plan, replay, trim."""
        key, backend = match.key, self.served.attn_backend
        self._recapture_if_moved()
        view = self._load(batch, Bucket(key.bs, key.tokens))
        metadata = backend.init_forward_metadata(view, graph_key=self._planned_key(key))
        if key in self._metadata:
            metadata = backend.upgrade_metadata(self._metadata[key], metadata)
        raw = {"bs": match.raw_bs, "tokens": match.raw_tokens}
        with forward_context(ForwardContext(backend, view, metadata)):
            return self.graphs.replay(match.graph, key, raw)

    def _load(self, batch: ForwardBatch, bucket: Bucket) -> ForwardBatch:
        self.registry.fill_from(
            batch,
            raw_bs=batch.batch_size,
            padded_bs=bucket.bs or batch.batch_size,
            raw_num_tokens=batch.num_tokens,
            padded_num_tokens=bucket.tokens,
            pp_proxy_tensors=batch.pp_proxy_tensors,
        )
        return self._view(batch, bucket)

    def _view(self, batch: ForwardBatch, bucket: Bucket) -> ForwardBatch:
        return self.registry.extract_buffer(
            padded_bs=bucket.bs or batch.batch_size,
            padded_num_tokens=bucket.tokens,
            forward_batch_template=batch,
        )

    def _traceable(self, view: ForwardBatch) -> ForwardBatch:
        return traceable_view(view, {*self.registry.slot_names, "batch_size"})

    def _planned_key(self, key: GraphKey) -> tuple[int, ...] | None:
        """What attention bakes: nothing where it runs as written between the segments."""
        return key.attention if self.graphs.mode == "FULL" else None

    # -- warming up ------------------------------------------------------------------------------

    def trace(self, sizes: Sequence[tuple[int, int]], examples: Collection[ForwardBatch]) -> None:
        """Trace every kind of batch that is served: each mode, with and without optional fields."""
        for mode, optional in itertools.product(self.modes, self._optional_fields()):
            batches = [
                self._dummy_batch(mode, bs, tokens, optional=optional) for bs, tokens in sizes
            ]
            self._trace_kind(batches, sizes)
        for example in examples:
            if example.forward_mode in self.modes:
                self._trace_kind([example] * len(sizes), sizes)
        self.is_warm = True

    def _trace_kind(
        self, batches: Sequence[ForwardBatch], sizes: Sequence[tuple[int, int]]
    ) -> None:
        views = [
            self._traceable(self._view(batch, Bucket(bs, tokens)))
            for batch, (bs, tokens) in zip(batches, sizes, strict=True)
        ]
        self._variants[variant_of(batches[0])] = self.traced.trace(views)

    def _optional_fields(self) -> list[tuple[str, ...]]:
        """With and without each field that a batch of this model may lack."""
        return [(), ("mrope_positions",)] if self.config.is_multimodal else [()]

    def captures(self) -> Iterator[tuple[Bucket, Callable[[], None]]]:
        """What is to be captured, the largest bucket first: each with the call that does it."""
        graphs = {graph.name: (variant, graph) for variant, graph in self._traced_variants()}
        for bucket in sorted(self.buckets, key=lambda b: (b.tokens, b.bs), reverse=True):
            for attention in reversed(self.attention_keys(bucket)):
                for variant, graph in graphs.values():

                    def capture(
                        bucket: Bucket = bucket,
                        attention: tuple[int, ...] = attention,
                        variant: Any = variant,
                        graph: TracedGraph = graph,
                    ) -> None:
                        self._capture(variant, graph, bucket, attention)

                    yield bucket, capture

    def _traced_variants(self) -> Iterator[tuple[ForwardBatch, TracedGraph]]:
        for mode, optional in itertools.product(self.modes, self._optional_fields()):
            batch = self._dummy_batch(mode, 1, self.served.tokens_per_bs, optional=optional)
            graph = self._variants.get(variant_of(batch))
            if isinstance(graph, TracedGraph):
                yield batch, graph

    def _capture(
        self,
        template: ForwardBatch,
        graph: TracedGraph,
        bucket: Bucket,
        attention: tuple[int, ...],
    ) -> None:
        backend = self.served.attn_backend
        batch_size = bucket.bs or 1
        bucket = self.bucket_of(graph, bucket)
        key = self.key(graph, bucket, attention)
        optional = ("mrope_positions",) if template.mrope_positions is not None else ()
        batch = self._dummy_batch(
            template.forward_mode, batch_size, bucket.tokens, optional=optional
        )
        view = self._load(batch, bucket)
        found = self.traced.find(self._traceable(view))
        if found is not graph:
            self.refusals[key] = Refusal(
                FallbackReason.GUARD_FAILED,
                f"the traced graph does not serve {bucket}: {found}",
            )
            return
        metadata = backend.init_forward_metadata(view, graph_key=self._planned_key(key))
        with forward_context(ForwardContext(backend, view, metadata)):
            refusal = self.graphs.capture(graph, key)
        if refusal is not None:
            self.refusals[key] = refusal
            return
        self.refusals.pop(key, None)
        self._metadata[key] = metadata
        self._addresses = self._external_addresses()

    # -- taking it back --------------------------------------------------------------------------

    def _external_addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self.served.attn_backend.captured_tensors()]

    def _recapture_if_moved(self) -> None:
        """Where the KV cache has moved, every graph that baked its address is captured again."""
        if self.served.engine.late_binding or self._external_addresses() == self._addresses:
            return
        self.reset()
        for _, capture in self.captures():
            capture()
        self.graphs.num_recaptures += len(self.graphs)

    def reset(self) -> None:
        """Drop every recording; the traced graphs stay."""
        self.graphs.reset()
        self.refusals.clear()
        self._metadata.clear()
