"""The order in which a batch fill visits the slots of a registry."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from compile_backend.registry.fill import SlotSource
from compile_backend.registry.fill_kernel import can_hold_number
from compile_backend.registry.slot import (
    ComputedNumber,
    FillContext,
    GraphSlot,
    PostFill,
    SourceFn,
)

__all__ = ["FillOrder", "batch_entries", "order_slots"]


NumberFn = Callable[[Any, FillContext], int | None]


@dataclass(frozen=True, slots=True)
class FillOrder:
    """The enabled slots in the order in which a batch fill visits them."""

    copied: tuple[GraphSlot, ...]  # from the batch attribute of the same name
    sourced: tuple[tuple[GraphSlot, SourceFn], ...]
    reset_only: tuple[GraphSlot, ...]
    numbers: tuple[tuple[NumberFn, Tensor], ...]  # written with the heads and tails
    hooks: tuple[tuple[PostFill, Tensor], ...]  # run after them
    computed: tuple[GraphSlot, ...]  # exposed whatever the batch holds
    filled: tuple[GraphSlot, ...]  # copied, then sourced: the slots that have a source
    address_ranges: tuple[tuple[int, int], ...]  # of filled
    starts: tuple[int, ...]  # addresses of all slots, increasing
    ends: tuple[int, ...]
    read: Callable[[Any], tuple[Any, ...]]


def order_slots(
    slots: Iterable[GraphSlot], *, launch_device: torch.device | None = None
) -> FillOrder:
    """Sort the enabled ones of ``slots`` by where their values come from.

    Computed numbers of integer slots on ``launch_device`` are kept apart from the other hooks.
    """
    enabled = [slot for slot in slots if slot.enabled]
    copied = tuple(slot for slot in enabled if not slot.is_computed and slot.source_fn is None)
    sourced = tuple((slot, slot.source_fn) for slot in enabled if slot.source_fn is not None)
    sourceless = (slot for slot in enabled if slot.is_computed and slot.source_fn is None)
    hooks: list[tuple[PostFill, Tensor]] = []
    numbers: list[tuple[NumberFn, Tensor]] = []
    for slot in enabled:
        hook, buffer = slot.post_fill, slot.layout.buffer
        if (
            isinstance(hook, ComputedNumber)
            and buffer.device == launch_device
            and can_hold_number(buffer.dtype)
        ):
            numbers.append((hook.number, buffer))
        elif hook is not None:
            hooks.append((hook, buffer))
    filled = (*copied, *(slot for slot, _ in sourced))
    ranges = sorted(slot.layout.address_range for slot in enabled)
    return FillOrder(
        copied=copied,
        sourced=sourced,
        reset_only=tuple(slot for slot in sourceless if slot.tail_value is not None),
        numbers=tuple(numbers),
        hooks=tuple(hooks),
        computed=tuple(slot for slot in enabled if slot.is_computed),
        filled=filled,
        address_ranges=tuple(slot.layout.address_range for slot in filled),
        starts=tuple(start for start, _ in ranges),
        ends=tuple(end for _, end in ranges),
        read=_reader([slot.name for slot in copied]),
    )


def _reader(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda batch: tuple(getattr(batch, name) for name in names)


def batch_entries(order: FillOrder, sources: Sequence[Tensor | None]) -> list[SlotSource]:
    """The entries of a batch fill; ``sources`` come in the order of ``order.filled``."""
    num_copied = len(order.copied)
    return [
        *map(SlotSource, order.copied, sources[:num_copied]),
        *(
            SlotSource(slot, source, own_length=True)
            for (slot, _), source in zip(order.sourced, sources[num_copied:], strict=True)
        ),
        *(SlotSource(slot, None) for slot in order.reset_only),
    ]
