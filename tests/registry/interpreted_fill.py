"""The fill kernel beside the grouped calls, byte for byte. Run by test_fill_kernel.py.

Needs ``TRITON_INTERPRET=1`` before Triton is imported, which is why no ordinary run collects this
file. Every buffer is bound in the middle of a larger tensor, and all of that is compared.
"""

import math
import os
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_backend.errors import SlotMismatchError
from compile_backend.forward_batch import ForwardBatch
from compile_backend.registry import (
    CudaGraphBufferRegistry,
    GraphSlot,
    PaddingPolicy,
    build_decode_registry,
    build_prefill_registry,
    triton_fill,
)
from compile_backend.registry.device_fill import DevicePlanner
from compile_backend.registry.slot import ComputedNumber

assert os.environ["TRITON_INTERPRET"] == "1"

P = PaddingPolicy
CPU = torch.device("cpu")
MAXIMA = {"bs": 4, "tokens": 6}
GUARD = 16  # elements around a buffer

INTS = [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
OTHER = [torch.bool, torch.uint32, torch.uint64, torch.float8_e4m3fn]
CASTS = [  # slot, source
    (torch.int64, torch.int32),
    (torch.int64, torch.uint32),
    (torch.int64, torch.bool),
    (torch.uint64, torch.uint16),
    (torch.int32, torch.int16),
    (torch.int32, torch.uint16),
    (torch.int16, torch.int8),
    (torch.int16, torch.uint8),
    (torch.uint8, torch.bool),
    (torch.float32, torch.float16),
    (torch.float32, torch.bfloat16),
    (torch.float64, torch.float32),
    (torch.float64, torch.float16),
    (torch.float64, torch.bfloat16),
    (torch.float64, torch.int32),
    (torch.float64, torch.uint32),
    (torch.float32, torch.int16),
    (torch.float32, torch.bool),
    (torch.float16, torch.int8),
    (torch.float16, torch.uint8),
    (torch.bfloat16, torch.int8),
    (torch.bfloat16, torch.uint8),
    (torch.bfloat16, torch.bool),
]
PAIRS = [*((one, one) for one in INTS + FLOATS + OTHER), *CASTS]


class CountedKernel:
    """The kernel's module, with its launches counted."""

    MAX_OPERANDS = triton_fill.MAX_OPERANDS

    def __init__(self):
        self.num_launches = 0

    def launch(self, *args):
        self.num_launches += 1
        triton_fill.launch(*args)


def on_kernel(registry, **options):
    """Let ``registry``, which has no slots yet, fill by the kernel; returns the counted kernel."""
    planner = registry._device_planner = DevicePlanner(CPU, **options)
    planner.kernel = CountedKernel()
    return planner.kernel


def new_registry(**sizes):
    sizes = {**MAXIMA, **sizes}
    return CudaGraphBufferRegistry(device="cpu", max_bs=sizes["bs"], max_num_tokens=sizes["tokens"])


def random_bytes(shape, dtype, generator):
    numel = torch.Size(shape).numel()
    block = torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator).to(torch.uint8)
    return (block & 1 if dtype is torch.bool else block).view(dtype).view(shape)


def values_of(dtype, shape, generator):
    """Values over the range of ``dtype``; the special ones of a float among them."""
    if not dtype.is_floating_point:
        return random_bytes(shape, dtype, generator)
    numel = torch.Size(shape).numel()
    scale = 10.0 ** torch.randint(-8, 5, (numel,), generator=generator)
    values = torch.randn(numel, generator=generator) * scale
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-7])
    places = torch.randint(0, 40, (numel,), generator=generator)
    values = torch.where(places < 6, special[places.clamp(max=5)], values)
    return values.to(dtype).view(shape)


LAYOUTS = ["plain", "longer", "every other", "transposed", "expanded", "odd address"]


def source_of(dtype, shape, layout, generator, *, may_be_longer):
    """A source of ``shape`` (or with more rows) in the given layout."""
    if layout == "longer" and may_be_longer:
        return values_of(dtype, [size + 2 for size in shape], generator)[
            tuple(slice(0, size + (dim in may_be_longer)) for dim, size in enumerate(shape))
        ]
    if layout == "every other":
        return values_of(dtype, [2 * size for size in shape], generator)[
            tuple(slice(None, None, 2) for _ in shape)
        ]
    if layout == "transposed":
        return values_of(dtype, shape[::-1], generator).permute(*reversed(range(len(shape))))
    if layout == "expanded":
        return values_of(dtype, (1, *shape[1:]), generator).expand(shape)
    if layout == "odd address":
        numel = torch.Size(shape).numel()
        return values_of(dtype, (numel + 1,), generator)[1:].view(shape)
    return values_of(dtype, shape, generator)


