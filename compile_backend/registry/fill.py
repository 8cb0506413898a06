"""The fill plan: everything about one fill that depends on shapes alone, decided once and kept.

A plan is built from the sizes and from the shape, dtype and device of every source, which are
also its key; so what was validated when a plan was built holds whenever the plan is found again,
and a steady-state fill is one look-up, one call to zero the tails and one to copy the heads.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from compile_backend.errors import SlotDefinitionError, SlotMismatchError, SlotOverflowError
from compile_backend.registry.fit import live_shape, require_tensor
from compile_backend.registry.layout import address_extent, narrow_to
from compile_backend.registry.slot import GraphSlot

__all__ = ["BoundedCache", "FillPlan", "SlotSource", "describe_sources", "plan_fill"]

_foreach_copy: Callable[[list[Tensor], Sequence[Tensor]], None] | None
_foreach_copy = getattr(torch, "_foreach_copy_", None)


Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class BoundedCache(Generic[Key, Value]):
    """A mapping that keeps the ``max_entries`` entries used last."""

    def __init__(self, max_entries: int) -> None:
        self.max_entries = max_entries
        self._entries: OrderedDict[Key, Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Value | None:
        """The value, now the one used last; None where there is none."""
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def put(self, key: Key, value: Value) -> Value:
        """Keep ``value``, dropping the entry used longest ago where the cache is full."""
        self._entries[key] = value
        if len(self._entries) > self.max_entries:
            self._entries.popitem(last=False)
        return value

    def clear(self) -> None:
        """Drop every entry."""
        self._entries.clear()


class SlotSource(NamedTuple):
    """One slot of a fill and what is copied into its head."""

    slot: GraphSlot
    source: Tensor | None  # None: only the tail is reset
    own_length: bool = False  # the source's length decides where the tail begins


@dataclass(frozen=True, slots=True)
class HeadCopies:
    """Copies that one grouped call can make."""

    heads: list[Tensor]
    pick: Callable[[Sequence[Tensor | None]], Sequence[Tensor]]  # the sources, in heads' order

    def run(self, sources: Sequence[Tensor | None]) -> None:
        if len(self.heads) == 1:
            self.heads[0].copy_(self.pick(sources)[0])
        elif _foreach_copy is not None:
            _foreach_copy(self.heads, self.pick(sources))
        else:
            for head, source in zip(self.heads, self.pick(sources), strict=True):
                head.copy_(source)


@dataclass(frozen=True, slots=True)
class FillPlan:
    """What one fill does. Holds views of the buffers; allocates nothing when it runs."""

    zero_tails: tuple[list[Tensor], ...]
    value_tails: tuple[tuple[Tensor, float], ...]
    copies: tuple[HeadCopies, ...]

    def run(self, sources: Sequence[Tensor | None]) -> None:
        """Reset the tails, then copy ``sources``, which come in the order they were planned in.

        Gradients must be off: a source that requires grad would make a buffer require it.
        """
        for tails in self.zero_tails:
            torch._foreach_zero_(tails)
        for tail, value in self.value_tails:
            tail.fill_(value)
        for group in self.copies:
            group.run(sources)


def describe_sources(
    key: list[Hashable],
    slots: Sequence[GraphSlot],
    sources: Sequence[Tensor | None],
    address_ranges: Sequence[tuple[int, int]],
) -> None:
    """Append to ``key`` everything about ``sources`` that a plan depends on.

    A source that lies in the memory of its own slot (a batch made of slot views) is described by
    its place as well, since a copy onto itself is left out.
    Raises SlotMismatchError for a source that is not a dense tensor.
    """
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
    except (AttributeError, RuntimeError):
        for slot, source in zip(slots, sources, strict=True):
            if source is not None:
                require_tensor(slot, source)
        raise


def plan_fill(
    entries: Iterable[SlotSource], raw: Mapping[str, int], padded: Mapping[str, int]
) -> FillPlan:
    """Validate every entry and decide what to write where. Writes nothing.

    A source is found at run time by the index of its entry.
    Raises SlotMismatchError and SlotOverflowError where sizes or sources do not fit.
    """
    _check_sizes(raw, padded)
    zeros: dict[Hashable, list[Tensor]] = {}
    values: list[tuple[Tensor, float]] = []
    copies: dict[Hashable, list[tuple[int, Tensor]]] = {}
    cuts: dict[int, tuple[int, ...]] = {}
    for index, (slot, source, own_length) in enumerate(entries):
        view = _checked_view(slot, raw, padded)
        live = slot.layout.shape(raw)
        if source is not None:
            live = live_shape(slot, source, live, own_length=own_length)
            head = _head(slot, view, live)
            if not _is_already_there(slot, view, head, narrow_to(source, live)):
                group = (head.device, head.dtype, source.dtype)
                copies.setdefault(group, []).append((index, head))
                if source.shape != head.shape:
                    cuts[index] = live
        tail_value = slot.tail_value
        if tail_value is None:
            continue
        tails = _tails(view, live)
        if tail_value == 0:
            zeros.setdefault((view.device, view.dtype), []).extend(tails)
        else:
            values.extend((tail, tail_value) for tail in tails)
    return FillPlan(
        tuple(tails for tails in zeros.values() if tails),
        tuple(values),
        tuple(
            HeadCopies([head for _, head in group], _picker([index for index, _ in group], cuts))
            for group in copies.values()
        ),
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


def _picker(
    indices: list[int], cuts: Mapping[int, tuple[int, ...]]
) -> Callable[[Sequence[Tensor | None]], Sequence[Tensor]]:
    if any(index in cuts for index in indices):
        places = [(index, cuts.get(index)) for index in indices]

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
