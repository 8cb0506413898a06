"""The fill kernel: one launch that writes every item of a table. Needs Triton; imported when used.

The table is :mod:`.fill_kernel`'s. Under ``TRITON_INTERPRET=1`` the same kernel runs on a CPU.

Operands are kernel arguments, not a second table in pinned memory: the launch itself copies its
arguments, so nothing has to outlive it, no copy engine has to run before it, and no event has to be
asked whether a pinned table is free again. The price is a fixed number of arguments per launch,
typed as 64 bits and never specialised on, so that no value of theirs compiles the kernel anew.
"""

from collections.abc import Sequence

from torch import Tensor

from compile_backend.errors import ConfigError
from compile_backend.registry.fill_kernel import BLOCK

try:
    import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
    import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]
except ImportError as error:
    raise ConfigError(
        f"the fill kernel needs Triton, which does not import here ({error}); run pip install "
        f"triton, or install a CUDA build of torch, which brings the version that fits it"
    ) from error

__all__ = ["MAX_OPERANDS", "launch"]

MAX_OPERANDS = 32
NUM_COLUMNS = tl.constexpr(16)
NUM_WARPS = 4

_OPERANDS = [f"o{index}" for index in range(MAX_OPERANDS)]


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def load_bits(address, at, live, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Elements ``at`` of the array at ``address``, extended to 64 bits."""
    return tl.load(address.to(tl.pointer_type(dtype)) + at, mask=live, other=0).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def store_bits(address, at, live, bits, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the low bits to elements ``at`` of the array at ``address``."""
    tl.store(address.to(tl.pointer_type(dtype)) + at, bits.to(dtype), mask=live)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def half_as_float(bits):  # type: ignore[no-untyped-def]
    """The float32 that equals the float16 in the low bits."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def float_as_double(bits):  # type: ignore[no-untyped-def]
    """The bits of the float64 that equals the float32 in the low bits."""
    value = bits.to(tl.int32).to(tl.float32, bitcast=True)
    return value.to(tl.float64).to(tl.int64, bitcast=True)


@triton.jit(do_not_specialize=_OPERANDS)  # type: ignore[untyped-decorator, unused-ignore]
def fill_items(  # type: ignore[no-untyped-def]
    table,
    item_of_block,
    block_size: tl.constexpr,
    o0: tl.int64,
    o1: tl.int64,
    o2: tl.int64,
    o3: tl.int64,
    o4: tl.int64,
    o5: tl.int64,
    o6: tl.int64,
    o7: tl.int64,
    o8: tl.int64,
    o9: tl.int64,
    o10: tl.int64,
    o11: tl.int64,
    o12: tl.int64,
    o13: tl.int64,
    o14: tl.int64,
    o15: tl.int64,
    o16: tl.int64,
    o17: tl.int64,
    o18: tl.int64,
    o19: tl.int64,
    o20: tl.int64,
    o21: tl.int64,
    o22: tl.int64,
    o23: tl.int64,
    o24: tl.int64,
    o25: tl.int64,
    o26: tl.int64,
    o27: tl.int64,
    o28: tl.int64,
    o29: tl.int64,
    o30: tl.int64,
    o31: tl.int64,
):
    """Program b writes the elements of block b: at most ``block_size`` of one item.

    table [items, 16] int64, item_of_block [blocks] int32. Branches are on the item alone, so no
    warp diverges.
    """
    block = tl.program_id(0).to(tl.int64)
    item = table + tl.load(item_of_block + block).to(tl.int64) * NUM_COLUMNS
    load = tl.load(item)
    conversion = tl.load(item + 1)
    width = tl.load(item + 2)
    destination = tl.load(item + 3)
    operand_at = tl.load(item + 4)
    constant = tl.load(item + 5)
    first_block = tl.load(item + 6)
    numel = tl.load(item + 7)
    size1 = tl.load(item + 8)
    size2 = tl.load(item + 9)
    stride0 = tl.load(item + 10)
    stride1 = tl.load(item + 11)
    stride2 = tl.load(item + 12)
    from0 = tl.load(item + 13)
    from1 = tl.load(item + 14)
    from2 = tl.load(item + 15)

    operand = constant
    if load != 1:
        operand = o0.to(tl.int64)
        operand = tl.where(operand_at == 1, o1.to(tl.int64), operand)
        operand = tl.where(operand_at == 2, o2.to(tl.int64), operand)
        operand = tl.where(operand_at == 3, o3.to(tl.int64), operand)
        operand = tl.where(operand_at == 4, o4.to(tl.int64), operand)
        operand = tl.where(operand_at == 5, o5.to(tl.int64), operand)
        operand = tl.where(operand_at == 6, o6.to(tl.int64), operand)
        operand = tl.where(operand_at == 7, o7.to(tl.int64), operand)
        operand = tl.where(operand_at == 8, o8.to(tl.int64), operand)
        operand = tl.where(operand_at == 9, o9.to(tl.int64), operand)
        operand = tl.where(operand_at == 10, o10.to(tl.int64), operand)
        operand = tl.where(operand_at == 11, o11.to(tl.int64), operand)
        operand = tl.where(operand_at == 12, o12.to(tl.int64), operand)
        operand = tl.where(operand_at == 13, o13.to(tl.int64), operand)
        operand = tl.where(operand_at == 14, o14.to(tl.int64), operand)
        operand = tl.where(operand_at == 15, o15.to(tl.int64), operand)
        operand = tl.where(operand_at == 16, o16.to(tl.int64), operand)
        operand = tl.where(operand_at == 17, o17.to(tl.int64), operand)
        operand = tl.where(operand_at == 18, o18.to(tl.int64), operand)
        operand = tl.where(operand_at == 19, o19.to(tl.int64), operand)
        operand = tl.where(operand_at == 20, o20.to(tl.int64), operand)
        operand = tl.where(operand_at == 21, o21.to(tl.int64), operand)
        operand = tl.where(operand_at == 22, o22.to(tl.int64), operand)
        operand = tl.where(operand_at == 23, o23.to(tl.int64), operand)
        operand = tl.where(operand_at == 24, o24.to(tl.int64), operand)
        operand = tl.where(operand_at == 25, o25.to(tl.int64), operand)
        operand = tl.where(operand_at == 26, o26.to(tl.int64), operand)
        operand = tl.where(operand_at == 27, o27.to(tl.int64), operand)
        operand = tl.where(operand_at == 28, o28.to(tl.int64), operand)
        operand = tl.where(operand_at == 29, o29.to(tl.int64), operand)
        operand = tl.where(operand_at == 30, o30.to(tl.int64), operand)
        operand = tl.where(operand_at == 31, o31.to(tl.int64), operand)

    at = (block - first_block) * block_size + tl.arange(0, block_size).to(tl.int64)
    live = at < numel
    to_at = at * stride2
    from_at = at * from2
    if size2 != numel:
        inner = at % size2
        row = at // size2
        to_at = (row // size1) * stride0 + (row % size1) * stride1 + inner * stride2
        from_at = (row // size1) * from0 + (row % size1) * from1 + inner * from2

    bits = tl.zeros([block_size], tl.int64) + operand
    if load == 2:
        bits = load_bits(operand, from_at, live, tl.uint8)
    elif load == 3:
        bits = load_bits(operand, from_at, live, tl.int8)
    elif load == 4:
        bits = load_bits(operand, from_at, live, tl.uint16)
    elif load == 5:
        bits = load_bits(operand, from_at, live, tl.int16)
    elif load == 6:
        bits = load_bits(operand, from_at, live, tl.uint32)
    elif load == 7:
        bits = load_bits(operand, from_at, live, tl.int32)
    elif load == 8:
        bits = load_bits(operand, from_at, live, tl.int64)

    if conversion == 1:
        bits = bits.to(tl.float32).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int64)
    elif conversion == 2:  # the value has at most 8 significant bits, so no rounding is lost
        bits = bits.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64) >> 16
    elif conversion == 3:
        bits = bits.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64)
    elif conversion == 4:
        bits = bits.to(tl.float64).to(tl.int64, bitcast=True)
    elif conversion == 5:
        bits = half_as_float(bits).to(tl.int32, bitcast=True).to(tl.int64)
    elif conversion == 6:
        bits = half_as_float(bits).to(tl.float64).to(tl.int64, bitcast=True)
    elif conversion == 7:  # a bfloat16 is the upper half of a float32
        bits = bits << 16
    elif conversion == 8:
        bits = float_as_double(bits << 16)
    elif conversion == 9:
        bits = float_as_double(bits)

    if width == 1:
        store_bits(destination, to_at, live, bits, tl.int8)
    elif width == 2:
        store_bits(destination, to_at, live, bits, tl.int16)
    elif width == 4:
        store_bits(destination, to_at, live, bits, tl.int32)
    else:
        store_bits(destination, to_at, live, bits, tl.int64)


def launch(table: Tensor, item_of_block: Tensor, operands: Sequence[int]) -> None:
    """Write every item of ``table``, on the current stream of the current device.

    table [items, 16] int64 and item_of_block [blocks] int32 are on that device; ``operands`` are at
    most MAX_OPERANDS addresses and numbers. The caller keeps both tensors, and what the addresses
    point at, alive in the stream's order. Allocates nothing, synchronises nothing.
    """
    padding = (0,) * (MAX_OPERANDS - len(operands))
    grid = (item_of_block.shape[0],)
    fill_items[grid](table, item_of_block, BLOCK, *operands, *padding, num_warps=NUM_WARPS)
