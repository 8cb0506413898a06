"""What the allocator's snapshot says about one memory pool. Pure functions of plain data.

A snapshot is what ``torch.cuda.memory_snapshot()`` returns: a list of segments (spans that came
from the driver), each a dict with ``address``, ``total_size``, ``allocated_size``, ``device``,
``segment_type`` ("small" or "large"), ``segment_pool_id`` and its ``blocks`` in order of address,
each with ``size`` and ``state``. All sizes are bytes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["PoolUse", "block_state", "segments_of_pool"]

Segment = Mapping[str, Any]

_IN_USE = "active_allocated"


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Bytes of a pool at one moment, or by how much they grew between two."""

    reserved_bytes: int  # in its segments, whether in use or free
    allocated_bytes: int  # part of reserved_bytes that tensors hold
    large_bytes: int  # part of reserved_bytes in segments that requests above 1 MiB come from

    @classmethod
    def of(cls, segments: Iterable[Segment]) -> "PoolUse":
        """The use that these segments, all of one pool, add up to."""
        segments = list(segments)
        return cls(
            reserved_bytes=sum(each["total_size"] for each in segments),
            allocated_bytes=sum(each["allocated_size"] for each in segments),
            large_bytes=sum(
                each["total_size"] for each in segments if each["segment_type"] == "large"
            ),
        )

    def since(self, before: "PoolUse") -> "PoolUse":
        """The growth from ``before`` to this; what shrank counts as nothing."""
        return PoolUse(
            max(0, self.reserved_bytes - before.reserved_bytes),
            max(0, self.allocated_bytes - before.allocated_bytes),
            max(0, self.large_bytes - before.large_bytes),
        )


def segments_of_pool(
    snapshot: Iterable[Segment], pool_id: tuple[int, int], device: int
) -> list[Segment]:
    """The segments of a snapshot that belong to ``pool_id`` on a device.

    Asking torch for one pool's snapshot fails where another device has no pool of that id.
    """
    return [
        segment
        for segment in snapshot
        if tuple(segment["segment_pool_id"]) == tuple(pool_id) and segment["device"] == device
    ]


def block_state(segments: Iterable[Segment], address: int) -> str | None:
    """ "used" or "free", by the block that holds ``address``; None outside of the segments."""
    for segment in segments:
        start = segment["address"]
        if not start <= address < start + segment["total_size"]:
            continue
        for block in segment["blocks"]:
            start += block["size"]
            if address < start:
                return "used" if block["state"] == _IN_USE else "free"
    return None
