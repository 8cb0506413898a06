"""A fill on a device: a host batch in one copy, then every head, tail and number in one launch.

Takes the same :class:`~.fill.FillWork` as the grouped calls and leaves the same bytes. Where the
kernel does not take the work (no Triton, a pair of dtypes, slots or sources in each other's memory)
the grouped calls run instead.

Fields of a host batch go through a landing place on the device rather than straight into the slots.
The slots' memory also holds what a fill must not touch (kept tails, absent fields, rows that a
graph wrote), so a single copy can only be made to a place that holds nothing else. It moves the
live rows only, and the launch that resets the tails takes them from there.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compile_backend.errors import ConfigError
from compile_backend.registry.arena import Arena, lay_out_parts
from compile_backend.registry.bounded_cache import BoundedCache
from compile_backend.registry.fill import (
    FillWork,
    HeadCopy,
    SlotSource,
    copy_heads,
    decide_fill,
    group_work,
    source_picker,
)
from compile_backend.registry.fill_kernel import (
    AddressRanges,
    KernelItem,
    head_item,
    item_of_block,
    number_item,
    table_rows,
    tail_item,
)
from compile_backend.registry.staging import StagingRing
from compile_backend.registry.stream_order import current_stream, make_event, stream_order

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["DeviceFill", "DevicePlanner"]

MAX_LAUNCHES = 16  # per plan: one for each set of source strides


class DevicePlanner:
    """Plans the fills of one registry, whose slots live on ``device``.

    ``stages_all`` stages sources that are on the device already too, which is how staging runs on a
    machine without one.
    """

    def __init__(self, device: torch.device, *, stages_all: bool = False) -> None:
        self.device = torch.empty(0, device=device).device  # with its index
        self.order = stream_order(self.device)
        self.landing = Arena(self.device)
        is_pinned = self.device.type == "cuda"
        self.ring = StagingRing(
            lambda: Arena(torch.device("cpu"), is_pinned=is_pinned),
            lambda: make_event(self.device),
        )
        self._stages_all = stages_all
        self.kernel: ModuleType | None = None
        self.no_kernel_reason: str | None = None
        try:
            from compile_backend.registry import triton_fill
        except ConfigError as error:
            self.no_kernel_reason = str(error)
        else:
            self.kernel = triton_fill

    def plan(
        self,
        entries: Sequence[SlotSource],
        raw: Mapping[str, int],
        padded: Mapping[str, int],
        numbers: Sequence[tuple[int, Tensor]] = (),
    ) -> "DeviceFill":
        """Validate and decide as :func:`~.fill.plan_fill` does. Raises the same; writes no slot.

        ``numbers`` are the integer buffers that are set to a number, and the index of each among
        the numbers of a fill.
        """
        work = decide_fill(entries, raw, padded)
        here = FillWork(
            tuple(copy for copy in work.heads if copy.head.device == self.device),
            tuple(reset for reset in work.tails if reset.tail.device == self.device),
            tuple(numbers),
        )
        elsewhere = FillWork(
            tuple(copy for copy in work.heads if copy.head.device != self.device),
            tuple(reset for reset in work.tails if reset.tail.device != self.device),
        )
        return DeviceFill(self, here, elsewhere)

    def is_staged(self, copy: HeadCopy) -> bool:
        """Whether the source of ``copy`` goes through a mirror."""
        return self._stages_all or copy.source_device != self.device

    def after_copy_out(self) -> None:
        """Note that the caller's stream is done with the slots once it has got this far."""
        self.order.after_copy_out(current_stream(self.device))

    def guard(self) -> AbstractContextManager[Any]:
        """Makes the device the current one, where it is not."""
        if self.device.type != "cuda" or torch.cuda.current_device() == self.device.index:
            return nullcontext()
        return torch.cuda.device(self.device)


