"""Arenas: parts that do not meet, mirrors of one layout, growth."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_backend.registry.arena import Arena, lay_out_parts

CPU = torch.device("cpu")
PARTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
        st.sampled_from([torch.bool, torch.int32, torch.int64, torch.bfloat16]),
    ),
    max_size=6,
)


@settings(max_examples=100, deadline=None)
@given(PARTS)
def test_parts_are_aligned_and_apart(parts):
    layout = lay_out_parts(parts)
    end = 0
    for (shape, dtype), part in zip(parts, layout.parts, strict=True):
        assert (part.shape, part.dtype) == (shape, dtype)
        assert part.num_bytes == math.prod(shape) * dtype.itemsize
        assert part.offset % 256 == 0
        assert part.offset >= end
        assert part.offset - end < 256
        end = part.offset + part.num_bytes
    assert layout.num_bytes == end


@settings(max_examples=50, deadline=None)
@given(PARTS)
def test_one_copy_moves_every_part_from_mirror_to_mirror(parts):
    layout = lay_out_parts(parts)
    (staging, sources), (landing, targets) = Arena(CPU).cut(layout), Arena(CPU).cut(layout)
    for number, source in enumerate(sources):
        source.copy_(torch.arange(source.numel()).view(source.shape) + number)
    landing.copy_(staging)
    for source, target, (shape, dtype) in zip(sources, targets, parts, strict=True):
        assert (target.shape, target.dtype) == (torch.Size(shape), dtype)
        assert target.data_ptr() % 256 == 0 or not target.numel()
        assert target.is_contiguous()
        assert torch.equal(source, target)


def test_views_are_the_same_until_the_arena_grows():
    arena = Arena(CPU)
    assert arena.num_bytes == 0
    small, large = (lay_out_parts([((n,), torch.int64)]) for n in (10, 100_000))
    whole, (part,) = arena.cut(small)
    again_whole, (again,) = arena.cut(small)
    assert again_whole is whole
    assert again is part
    before = arena.num_bytes
    assert arena.cut(large)[0].numel() == 800_000
    assert arena.num_bytes >= 800_000 > before
    _, (moved,) = arena.cut(small)
    assert moved.data_ptr() == arena.cut(large)[0].data_ptr() != part.data_ptr()


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad])
def test_an_arena_can_be_written_in_and_out_of_inference_mode(first):
    arena, layout = Arena(CPU), lay_out_parts([((4,), torch.int64)])
    with first():
        arena.cut(layout)[1][0].fill_(1)
    arena.cut(layout)[1][0].fill_(2)
    with torch.inference_mode():
        arena.cut(layout)[1][0].fill_(3)
    assert arena.cut(layout)[1][0].tolist() == [3] * 4
