"""Several tensors in one block of memory, so that one copy moves them all.

A layout says where each part lies; an arena is the block, on the host or on a device. Two arenas
that are cut by one layout are mirrors of each other.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from compile_backend.registry.bounded_cache import BoundedCache
from compile_backend.registry.pool import ALIGNMENT_BYTES, allocate

__all__ = ["Arena", "ArenaLayout", "ArenaPart", "lay_out_parts"]

MIN_ARENA_BYTES = 1 << 16
MAX_CUT_LAYOUTS = 64


@dataclass(frozen=True, slots=True)
class ArenaPart:
    """One contiguous tensor of an arena. ``offset`` is in bytes, a multiple of 256."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class ArenaLayout:
    """Where the parts lie: in order, none in another. Compared by identity."""

    parts: tuple[ArenaPart, ...]
    num_bytes: int  # from the first byte to the last of any part


def lay_out_parts(parts: Iterable[tuple[tuple[int, ...], torch.dtype]]) -> ArenaLayout:
    """Pack (shape, dtype) pairs, each at the next multiple of 256 bytes."""
    placed: list[ArenaPart] = []
    end = 0
    for shape, dtype in parts:
        part = ArenaPart(-(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES, tuple(shape), dtype)
        placed.append(part)
        end = part.offset + part.num_bytes
    return ArenaLayout(tuple(placed), end)


class Arena:
    """A block of bytes on one device that grows on demand; in pinned memory where asked for."""

    def __init__(self, device: torch.device, *, is_pinned: bool = False) -> None:
        self.device = device
        self.is_pinned = is_pinned
        self._block: Tensor | None = None
        self._cuts: BoundedCache[ArenaLayout, tuple[Tensor, list[Tensor]]] = BoundedCache(
            MAX_CUT_LAYOUTS
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the block, of which the largest layout yet takes more than half."""
        return 0 if self._block is None else self._block.nbytes

    def cut(self, layout: ArenaLayout) -> tuple[Tensor, list[Tensor]]:
        """All bytes that ``layout`` takes [num_bytes] uint8, and its parts.

        Both are views of the block, and the same objects from call to call until the block grows.
        A layout larger than the block moves it: its contents and earlier views are given up, so
        nothing may be in flight to or from it on a stream that the current one does not follow.
        """
        found = self._cuts.get(layout)
        if found is None:
            with torch.inference_mode(False), torch.no_grad():
                block = self._block
                if block is None or block.nbytes < layout.num_bytes:
                    block = self._grow(layout.num_bytes)
                parts = [
                    block.narrow(0, part.offset, part.num_bytes).view(part.dtype).view(part.shape)
                    for part in layout.parts
                ]
                found = self._cuts.put(layout, (block.narrow(0, 0, layout.num_bytes), parts))
        return found

    def _grow(self, num_bytes: int) -> Tensor:
        if self._block is not None and self._block.is_cuda:
            # Freed memory goes back to the stream it was allocated on, which may not be this one.
            self._block.record_stream(torch.cuda.current_stream(self.device))
        self._cuts.clear()
        capacity = max(MIN_ARENA_BYTES, 1 << (num_bytes - 1).bit_length())
        if self.is_pinned:
            self._block = torch.zeros(capacity, dtype=torch.uint8, device="cpu", pin_memory=True)
        else:
            self._block = allocate((capacity,), torch.uint8, self.device)
        return self._block