def size_of(axis, sizes):
    return 3 if axis is None else sizes[axis]


def add_slots(registry, descriptions, generator):
    """Register the slots on bound buffers; returns the tensors around those."""
    around = []
    for number, (axis, policy, (dtype, _), value, shift) in enumerate(descriptions):
        shape = tuple(size_of(one, MAXIMA) for one in axis)
        numel = torch.Size(shape).numel()
        base = random_bytes((numel + 2 * GUARD,), dtype, generator)
        around.append(base)
        takes_value = policy in (P.FILL_SENTINEL, P.FILL_ONCE)
        pad_value = value % 2 if dtype is torch.bool else value
        registry.register_slot(
            GraphSlot(
                f"s{number}",
                lambda bs, tokens, shape=shape: shape,
                dtype,
                axis=axis,
                padding_policy=policy,
                pad_value=pad_value if takes_value else None,
            ),
            bind=base[GUARD + shift : GUARD + shift + numel].view(shape),
        )
    return around


def same_bytes(one, other):
    """Equal in every byte, where not both are NaN: torch itself widens those in several ways."""
    if one.dtype in FLOATS:
        both_nan = one.isnan() & other.isnan()
        one, other = (each.clone().masked_fill_(both_nan, 0) for each in (one, other))
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


axes = st.lists(st.sampled_from(["bs", "tokens", None]), min_size=1, max_size=3).map(tuple)
slots = st.lists(
    st.tuples(
        axes,
        st.sampled_from(list(P)),
        st.sampled_from(PAIRS),
        st.integers(0, 5),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=5,
)
steps = st.lists(
    st.tuples(
        st.tuples(st.integers(0, 4), st.integers(0, 4)).map(sorted),
        st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted),
        st.lists(st.sampled_from(LAYOUTS), min_size=5, max_size=5),
        st.integers(0, 7),
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(slots, steps, st.booleans(), st.integers(0, 2**31))
def test_one_launch_leaves_the_bytes_that_grouped_calls_leave(
    descriptions, fills, stages_all, seed
):
    plain, fused = new_registry(), new_registry()
    kernel = on_kernel(fused, stages_all=stages_all)
    memories = [
        add_slots(registry, descriptions, torch.Generator().manual_seed(seed))
        for registry in (plain, fused)
    ]
    generator = torch.Generator().manual_seed(seed + 1)
    for (raw_bs, padded_bs), (raw_tokens, padded_tokens), layouts, absent in fills:
        raw = {"bs": raw_bs, "tokens": raw_tokens}
        batch = SimpleNamespace()
        for number, (axis, _, (_, dtype), _, _) in enumerate(descriptions):
            shape = [size_of(one, raw) for one in axis]
            longer = [dim for dim, one in enumerate(axis) if one and raw[one] < MAXIMA[one]]
            source = source_of(dtype, shape, layouts[number], generator, may_be_longer=longer)
            setattr(batch, f"s{number}", None if number == absent else source)
        before = kernel.num_launches
        padded = {"bs": padded_bs, "tokens": padded_tokens}
        for registry in (plain, fused):
            registry.fill_from(
                batch,
                raw_bs=raw_bs,
                padded_bs=padded_bs,
                raw_num_tokens=raw_tokens,
                padded_num_tokens=padded_tokens,
            )
        num_written = 0
        for number, (axis, policy, *_) in enumerate(descriptions):
            num_live, num_padded = (
                math.prod(size_of(one, sizes) for one in axis) for sizes in (raw, padded)
            )
            num_written += num_live if number != absent else 0
            num_written += num_padded - num_live if policy in (P.ZERO, P.FILL_SENTINEL) else 0
        assert kernel.num_launches == before + (num_written > 0)
        for number, (one, other) in enumerate(zip(*memories, strict=True)):
            assert same_bytes(one, other), (descriptions[number], layouts[number])


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_the_kernel_takes_every_pair_it_names(pair):
    """One slot per pair, over more than one block, so that nothing hides behind the other path."""
    dtype, source_dtype = pair
    generator = torch.Generator().manual_seed(3)
    memories = []
    source = values_of(source_dtype, (1500,), generator)
    for is_fused in (False, True):
        registry = new_registry(tokens=2500)
        kernel = on_kernel(registry) if is_fused else None
        slot = GraphSlot("x", lambda bs, tokens: (tokens,), dtype, padding_policy=P.ZERO)
        base = random_bytes((2600,), dtype, torch.Generator().manual_seed(4))
        registry.register_slot(slot, bind=base[40:2540])
        registry.fill_tensors({"x": source}, raw={"tokens": 1500}, padded={"tokens": 2200})
        memories.append(base)
    assert same_bytes(*memories)
    assert kernel.num_launches == 1


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.int8, -3),
        (torch.int16, -300),
        (torch.int32, -70000),
        (torch.int64, -(2**40)),
        (torch.uint8, 200),
        (torch.bool, 1),
        (torch.float16, 0.1),
        (torch.bfloat16, -0.1),
        (torch.float32, float("-inf")),
        (torch.float64, float("nan")),
        (torch.float8_e5m2, 1.5),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_tail", [1, 7, 8], ids=lambda n: f"tail-{n}")
def test_a_tail_value_is_written_as_torch_rounds_it(dtype, value, num_tail):
    registry = new_registry(tokens=16)
    kernel = on_kernel(registry)
    slot = registry.register_slot(
        GraphSlot(
            "x",
            lambda bs, tokens: (tokens,),
            dtype,
            padding_policy=P.FILL_SENTINEL,
            pad_value=value,
        )
    )
    slot.buffer.zero_()
    expected = slot.buffer.clone()
    expected[8 : 8 + num_tail] = value
    registry.fill_tensors({"x": None}, raw={"tokens": 8}, padded={"tokens": 8 + num_tail})
    assert same_bytes(slot.buffer, expected)
    assert kernel.num_launches == 1


# --- the standard slots ------------------------------------------------------------------------


def decode_batch(rows, step, **fields):
    numbers = torch.arange(rows) + 100 * step
    return ForwardBatch(
        batch_size=rows,
        input_ids=numbers,
        positions=numbers.int(),
        out_cache_loc=numbers + 1,
        req_pool_indices=numbers + 2,
        seq_lens=torch.arange(min(rows + 2, 8)),  # longer than raw: cut
        seq_lens_cpu=numbers + 4,
        mrope_positions=torch.arange(3 * rows).view(rows, 3).t() + step,
        mamba_track_indices=numbers,
        mamba_track_mask=numbers % 2 == 0,
        encoder_lens=numbers.int(),
        **fields,
    )


DECODE = {
    "seq_len_fill_value": 3,
    "cache_loc_dtype": torch.int64,
    "enable_mamba_track": True,
    "is_encoder_decoder": True,
    "enable_num_token_non_padded": True,
}
PREFILL = {
    "cache_loc_dtype": torch.int64,
    "is_multimodal": True,
    "hidden_size": 5,
    "embed_dtype": torch.bfloat16,
    "enable_mamba_track": True,
    "enable_num_token_non_padded": True,
}
GATHERED = {"require_gathered_buffer": True, "attn_tp_size": 2, "attn_tp_rank": 1}


@pytest.mark.parametrize("stages_all", [False, True], ids=["device", "staged"])
@pytest.mark.parametrize(
    ("build", "options"),
    [
        (build_decode_registry, DECODE),
        (
            build_decode_registry,
            {**DECODE, **GATHERED, "require_mlp_tp_gather": True, "dp_size": 3},
        ),
        (build_prefill_registry, PREFILL),
        (build_prefill_registry, {**PREFILL, **GATHERED}),
    ],
    ids=["decode", "decode-gathered", "prefill", "prefill-gathered"],
)
def test_a_standard_registry_is_filled_by_one_launch(build, options, stages_all, monkeypatch):
    sizes = {"device": "cpu", "max_bs": 8, "max_num_token": 16, "share_pool": False}
    plain = build(**sizes, **options)
    with monkeypatch.context() as patch:
        kernels = []
        init = CudaGraphBufferRegistry.__init__

        def init_on_kernel(self, **kwargs):
            init(self, **kwargs)
            kernels.append(on_kernel(self, stages_all=stages_all))

        patch.setattr(CudaGraphBufferRegistry, "__init__", init_on_kernel)
        fused = build(**sizes, **options)
    (kernel,) = kernels
    counts = [{}, {"num_token_non_padded": torch.tensor([4], dtype=torch.int32)}]
    counts.append({"num_token_non_padded_cpu": 2})
    for step, (rows, padded) in enumerate([(5, 8), (3, 4), (8, 8), (5, 8), (0, 4), (5, 8)]):
        batch = decode_batch(rows, step, **counts[step % 3], mamba_track_seqlens=torch.arange(rows))
        for registry in (plain, fused):
            for name in registry.slot_names:
                registry.get_slot(name).buffer.fill_(1 if "mask" in name else 77)
            before = kernel.num_launches
            registry.fill_from(
                batch,
                raw_bs=rows,
                padded_bs=padded,
                raw_num_tokens=rows,
                padded_num_tokens=padded,
            )
        assert kernel.num_launches == before + 1
        for name in plain.slot_names:
            mine, theirs = fused.get_slot(name).buffer, plain.get_slot(name).buffer
            assert torch.equal(mine, theirs), name
    before = kernel.num_launches
    fused.reset_padding(padded_bs=8, padded_num_tokens=8)
    assert kernel.num_launches == before + 1
    assert fused.get_slot("positions").buffer[:8].eq(0).all()


# --- what the kernel does not take, and what changes between calls -------------------------------


def two_slots(registry, dtype=torch.int64, width=2, **options):
    for name in ("a", "b"):
        registry.register_slot(
            GraphSlot(
                name,
                lambda bs, tokens: (tokens, width),
                dtype,
                padding_policy=P.ZERO,
                **options,
            )
        ).buffer.fill_(77)


FULL = {"raw": {"tokens": 4}, "padded": {"tokens": 6}}


def test_other_strides_at_the_same_shape_are_followed():
    registry = new_registry()
    kernel = on_kernel(registry)
    two_slots(registry)
    plain = torch.arange(8).view(4, 2)
    for source in (plain, plain.view(2, 4).t(), torch.arange(9)[1:].view(4, 2), plain):
        registry.fill_tensors({"a": source, "b": plain[:1].expand(4, 2)}, **FULL)
        assert torch.equal(registry.get_slot("a").buffer[:4], source)
        assert registry.get_slot("a").buffer[4:].eq(0).all()
        assert torch.equal(registry.get_slot("b").buffer[:4], plain[:1].expand(4, 2))
    assert kernel.num_launches == 4
    assert len(registry._plans) == 1


def test_a_source_in_memory_that_the_fill_writes_is_left_to_the_grouped_calls():
    plain, fused = new_registry(), new_registry()
    kernel = on_kernel(fused)
    for registry in (plain, fused):
        two_slots(registry)
        registry.get_slot("a").buffer.copy_(torch.arange(12).view(6, 2))
        elsewhere = registry.get_slot("a").buffer[1:5]
        registry.fill_tensors({"b": elsewhere, "a": torch.ones(4, 2).long()}, **FULL)
    assert kernel.num_launches == 0
    for name in ("a", "b"):
        assert torch.equal(plain.get_slot(name).buffer, fused.get_slot(name).buffer)
    free = torch.arange(8).view(4, 2)
    fused.fill_tensors({"b": free, "a": free}, **FULL)  # the same plan, launched
    assert (kernel.num_launches, len(fused._plans)) == (1, 1)


def test_slots_on_one_memory_are_left_to_the_grouped_calls():
    registry = new_registry()
    kernel = on_kernel(registry)
    shared = torch.full((6,), 77)
    for name, policy in (("a", P.ZERO), ("b", P.FOREACH_COPY)):
        registry.register_slot(
            GraphSlot(name, lambda bs, tokens: (tokens,), torch.int64, padding_policy=policy),
            bind=shared,
        )
    registry.fill_tensors(
        {"a": torch.ones(3).long(), "b": torch.full((3,), 2)},
        raw={"tokens": 3},
        padded={"tokens": 5},
    )
    assert shared.tolist() == [2, 2, 2, 0, 0, 77]
    assert kernel.num_launches == 0


@pytest.mark.parametrize(
    ("dtype", "source"),
    [
        (torch.complex64, torch.randn(4, 2, dtype=torch.complex64).conj()),
        (torch.float32, torch.randn(4, 2, dtype=torch.complex64).conj().imag),
        (torch.float32, torch.randn(4, 2).to(torch.float8_e5m2)),
    ],
    ids=["conjugate", "negated", "float8"],
)
def test_what_memory_does_not_show_is_left_to_the_grouped_calls(dtype, source):
    registry = new_registry()
    kernel = on_kernel(registry)
    two_slots(registry, dtype)
    registry.fill_tensors({"a": source, "b": torch.ones(4, 2, dtype=dtype)}, **FULL)
    assert torch.equal(registry.get_slot("a").buffer[:4], source.to(dtype))
    assert registry.get_slot("a").buffer[4:].eq(0).all()
    assert kernel.num_launches == 0


def test_more_slots_than_operands_take_a_second_launch():
    registry = new_registry()
    kernel = on_kernel(registry)
    num_slots = triton_fill.MAX_OPERANDS + 3
    for number in range(num_slots):
        registry.register_slot(
            GraphSlot(
                f"s{number}", lambda bs, tokens: (tokens,), torch.int64, padding_policy=P.ZERO
            )
        ).buffer.fill_(77)
    values = {f"s{number}": torch.arange(4) + number for number in range(num_slots)}
    registry.fill_tensors(values, **FULL)
    for number in range(num_slots):
        expected = [*range(number, number + 4), 0, 0]
        assert registry.get_slot(f"s{number}").buffer.tolist() == expected
    assert kernel.num_launches == 2


def number_slot(name, dtype, number):
    return GraphSlot(
        name,
        lambda bs, tokens: (2,),
        dtype,
        axis="none",
        copy_from_fb=False,
        post_fill=ComputedNumber(lambda batch, context: number(batch)),
    )


def fill(registry, batch):
    registry.fill_from(batch, raw_bs=1, padded_bs=1, raw_num_tokens=1, padded_num_tokens=2)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_numbers_change_from_batch_to_batch_without_another_plan(dtype):
    registry = new_registry()
    kernel = on_kernel(registry)
    slot = registry.register_slot(number_slot("n", dtype, lambda batch: batch.n))
    for number in (3, 200, 0):
        fill(registry, SimpleNamespace(n=number))
        assert slot.buffer.tolist() == [number, number]
    fill(registry, SimpleNamespace(n=None))
    assert slot.buffer.tolist() == [0, 0]
    assert (kernel.num_launches, len(registry._plans)) == (3, 2)


def test_a_number_that_its_slot_cannot_hold_is_refused_as_on_the_host():
    registry = new_registry()
    on_kernel(registry)
    registry.register_slot(number_slot("n", torch.int16, lambda batch: batch.n))
    with pytest.raises(RuntimeError, match="overflow"):
        fill(registry, SimpleNamespace(n=1 << 20))


def test_numbers_of_other_dtypes_are_hooks_like_others():
    registry = new_registry()
    kernel = on_kernel(registry)
    slot = registry.register_slot(number_slot("n", torch.float32, lambda batch: 7))
    fill(registry, SimpleNamespace())
    assert slot.buffer.tolist() == [7.0, 7.0]
    assert kernel.num_launches == 0


def test_a_refused_batch_leaves_every_byte():
    registry = new_registry()
    on_kernel(registry, stages_all=True)
    two_slots(registry)
    with pytest.raises(SlotMismatchError):
        registry.fill_tensors({"a": torch.ones(4, 2).long(), "b": torch.ones(4, 2)}, **FULL)
    assert registry.get_slot("a").buffer.eq(77).all()


def test_staged_sources_may_be_overwritten_at_once_and_grow():
    registry = new_registry(tokens=9000)
    kernel = on_kernel(registry, stages_all=True)
    two_slots(registry)
    source = torch.empty(9000, 2, dtype=torch.int64)
    for rows in (3, 9000, 5, 9000):
        live = source[:rows].copy_(torch.arange(2 * rows).view(rows, 2) + rows)
        sizes = {"raw": {"tokens": rows}, "padded": {"tokens": 9000}}
        registry.fill_tensors({"a": live, "b": live.int()}, **sizes)
        source.fill_(-1)
        expected = torch.arange(2 * rows).view(rows, 2) + rows
        for name in ("a", "b"):
            assert torch.equal(registry.get_slot(name).buffer[:rows], expected)
            assert registry.get_slot(name).buffer[rows:].eq(0).all()
    assert kernel.num_launches == 4
    assert len(registry._device_planner.ring) == 1  # no copy was ever in flight
