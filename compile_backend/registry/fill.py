"""The fill plan: everything about one fill that depends on shapes alone, decided once and kept.

A plan is built from the sizes and from the shape, dtype and device of every source, which are
also its key; so what was validated when a plan was built holds whenever the plan is found again,
and a steady-state fill is one look-up, one call to zero the tails and one to copy the heads.
What is written where is a :class:`FillWork`. :func:`group_work` turns it into grouped calls, for
any device; :mod:`.device_fill` turns it into one launch.
"""

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from compile_backend.errors import SlotDefinitionError, SlotMismatchError, SlotOverflowError
from compile_backend.registry.bounded_cache import BoundedCache
from compile_backend.registry.fit import live_shape, require_tensor
from compile_backend.registry.layout import address_extent, narrow_to
from compile_backend.registry.slot import GraphSlot

__all__ = [
    "BoundedCache",
    "FillPlan",
    "FillWork",
    "HeadCopy",
    "SlotSource",
    "TailReset",
    "copy_heads",
    "decide_fill",
    "describe_sources",
    "group_work",
    "plan_fill",
    "source_picker",
]

_foreach_copy: Callable[[list[Tensor], Sequence[Tensor]], None] | None
_foreach_copy = getattr(torch, "_foreach_copy_", None)


class SlotSource(NamedTuple):
    """One slot of a fill and what is copied into its head."""

    slot: GraphSlot
    source: Tensor | None  # None: only the tail is reset
    own_length: bool = False  # the source's length decides where the tail begins


class HeadCopy(NamedTuple):
    """One head and the source that goes there."""

    entry_at: int  # index of the entry, by which its source is found
    head: Tensor
    source_dtype: torch.dtype
    source_device: torch.device
    is_cut: bool  # the source is larger than the head, and its corner is copied


class TailReset(NamedTuple):
    """One slab of a tail and what it is reset to."""

    entry_at: int
    tail: Tensor
    value: float


@dataclass(frozen=True, slots=True)
class FillWork:
    """What one fill writes: views of the buffers. First tails, then heads, then numbers.

    The head and the tails of one entry have no element in common. ``numbers`` are pairs of an index
    among the numbers of a fill and the buffer that is set to that number.
    """

    heads: tuple[HeadCopy, ...]
    tails: tuple[TailReset, ...]
    numbers: tuple[tuple[int, Tensor], ...] = ()


