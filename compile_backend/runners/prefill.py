"""Prefill from PIECEWISE graphs, with buckets on the token axis."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from compile_backend.errors import FallbackReason, PassError
from compile_backend.forward_batch import ForwardBatch, ForwardMode
from compile_backend.passes.axes import Refusal
from compile_backend.registry.buckets import pad_to
from compile_backend.registry.builders import build_prefill_registry
from compile_backend.registry.capacity import max_prefill_buffer_tokens, prefill_capture_sizes
from compile_backend.runners.base import ServedModel
from compile_backend.runners.contracts import Bucket, GraphSource, ServedGraph
from compile_backend.runners.eager import (
    embeddings_slot,
    refuse_embeddings,
    takes_embeddings,
    writes_embeddings,
)
from compile_backend.runners.graph_runner import GraphRunner
from compile_backend.runners.traced import TracedGraph

__all__ = ["PrefillCudaGraphRunner"]


class PrefillCudaGraphRunner(GraphRunner):
    """The segments between attention calls, one set per token count; attention runs as written."""

    name = "prefill"
    unit = "tokens"

    def __init__(self, served: ServedModel, traced: GraphSource) -> None:
        config = served.config
        registry = build_prefill_registry(register_input_embeds=False, **served.registry_options)
        if writes_embeddings(config) or takes_embeddings(config):
            registry.register_slot(embeddings_slot(config))
        super().__init__(
            served,
            registry,
            traced,
            mode="PIECEWISE",
            modes=(ForwardMode.EXTEND, ForwardMode.MIXED),
        )
        self._sizes = prefill_capture_sizes(config)
        self._stale = [
            name
            for name in registry.slot_names
            if registry.get_slot(name).axis == "bs" and registry.get_slot(name).tail_value is None
        ]

    @property
    def buckets(self) -> Sequence[Bucket]:
        """None where none would be replayed."""
        return [] if self._refuse_all() else [Bucket(0, size) for size in self._sizes]

    def trace(self, sizes: Sequence[tuple[int, int]], examples: Collection[ForwardBatch]) -> None:
        if not self.buckets:
            self.is_warm = True
            return
        super().trace(sizes, examples)
        for graph in self.traced.graphs:
            reads = isinstance(graph, TracedGraph) and "input_embeds" in graph.only_read
            if reads and writes_embeddings(self.config):
                raise PassError(
                    f"{self.traced.name} reads input_embeds and does not write them, although "
                    f"input_embeds is 'in_graph' in the config; set it to 'from_batch'"
                )

    def _may_lack(self) -> dict[str, bool]:
        return {**super()._may_lack(), "input_embeds": takes_embeddings(self.config)}

    def _refuse_kind(self, batch: ForwardBatch) -> Refusal | None:
        return (
            super()._refuse_kind(batch)
            or self._refuse_all()
            or refuse_embeddings(batch, self.config)
        )

    def _refuse_all(self) -> Refusal | None:
        """Why this worker has no prefill graphs at all, or None."""
        if self.config.attn_cp_size > 1:
            return Refusal(
                FallbackReason.CONTEXT_PARALLEL,
                f"attn_cp_size is {self.config.attn_cp_size}; decode keeps its graphs",
            )
        if self.config.enable_mlp_sync:
            return Refusal(
                FallbackReason.RANKS_DIFFER,
                "under MLP sync a prefill runs at the size that the ranks agreed on, eagerly",
            )
        return None

    def _load(self, batch: ForwardBatch, bucket: Bucket) -> ForwardBatch:
        view = super()._load(batch, bucket)
        live = batch.batch_size
        if bucket.bs > live:  # the graph reads such fields at full length, rows of others included
            for name in self._stale:
                tail = self.registry.view(name, {"bs": bucket.bs, "tokens": bucket.tokens})
                tail.narrow(0, live, bucket.bs - live).zero_()
        return view

    def bucket_for(self, batch: ForwardBatch) -> Bucket | Refusal:
        live = batch.num_tokens
        if live == 0:
            return Refusal(FallbackReason.NO_TOKENS, "the batch has no token to pad")
        size = pad_to(live, self._sizes)
        if size is None:
            return Refusal(
                FallbackReason.ABOVE_LARGEST_BUCKET,
                f"the batch has {live} tokens and the largest captured size is {self._sizes[-1]}; "
                f"{self._advice(live)}",
            )
        if size > live * self.config.max_padding_waste:
            return Refusal(
                FallbackReason.PADDING_WASTE,
                f"{live} tokens would run as {size}, more than max_padding_waste = "
                f"{self.config.max_padding_waste:g} times as many; give prefill_capture_sizes with "
                f"a size nearer to {live}, or raise it",
            )
        return Bucket(0, size)

    def attention_keys(self, bucket: Bucket) -> Sequence[tuple[int, ...]]:
        return [()]

    def attention_key(self, batch: ForwardBatch) -> tuple[int, ...]:
        return ()

    def bucket_of(self, graph: ServedGraph, bucket: Bucket) -> Bucket:
        """A graph that reads a field on the bs axis reads it at its full length."""
        return Bucket(self.served.max_bs, bucket.tokens) if graph.reads_axis("bs") else bucket

    def _advice(self, live: int) -> str:
        ceiling = max_prefill_buffer_tokens(self.config)
        if live <= ceiling:
            return f"give prefill_capture_sizes with a size of {live} or more"
        return f"raise chunked_prefill_size, which is what prefill graphs go up to, to {live}"
