"""Whether a batch field fits its slot: the strictness rule, applied before anything is written."""

from functools import cache

import torch
from torch import Tensor

from compile_backend.errors import SlotMismatchError, SlotOverflowError
from compile_backend.registry.slot import GraphSlot

__all__ = ["holds_losslessly", "live_shape", "require_tensor"]

# Formats that iinfo and finfo describe rightly. The others hold only themselves: packed ones,
# scales, and the fnuz formats (torch 2.13 gives float8_e5m2fnuz the eps of float8_e4m3fnuz).
_INTEGERS = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    }
)
_FLOATS = frozenset(
    {
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)


def require_tensor(slot: GraphSlot, source: object) -> None:
    """Raise SlotMismatchError unless ``source`` is a dense tensor with memory of its own."""
    if not isinstance(source, Tensor):
        raise SlotMismatchError(
            f"slot {slot.name!r} copies a tensor but the batch brings {type(source).__name__} "
            f"{source!r:.80}; make the field a {slot.dtype} tensor or None"
        )
    if source.layout is not torch.strided:
        raise SlotMismatchError(
            f"slot {slot.name!r} copies a dense tensor but the batch brings layout "
            f"{source.layout} (shape {list(source.shape)}); call to_dense() first"
        )


def live_shape(
    slot: GraphSlot, source: Tensor, raw_shape: tuple[int, ...], *, own_length: bool
) -> tuple[int, ...]:
    """The shape of the part of ``source`` that is copied to the head of the slot.

    ``raw_shape`` is the slot's shape at the raw sizes. With ``own_length`` (slots with a
    ``source_fn``) the padded dimensions are as long as the source, else as long as ``raw_shape``.

    Raises SlotMismatchError for another device (a host tensor fits a CUDA slot: it is staged), a
    dtype that the slot's cannot hold without loss, another rank or other fixed dimensions, and
    fewer rows than raw; SlotOverflowError for more rows than the slot holds.
    """
    require_tensor(slot, source)
    buffer = slot.layout.buffer
    if source.device != buffer.device and not (source.is_cpu and buffer.is_cuda):
        raise SlotMismatchError(
            f"slot {slot.name!r} lives on {buffer.device} but the batch brings a tensor on "
            f"{source.device}; build the field on {buffer.device}, or declare the slot with "
            f"device={str(source.device)!r}"
        )
    if not holds_losslessly(buffer.dtype, source.dtype):
        raise SlotMismatchError(
            f"slot {slot.name!r} is {buffer.dtype} but the batch brings {source.dtype}, which it "
            f"cannot hold without loss; convert the field to {buffer.dtype}, or declare the slot "
            f"as {source.dtype}"
        )
    if source.dim() != len(raw_shape):
        raise SlotMismatchError(
            f"slot {slot.name!r} has {len(raw_shape)} dimensions (shape {list(buffer.shape)}) but "
            f"the batch brings {source.dim()} (shape {list(source.shape)}); reshape the field"
        )
    capacities = {padded.dim: padded.capacity for padded in slot.layout.padded_dims}
    if own_length and not capacities and raw_shape:
        capacities = {0: raw_shape[0]}
    shape = list(raw_shape)
    for dim, (rows, raw) in enumerate(zip(source.shape, raw_shape, strict=True)):
        if dim not in capacities:
            if rows != raw:
                raise SlotMismatchError(
                    f"slot {slot.name!r} has size {raw} in dimension {dim} but the batch brings "
                    f"{rows} (shape {list(source.shape)}); both must be equal, a copy would "
                    f"broadcast or cut"
                )
            continue
        if rows > capacities[dim]:
            raise SlotOverflowError(
                f"slot {slot.name!r} holds {capacities[dim]} rows in dimension {dim} but the batch "
                f"brings {rows} (shape {list(source.shape)}); raise the registry's maximum to at "
                f"least {rows} or split the batch"
            )
        if own_length:
            shape[dim] = rows
        elif rows < raw:
            raise SlotMismatchError(
                f"slot {slot.name!r} needs {raw} live rows in dimension {dim} but the batch brings "
                f"{rows} (shape {list(source.shape)}), which a copy would broadcast; pass the raw "
                f"sizes that the batch has, or fill the field"
            )
    return tuple(shape)


@cache
def holds_losslessly(slot_dtype: torch.dtype, field_dtype: torch.dtype) -> bool:
    """Whether every value of ``field_dtype`` is a value of ``slot_dtype``.

    True for equal dtypes, int32 into int64, bfloat16 into float32, int16 into float32; false for
    int64 into float32 (24 bits of mantissa), bfloat16 into float16 (range), float into int.
    """
    if slot_dtype == field_dtype:
        return True
    if slot_dtype.is_complex:
        slot_dtype = slot_dtype.to_real()
        field_dtype = field_dtype.to_real() if field_dtype.is_complex else field_dtype
        return holds_losslessly(slot_dtype, field_dtype)
    if field_dtype in _FLOATS:
        return slot_dtype in _FLOATS and _float_holds_float(slot_dtype, field_dtype)
    if field_dtype not in _INTEGERS or slot_dtype not in _FLOATS | _INTEGERS:
        return False
    least, most = _integer_range(field_dtype)
    if slot_dtype in _FLOATS:
        info = torch.finfo(slot_dtype)
        exact_up_to = 2 / info.eps  # 2 ** (mantissa bits), up to which every integer is a value
        return max(-least, most) <= min(exact_up_to, info.max)
    slot_least, slot_most = _integer_range(slot_dtype)
    return slot_least <= least and most <= slot_most


def _integer_range(dtype: torch.dtype) -> tuple[int, int]:
    if dtype is torch.bool:
        return 0, 1
    info = torch.iinfo(dtype)
    return info.min, info.max


def _float_holds_float(slot_dtype: torch.dtype, field_dtype: torch.dtype) -> bool:
    slot, field = torch.finfo(slot_dtype), torch.finfo(field_dtype)
    smallest_subnormal = slot.tiny * slot.eps <= field.tiny * field.eps
    return slot.eps <= field.eps and slot.max >= field.max and smallest_subnormal