def copy_heads(heads: list[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to the head of its place, in one grouped call where torch has that."""
    if len(heads) == 1:
        heads[0].copy_(sources[0])
    elif _foreach_copy is not None:
        _foreach_copy(heads, sources)
    else:
        for head, source in zip(heads, sources, strict=True):
            head.copy_(source)


@dataclass(frozen=True, slots=True)
class HeadCopies:
    """Copies that one grouped call can make."""

    heads: list[Tensor]
    pick: Callable[[Sequence[Tensor | None]], Sequence[Tensor]]  # the sources, in heads' order

    def run(self, sources: Sequence[Tensor | None]) -> None:
        copy_heads(self.heads, self.pick(sources))


@dataclass(frozen=True, slots=True)
class FillPlan:
    """What one fill does. Holds views of the buffers; allocates nothing when it runs."""

    zero_tails: tuple[list[Tensor], ...]
    value_tails: tuple[tuple[Tensor, float], ...]
    copies: tuple[HeadCopies, ...]
    numbers: tuple[tuple[int, Tensor], ...] = ()

    def run(self, sources: Sequence[Tensor | None], numbers: Sequence[int | None] = ()) -> None:
        """Reset the tails, copy ``sources``, write ``numbers``; both in the order planned.

        Gradients must be off: a source that requires grad would make a buffer require it.
        """
        for tails in self.zero_tails:
            torch._foreach_zero_(tails)
        for tail, value in self.value_tails:
            tail.fill_(value)
        for group in self.copies:
            group.run(sources)
        for index, buffer in self.numbers:
            number = numbers[index]
            assert number is not None, "a plan writes the numbers that its key says there are"
            buffer.fill_(number)


def describe_sources(
    key: list[Hashable],
    slots: Sequence[GraphSlot],
    sources: Sequence[Tensor | None],
    address_ranges: Sequence[tuple[int, int]],
    occupied: tuple[Sequence[int], Sequence[int]] = ((), ()),
) -> None:
    """Append to ``key`` everything about ``sources`` that a plan depends on.

    A source that lies in the memory of its own slot (a batch made of slot views) is described by
    its place as well, since a copy onto itself is left out.
    ``occupied`` are the first addresses of all slots in increasing order, and where each ends.
    Raises SlotMismatchError for a source that is not a dense tensor, or that lies in the memory of
    another slot, which may be written before it is read.
    """
    starts, ends = occupied
    try:
        for source, (start, end) in zip(sources, address_ranges, strict=True):
            if source is None:
                key.append(None)
                continue
            key.append(source.shape)
            key.append(source.dtype)
            key.append(source.device)
            address = source.data_ptr()
            if start <= address < end:
                key.append((address - start, source.stride()))
            elif (
                starts
                and address < ends[bisect_right(starts, address) - 1]
                and (address >= starts[0])
            ):
                _refuse_other_slots_memory(slots, sources, source)
    except (AttributeError, RuntimeError):
        for slot, source in zip(slots, sources, strict=True):
            if source is not None:
                require_tensor(slot, source)
        raise


def _refuse_other_slots_memory(
    slots: Sequence[GraphSlot], sources: Sequence[Tensor | None], source: Tensor
) -> NoReturn:
    name = next(slot.name for slot, each in zip(slots, sources, strict=True) if each is source)
    raise SlotMismatchError(
        f"field {name!r} lies in the memory of another slot, which may be written before it is "
        f"read; give a copy (outputs may be views of slots, unless copy_outputs is set)"
    )


def plan_fill(
    entries: Iterable[SlotSource], raw: Mapping[str, int], padded: Mapping[str, int]
) -> FillPlan:
    """:func:`decide_fill`, in grouped calls."""
    return group_work(decide_fill(entries, raw, padded))


def decide_fill(
    entries: Iterable[SlotSource], raw: Mapping[str, int], padded: Mapping[str, int]
) -> FillWork:
    """Validate every entry and decide what to write where. Writes nothing.

    A source is found at run time by the index of its entry.
    Raises SlotMismatchError and SlotOverflowError where sizes or sources do not fit.
    """
    _check_sizes(raw, padded)
    heads: list[HeadCopy] = []
    tails: list[TailReset] = []
    for index, (slot, source, own_length) in enumerate(entries):
        view = _checked_view(slot, raw, padded)
        live = slot.layout.shape(raw)
        if source is not None:
            live = live_shape(slot, source, live, own_length=own_length)
            head = _head(slot, view, live)
            if not _is_already_there(slot, view, head, narrow_to(source, live)):
                is_cut = source.shape != head.shape
                heads.append(HeadCopy(index, head, source.dtype, source.device, is_cut))
        tail_value = slot.tail_value
        if tail_value is not None:
            tails.extend(TailReset(index, slab, tail_value) for slab in _tails(view, live))
    return FillWork(tuple(heads), tuple(tails))


def group_work(work: FillWork) -> FillPlan:
    """The work in as few calls as the grouped operators take it: one per device and dtypes."""
    zeros: dict[Hashable, list[Tensor]] = {}
    values: list[tuple[Tensor, float]] = []
    copies: dict[Hashable, list[HeadCopy]] = {}
    for _, tail, value in work.tails:
        if value == 0:
            zeros.setdefault((tail.device, tail.dtype), []).append(tail)
        else:
            values.append((tail, value))
    for copy in work.heads:
        group = (copy.head.device, copy.head.dtype, copy.source_dtype)
        copies.setdefault(group, []).append(copy)
    return FillPlan(
        tuple(zeros.values()),
        tuple(values),
        tuple(
            HeadCopies([c.head for c in group], source_picker(group)) for group in copies.values()
        ),
        work.numbers,
    )


def _check_sizes(raw: Mapping[str, int], padded: Mapping[str, int]) -> None:
    if raw.keys() != padded.keys():
        raise SlotMismatchError(
            f"raw sizes name the axes {sorted(raw)} but padded sizes name {sorted(padded)}; give "
            f"both for every axis"
        )
    for axis, size in raw.items():
        if size > padded[axis]:
            raise SlotOverflowError(
                f"the batch has {size} rows on axis {axis!r} but its bucket has {padded[axis]}; "
                f"pick a bucket of at least {size} rows, or run this batch without one"
            )


def _checked_view(slot: GraphSlot, raw: Mapping[str, int], padded: Mapping[str, int]) -> Tensor:
    view = slot.layout.view(padded)
    if slot.slice_fn is not None:
        live = slot.layout.view(raw)
        fits = all(one <= other for one, other in zip(live.shape, view.shape, strict=True))
        starts_alike = not live.numel() or live.data_ptr() == view.data_ptr()
        if not (fits and starts_alike and _same_strides(live, view)):
            raise SlotDefinitionError(
                f"slice_fn of slot {slot.name!r} cuts shape {list(live.shape)} with strides "
                f"{list(live.stride())} at {dict(raw)} and shape {list(view.shape)} with strides "
                f"{list(view.stride())} at {dict(padded)}; the smaller must be the first rows of "
                f"the larger, so cut with narrow from index 0"
            )
    return view


def _head(slot: GraphSlot, view: Tensor, live: tuple[int, ...]) -> Tensor:
    """Where ``live`` rows go: in the view, or past its end for a source of its own length."""
    if all(one <= other for one, other in zip(live, view.shape, strict=True)):
        return narrow_to(view, live)
    if slot.slice_fn is None and not slot.layout.is_flat:
        return narrow_to(slot.layout.buffer, live)
    raise SlotOverflowError(
        f"slot {slot.name!r} has a view of shape {list(view.shape)} for this bucket but source_fn "
        f"brings {list(live)}; return at most the padded size, or pick a larger bucket"
    )


def _tails(view: Tensor, live: tuple[int, ...]) -> list[Tensor]:
    """Slabs of ``view`` that cover, once each, every position outside the ``live`` corner."""
    slabs = []
    for dim, size in enumerate(live):
        padded = view.shape[dim]
        if size < padded:
            slab = view.narrow(dim, size, padded - size)
            if slab.numel():
                slabs.append(slab)
            view = view.narrow(dim, 0, size)
    return slabs


def source_picker(
    copies: Sequence[HeadCopy],
) -> Callable[[Sequence[Tensor | None]], Sequence[Tensor]]:
    """What gets the sources of ``copies`` out of those of a fill, each cut to its head's shape."""
    indices = [copy.entry_at for copy in copies]
    if any(copy.is_cut for copy in copies):
        places = [(c.entry_at, tuple(c.head.shape) if c.is_cut else None) for c in copies]

        def pick_and_cut(sources: Sequence[Tensor | None]) -> list[Tensor]:
            found = [(sources[index], shape) for index, shape in places]
            return [
                narrow_to(one, shape) if shape else one for one, shape in found if one is not None
            ]

        return pick_and_cut
    if len(indices) == 1:
        return itemgetter(slice(indices[0], indices[0] + 1))
    return itemgetter(*indices)


def _is_already_there(slot: GraphSlot, view: Tensor, head: Tensor, source: Tensor) -> bool:
    """Whether the copy of ``source`` into ``head`` would be a copy onto itself."""
    start, end = slot.layout.address_range
    if not start <= source.data_ptr() < end:
        return False
    if source.dtype == head.dtype and source.data_ptr() == head.data_ptr():
        if _same_strides(head, source):
            return True
    elif not any(_overlap(source, mine) for mine in (view, head)):
        return False
    raise SlotMismatchError(
        f"slot {slot.name!r} at {head.data_ptr():#x} (strides {list(head.stride())}) is given a "
        f"source in its own buffer at {source.data_ptr():#x} (strides {list(source.stride())}), "
        f"which the fill would overwrite while it reads; clone the field first"
    )


def _same_strides(one: Tensor, other: Tensor) -> bool:
    both = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(size <= 1 or mine == theirs for size, mine, theirs in both)


def _overlap(one: Tensor, other: Tensor) -> bool:
    (start, end), (other_start, other_end) = address_extent(one), address_extent(other)
    return start < other_end and other_start < end
