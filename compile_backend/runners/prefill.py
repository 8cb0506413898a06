"""Prefill from PIECEWISE graphs, with buckets on the token axis."""

from __future__ import annotations

from collections.abc import Sequence

from compile_backend.errors import FallbackReason
from compile_backend.forward_batch import ForwardBatch, ForwardMode
from compile_backend.passes.axes import Refusal
from compile_backend.registry.buckets import pad_to
from compile_backend.registry.builders import build_prefill_registry
from compile_backend.registry.capacity import prefill_capture_sizes
from compile_backend.runners.base import ServedModel
from compile_backend.runners.graph_runner import Bucket, GraphRunner
from compile_backend.runners.traced import TracedCallable, TracedGraph

__all__ = ["PrefillCudaGraphRunner"]


class PrefillCudaGraphRunner(GraphRunner):
    """The segments between attention calls, one set per token count; attention runs as written."""

    name = "prefill"
    unit = "tokens"

    def __init__(self, served: ServedModel, traced: TracedCallable) -> None:
        config = served.config
        registry = build_prefill_registry(
            device=served.device,
            max_bs=served.max_bs,
            max_num_token=served.max_num_token,
            cache_loc_dtype=config.cache_loc_dtype,
            is_multimodal=config.is_multimodal,
            hidden_size=config.hidden_size or 0,
            embed_dtype=config.embed_dtype,
            enable_mamba_track=config.enable_mamba_track,
        )
        super().__init__(
            served,
            registry,
            traced,
            mode="PIECEWISE",
            modes=(ForwardMode.EXTEND, ForwardMode.MIXED),
        )
        self._sizes = prefill_capture_sizes(config)

    @property
    def buckets(self) -> Sequence[Bucket]:
        return [Bucket(0, size) for size in self._sizes]

    def bucket_for(self, batch: ForwardBatch) -> Bucket | Refusal:
        live = batch.num_tokens
        if live == 0:
            return Refusal(FallbackReason.NO_TOKENS, "the batch has no token to pad")
        size = pad_to(live, self._sizes)
        if size is None:
            return Refusal(
                FallbackReason.ABOVE_LARGEST_BUCKET,
                f"the batch has {live} tokens and the largest captured size is {self._sizes[-1]}; "
                f"give prefill_capture_sizes with a size of {live} or more",
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

    def bucket_of(self, graph: TracedGraph, bucket: Bucket) -> Bucket:
        """A graph that reads a field on the bs axis reads it at its full length."""
        return Bucket(self.served.max_bs, bucket.tokens) if graph.reads_axis("bs") else bucket
