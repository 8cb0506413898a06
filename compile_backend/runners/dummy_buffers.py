"""Dummy batches on memory that is there already: one set of slot views, cut to each size.

Autotuning and kernel warm-up run the model on the slots that it will be served on, so that a dummy
forward makes none. As in :mod:`.dummy`, every token writes the scratch slot and every request
reads the scratch row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from compile_backend.forward_batch import ForwardBatch, ForwardMode, PPProxyTensors
from compile_backend.registry.registry import CudaGraphBufferRegistry
from compile_backend.runner_config import RunnerConfig

__all__ = ["DraftMask", "DummyBuffers", "dummy_buffers", "set_requests"]

_FIELDS = frozenset(field.name for field in fields(ForwardBatch))


@dataclass(eq=False)
class DraftMask:
    """What a dummy verify brings as ``spec_info``."""

    custom_mask: Tensor  # flat bool, [new tokens, keys] of each request in turn


@dataclass(eq=False, kw_only=True)
class DummyBuffers(ForwardBatch):
    """A batch of the largest size whose tensors are slots, and what no slot holds."""

    logits_buffer: Tensor | None = None  # [tokens, vocab], where it was asked for
    custom_mask: Tensor | None = None  # as DraftMask has it, for all requests


def dummy_buffers(
    registry: CudaGraphBufferRegistry,
    config: RunnerConfig,
    *,
    batch_size: int,
    num_tokens: int,
    pp_proxy_rows: Mapping[str, object],
    mask_tokens: int = 0,
    vocab_size: int | None = None,
) -> DummyBuffers:
    """The slots of ``registry`` at these sizes, zeroed. Fields that the model may branch on are
    absent where its batches lack them.

    What is not a slot is made here, once: the fields of an extend [batch_size]; proxies of a later
    pipeline stage without slots [num_tokens, hidden_size]; a mask of ``mask_tokens`` new tokens and
    keys per request; logits [num_tokens, vocab_size].
    """
    sizes = {"bs": batch_size, "tokens": num_tokens}
    device = registry.device
    absent = {"input_embeds"} if config.is_multimodal else {"input_embeds", "mrope_positions"}
    buffers = DummyBuffers(batch_size=batch_size)
    for name in registry.slot_names:
        slot = registry.get_slot(name)
        is_copied = slot.copy_from_fb and slot.enabled and slot.source_fn is None
        if is_copied and name in _FIELDS - absent:
            setattr(buffers, name, registry.view(name, sizes).zero_())
    buffers.pp_proxy_tensors = _proxies(registry, config, sizes, pp_proxy_rows)
    with torch.inference_mode(False):
        buffers.extend_seq_lens, buffers.extend_prefix_lens, buffers.extend_start_loc = torch.zeros(
            3, batch_size, dtype=torch.int64, device=device
        )
        if mask_tokens:
            size = batch_size * mask_tokens**2
            buffers.custom_mask = torch.ones(size, dtype=torch.bool, device=device)
        if vocab_size is not None:
            buffers.logits_buffer = torch.zeros(num_tokens, vocab_size, device=device)
    return buffers


def set_requests(
    batch: DummyBuffers,
    buffers: DummyBuffers,
    mode: ForwardMode,
    *,
    seq_len: int,
    encoder_len: int | None,
) -> None:
    """Make ``batch``, slot views at one size, a batch of ``mode``; ``buffers`` has the rest.

    Requests of a decode have ``seq_len`` tokens. In the modes that extend, those of the batch are
    dealt out evenly, and nobody has a prefix.
    """
    bs, num_tokens = batch.batch_size, batch.num_tokens
    batch.forward_mode = mode
    tokens_each, num_longer = divmod(num_tokens, bs) if mode.is_extend() else (seq_len, 0)
    lengths = [tokens_each + 1] * num_longer + [tokens_each] * (bs - num_longer)
    _write_lengths(batch.seq_lens, tokens_each, num_longer)
    _write_lengths(batch.seq_lens_cpu, tokens_each, num_longer)
    batch.seq_lens_sum = sum(lengths)
    if batch.encoder_lens is not None and encoder_len is not None:
        batch.encoder_lens.fill_(encoder_len)
        batch.encoder_lens_cpu = [encoder_len] * bs
    if not mode.is_extend():
        batch.extend_seq_lens = batch.extend_prefix_lens = batch.extend_start_loc = None
        return
    for name in ("extend_seq_lens", "extend_prefix_lens", "extend_start_loc"):
        setattr(batch, name, getattr(buffers, name).narrow(0, 0, bs))
    _write_lengths(batch.extend_seq_lens, tokens_each, num_longer)
    assert batch.extend_seq_lens is not None
    assert batch.extend_start_loc is not None
    torch.cumsum(batch.extend_seq_lens, 0, out=batch.extend_start_loc)
    batch.extend_start_loc.sub_(batch.extend_seq_lens)
    batch.extend_num_tokens = num_tokens
    batch.extend_seq_lens_cpu = lengths
    batch.extend_prefix_lens_cpu = [0] * bs
    mask = buffers.custom_mask if mode is ForwardMode.TARGET_VERIFY else None
    if mask is not None:
        batch.spec_info = DraftMask(mask.narrow(0, 0, mask.shape[0] // buffers.batch_size * bs))


def _write_lengths(lengths: Tensor | None, tokens_each: int, num_longer: int) -> None:
    if lengths is not None:
        lengths.fill_(tokens_each)
        lengths.narrow(0, 0, num_longer).fill_(tokens_each + 1)


def _proxies(
    registry: CudaGraphBufferRegistry,
    config: RunnerConfig,
    sizes: Mapping[str, int],
    rows: Mapping[str, object],
) -> PPProxyTensors | None:
    """What a later pipeline stage is given in place of the stage before: nothing is received."""
    if rows:
        views = {key: registry.view(f"pp_proxy_tensors.{key}", sizes) for key in rows}
        return PPProxyTensors({key: view.zero_() for key, view in views.items()})
    if config.pp_rank == 0 or config.hidden_size is None:
        return None
    shape = (sizes["tokens"], config.hidden_size)
    names = ("hidden_states", "residual")
    with torch.inference_mode(False):
        return PPProxyTensors(
            {
                name: torch.zeros(shape, dtype=config.embed_dtype, device=registry.device)
                for name in names
            }
        )
