"""What every runner is built on, and the contract that :class:`ModelRunner` dispatches by."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from compile_backend.attention import AttentionBackend, ForwardContext, forward_context
from compile_backend.engines import Engine
from compile_backend.errors import FallbackReason, SlotOverflowError
from compile_backend.forward_batch import ForwardBatch, ForwardMode, PPProxyTensors
from compile_backend.passes.axes import Refusal
from compile_backend.registry.builders import ProxyRows
from compile_backend.registry.capacity import max_bs, max_num_token, mlp_sync_align
from compile_backend.registry.mlp_sync import prepare_mlp_sync_batch
from compile_backend.registry.registry import CudaGraphBufferRegistry
from compile_backend.runner_config import RunnerConfig
from compile_backend.runners.dummy import dummy_batch
from compile_backend.runners.dummy_buffers import DummyBuffers, dummy_buffers, set_requests

__all__ = ["BaseRunner", "ServedModel", "captured_mode", "captured_widths"]

Batch = TypeVar("Batch", bound=ForwardBatch)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the runners of one model share. All of it is settled."""

    model: Callable[[ForwardBatch], Any]
    attn_backend: AttentionBackend
    config: RunnerConfig
    engine: Engine
    decode_engine: Engine  # of whole graphs, which nothing reads inside the graph pool
    device: torch.device
    max_bs: int  # of every registry: the capacity, and at least what tracing needs
    max_num_token: int
    tokens_per_bs: int  # of a batch that the decode graphs serve
    pp_proxy_rows: ProxyRows = field(default_factory=dict)  # from the previous pipeline stage

    @property
    def captured_mode(self) -> ForwardMode:
        """The mode whose batches bring the same number of tokens for each request."""
        return captured_mode(self.config)

    @property
    def registry_options(self) -> dict[str, Any]:
        """What every builder is given: sizes, dtypes, and which parts of the model need slots."""
        config = self.config
        return {
            "device": self.device,
            "max_bs": self.max_bs,
            "max_num_token": self.max_num_token,
            "cache_loc_dtype": config.cache_loc_dtype,
            "enable_mamba_track": config.enable_mamba_track,
            "enable_num_token_non_padded": config.enable_mlp_sync,
            "require_gathered_buffer": config.enable_mlp_sync,
            "attn_tp_size": config.attn_tp_size,
            "attn_tp_rank": config.attn_tp_rank,
            "contiguous_views": True,
            "pp_proxy_rows": self.pp_proxy_rows,
        }

    @property
    def encoder_options(self) -> dict[str, Any]:
        """The same of an encoder-decoder, for the builders of decode and eager slots."""
        config = self.config
        return {
            "is_encoder_decoder": config.is_encoder_decoder,
            "encoder_len_fill_value": config.encoder_len_fill_value,
            "encoder_lens_dtype": config.encoder_lens_dtype,
        }


