"""A fill as a table of items for one kernel: where each lies, and how its elements are written.

Pure arithmetic on addresses, shapes and strides. An item is a head, a tail or a number; the rows of
the table are its columns, in the order of :class:`KernelItem`. Everything in it is fixed for one
plan and one set of source strides. What changes from batch to batch, the addresses of the sources
and the numbers, are the *operands*: an item holds the index of its operand.

An element is carried as 64 bits: loaded (zero- or sign-extended from the source's width),
converted where source and slot differ in more than width, and stored (cut to the slot's width).
Only lossless pairs are planned, so cutting never drops a set bit.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from enum import IntEnum
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from compile_backend.registry.layout import address_extent

__all__ = [
    "BLOCK",
    "AddressRanges",
    "Conversion",
    "KernelItem",
    "Load",
    "can_hold_number",
    "head_item",
    "item_of_block",
    "number_item",
    "table_rows",
    "tail_item",
]

BLOCK = 1024  # elements that one program of the kernel writes
MAX_DIMS = 3  # of an item, after dimensions that lie in one run were merged


class Load(IntEnum):
    """How 64 bits are made of a source element. The kernel has the same numbers."""

    OPERAND = 0  # there is no source: every element is the operand itself
    CONSTANT = 1  # or the item's constant
    U8 = 2
    I8 = 3
    U16 = 4
    I16 = 5
    U32 = 6
    I32 = 7
    I64 = 8


class Conversion(IntEnum):
    """What becomes of the 64 bits. The kernel has the same numbers."""

    NONE = 0
    INT_TO_F16 = 1
    INT_TO_BF16 = 2
    INT_TO_F32 = 3
    INT_TO_F64 = 4
    F16_TO_F32 = 5
    F16_TO_F64 = 6
    BF16_TO_F32 = 7
    BF16_TO_F64 = 8
    F32_TO_F64 = 9


class KernelItem(NamedTuple):
    """One region that is written, as the row of the kernel's table. Strides are in elements."""

    load: Load
    conversion: Conversion
    width: int  # bytes of an element of the slot: 1, 2, 4 or 8
    destination: int  # address
    operand: int  # index among the operands; 0 where none is used
    constant: int
    first_block: int  # of the launch
    numel: int
    sizes: tuple[int, int, int]  # outermost first
    strides: tuple[int, int, int]
    source_strides: tuple[int, int, int]

    @property
    def num_blocks(self) -> int:
        """Programs that write it."""
        return -(-self.numel // BLOCK)


_RAW_LOADS = {1: Load.U8, 2: Load.I16, 4: Load.I32, 8: Load.I64}
_INT_LOADS = {
    torch.bool: Load.U8,
    torch.uint8: Load.U8,
    torch.int8: Load.I8,
    torch.uint16: Load.U16,
    torch.int16: Load.I16,
    torch.uint32: Load.U32,
    torch.int32: Load.I32,
}
_TO_FLOAT = {
    torch.float16: Conversion.INT_TO_F16,
    torch.bfloat16: Conversion.INT_TO_BF16,
    torch.float32: Conversion.INT_TO_F32,
    torch.float64: Conversion.INT_TO_F64,
}
_WIDEN_FLOAT = {
    (torch.float16, torch.float32): Conversion.F16_TO_F32,
    (torch.float16, torch.float64): Conversion.F16_TO_F64,
    (torch.bfloat16, torch.float32): Conversion.BF16_TO_F32,
    (torch.bfloat16, torch.float64): Conversion.BF16_TO_F64,
    (torch.float32, torch.float64): Conversion.F32_TO_F64,
}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def head_item(
    head: Tensor,
    source_dtype: torch.dtype,
    source_strides: Sequence[int],
    operand: int,
    *,
    sources_are_aligned: bool,
) -> KernelItem | None:
    """The copy of a source of the head's shape, at the address that ``operand`` will be.

    ``sources_are_aligned`` says that the address is a multiple of 8, so that a copy of whole words
    may move words. None where the kernel does not take the pair of dtypes, or where more than three
    dimensions stay apart.
    """
    how = _how_to_copy(head.dtype, source_dtype)
    region = _merge_dims(head.shape, head.stride(), source_strides)
    if how is None or region is None:
        return None
    load, conversion = how
    item = _item(head, region, load, conversion, operand=operand)
    if conversion is Conversion.NONE and head.dtype == source_dtype and sources_are_aligned:
        return _in_words(item)
    return item


def tail_item(tail: Tensor, value: float) -> KernelItem | None:
    """The reset of ``tail`` to ``value``; None where the kernel does not take it."""
    strides = tail.stride()
    region = _merge_dims(tail.shape, strides, (0,) * len(strides))
    if tail.dtype.itemsize not in _BITS or tail.dtype.is_complex or region is None:
        return None
    bits = 0 if value == 0 else _bits_of(value, tail.dtype)
    return _in_words(_item(tail, region, Load.CONSTANT, Conversion.NONE, constant=bits))


def number_item(buffer: Tensor, operand: int) -> KernelItem | None:
    """The write of the number that ``operand`` will be to all of an integer ``buffer``."""
    strides = buffer.stride()
    region = _merge_dims(buffer.shape, strides, (0,) * len(strides))
    if region is None or not can_hold_number(buffer.dtype):
        return None
    return _item(buffer, region, Load.OPERAND, Conversion.NONE, operand=operand)


def can_hold_number(dtype: torch.dtype) -> bool:
    """Whether an operand can be written to elements of ``dtype`` as it is."""
    return dtype is torch.int64 or (dtype in _INT_LOADS and dtype is not torch.bool)


def table_rows(items: Iterable[KernelItem]) -> list[list[int]]:
    """The table [items, 16]: a row per item, with the blocks numbered through. Empty ones go."""
    rows, first_block = [], 0
    for item in items:
        if item.numel:
            placed = item._replace(first_block=first_block)
            rows.append(
                [
                    *map(int, placed[:8]),
                    # The outermost size follows from numel.
                    *placed.sizes[1:],
                    *placed.strides,
                    *placed.source_strides,
                ]
            )
            first_block += item.num_blocks
    return rows


def item_of_block(items: Iterable[KernelItem]) -> list[int]:
    """The row of the table that each block of the launch writes to."""
    blocks = [item.num_blocks for item in items if item.numel]
    return [row for row, num_blocks in enumerate(blocks) for _ in range(num_blocks)]


class AddressRanges:
    """The memory that a fill writes, to tell whether its items may be written in any order.

    Each group of tensors, whose elements are known to be apart, counts as one range.
    """

    def __init__(self, groups: Iterable[Iterable[Tensor]]) -> None:
        extents: list[tuple[int, int]] = []
        for group in groups:
            ends = [address_extent(tensor) for tensor in group if tensor.numel()]
            if ends:
                extents.append((min(start for start, _ in ends), max(end for _, end in ends)))
        extents.sort()
        self._starts = [start for start, _ in extents]
        self._ends = [end for _, end in extents]
        self.overlap = any(one[1] > other[0] for one, other in pairwise(extents))

    def touch(self, start: int, end: int) -> bool:
        """Whether [start, end) meets one of them, which must not overlap each other."""
        before = bisect_left(self._starts, end)
        return before > 0 and self._ends[before - 1] > start


def _how_to_copy(dtype: torch.dtype, source: torch.dtype) -> tuple[Load, Conversion] | None:
    if dtype.is_complex or dtype.itemsize not in _BITS:
        return None  # a complex source may be lazily conjugated, which its memory does not show
    if dtype == source:
        return _RAW_LOADS[dtype.itemsize], Conversion.NONE
    if (source, dtype) in _WIDEN_FLOAT:
        return _RAW_LOADS[source.itemsize], _WIDEN_FLOAT[source, dtype]
    if source not in _INT_LOADS:
        return None
    if dtype in _TO_FLOAT:
        return _INT_LOADS[source], _TO_FLOAT[dtype]
    is_integer = dtype in _INT_LOADS or dtype in (torch.int64, torch.uint64)
    return (_INT_LOADS[source], Conversion.NONE) if is_integer else None


Region = list[tuple[int, int, int]]  # size, stride and source stride, outermost dimension first


def _merge_dims(
    shape: Sequence[int], strides: Sequence[int], source_strides: Sequence[int]
) -> Region | None:
    """The same elements in the same order, in at most three dimensions; None where it takes more.

    A dimension is merged into the one inside it where both walk on from its end. None as well
    where two elements of the slot would be one.
    """
    merged: Region = []
    for size, stride, source in zip(shape, strides, source_strides, strict=True):
        if size == 1:
            continue
        if size > 1 and stride == 0:
            return None
        if merged:
            outer_size, outer, outer_source = merged[-1]
            if outer == size * stride and outer_source == size * source:
                merged[-1] = (outer_size * size, stride, source)
                continue
        merged.append((size, stride, source))
    if len(merged) > MAX_DIMS:
        return None
    return [(1, 0, 0)] * (MAX_DIMS - len(merged)) + merged


def _item(
    target: Tensor,
    region: Region,
    load: Load,
    conversion: Conversion,
    *,
    operand: int = 0,
    constant: int = 0,
) -> KernelItem:
    sizes, strides, source_strides = zip(*region, strict=True)
    return KernelItem(
        load,
        conversion,
        target.dtype.itemsize,
        target.data_ptr(),
        operand,
        constant,
        0,
        prod(sizes),
        sizes,
        strides,
        source_strides,
    )


def _in_words(item: KernelItem) -> KernelItem:
    """The item with 8 bytes per element, where it is one run of whole words."""
    num_bytes = item.numel * item.width
    is_run = item.numel == item.sizes[-1] and item.strides[-1] == 1
    is_source_run = item.load is Load.CONSTANT or item.source_strides[-1] == 1
    if not (is_run and is_source_run) or item.destination % 8 or num_bytes % 8 or not num_bytes:
        return item
    numel = num_bytes // 8
    constant = item.constant
    if item.load is Load.CONSTANT:
        one = (constant % (1 << 8 * item.width)).to_bytes(item.width, "little")
        constant = int.from_bytes(one * (8 // item.width), "little", signed=True)
    return item._replace(
        load=Load.CONSTANT if item.load is Load.CONSTANT else Load.I64,
        width=8,
        constant=constant,
        numel=numel,
        sizes=(1, 1, numel),
    )


def _bits_of(value: float, dtype: torch.dtype) -> int:
    """The bits of ``value`` as an element of ``dtype``, as torch rounds it."""
    element = torch.full((1,), value, dtype=dtype, device="cpu")
    return int(element.view(_BITS[dtype.itemsize]).item())
