"""How a slot's buffer is cut: which dimension follows which axis, and the view of given sizes.

Owned here: the geometry of one buffer, and nothing about policies or batches. There are three cuts.

* The padded axis is the leading dimension: the view is ``buffer.narrow(0, 0, n)``.
* Another dimension, or more than one, is padded: the view is the head of the flat buffer reshaped
  to the padded shape, so that every bucket sees a contiguous tensor at the same address.
* The slot has a ``slice_fn``: the view is what it returns, strides included.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from compile_backend.errors import SlotDefinitionError, SlotMismatchError, SlotOverflowError

__all__ = ["Axis", "SliceFn", "SlotLayout", "address_extent", "build_layout", "narrow_to"]

Axis = str | tuple[str | None, ...]
"""``"bs"``, ``"tokens"`` or another axis name (the leading dimension), ``"none"`` (the whole
buffer), or one axis name or None per dimension."""

SliceFn = Callable[[Tensor, int, int], Tensor]
"""``slice_fn(buffer, padded_bs, padded_num_tokens)``: a view of the buffer."""

NO_AXIS = "none"


@dataclass(frozen=True, slots=True)
class PaddedDim:
    """One dimension whose size follows an axis; ``capacity`` is the most that it can be."""

    dim: int
    axis: str
    capacity: int


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """The geometry of one buffer. Every tensor it hands out is a view of ``buffer``."""

    name: str
    buffer: Tensor
    padded_dims: tuple[PaddedDim, ...]
    slice_fn: SliceFn | None
    address_range: tuple[int, int]  # of the storage that the buffer lies in, end excluded

    @property
    def is_flat(self) -> bool:
        """Whether views are reshapes of the flat head rather than leading rows."""
        return self.slice_fn is None and any(padded.dim != 0 for padded in self.padded_dims)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axis names that a view of this slot depends on."""
        if self.slice_fn is not None:
            return ("bs", "tokens")
        return tuple(dict.fromkeys(padded.axis for padded in self.padded_dims))

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the view of these sizes.

        Raises SlotOverflowError when a size exceeds the buffer, SlotMismatchError when ``sizes``
        lacks an axis of this slot or holds a negative size.
        """
        shape = list(self.buffer.shape)
        for padded in self.padded_dims:
            shape[padded.dim] = self._size(padded, sizes)
        if self.slice_fn is not None:
            return tuple(self._sliced(self.slice_fn, sizes).shape)
        return tuple(shape)

    def view(self, sizes: Mapping[str, int]) -> Tensor:
        """The view of these sizes: allocates no storage. Raises as :meth:`shape` does."""
        shape = self.shape(sizes)
        if self.slice_fn is not None:
            return self._sliced(self.slice_fn, sizes)
        if self.is_flat:
            return self.buffer.view(-1).narrow(0, 0, prod(shape)).view(shape)
        return narrow_to(self.buffer, shape)

    def _size(self, padded: PaddedDim, sizes: Mapping[str, int]) -> int:
        size = sizes.get(padded.axis)
        if size is None or size < 0:
            raise SlotMismatchError(
                f"slot {self.name!r} needs a size of 0 or more for its axis {padded.axis!r} but "
                f"the sizes given are {dict(sizes)}; add {padded.axis!r} to raw and padded"
            )
        if size > padded.capacity:
            raise SlotOverflowError(
                f"slot {self.name!r} holds {padded.capacity} rows on axis {padded.axis!r} but "
                f"{size} are asked for; raise the registry's maximum for {padded.axis!r} to at "
                f"least {size}, or run this batch without a bucket"
            )
        return size

    def _sliced(self, slice_fn: SliceFn, sizes: Mapping[str, int]) -> Tensor:
        view = slice_fn(self.buffer, sizes.get("bs", 0), sizes.get("tokens", 0))
        own, returned = self.buffer.untyped_storage(), view.untyped_storage()
        if own.data_ptr() != returned.data_ptr() or view.dtype != self.buffer.dtype:
            raise SlotDefinitionError(
                f"slice_fn of slot {self.name!r} returned a {view.dtype} tensor of shape "
                f"{list(view.shape)} that is no view of the buffer; cut it with narrow, without "
                f"contiguous(), clone() or to()"
            )
        return view


def build_layout(
    name: str,
    buffer: Tensor,
    axis: Axis,
    slice_fn: SliceFn | None,
    max_sizes: Mapping[str, int],
) -> SlotLayout:
    """The layout of ``buffer``, checked against the largest sizes of the registry.

    Raises SlotDefinitionError for an axis that the registry does not know, a buffer smaller than
    the registry's maximum on its axis, a flat cut of a buffer that is not contiguous, and a
    ``slice_fn`` that cannot cut the maximum or zero rows.
    """
    if isinstance(axis, str):
        named = [] if axis == NO_AXIS else [(0, axis)]
    else:
        named = [(dim, one) for dim, one in enumerate(axis) if one is not None]
        if len(axis) != buffer.dim():
            raise SlotDefinitionError(
                f"slot {name!r} has {buffer.dim()} dimensions (shape {list(buffer.shape)}) but its "
                f"axis {axis!r} names {len(axis)}; give one axis name or None per dimension"
            )
    for _, one in named:
        if one not in max_sizes:
            raise SlotDefinitionError(
                f"slot {name!r} follows axis {one!r} but the registry knows "
                f"{sorted(max_sizes)}; pass max_sizes={{{one!r}: ...}} to the registry"
            )
    if slice_fn is not None and isinstance(axis, str) and named:
        return _probe_slice(name, buffer, axis, slice_fn, max_sizes)

    for dim, one in named:
        if dim >= buffer.dim() or buffer.shape[dim] < max_sizes[one]:
            raise SlotDefinitionError(
                f"slot {name!r} has shape {list(buffer.shape)}, so dimension {dim} cannot hold the "
                f"registry's maximum of {max_sizes[one]} on axis {one!r}; make shape_fn return at "
                f"least that many"
            )
    padded_dims = tuple(PaddedDim(dim, one, buffer.shape[dim]) for dim, one in named)
    layout = SlotLayout(name, buffer, padded_dims, slice_fn, _storage_range(buffer))
    if layout.is_flat and not buffer.is_contiguous():
        raise SlotDefinitionError(
            f"slot {name!r} with axis {axis!r} is cut as a reshape of a flat buffer, which needs a "
            f"contiguous tensor, but strides are {list(buffer.stride())}; bind a contiguous tensor "
            f"or give the slot a slice_fn"
        )
    layout.view(max_sizes)
    layout.view(_halved(max_sizes))
    return layout


def _probe_slice(
    name: str, buffer: Tensor, axis: str, slice_fn: SliceFn, max_sizes: Mapping[str, int]
) -> SlotLayout:
    """Find which dimensions ``slice_fn`` cuts, by cutting the maximum and nothing."""
    unknown = SlotLayout(name, buffer, (), slice_fn, _storage_range(buffer))
    full = unknown.shape(max_sizes)
    unknown.shape(_halved(max_sizes))
    empty = unknown.shape({**max_sizes, axis: 0})
    padded_dims = tuple(
        PaddedDim(dim, axis, max_sizes[axis])
        for dim, (most, least) in enumerate(zip(full, empty, strict=True))
        if most != least
    )
    if not padded_dims and max_sizes[axis] > 0:
        raise SlotDefinitionError(
            f"slice_fn of slot {name!r} returns shape {list(full)} both for {max_sizes[axis]} and "
            f"for 0 rows on axis {axis!r}; cut a dimension by it or declare axis='none'"
        )
    return replace(unknown, padded_dims=padded_dims)


def _halved(sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes at which a cut that copies shows: contiguous() copies neither all rows nor none."""
    return {axis: size // 2 for axis, size in sizes.items()}


def _storage_range(buffer: Tensor) -> tuple[int, int]:
    storage = buffer.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def narrow_to(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The corner of ``tensor`` at index 0 with the given shape; raises where it is larger."""
    for dim, size in enumerate(shape):
        if size != tensor.shape[dim]:
            tensor = torch.narrow(tensor, dim, 0, size)
    return tensor


def address_extent(tensor: Tensor) -> tuple[int, int]:
    """First address, and the address past the last element, that ``tensor`` covers."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return start, start + (last + 1) * tensor.element_size()