class BaseRunner(ABC):
    """Serves some forward modes on one registry. Not thread-safe: ModelRunner holds the lock."""

    name: str

    def __init__(self, served: ServedModel, registry: CudaGraphBufferRegistry) -> None:
        self.served = served
        self.registry = registry

    @property
    def config(self) -> RunnerConfig:
        return self.served.config

    def decline(self, batch: ForwardBatch) -> FallbackReason | None:
        """Why this runner does not take ``batch``, or None. Writes nothing."""
        refusal = self.refuse(batch)
        return None if refusal is None else refusal.reason

    def can_run_graph(self, batch: ForwardBatch) -> bool:
        """Whether :meth:`decline` has no reason."""
        return self.refuse(batch) is None

    @abstractmethod
    def refuse(self, batch: ForwardBatch) -> Refusal | None:
        """As :meth:`decline`, with a message that says which value and what to do."""

    @abstractmethod
    def load_batch(self, batch: ForwardBatch) -> ForwardBatch:
        """Copy ``batch`` into the slots; returns a new view of it. ``batch`` is not changed.

        The view's tensors are the slots', at the sizes that the runner runs at. Whatever does not
        fit raises before the first byte is written.
        """

    @abstractmethod
    def execute(self, batch: ForwardBatch) -> Any:
        """Load ``batch`` and run it: what the model returns, for the live rows."""

    def _dummy_run(
        self,
        batch_size: int,
        buffers: DummyBuffers | None = None,
        forward_mode: ForwardMode | None = None,
        *,
        num_tokens: int | None = None,
    ) -> Any:
        """Run the model once on scratch rows, as autotuning and warm-up do.

        ``buffers`` are this runner's: the model then runs as written, on their first rows, and no
        memory is made for the batch. By default a new dummy batch is executed. Sizes are aligned
        for MLP sync. Raises SlotOverflowError for a size above that of ``buffers``.
        """
        mode = ForwardMode.DECODE if forward_mode is None else forward_mode
        if buffers is None:
            return self.execute(self._dummy_batch(mode, batch_size, num_tokens))
        batch = self._cut_buffers(buffers, mode, batch_size, num_tokens)
        bs, tokens = batch.batch_size, batch.num_tokens
        # Writes what is computed from the sizes; a slot's own view is not copied onto itself.
        self.registry.fill_from(
            batch,
            raw_bs=bs,
            padded_bs=bs,
            raw_num_tokens=tokens,
            padded_num_tokens=tokens,
            pp_proxy_tensors=batch.pp_proxy_tensors,
        )
        view = self._extract(batch, bs, tokens)
        backend = self.served.attn_backend
        metadata = backend.init_forward_metadata(view)
        with forward_context(ForwardContext(backend, view, metadata)):
            return self.served.model(view)

    def _autotune_buffers(self) -> tuple[DummyBuffers, int] | None:
        """What a kernel tuner runs on: buffers that the runner owns, and the batch size they hold.

        None for a runner that owns none to run a whole batch on.
        """
        return None

    def _alloc_dummy_decode_buffers(
        self, size: int, *, vocab_size: int | None = None
    ) -> DummyBuffers:
        """Buffers for dummy batches of up to ``size`` requests or tokens, as far as slots go.

        They are the runner's slots, which this zeroes, and what no slot holds; logits
        [tokens, vocab_size] only where asked for. :meth:`_dummy_run` cuts any smaller batch.
        """
        served, config = self.served, self.config
        batch_size = min(mlp_sync_align(config, size), max_bs(config))
        num_tokens = max(mlp_sync_align(config, size), batch_size * served.tokens_per_bs)
        return dummy_buffers(
            self.registry,
            config,
            batch_size=batch_size,
            num_tokens=min(num_tokens, max_num_token(config)),
            pp_proxy_rows=served.pp_proxy_rows,
            mask_tokens=served.tokens_per_bs if config.speculative_role == "target" else 0,
            vocab_size=vocab_size,
        )

    def _cut_buffers(
        self, buffers: DummyBuffers, mode: ForwardMode, batch_size: int, num_tokens: int | None
    ) -> ForwardBatch:
        """The first rows of ``buffers`` as a batch like a live one: aligned, with lengths."""
        config = self.config
        bs = mlp_sync_align(config, batch_size)
        per_request = self.served.tokens_per_bs if mode is self.served.captured_mode else 1
        tokens = mlp_sync_align(config, bs * per_request if num_tokens is None else num_tokens)
        if bs > buffers.batch_size or tokens > buffers.num_tokens or tokens < bs:
            raise SlotOverflowError(
                f"a dummy {mode.name} of {bs} requests and {tokens} tokens does not fit buffers of "
                f"{buffers.batch_size} and {buffers.num_tokens}; ask for fewer, with a token for "
                f"each request, or make them with _alloc_dummy_decode_buffers({max(bs, tokens)})"
            )
        batch = self._extract(buffers, bs, tokens)
        if batch.logits_buffer is not None:
            batch.logits_buffer = batch.logits_buffer.narrow(0, 0, tokens)
        if batch.pp_proxy_tensors is not None and not self.served.pp_proxy_rows:
            proxies = {
                key: each.narrow(0, 0, tokens) for key, each in batch.pp_proxy_tensors.items()
            }
            batch.pp_proxy_tensors = PPProxyTensors(proxies)
        encoder_lens = self._encoder_lens()
        set_requests(
            batch,
            buffers,
            mode,
            seq_len=max(1, self.served.attn_backend.seq_len_fill_value),
            encoder_len=None if encoder_lens is None else encoder_lens[0],
        )
        num_ranks = config.dp_size if config.require_mlp_tp_gather else 1
        return prepare_mlp_sync_batch(batch, config, [tokens] * num_ranks)

    def _dummy_batch(
        self, mode: ForwardMode, batch_size: int, num_tokens: int | None = None, **options: Any
    ) -> ForwardBatch:
        """``batch_size`` requests on scratch rows, or more where a prefill needs them to hold
        ``num_tokens``."""
        served = self.served
        longest = served.attn_backend.max_seq_len
        if num_tokens is not None and longest is not None and mode.wants_last_tokens():
            batch_size = max(batch_size, -(-num_tokens // longest))
        per_request = served.tokens_per_bs if mode is served.captured_mode else 1
        return dummy_batch(
            mode,
            batch_size=batch_size,
            num_tokens=batch_size * per_request if num_tokens is None else num_tokens,
            seq_len=max(1, served.attn_backend.seq_len_fill_value),
            device=served.device,
            cache_loc_dtype=self.config.cache_loc_dtype,
            pp_proxy_rows=served.pp_proxy_rows,
            encoder_lens=self._encoder_lens(),
            embeds=self._embeds(),
            **options,
        )

    def _embeds(self) -> tuple[int, torch.dtype] | None:
        width, dtype = self.config.hidden_size, self.config.embed_dtype
        return None if width is None or dtype is None else (width, dtype)

    def _encoder_lens(self) -> tuple[int, torch.dtype] | None:
        config = self.config
        if not config.is_encoder_decoder:
            return None
        return max(1, config.encoder_len_fill_value), config.encoder_lens_dtype

    def _extract(self, batch: Batch, bs: int, num_tokens: int) -> Batch:
        """A new view of ``batch`` on the slots, at these sizes."""
        view = self.registry.extract_buffer(
            padded_bs=bs, padded_num_tokens=num_tokens, forward_batch_template=batch
        )
        if batch.pp_proxy_tensors is not None and self.served.pp_proxy_rows:
            sizes = {"bs": bs, "tokens": num_tokens}
            view.pp_proxy_tensors = PPProxyTensors(
                {
                    key: self.registry.view(f"pp_proxy_tensors.{key}", sizes)
                    for key in self.served.pp_proxy_rows
                }
            )
        return view


def captured_mode(config: RunnerConfig) -> ForwardMode:
    """The mode whose batches bring a fixed number of tokens per request."""
    if config.dllm_block_size is not None:
        return ForwardMode.DLLM_EXTEND
    if config.speculative_role == "target":
        return ForwardMode.TARGET_VERIFY
    return ForwardMode.DECODE


def captured_widths(config: RunnerConfig) -> tuple[int, ...]:
    """How many tokens each request of such a batch brings: one number, increasing ones where the
    width of the draft adapts.

    A draft worker steps with a token per branch. Where a frozen-KV MTP lays out branches as
    requests, that is one per request. What a draft takes in after that runs eagerly.
    """
    if config.dllm_block_size is not None:
        return (config.dllm_block_size,)
    if config.speculative_role == "target":
        least = config.speculative_num_draft_tokens
        return tuple(range(least, (config.speculative_adaptive_max_draft_tokens or least) + 1))
    if config.speculative_role == "draft" and config.speculative_algorithm != "FROZEN_KV_MTP":
        return (config.speculative_eagle_topk,)
    return (1,)
