"""The batch of one step, and the declaration that gives its fields static slots.

A row is one token of one request, at a position of its own. So the rows of a prompt's chunk and the
one row of a decoding request are the same kind of thing, they mix freely in a step, and one axis,
``tokens``, says how large the step is.

This is the only file of the example that a backend asks for. The declaration names every field and
how its padded rows are filled; the model stays as it was.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compile_backend import GraphSlot, PaddingPolicy, declare_batch


@dataclass
class LlamaBatch:
    """Token rows, each field [rows] int64."""

    input_ids: Tensor
    positions: Tensor
    out_cache_loc: Tensor  # the KV slot that the row writes
    req_pool_indices: Tensor  # the row of the page table that the row reads
    seq_lens: Tensor  # how many tokens the row attends to: its position + 1


def _per_row(max_bs: int, max_num_tokens: int) -> tuple[int, ...]:
    return (max_num_tokens,)


def _row_slot(name: str, policy: PaddingPolicy, pad_value: int | None = None) -> GraphSlot:
    return GraphSlot(
        name, _per_row, torch.int64, axis="tokens", padding_policy=policy, pad_value=pad_value
    )


declare_batch(
    LlamaBatch,
    slots=[
        # A padded row computes something nobody reads, so any token will do, also a stale one.
        _row_slot("input_ids", PaddingPolicy.FOREACH_COPY),
        _row_slot("positions", PaddingPolicy.ZERO),
        # KV slot 0 is in the scratch page and table row 0 points at nothing but that page.
        _row_slot("out_cache_loc", PaddingPolicy.ZERO),
        _row_slot("req_pool_indices", PaddingPolicy.ZERO),
        # Attention over no token at all is NaN, so a padded row attends to one scratch token.
        _row_slot("seq_lens", PaddingPolicy.FILL_SENTINEL, pad_value=1),
    ],
)
