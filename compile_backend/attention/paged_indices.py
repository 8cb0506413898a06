"""Which token slots each request attends to, as the CSR arrays that paged-attention kernels take.

A page is one token slot. Request ``i`` reads ``indices[indptr[i] : indptr[i + 1]]``, its tokens in
order. Plain tensor arithmetic, on any device; sizes come from the host, so nothing is read back.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["indptr_of", "write_indices"]


def indptr_of(lengths: Sequence[int]) -> Tensor:
    """Where each request begins, and the end: [len(lengths) + 1] int32, on the host."""
    indptr = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(torch.tensor(lengths, dtype=torch.int32), 0, out=indptr[1:])
    return indptr


def write_indices(
    req_to_token: Tensor, rows: Tensor, indptr: Tensor, total: int, out: Tensor
) -> Tensor:
    """The first entries of each row of ``req_to_token``, one row after the other.

    ``rows`` [requests] are the rows, ``indptr`` [requests + 1] how many entries of each, of
    ``total`` in all; both on the table's device. Written to the head of ``out``, an int32 tensor
    there, which is returned as a view of ``total`` elements.
    """
    lengths = indptr.diff()
    starts = rows * req_to_token.shape[1] - indptr[:-1]  # of a row in the flat table, less its own
    places = torch.repeat_interleave(starts, lengths, output_size=total)
    places += torch.arange(total, device=places.device)
    head = out.narrow(0, 0, total)
    return torch.index_select(req_to_token.view(-1), 0, places, out=head)
