"""Requests that attend in one call: which token slots they read, and what each token may see.

Both ways to plan end in a :class:`RequestGroup`. Extends are planned from lengths on the host, a
decode from tensors, so that a captured graph can read a plan at a fixed address.

An entry that a request may not see points at the request's own first slot. It gets weight 0, and
``0 * NaN`` is NaN: what a stranger left in a freed slot or in the scratch slot must stay out of it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["SHORT_EXTEND", "DecodePlan", "ExtendPlan", "RequestGroup", "extend_groups"]

SHORT_EXTEND = 16
"""Up to so many new tokens per request a call costs more than its padding: requests with different
prefixes share one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestGroup:
    """Requests with equally many new tokens, whose KV lengths are padded to the longest."""

    num_requests: int
    num_new: int  # tokens per request
    kv_len: int
    slots: Tensor  # [num_requests * kv_len] int32, the token slots of each request in turn
    mask: Tensor | None  # [num_requests or 1, 1, num_new, kv_len] bool, True where visible
    is_causal: bool = False  # in place of a mask: no prefix, and token i sees tokens 0 to i

    @property
    def num_tokens(self) -> int:
        return self.num_requests * self.num_new


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendPlan:
    """The groups of an extend, in the order of the batch's tokens."""

    groups: tuple[RequestGroup, ...]
    num_tokens: int  # live ones; rows past them are padding


class DecodePlan:
    """A group of one token per request, in given memory. ``write`` fills it; no allocation."""

    __slots__ = ("_first", "_slots", "_visible", "group")

    def __init__(
        self, slots: Tensor, first: Tensor, visible: Tensor, *, batch_size: int, kv_len: int
    ) -> None:
        """``slots`` and ``visible`` are flat, of at least batch_size * kv_len elements; ``first``
        is flat, of at least batch_size. Their heads are used."""
        size = batch_size * kv_len
        self._slots = slots.narrow(0, 0, size).view(batch_size, kv_len)
        self._first = first.narrow(0, 0, batch_size).view(batch_size, 1)
        self._visible = visible.narrow(0, 0, size).view(batch_size, kv_len)
        self.group = RequestGroup(
            num_requests=batch_size,
            num_new=1,
            kv_len=kv_len,
            slots=slots.narrow(0, 0, size),
            mask=self._visible.view(batch_size, 1, 1, kv_len),
        )

    @staticmethod
    def buffers(size: int, batch_size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Memory for plans of up to ``batch_size`` requests with ``size`` entries in all."""
        with torch.inference_mode(False):
            return (
                torch.zeros(size, dtype=torch.int32, device=device),
                torch.zeros(batch_size, dtype=torch.int32, device=device),
                torch.zeros(size, dtype=torch.bool, device=device),
            )

    def write(
        self, req_to_token: Tensor, positions: Tensor, rows: Tensor, seq_lens: Tensor
    ) -> RequestGroup:
        """Plan for requests ``rows`` [batch_size] of ``seq_lens`` [batch_size] tokens each."""
        kv_len = self.group.kv_len
        torch.index_select(req_to_token.narrow(1, 0, kv_len), 0, rows, out=self._slots)
        self._first.copy_(self._slots.narrow(1, 0, 1))
        torch.lt(positions.narrow(0, 0, kv_len), seq_lens.unsqueeze(1), out=self._visible)
        torch.where(self._visible, self._slots, self._first, out=self._slots)
        return self.group


def extend_groups(
    req_to_token: Tensor,
    positions: Tensor,
    rows: Tensor,
    *,
    new_lens: Sequence[int],
    prefix_lens: Sequence[int],
    is_causal: bool,
) -> Iterator[RequestGroup]:
    """Groups of consecutive requests; those without new tokens are in none.

    Where not ``is_causal`` the new tokens of a request see each other. No host read.
    """
    for start, stop in _runs(new_lens, prefix_lens):
        num_new = new_lens[start]
        kv_lens = [prefix + num_new for prefix in prefix_lens[start:stop]]
        kv_len = max(kv_lens)
        table = req_to_token.narrow(1, 0, kv_len)
        slots = table.index_select(0, rows.narrow(0, start, stop - start))
        reach = torch.tensor(kv_lens, device=slots.device).unsqueeze(1)  # [requests, 1]
        if min(kv_lens) == kv_len:
            reach = reach.narrow(0, 0, 1)  # the same for every request
        else:
            own = positions.narrow(0, 0, kv_len) < reach
            slots = torch.where(own, slots, slots.narrow(1, 0, 1))
        if is_causal:
            reach = reach + torch.arange(1 - num_new, 1, device=slots.device)  # [.., num_new]
        else:
            reach = reach.expand(-1, num_new)
        sees_all = min(kv_lens) == kv_len and (num_new == 1 or not is_causal)
        triangular = is_causal and kv_len == num_new > SHORT_EXTEND
        mask = None
        if not sees_all and not triangular:
            mask = (positions.narrow(0, 0, kv_len) < reach.unsqueeze(-1)).unsqueeze(1)
        yield RequestGroup(
            num_requests=stop - start,
            num_new=num_new,
            kv_len=kv_len,
            slots=slots.view(-1),
            mask=mask,
            is_causal=triangular,
        )


def _runs(new_lens: Sequence[int], prefix_lens: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The bounds of consecutive requests that form one group."""
    start = 0
    for stop in range(1, len(new_lens) + 1):
        joins = (
            stop < len(new_lens)
            and new_lens[stop] == new_lens[start]
            and (new_lens[stop] <= SHORT_EXTEND or prefix_lens[stop] == prefix_lens[start])
        )
        if not joins:
            if new_lens[start]:
                yield start, stop
            start = stop
