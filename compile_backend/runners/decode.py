"""Decode from FULL graphs: one per batch size, and per span of keys that attention reads."""

from __future__ import annotations

from collections.abc import Sequence

from compile_backend.errors import FallbackReason
from compile_backend.forward_batch import ForwardBatch, ForwardMode
from compile_backend.passes.axes import Refusal
from compile_backend.registry.buckets import pad_to
from compile_backend.registry.builders import build_decode_registry
from compile_backend.registry.capacity import decode_capture_sizes
from compile_backend.runners.base import ServedModel
from compile_backend.runners.graph_runner import Bucket, GraphRunner
from compile_backend.runners.traced import TracedCallable

__all__ = ["DecodeCudaGraphRunner"]


class DecodeCudaGraphRunner(GraphRunner):
    """One graph per batch size, the whole sequence of pieces and attention in it.

    Where the attention backend reads the host in this mode, the segments between attention calls
    are captured instead.
    """

    name = "decode"
    unit = "bs"

    def __init__(self, served: ServedModel, traced: TracedCallable) -> None:
        config, backend = served.config, served.attn_backend
        mode = ForwardMode.DECODE
        registry = build_decode_registry(
            device=served.device,
            max_bs=served.max_bs,
            max_num_token=served.max_num_token,
            seq_len_fill_value=backend.seq_len_fill_value,
            cache_loc_dtype=config.cache_loc_dtype,
            enable_mamba_track=config.enable_mamba_track,
            is_encoder_decoder=config.is_encoder_decoder,
            encoder_len_fill_value=config.encoder_len_fill_value,
            encoder_lens_dtype=config.encoder_lens_dtype,
        )
        super().__init__(
            served,
            registry,
            traced,
            mode="FULL" if mode in backend.full_graph_modes else "PIECEWISE",
            modes=(mode,),
        )
        self._sizes = decode_capture_sizes(config)

    @property
    def buckets(self) -> Sequence[Bucket]:
        return [Bucket(bs, bs * self.served.tokens_per_bs) for bs in self._sizes]

    def bucket_for(self, batch: ForwardBatch) -> Bucket | Refusal:
        bs, per_request = batch.batch_size, self.served.tokens_per_bs
        if batch.num_tokens != bs * per_request:
            return Refusal(
                FallbackReason.LIVE_SIZES_DIFFER,
                f"{bs} requests bring {batch.num_tokens} tokens and the graphs were captured with "
                f"{per_request} for each",
            )
        size = pad_to(bs, self._sizes)
        if size is None:
            return Refusal(
                FallbackReason.ABOVE_LARGEST_BUCKET,
                f"the batch has {bs} requests and the largest captured size is {self._sizes[-1]}; "
                f"give cudagraph_capture_sizes with a size of {bs} or more",
            )
        return Bucket(size, size * per_request)

    def attention_keys(self, bucket: Bucket) -> Sequence[tuple[int, ...]]:
        if self.graphs.mode == "PIECEWISE":
            return [()]
        return self.served.attn_backend.capture_keys(self.modes[0], bucket.bs)

    def attention_key(self, batch: ForwardBatch) -> tuple[int, ...]:
        if self.graphs.mode == "PIECEWISE":
            return ()
        return self.served.attn_backend.graph_key(batch)
