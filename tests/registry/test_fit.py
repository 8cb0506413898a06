"""The dtype rule against an oracle: convert every value there is and convert it back."""

from itertools import product

import pytest
import torch

from compile_backend.registry.fit import holds_losslessly

SMALL = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
LARGE = [torch.int32, torch.int64, torch.float32, torch.float64]


def every_value(dtype):
    if dtype is torch.bool:
        return torch.tensor([False, True])
    bits = torch.empty(0, dtype=dtype).element_size() * 8
    pattern = torch.arange(2**bits, dtype=torch.int32)
    return pattern.to(torch.uint8 if bits == 8 else torch.uint16).view(dtype)


@pytest.mark.parametrize("field", SMALL, ids=str)
@pytest.mark.parametrize("slot", [*SMALL, *LARGE], ids=str)
def test_the_rule_agrees_with_converting_every_value(slot, field):
    values = every_value(field)
    if not slot.is_floating_point and field.is_floating_point:
        assert not holds_losslessly(slot, field)
        return
    exact = values.to(torch.float64)
    converted = torch.zeros(len(values), dtype=slot).copy_(values).to(torch.float64)
    is_lossless = torch.equal(converted.nan_to_num(0.25), exact.nan_to_num(0.25)) and torch.equal(
        converted.isnan(), exact.isnan()
    )
    assert holds_losslessly(slot, field) == is_lossless


LOSSLESS = {
    (torch.int64, torch.int32),
    (torch.float64, torch.int32),
    (torch.float64, torch.float32),
    (torch.int64, torch.uint32),
    (torch.uint64, torch.uint32),
    (torch.float64, torch.uint32),
    (torch.complex128, torch.complex64),
    (torch.complex64, torch.float32),
    (torch.complex128, torch.float32),
    (torch.complex128, torch.int32),
    (torch.complex128, torch.float64),
    (torch.complex128, torch.uint32),
}
WIDE = [*LARGE, torch.uint32, torch.uint64, torch.complex64, torch.complex128]


@pytest.mark.parametrize(("slot", "field"), list(product(WIDE, WIDE)), ids=str)
def test_wide_dtypes(slot, field):
    assert holds_losslessly(slot, field) == (slot == field or (slot, field) in LOSSLESS)


def test_packed_and_scale_formats_hold_themselves_only():
    for dtype in (torch.float8_e8m0fnu, torch.float8_e5m2fnuz, torch.float4_e2m1fn_x2):
        assert holds_losslessly(dtype, dtype)
        assert not holds_losslessly(torch.float32, dtype)
        assert not holds_losslessly(dtype, torch.bool)
