"""Slots with a tuple of axes, filled and viewed by name."""

import pytest
import torch

from compile_backend.errors import (
    SlotDefinitionError,
    SlotMismatchError,
    SlotNotAllocatedError,
    SlotNotFoundError,
    SlotOverflowError,
)
from compile_backend.registry import CudaGraphBufferRegistry, GraphSlot, PaddingPolicy

POISON = -77.0
P = PaddingPolicy
MAXIMA = {"dim0": 4, "dim1": 6}


@pytest.fixture
def derived():
    return CudaGraphBufferRegistry(device="cpu", max_bs=8, max_num_tokens=16, max_sizes=MAXIMA)


def add(registry, name, axis, shape, policy=P.ZERO, pad_value=None, dtype=torch.float32):
    return registry.register_slot(
        GraphSlot(
            name,
            lambda bs, tokens: shape,
            dtype,
            axis=axis,
            padding_policy=policy,
            pad_value=pad_value,
        )
    )


def padded_like(live, shape, tail):
    expected = torch.full(shape, tail)
    expected[tuple(slice(0, size) for size in live.shape)] = live
    return expected


GEOMETRIES = {
    "two-axes": (("dim0", "dim1", None), (4, 6, 3)),
    "outer-and-inner": (("dim0", None, "dim1"), (4, 3, 6)),
    "inner-only": ((None, "dim1"), (3, 6)),
    "one-axis-twice": (("dim0", "dim0"), (4, 4)),
    "leading": (("dim0", None), (4, 3)),
    "leading-by-name": ("dim0", (4, 3)),
    "whole": ("none", (4, 3)),
    "scalar": ("none", ()),
}


def shape_at(axis, full, sizes):
    names = axis if isinstance(axis, tuple) else (None if axis == "none" else axis,)
    names = (*names, *[None] * (len(full) - len(names)))[: len(full)]
    return tuple(
        whole if name is None else sizes[name] for name, whole in zip(names, full, strict=True)
    )


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize(
    ("policy", "pad_value", "tail"),
    [(P.ZERO, None, 0.0), (P.FILL_SENTINEL, 2.5, 2.5), (P.FOREACH_COPY, None, POISON)],
    ids=["zero", "sentinel", "copy"],
)
def test_every_position_outside_the_live_corner_is_reset(
    derived, geometry, policy, pad_value, tail
):
    axis, full = GEOMETRIES[geometry]
    slot = add(derived, "x", axis, full, policy, pad_value)
    sizes = [(4, 6), (2, 3), (3, 6), (1, 1), (3, 2), (0, 4), (4, 0)]
    for raw in sizes:
        for padded in sizes:
            if raw[0] > padded[0] or raw[1] > padded[1]:
                continue
            slot.buffer.fill_(POISON)
            at_raw, at_padded = (dict(zip(MAXIMA, one, strict=True)) for one in (raw, padded))
            live = torch.randn(shape_at(axis, full, at_raw))
            derived.fill_tensors({"x": live}, raw=at_raw, padded=at_padded)
            view = derived.view("x", at_padded)
            expected = padded_like(live, shape_at(axis, full, at_padded), tail)
            assert torch.equal(view, expected)
            assert view.is_contiguous()
            assert view.data_ptr() == slot.buffer.data_ptr() or not view.numel()
            beyond = slot.buffer.view(-1)[view.numel() :]
            assert torch.equal(beyond, torch.full_like(beyond, POISON))


def test_a_view_is_one_object_per_size_and_reads_the_buffer(derived):
    add(derived, "x", ("dim0", "dim1"), (4, 6))
    first = derived.view("x", {"dim0": 2, "dim1": 3})
    assert derived.view("x", {"dim0": 2, "dim1": 3, "bs": 5}) is first
    derived.fill_tensors(
        {"x": torch.ones(2, 3)}, raw={"dim0": 2, "dim1": 3}, padded={"dim0": 2, "dim1": 3}
    )
    assert first.eq(1).all()
    assert derived.view("x", {"dim0": 3, "dim1": 2}).shape == (3, 2)


def test_only_the_named_slots_are_touched(derived):
    for name in ("x", "y"):
        add(derived, name, "dim0", (4,)).buffer.fill_(POISON)
    derived.fill_tensors({"x": torch.ones(2)}, raw={"dim0": 2}, padded={"dim0": 3})
    assert derived.get_slot("x").buffer.tolist() == [1, 1, 0, POISON]
    assert derived.get_slot("y").buffer.tolist() == [POISON] * 4
    derived.fill_tensors({"x": None, "y": torch.ones(1)}, raw={"dim0": 1}, padded={"dim0": 2})
    assert derived.get_slot("x").buffer.tolist() == [1, 0, 0, POISON]
    assert derived.get_slot("y").buffer.tolist() == [1, 0, POISON, POISON]


