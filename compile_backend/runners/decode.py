"""Decode from FULL graphs: one per batch size, and per span of keys that attention reads."""

from __future__ import annotations

from collections.abc import Sequence

from compile_backend.errors import FallbackReason
from compile_backend.forward_batch import ForwardBatch
from compile_backend.passes.axes import Refusal
from compile_backend.registry.buckets import pad_to
from compile_backend.registry.builders import build_decode_registry
from compile_backend.registry.capacity import decode_capture_sizes, max_bs
from compile_backend.registry.mlp_sync import agreed_num_tokens
from compile_backend.runners.base import ServedModel, captured_mode, captured_widths
from compile_backend.runners.contracts import Bucket
from compile_backend.runners.dummy_buffers import DummyBuffers
from compile_backend.runners.graph_runner import GraphRunner
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
        mode = captured_mode(config)
        registry = build_decode_registry(
            seq_len_fill_value=backend.seq_len_fill_value,
            require_mlp_tp_gather=config.require_mlp_tp_gather,
            dp_size=config.dp_size,
            **served.registry_options,
            **served.encoder_options,
        )
        super().__init__(
            served,
            registry,
            traced,
            mode="FULL" if mode in backend.full_graph_modes else "PIECEWISE",
            modes=(mode,),
        )
        self._sizes = decode_capture_sizes(config)
        self._widths = captured_widths(config)

    @property
    def buckets(self) -> Sequence[Bucket]:
        return [Bucket(bs, bs * width) for bs in self._sizes for width in self._widths]

    def _autotune_buffers(self) -> tuple[DummyBuffers, int]:
        """The decode slots at the largest batch size."""
        size = max_bs(self.config)
        return self._alloc_dummy_decode_buffers(size), size

    @property
    def num_streams(self) -> int:
        return self.config.num_streams

    def prepare(self, batch: ForwardBatch) -> ForwardBatch:
        """An idle rank replays padding alone, as a batch of the captured mode with 0 rows."""
        if not batch.forward_mode.is_idle() or not self.config.enable_mlp_sync:
            return batch
        idle = self._dummy_batch(self.modes[0], 0, 0)
        for name in (
            "global_num_tokens_cpu",
            "num_token_non_padded_cpu",
            "can_run_dp_cuda_graph",
            "capture_hidden_mode",
            "stream_index",
        ):
            setattr(idle, name, getattr(batch, name))
        return idle

    def _refuse_kind(self, batch: ForwardBatch) -> Refusal | None:
        if refusal := super()._refuse_kind(batch):
            return refusal
        if self.config.enable_mlp_sync and not batch.can_run_dp_cuda_graph:
            return Refusal(
                FallbackReason.RANKS_DIFFER,
                "can_run_dp_cuda_graph is False: set it when every rank of the group decodes or "
                "is idle, so that all replay together",
            )
        if self.config.is_encoder_decoder and batch.encoder_lens is not None:
            lens = batch.encoder_lens_cpu
            lens = batch.encoder_lens.tolist() if lens is None else lens
            if 0 in lens:
                return Refusal(
                    FallbackReason.MIXED_ENCODER,
                    f"request {lens.index(0)} has no encoder output (encoder_lens {lens}) and the "
                    f"graphs attend to one",
                )
        return None

    def bucket_for(self, batch: ForwardBatch) -> Bucket | Refusal:
        bs, tokens = batch.batch_size, batch.num_tokens
        width = tokens // bs if bs else self._widths[-1]
        if width not in self._widths or tokens != bs * width:
            widths = " or ".join(map(str, self._widths))
            return Refusal(
                FallbackReason.LIVE_SIZES_DIFFER,
                f"{bs} requests bring {tokens} tokens and the graphs were captured with {widths} "
                f"for each; give every request as many",
            )
        bs = max(bs, self._agreed_bs(batch, width))
        size = pad_to(bs, self._sizes)
        if size is None:
            return Refusal(
                FallbackReason.ABOVE_LARGEST_BUCKET,
                f"the batch has {bs} requests and the largest captured size is {self._sizes[-1]}; "
                f"give cudagraph_capture_sizes with a size of {bs} or more",
            )
        return Bucket(size, size * width)

    def _agreed_bs(self, batch: ForwardBatch, width: int) -> int:
        """Requests of the largest rank: under MLP sync all ranks replay one bucket."""
        if not self.config.enable_mlp_sync:
            return 0
        return -(-max(agreed_num_tokens(batch)) // width)

    def _trace_sizes(self, sizes: Sequence[tuple[int, int]]) -> list[Sequence[tuple[int, int]]]:
        """Sizes that the two axes do not share, so that prefill is served by the same graph; for a
        model that combines them, the sizes that they have in every such batch."""
        return [sizes, [(bs, bs * self.served.tokens_per_bs) for bs, _ in sizes]]

    def attention_keys(self, bucket: Bucket) -> Sequence[tuple[int, ...]]:
        if self.graphs.mode == "PIECEWISE":
            return [()]
        return self.served.attn_backend.capture_keys(self.modes[0], bucket.bs)

    def attention_key(self, batch: ForwardBatch) -> tuple[int, ...]:
        if self.graphs.mode == "PIECEWISE":
            return ()
        return self.served.attn_backend.graph_key(batch)
