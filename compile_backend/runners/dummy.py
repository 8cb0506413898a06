"""Batches that nobody asked for: to trace, to warm up and to capture with.

Every token of a dummy batch writes the scratch slot, and every request reads the scratch row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch

from compile_backend.forward_batch import ForwardBatch, ForwardMode, PPProxyTensors

__all__ = ["dummy_batch", "trace_sizes"]


def dummy_batch(
    mode: ForwardMode,
    *,
    batch_size: int,
    num_tokens: int,
    seq_len: int,
    device: torch.device,
    cache_loc_dtype: torch.dtype = torch.int64,
    optional: Collection[str] = (),
    pp_proxy_rows: Mapping[str, tuple[tuple[int, ...], torch.dtype]] | None = None,
    encoder_lens: tuple[int, torch.dtype] | None = None,
    embeds: tuple[int, torch.dtype] | None = None,
) -> ForwardBatch:
    """``batch_size`` requests with ``num_tokens`` tokens between them; ``seq_len`` each in decode.

    In the modes that extend, requests have equal shares of the tokens, and nobody has a prefix.
    ``optional`` names what is present: ``mrope_positions``, ``mamba_track``, ``lora``,
    ``input_embeds`` (of width and dtype ``embeds``). ``encoder_lens`` gives each request's encoder
    length, and the dtype.
    """
    extends = mode.is_extend()
    share, rest = divmod(num_tokens, batch_size) if batch_size else (0, 0)
    lengths = [share + (request < rest) for request in range(batch_size)]
    seq_lens = torch.tensor(lengths if extends else [seq_len] * batch_size, dtype=torch.int64)

    def per_token(dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(num_tokens, dtype=dtype, device=device)

    def per_request(dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(batch_size, dtype=dtype, device=device)

    batch = ForwardBatch(
        forward_mode=mode,
        batch_size=batch_size,
        input_ids=per_token(),
        positions=per_token(),
        out_cache_loc=per_token(cache_loc_dtype),
        req_pool_indices=per_request(),
        seq_lens=seq_lens.to(device),
        seq_lens_cpu=seq_lens,
        seq_lens_sum=int(seq_lens.sum()),
    )
    if extends:
        on_device = seq_lens.to(device)
        batch.extend_num_tokens = num_tokens
        batch.extend_seq_lens = on_device
        batch.extend_prefix_lens = torch.zeros_like(on_device)
        batch.extend_start_loc = on_device.cumsum(0) - on_device
        batch.extend_seq_lens_cpu = lengths
        batch.extend_prefix_lens_cpu = [0] * batch_size
    if "mrope_positions" in optional:
        batch.mrope_positions = torch.zeros(3, num_tokens, dtype=torch.int64, device=device)
    if "input_embeds" in optional:
        assert embeds is not None
        width, dtype = embeds
        batch.input_embeds = torch.zeros(num_tokens, width, dtype=dtype, device=device)
    if "mamba_track" in optional:
        batch.mamba_track_indices = per_request()
        batch.mamba_track_mask = per_request(torch.bool)
        if extends:
            batch.mamba_track_seqlens = per_request()
    if encoder_lens is not None:
        length, dtype = encoder_lens
        batch.encoder_lens = torch.full((batch_size,), length, dtype=dtype, device=device)
        batch.encoder_lens_cpu = [length] * batch_size
    if pp_proxy_rows:
        batch.pp_proxy_tensors = PPProxyTensors(
            {
                key: torch.zeros(num_tokens, *row, dtype=dtype, device=device)
                for key, (row, dtype) in pp_proxy_rows.items()
            }
        )
    batch.has_lora = "lora" in optional
    return batch


def trace_sizes(static_sizes: Iterable[int]) -> list[tuple[int, int]]:
    """Two pairs of (batch size, tokens) to trace at: all four differ from each other, from 0 and 1
    and from every static dimension, so that no size is taken for another."""
    taken = {0, 1, *static_sizes}
    free = [size for size in range(2, 4 * len(taken) + 16) if size not in taken][:4]
    return [(free[0], free[2]), (free[1], free[3])]