def test_declared_axes_can_be_filled_by_name(derived):
    add(derived, "x", ("tokens", None, "bs"), (16, 2, 8))
    sizes = {"bs": 3, "tokens": 5}
    live = torch.randn(5, 2, 3)
    derived.fill_tensors({"x": live}, raw=sizes, padded={"bs": 4, "tokens": 8})
    view = derived.view("x", {"bs": 4, "tokens": 8})
    assert torch.equal(view, padded_like(live, (8, 2, 4), 0.0))
    assert torch.equal(derived.get_slot("x").slice_for(4, 8), view)


def test_a_tensor_that_is_the_slots_view_is_not_copied(derived):
    slot = add(derived, "x", ("dim0", "dim1"), (4, 6))
    sizes = {"dim0": 2, "dim1": 3}
    derived.fill_tensors({"x": torch.ones(2, 3)}, raw=sizes, padded=sizes)
    version = slot.buffer._version
    derived.fill_tensors({"x": derived.view("x", sizes)}, raw=sizes, padded=sizes)
    assert slot.buffer._version == version
    derived.fill_tensors({"x": torch.ones(2, 3)}, raw=sizes, padded=sizes)
    assert slot.buffer._version > version
    # The same memory cut for another bucket is not where this bucket's live rows go.
    with pytest.raises(SlotMismatchError, match="clone the field"):
        derived.fill_tensors(
            {"x": derived.view("x", sizes)}, raw=sizes, padded={"dim0": 4, "dim1": 6}
        )


@pytest.mark.parametrize(
    ("raw", "padded", "error", "words"),
    [
        ({"dim0": 2}, {"dim0": 2}, SlotMismatchError, "'dim1'"),
        ({"dim0": 2, "dim1": 3}, {"dim0": 2}, SlotMismatchError, "padded sizes name"),
        ({"dim0": 2, "dim1": 3}, {"dim0": 1, "dim1": 3}, SlotOverflowError, "'dim0'"),
        ({"dim0": 2, "dim1": 3}, {"dim0": 5, "dim1": 3}, SlotOverflowError, "holds 4 rows"),
        ({"dim0": 3, "dim1": 3}, {"dim0": 4, "dim1": 3}, SlotMismatchError, "brings 2"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_anything_is_written(
    derived, raw, padded, error, words
):
    add(derived, "a", "dim0", (4,)).buffer.fill_(POISON)
    add(derived, "x", ("dim0", "dim1"), (4, 6)).buffer.fill_(POISON)
    values = {"a": torch.ones(raw["dim0"]), "x": torch.ones(2, 3)}
    with pytest.raises(error, match=words):
        derived.fill_tensors(values, raw=raw, padded=padded)
    assert derived.get_slot("a").buffer.eq(POISON).all()
    assert derived.get_slot("x").buffer.eq(POISON).all()


def test_names_without_a_buffer_are_refused(derived):
    with pytest.raises(SlotNotFoundError, match="no slot 'z'"):
        derived.fill_tensors({"z": torch.ones(2)}, raw={"dim0": 2}, padded={"dim0": 2})
    derived.register_slot(
        GraphSlot("off", lambda bs, tokens: (4,), torch.float32, axis="dim0", enabled=False)
    )
    with pytest.raises(SlotNotAllocatedError, match="enabled=True"):
        derived.fill_tensors({"off": torch.ones(2)}, raw={"dim0": 2}, padded={"dim0": 2})
    with pytest.raises(SlotNotAllocatedError, match="enabled=True"):
        derived.view("off", {"dim0": 2})


def test_an_axis_that_the_registry_does_not_know_is_refused(registry):
    with pytest.raises(SlotDefinitionError, match=r"max_sizes=.*'dim0'"):
        add(registry, "x", ("dim0", None), (4, 3))


def test_a_buffer_smaller_than_the_largest_size_is_refused(derived):
    with pytest.raises(SlotDefinitionError, match="maximum of 6 on axis 'dim1'"):
        add(derived, "x", ("dim0", "dim1"), (4, 5))
    with pytest.raises(SlotDefinitionError, match="maximum of 16 on axis 'tokens'"):
        add(derived, "y", "tokens", (15,))


def test_a_tuple_of_the_wrong_length_is_refused(derived):
    with pytest.raises(SlotDefinitionError, match="names 3"):
        add(derived, "x", ("dim0", "dim1", None), (4, 6))


def test_a_flat_cut_of_a_strided_tensor_is_refused(derived):
    with pytest.raises(SlotDefinitionError, match="contiguous"):
        derived.register_slot(
            GraphSlot("x", lambda bs, tokens: (4, 6), torch.float32, axis=("dim0", "dim1")),
            bind=torch.zeros(6, 4).t(),
        )