class DeviceFill:
    """One planned fill. Stands in for :class:`~.fill.FillPlan` where slots are on a device.

    Runs on the caller's stream, after the last copy-out on whatever stream that was. Takes no
    storage and blocks on nothing once its launch has been made, unless four host batches are in
    flight already; the first run with new source strides makes that launch.
    """

    def __init__(self, planner: DevicePlanner, work: FillWork, elsewhere: FillWork) -> None:
        self._planner = planner
        self._work = work
        self._grouped = group_work(work)
        self._elsewhere = group_work(elsewhere)
        staged = [copy for copy in work.heads if planner.is_staged(copy)]
        self._staged_indices = [copy.entry_at for copy in staged]
        self._pick_staged = source_picker(staged) if staged else None
        self._layout = lay_out_parts((tuple(c.head.shape), c.source_dtype) for c in staged)
        self._head_indices = [copy.entry_at for copy in work.heads]
        self._limits = [(index, *_int_range(buffer.dtype)) for index, buffer in work.numbers]
        self._written = _written_ranges(work)
        # A float source may be lazily negated (an imaginary part of a conjugate).
        self._float_indices = [c.entry_at for c in work.heads if c.source_dtype.is_floating_point]
        self._may_launch = planner.kernel is not None and not self._written.overlap
        self._launches: BoundedCache[object, _Launch] = BoundedCache(MAX_LAUNCHES)

    def run(self, sources: Sequence[Tensor | None], numbers: Sequence[int | None] = ()) -> None:
        """As :meth:`.fill.FillPlan.run`. Sources on the host may be reused when this returns."""
        self._elsewhere.run(sources)
        with self._planner.guard():
            stream = current_stream(self._planner.device)
            self._planner.order.begin_fill(stream)
            if self._pick_staged is not None:
                sources = self._stage(sources, stream)
            if not self._may_launch or not self._launch(sources, numbers, stream):
                self._grouped.run(sources, numbers)

    def _stage(self, sources: Sequence[Tensor | None], stream: Any) -> list[Tensor | None]:
        """Copy what is on the host to the landing place; returns the sources with it there."""
        assert self._pick_staged is not None
        landing, landed = self._planner.landing.cut(self._layout)
        with self._planner.ring.borrow() as mirror:
            staging, parts = mirror.arena.cut(self._layout)
            copy_heads(parts, self._pick_staged(sources))
            if self._layout.num_bytes:
                landing.copy_(staging, non_blocking=True)
                mirror.mark_in_flight(stream)
        on_device = list(sources)
        for index, part in zip(self._staged_indices, landed, strict=True):
            on_device[index] = part
        return on_device

    def _launch(
        self, sources: Sequence[Tensor | None], numbers: Sequence[int | None], stream: Any
    ) -> bool:
        """Write everything by the kernel. False, with nothing written, where it does not."""
        found = [sources[index] for index in self._head_indices]
        heads = [source for source in found if source is not None]
        addresses = [source.data_ptr() for source in heads]
        low_bits = 0
        for address in addresses:
            low_bits |= address
        key = (low_bits % 8 == 0, *[source.stride() for source in heads])
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches.put(key, self._make_launch(heads, key[0] is True))
        if not launch.tables:
            return launch.is_empty
        for address, num_bytes in zip(addresses, launch.source_bytes, strict=True):
            if self._written.touch(address, address + num_bytes):
                return False
        for index in self._float_indices:
            source = sources[index]
            if source is not None and source.is_neg():
                return False
        operands = addresses
        for index, least, most in self._limits:
            number = numbers[index]
            assert number is not None, "a plan writes the numbers that its key says there are"
            if not least <= number <= most:
                return False  # torch refuses it in its own words
            operands.append(number)
        kernel = self._planner.kernel
        assert kernel is not None
        for table in launch.tables:
            table.hold(stream)
            kernel.launch(table.rows, table.item_of_block, operands[table.first : table.end])
        return True

    def _make_launch(self, heads: Sequence[Tensor], are_aligned: bool) -> "_Launch":
        kernel = self._planner.kernel
        assert kernel is not None
        work, step = self._work, kernel.MAX_OPERANDS
        items: list[KernelItem | None] = [
            head_item(
                copy.head,
                copy.source_dtype,
                source.stride(),
                at % step,
                sources_are_aligned=are_aligned,
            )
            for at, (copy, source) in enumerate(zip(work.heads, heads, strict=True))
        ]
        items += [
            number_item(buffer, at % step)
            for at, (_, buffer) in enumerate(work.numbers, start=len(items))
        ]
        num_operands = len(items)
        items += [tail_item(tail, value) for _, tail, value in work.tails]
        taken = [item for item in items if item is not None]
        if len(taken) < len(items):
            return _Launch((), (), is_empty=False)
        tables = []
        for first in range(0, max(num_operands, 1), step):
            end = min(first + step, num_operands)
            # The tails take no operand, so they go with the first.
            chosen = taken[first:end] + ([] if first else taken[num_operands:])
            rows = table_rows(chosen)
            if rows:
                blocks = item_of_block(chosen)
                tables.append(_Table(rows, blocks, first, end, self._planner.device))
        source_bytes = tuple(
            _extent_bytes(copy.head.shape, source.stride(), source.element_size())
            for copy, source in zip(work.heads, heads, strict=True)
        )
        return _Launch(tuple(tables), source_bytes, is_empty=not tables)


class _Table:
    """The items of one launch on the device, and which of the operands it takes."""

    def __init__(
        self,
        rows: list[list[int]],
        blocks: list[int],
        first: int,
        end: int,
        device: torch.device,
    ) -> None:
        self.first, self.end = first, end
        self._stream = current_stream(device)
        with torch.inference_mode(False), torch.no_grad():
            self.rows = _upload(rows, torch.int64, device)
            self.item_of_block = _upload(blocks, torch.int32, device)

    def hold(self, stream: Any) -> None:
        """Keep the memory from reuse until ``stream`` has got this far, also if dropped before."""
        if stream != self._stream:
            self.rows.record_stream(stream)
            self.item_of_block.record_stream(stream)


class _Launch:
    """The tables for one set of source strides. Without tables: there is nothing to do
    (``is_empty``), or the kernel does not take the work."""

    def __init__(
        self, tables: tuple[_Table, ...], source_bytes: tuple[int, ...], *, is_empty: bool
    ) -> None:
        self.tables, self.source_bytes, self.is_empty = tables, source_bytes, is_empty


def _written_ranges(work: FillWork) -> AddressRanges:
    """A range per entry, since its head and tails interleave where a view is strided."""
    by_entry: dict[int, list[Tensor]] = {}
    for copy in work.heads:
        by_entry.setdefault(copy.entry_at, []).append(copy.head)
    for reset in work.tails:
        by_entry.setdefault(reset.entry_at, []).append(reset.tail)
    return AddressRanges([*by_entry.values(), *([buffer] for _, buffer in work.numbers)])


def _upload(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    on_host = torch.tensor(values, dtype=dtype, device="cpu")
    if device.type == "cuda":
        # From pinned memory nothing waits for the device; torch keeps the memory until it is read.
        return on_host.pin_memory().to(device, non_blocking=True)
    return on_host.to(device)


def _extent_bytes(shape: Sequence[int], strides: Sequence[int], element_bytes: int) -> int:
    if 0 in shape:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return (last + 1) * element_bytes


def _int_range(dtype: torch.dtype) -> tuple[int, int]:
    info = torch.iinfo(dtype)
    return info.min, info.max
