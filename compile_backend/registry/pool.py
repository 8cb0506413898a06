"""The input pool: the process-wide store of buffers that registries share.

The key is ``(name, numel, dtype, device)``. The same key always finds the same storage; another
size is another key, gets a storage of its own and displaces nothing. No storage is ever grown or
replaced, and one that a graph has captured is never dropped either.
"""

import threading
from dataclasses import dataclass
from math import prod
from weakref import WeakSet

import torch
from torch import Tensor

from compile_backend.errors import SlotDefinitionError
from compile_backend.registry.layout import address_extent
from compile_backend.registry.slot import GraphSlot, PaddingPolicy

__all__ = [
    "InputPool",
    "allocate",
    "check_bindable",
    "check_sharing",
    "input_pool",
    "remember_slot",
    "share_input_buffer",
]

ALIGNMENT_BYTES = 256  # what the CUDA caching allocator gives; kernels may rely on it everywhere


@dataclass(frozen=True, slots=True)
class PoolKey:
    """What two slots must agree on to share a storage."""

    name: str
    numel: int
    dtype: torch.dtype
    device: torch.device


class InputPool:
    """Storages by :class:`PoolKey`. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers: dict[PoolKey, Tensor] = {}
        self._captured: set[PoolKey] = set()

    def __len__(self) -> int:
        return len(self._buffers)

    @property
    def pool_bytes(self) -> int:
        """Bytes of all storages in the pool."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def share(self, name: str, tensor: Tensor) -> Tensor:
        """The pooled buffer of this name, size, dtype and device, in the shape of ``tensor``.

        ``tensor`` becomes the pooled buffer where there is none yet; otherwise it is not used and
        its values are not copied. Raises SlotDefinitionError for a tensor that cannot be a buffer.
        """
        check_bindable(name, tensor)
        key = PoolKey(name, tensor.numel(), tensor.dtype, tensor.device)
        if not tensor.is_contiguous():
            raise SlotDefinitionError(
                f"buffer {name!r} has shape {list(tensor.shape)} and strides "
                f"{list(tensor.stride())}; the pool shares contiguous tensors only, so pass "
                f"tensor.contiguous()"
            )
        with self._lock:
            buffer = self._buffers.setdefault(key, tensor)
        return _in_shape(buffer, tuple(tensor.shape))

    def get_or_allocate(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, bool]:
        """The pooled buffer in the given shape, and whether it was allocated by this call."""
        key = PoolKey(name, prod(shape), dtype, torch.empty(0, device=device).device)
        with self._lock:
            buffer = self._buffers.get(key)
            is_new = buffer is None
            if buffer is None:
                buffer = self._buffers[key] = allocate(shape, dtype, device)
        return _in_shape(buffer, shape), is_new

    def mark_captured(self, name: str, buffer: Tensor) -> None:
        """Keep this buffer for the life of the process: a graph has recorded its address."""
        key = PoolKey(name, buffer.numel(), buffer.dtype, buffer.device)
        with self._lock:
            pooled = self._buffers.get(key)
            if pooled is not None and pooled.data_ptr() == buffer.data_ptr():
                self._captured.add(key)

    def clear(self) -> None:
        """Drop the buffers that no graph has captured; registries that hold one keep it alive."""
        with self._lock:
            for key in self._buffers.keys() - self._captured:
                del self._buffers[key]


input_pool = InputPool()
"""The one pool of the process."""


def share_input_buffer(name: str, tensor: Tensor) -> Tensor:
    """Put ``tensor`` in the process's pool, or get what is there under the same key.

    Returns a tensor of the shape of ``tensor`` on the pooled storage of that name, number of
    elements, dtype and device. Where there was one, ``tensor`` is not used and not copied from.
    Raises SlotDefinitionError for a tensor that is not contiguous or was made in inference mode.
    """
    return input_pool.share(name, tensor)


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A zeroed contiguous tensor at an address that is a multiple of 256 bytes.

    Made outside inference mode whatever the caller's mode, so that it can be written in both.
    """
    num_bytes = prod(shape) * torch.empty(0, dtype=dtype).element_size()
    with torch.inference_mode(False), torch.no_grad():
        block = torch.zeros(num_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
        skipped_bytes = -block.data_ptr() % ALIGNMENT_BYTES
        # set_ rather than slicing and view(dtype): the result is a tensor of its own, not a view,
        # so tracers do not rebuild the byte block behind it.
        empty = torch.empty(0, dtype=dtype, device=device)
        offset = skipped_bytes // empty.element_size()
        strides = torch.empty(shape, device="meta").stride()
        return empty.set_(block.untyped_storage(), offset, shape, strides)


def check_bindable(name: str, tensor: Tensor) -> None:
    """Raise SlotDefinitionError for a tensor whose memory cannot be a static input."""
    if tensor.is_inference():
        raise SlotDefinitionError(
            f"buffer {name!r} was made in inference mode, so nothing may write it outside; "
            f"allocate it under torch.inference_mode(False)"
        )
    if tensor.requires_grad:
        raise SlotDefinitionError(
            f"buffer {name!r} requires grad, but a static input is overwritten at every step; "
            f"pass tensor.detach()"
        )
    if any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        raise SlotDefinitionError(
            f"buffer {name!r} of shape {list(tensor.shape)} is expanded (strides "
            f"{list(tensor.stride())}), so its rows share memory; pass tensor.contiguous()"
        )


def _in_shape(buffer: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(buffer.shape) == shape:
        return buffer
    with torch.inference_mode(False), torch.no_grad():
        return buffer.view(shape)


_live_slots: WeakSet[GraphSlot] = WeakSet()


def check_sharing(slot: GraphSlot, buffer: Tensor) -> None:
    """Refuse a slot whose tail value another live slot on the same memory would undo, or suffer.

    A FILL_ONCE buffer is filled at registration and never again, so every other slot on its memory
    must want the same value. Other policies restore their own tails at every fill and need no
    agreement. Raises SlotDefinitionError.
    """
    for other in list(_live_slots):
        if _shares_memory(buffer, other.layout.buffer) and _undo_each_other(slot, other):
            raise SlotDefinitionError(
                f"slot {slot.name!r} ({slot.padding_policy.name}, value {_wanted(slot)!r}) shares "
                f"the buffer of slot {other.name!r} ({other.padding_policy.name}, value "
                f"{_wanted(other)!r}) of another registry, and FILL_ONCE is filled only at "
                f"registration; use the same value in both, or share_pool=False for one"
            )


def remember_slot(slot: GraphSlot) -> None:
    """Let later :func:`check_sharing` calls see this slot, for as long as it lives."""
    _live_slots.add(slot)


def _wanted(slot: GraphSlot) -> float | None:
    is_once = slot.padding_policy is PaddingPolicy.FILL_ONCE
    return slot.pad_value if is_once else slot.tail_value


def _undo_each_other(slot: GraphSlot, other: GraphSlot) -> bool:
    if PaddingPolicy.FILL_ONCE not in (slot.padding_policy, other.padding_policy):
        return False
    mine, theirs = _wanted(slot), _wanted(other)
    if mine is None or theirs is None:
        return False
    return mine != theirs and not (mine != mine and theirs != theirs)  # NaN agrees with NaN


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    if one.device != other.device or one.device.type == "meta":
        return False
    (start, end), (other_start, other_end) = address_extent(one), address_extent(other)
    return start < other_end and other_start < end
