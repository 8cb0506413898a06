"""Batches that nobody asked for: to trace, to warm up and to capture with.

Every token of a dummy batch writes the scratch slot, and every request reads the scratch row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from compile_backend.forward_batch import ForwardBatch, ForwardMode

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
) -> ForwardBatch:
    """``batch_size`` requests with ``num_tokens`` tokens between them; ``seq_len`` each in decode.

    In the modes that extend, the first request has what the others, of one token, leave over, and
    nobody has a prefix. ``optional`` names optional fields that are present.
    """
    extends = mode.is_extend() and batch_size > 0
    lengths = [num_tokens // batch_size] * batch_size if batch_size else []
    if batch_size:
        lengths[0] += num_tokens - sum(lengths)
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
    return batch


def trace_sizes(static_sizes: Iterable[int]) -> list[tuple[int, int]]:
    """Two pairs of (batch size, tokens) to trace at: all four differ from each other, from 0 and 1
    and from every static dimension, so that no size is taken for another."""
    taken = {0, 1, *static_sizes}
    free = [size for size in range(2, 4 * len(taken) + 16) if size not in taken][:4]
    return [(free[0], free[2]), (free[1], free[3])]
