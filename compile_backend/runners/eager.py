"""The runner without graphs: every forward that no graph takes, on the same slots."""

from __future__ import annotations

from typing import Any

from compile_backend.attention import ForwardContext, forward_context
from compile_backend.forward_batch import ForwardBatch
from compile_backend.passes.axes import Refusal
from compile_backend.registry.builders import build_eager_registry
from compile_backend.runners.base import BaseRunner, ServedModel

__all__ = ["EagerRunner"]


class EagerRunner(BaseRunner):
    """Runs the model as written, at the exact sizes of the batch.

    Built first, at the largest sizes that any mode needs, so that its buffers are the ones that
    the graph runners share. It captures nothing. MIXED runs as EXTEND does; IDLE runs the model on
    0 rows, so that whatever collectives the model enters are entered.
    """

    name = "eager"

    def __init__(self, served: ServedModel) -> None:
        config = served.config
        super().__init__(
            served,
            build_eager_registry(
                device=served.device,
                max_bs=served.max_bs,
                max_num_token=served.max_num_token,
                cache_loc_dtype=config.cache_loc_dtype,
                enable_mamba_track=config.enable_mamba_track,
                is_encoder_decoder=config.is_encoder_decoder,
                encoder_len_fill_value=config.encoder_len_fill_value,
                encoder_lens_dtype=config.encoder_lens_dtype,
            ),
        )

    def refuse(self, batch: ForwardBatch) -> Refusal | None:
        return None

    def load_batch(self, batch: ForwardBatch) -> ForwardBatch:
        bs, tokens = batch.batch_size, batch.num_tokens
        self.registry.fill_from(
            batch,
            raw_bs=bs,
            padded_bs=bs,
            raw_num_tokens=tokens,
            padded_num_tokens=tokens,
            pp_proxy_tensors=batch.pp_proxy_tensors,
        )
        return self.registry.extract_buffer(
            padded_bs=bs, padded_num_tokens=tokens, forward_batch_template=batch
        )

    def execute(self, batch: ForwardBatch) -> Any:
        view = self.load_batch(batch)
        backend = self.served.attn_backend
        metadata = backend.init_forward_metadata(view)
        with forward_context(ForwardContext(backend, view, metadata)):
            return self.served.model(view)

    def execute_on_own_tensors(self, batch: ForwardBatch) -> Any:
        """As :meth:`execute`, without the slots, which somebody else is using."""
        backend = self.served.attn_backend
        metadata = backend.init_forward_metadata(batch)
        with forward_context(ForwardContext(backend, batch, metadata)):
            return self.served.model(batch)
