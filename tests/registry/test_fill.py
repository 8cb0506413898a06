"""Filling slots from a batch: tails, heads, hooks, and what is refused."""

from types import SimpleNamespace

import pytest
import torch

from compile_backend.errors import (
    GraphbufError,
    SlotDefinitionError,
    SlotMismatchError,
    SlotNotFoundError,
    SlotOverflowError,
)
from compile_backend.registry import CudaGraphBufferRegistry, GraphSlot, PaddingPolicy

POISON = -77
P = PaddingPolicy
POLICIES = [
    pytest.param(P.ZERO, None, 0, id="zero"),
    pytest.param(P.FILL_SENTINEL, 9, 9, id="sentinel"),
    pytest.param(P.FILL_SENTINEL, 0, 0, id="sentinel-0"),
    pytest.param(P.KEEP_PAD, None, POISON, id="keep"),
    pytest.param(P.FOREACH_COPY, None, POISON, id="foreach-copy"),
    pytest.param(P.FILL_ONCE, 9, POISON, id="fill-once"),
]


def fill(registry, batch, raw, padded, *, raw_tokens=None, padded_tokens=None, **options):
    registry.fill_from(
        batch,
        raw_bs=raw,
        padded_bs=padded,
        raw_num_tokens=raw if raw_tokens is None else raw_tokens,
        padded_num_tokens=padded if padded_tokens is None else padded_tokens,
        **options,
    )


def poison(registry, value=POISON):
    for name in registry.slot_names:
        buffer = registry.get_slot(name).buffer
        if buffer is not None:
            buffer.fill_(value)


def snapshot(registry):
    return {name: registry.get_slot(name).buffer.clone() for name in registry.slot_names}


# --- tails and heads -------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "pad_value", "tail"), POLICIES)
@pytest.mark.parametrize("sizes", [(3, 5, 3), (5, 3), (8, 1, 8), (0, 3, 0)], ids=str)
@pytest.mark.parametrize("width", [None, 2], ids=["1d", "2d"])
def test_a_buffer_holds_live_rows_then_its_tail(registry, sizes, policy, pad_value, tail, width):
    shape = () if width is None else (width,)
    slot = registry.register_slot(
        GraphSlot(
            "x",
            lambda bs, tokens: (bs, *shape),
            torch.int64,
            axis="bs",
            padding_policy=policy,
            pad_value=pad_value,
        )
    )
    for step, raw in enumerate(sizes):
        for padded in (raw, 5 if raw <= 5 else 8, 8):
            poison(registry)
            live = torch.arange(raw * (width or 1)).reshape(raw, *shape) + 100 * (step + 1)
            fill(registry, SimpleNamespace(x=live), raw, padded)
            expected = torch.full((8, *shape), POISON)
            expected[raw:padded] = tail
            expected[:raw] = live
            assert torch.equal(slot.buffer, expected)


def test_fill_once_fills_the_whole_buffer_when_it_is_registered(registry, bs_slot):
    slot = registry.register_slot(bs_slot("x", P.FILL_ONCE, pad_value=6))
    assert slot.buffer.tolist() == [6] * 8
    fill(registry, SimpleNamespace(x=torch.tensor([1, 2, 3])), 3, 8)
    fill(registry, SimpleNamespace(x=torch.tensor([4])), 1, 8)
    assert slot.buffer.tolist() == [4, 2, 3, 6, 6, 6, 6, 6]


def test_new_buffers_start_with_their_pad_value(registry, bs_slot):
    assert registry.register_slot(bs_slot("x", P.FILL_SENTINEL, pad_value=4)).buffer.eq(4).all()
    assert registry.register_slot(bs_slot("y", P.ZERO)).buffer.eq(0).all()


def test_each_slot_follows_its_own_axis(registry):
    for name, axis in (("b", "bs"), ("t", "tokens"), ("n", "none")):
        registry.register_slot(
            GraphSlot(
                name,
                lambda bs, tokens, axis=axis: ({"bs": bs, "tokens": tokens, "none": 3}[axis],),
                torch.int64,
                axis=axis,
                padding_policy=P.ZERO,
            )
        )
    poison(registry)
    batch = SimpleNamespace(b=torch.ones(2).long(), t=torch.ones(5).long(), n=torch.ones(3).long())
    fill(registry, batch, 2, 4, raw_tokens=5, padded_tokens=6)
    assert registry.get_slot("b").buffer.tolist() == [1, 1, 0, 0] + [POISON] * 4
    assert registry.get_slot("t").buffer.tolist() == [1] * 5 + [0] + [POISON] * 10
    assert registry.get_slot("n").buffer.tolist() == [1, 1, 1]


@pytest.mark.parametrize("axis", ["tokens", (None, "tokens")], ids=str)
def test_a_slice_fn_is_cut_filled_and_reset_along_its_dimension(registry, axis):
    slot = registry.register_slot(
        GraphSlot(
            "mrope_positions",
            lambda bs, tokens: (3, tokens),
            torch.int64,
            axis=axis,
            padding_policy=P.ZERO,
            slice_fn=lambda buffer, bs, tokens: buffer[:, :tokens],
        )
    )
    for raw in (5, 2, 7, 1):
        poison(registry)
        live = torch.arange(3 * raw).view(3, raw) + 10 * raw
        fill(registry, SimpleNamespace(mrope_positions=live), 1, 1, raw_tokens=raw, padded_tokens=8)
        expected = torch.full((3, 16), POISON)
        expected[:, raw:8] = 0
        expected[:, :raw] = live
        assert torch.equal(slot.buffer, expected)
        view = slot.slice_for(1, 8)
        assert view.shape == (3, 8)
        assert view.stride() == (16, 1)
        assert view.data_ptr() == slot.buffer.data_ptr()


def test_a_field_longer_than_raw_gives_its_first_raw_rows(registry, bs_slot):
    registry.register_slot(bs_slot("x"))
    registry.register_slot(bs_slot("y"))
    poison(registry)
    batch = SimpleNamespace(x=torch.arange(1, 7), y=torch.arange(1, 4))
    fill(registry, batch, 3, 4)
    for name in ("x", "y"):
        assert registry.get_slot(name).buffer.tolist() == [1, 2, 3, 0] + [POISON] * 4


def test_sources_of_any_strides_are_copied(registry):
    slot = registry.register_slot(
        GraphSlot("x", lambda bs, tokens: (bs, 2), torch.float32, axis="bs")
    )
    for source in (torch.randn(2, 3).t(), torch.randn(6, 2)[::2], torch.randn(1, 2).expand(3, 2)):
        fill(registry, SimpleNamespace(x=source), 3, 4)
        assert torch.equal(slot.buffer[:3], source)


def test_many_dtypes_fill_in_one_call(registry):
    dtypes = [torch.int64, torch.int32, torch.bool, torch.float32, torch.bfloat16, torch.int64]
    for index, dtype in enumerate(dtypes):
        registry.register_slot(
            GraphSlot(
                f"f{index}", lambda bs, tokens: (bs,), dtype, axis="bs", padding_policy=P.ZERO
            )
        )
    poison(registry, 1)
    live = {f"f{i}": torch.tensor([1, 0, 1]).to(dtype) for i, dtype in enumerate(dtypes)}
    fill(registry, SimpleNamespace(**live), 3, 5)
    for name, source in live.items():
        buffer = registry.get_slot(name).buffer
        assert buffer.tolist() == [*source.tolist(), 0, 0, 1, 1, 1]


# --- optional fields, sources, hooks ---------------------------------------------------------


def test_an_absent_field_is_not_copied_and_its_tail_is_reset(registry, bs_slot):
    slot = registry.register_slot(bs_slot("x"))
    poison(registry)
    fill(registry, SimpleNamespace(x=None), 3, 5)
    assert slot.buffer.tolist() == [POISON] * 3 + [0, 0] + [POISON] * 3


def test_optional_fields_come_and_go(registry, bs_slot):
    registry.register_slot(bs_slot("ids"))
    image = registry.register_slot(bs_slot("image"))
    for step, present in enumerate([True, False, True, True, False]):
        live = torch.full((3,), step)
        batch = SimpleNamespace(ids=live, image=live + 10 if present else None)
        fill(registry, batch, 3, 4)
        view = registry.extract_buffer(
            padded_bs=4, padded_num_tokens=4, forward_batch_template=batch
        )
        assert view.ids.tolist() == [step] * 3 + [0]
        if present:
            assert view.image.tolist() == [step + 10] * 3 + [0]
            assert view.image.data_ptr() == image.buffer.data_ptr()
        else:
            assert view.image is None


@pytest.mark.parametrize("is_warm", [False, True], ids=["first-fill", "later-fill"])
def test_a_misspelt_slot_raises_and_names_the_field(registry, bs_slot, is_warm):
    registry.register_slot(bs_slot("positions"))
    if is_warm:
        fill(registry, SimpleNamespace(positions=torch.ones(2).long()), 2, 2)
    registry.register_slot(bs_slot("seq_len"))
    batch = SimpleNamespace(positions=torch.zeros(2).long(), seq_lens=torch.zeros(2).long())
    with pytest.raises(SlotNotFoundError, match=r"'seq_len'.*did you mean 'seq_lens'"):
        fill(registry, batch, 2, 2)
    with pytest.raises(SlotNotFoundError, match="'seq_len'"):
        registry.extract_buffer(padded_bs=2, padded_num_tokens=2, forward_batch_template=batch)
    batch.seq_len = None  # as the message advises
    fill(registry, batch, 2, 2)


def test_a_batch_property_that_fails_inside_keeps_its_own_error(registry, bs_slot):
    class Batch:
        @property
        def ids(self):
            return self.no_such_thing

    registry.register_slot(bs_slot("ids"))
    with pytest.raises(GraphbufError, match="'ids'") as caught:
        fill(registry, Batch(), 2, 2)
    assert "no_such_thing" in str(caught.value.__cause__)


def test_source_fn_replaces_the_attribute_and_copies_its_own_length(registry, bs_slot):
    lengths = {"short": 2, "long": 6}
    for name, length in lengths.items():
        registry.register_slot(
            bs_slot(name, source_fn=lambda batch, ctx, n=length: torch.full((n,), batch.value))
        )
    poison(registry)
    fill(registry, SimpleNamespace(value=5), 4, 5)  # no attributes "short" and "long"
    assert registry.get_slot("short").buffer.tolist() == [5, 5, 0, 0, 0] + [POISON] * 3
    assert registry.get_slot("long").buffer.tolist() == [5] * 6 + [POISON] * 2


def test_source_fn_sees_the_sizes_and_the_proxy_tensors_and_may_skip(registry, bs_slot):
    seen = []

    def source(batch, context):
        seen.append(context)
        return context.pp_proxy_tensors

    registry.register_slot(bs_slot("x", source_fn=source))
    poison(registry)
    fill(registry, SimpleNamespace(), 2, 4, raw_tokens=6, padded_tokens=7)
    assert registry.get_slot("x").buffer.tolist() == [POISON] * 2 + [0, 0] + [POISON] * 4
    fill(registry, SimpleNamespace(), 2, 4, pp_proxy_tensors=torch.tensor([3, 4]))
    assert registry.get_slot("x").buffer.tolist() == [3, 4, 0, 0] + [POISON] * 4
    first = seen[0]
    assert (first.raw_bs, first.padded_bs) == (2, 4)
    assert (first.raw_num_tokens, first.padded_num_tokens) == (6, 7)


def test_post_fill_runs_last_on_the_whole_buffer(registry, bs_slot):
    calls = []

    def hook(buffer, batch, context):
        calls.append((buffer.clone(), batch, context.padded_bs))
        buffer[context.padded_bs - 1] = 42

    slot = registry.register_slot(bs_slot("x", post_fill=hook))
    other = registry.register_slot(bs_slot("y"))
    batch = SimpleNamespace(x=torch.tensor([1, 2]), y=torch.tensor([7, 8]))
    fill(registry, batch, 2, 4)
    assert calls[0][0].tolist() == [1, 2, 0, 0, 0, 0, 0, 0]
    assert calls[0][1:] == (batch, 4)
    assert slot.buffer.tolist() == [1, 2, 0, 42, 0, 0, 0, 0]
    assert other.buffer[:2].tolist() == [7, 8]


def test_a_computed_slot_is_reset_and_never_read_from_the_batch(registry, bs_slot):
    slot = registry.register_slot(bs_slot("x", copy_from_fb=False))
    poison(registry)
    fill(registry, SimpleNamespace(x=torch.ones(2).long()), 2, 4)
    assert slot.buffer.tolist() == [POISON] * 2 + [0, 0] + [POISON] * 4


def test_disabled_slots_are_left_alone(registry, bs_slot):
    slot = registry.register_slot(bs_slot("x", enabled=False))
    batch = SimpleNamespace()
    fill(registry, batch, 2, 4)
    view = registry.extract_buffer(padded_bs=4, padded_num_tokens=4, forward_batch_template=batch)
    assert slot.buffer is None
    assert not hasattr(view, "x")


# --- capacity and strictness -----------------------------------------------------------------


def test_capacity_exactly_one_above_and_far_above(registry, bs_slot):
    slot = registry.register_slot(bs_slot("x"))
    fill(registry, SimpleNamespace(x=torch.arange(8)), 8, 8)
    assert slot.buffer.tolist() == list(range(8))
    for rows in (9, 1000):
        with pytest.raises(SlotOverflowError, match=rf"'x' holds 8 rows .*{rows}"):
            fill(registry, SimpleNamespace(x=torch.zeros(rows).long()), rows, rows)
        with pytest.raises(SlotOverflowError, match=rf"'x' holds 8 rows .*brings {rows}"):
            fill(registry, SimpleNamespace(x=torch.zeros(rows).long()), 8, 8)
    assert slot.buffer.tolist() == list(range(8))
    fill(registry, SimpleNamespace(x=torch.tensor([5])), 1, 2)
    assert slot.buffer.tolist() == [5, 0, *range(2, 8)]


def test_a_bucket_below_the_live_size_is_refused(registry, bs_slot):
    registry.register_slot(bs_slot("x"))
    with pytest.raises(SlotOverflowError, match="5 rows on axis 'bs' but its bucket has 4"):
        fill(registry, SimpleNamespace(x=torch.zeros(5).long()), 5, 4)


def test_negative_sizes_are_refused(registry, bs_slot):
    registry.register_slot(bs_slot("x"))
    with pytest.raises(SlotMismatchError, match="0 or more"):
        fill(registry, SimpleNamespace(x=torch.zeros(5).long()), -1, 4)


BAD_FIELDS = {
    "lossy-dtype": (torch.zeros(3, dtype=torch.float32), SlotMismatchError, "torch.float32"),
    "narrower-slot": (torch.zeros(3, dtype=torch.uint64), SlotMismatchError, "torch.uint64"),
    "device": (torch.zeros(3, dtype=torch.int64, device="meta"), SlotMismatchError, "meta"),
    "rank": (torch.zeros(3, 1, dtype=torch.int64), SlotMismatchError, "2 "),
    "scalar": (torch.tensor(3), SlotMismatchError, "brings 0 "),
    "broadcast": (torch.zeros(1, dtype=torch.int64), SlotMismatchError, "brings 1 "),
    "fewer": (torch.zeros(2, dtype=torch.int64), SlotMismatchError, "brings 2 "),
    "empty": (torch.zeros(0, dtype=torch.int64), SlotMismatchError, "brings 0 "),
    "above-capacity": (torch.zeros(9, dtype=torch.int64), SlotOverflowError, "brings 9 "),
    "list": ([1, 2, 3], SlotMismatchError, "list"),
    "sparse": (torch.ones(3, dtype=torch.int64).to_sparse(), SlotMismatchError, "to_dense"),
}


@pytest.mark.parametrize("is_warm", [False, True], ids=["first-fill", "later-fill"])
@pytest.mark.parametrize("kind", BAD_FIELDS)
def test_a_refused_batch_writes_nothing_and_later_batches_work(registry, bs_slot, kind, is_warm):
    value, error, words = BAD_FIELDS[kind]
    hooks = []
    registry.register_slot(bs_slot("first", post_fill=lambda *args: hooks.append(args)))
    registry.register_slot(bs_slot("sourced", source_fn=lambda batch, ctx: batch.first))
    registry.register_slot(bs_slot("last"))
    good = SimpleNamespace(first=torch.tensor([1, 2, 3]), last=torch.tensor([4, 5, 6]))
    if is_warm:
        fill(registry, good, 3, 5)
    poison(registry)
    before, num_hooks = snapshot(registry), len(hooks)
    with pytest.raises(error, match=words) as caught:
        fill(registry, SimpleNamespace(first=good.first, last=value), 3, 5)
    assert "'last'" in str(caught.value)
    assert len(hooks) == num_hooks
    for name, buffer in snapshot(registry).items():
        assert torch.equal(buffer, before[name]), name
    fill(registry, good, 3, 5)
    assert registry.get_slot("first").buffer[:5].tolist() == [1, 2, 3, 0, 0]
    assert registry.get_slot("last").buffer[:5].tolist() == [4, 5, 6, 0, 0]


def test_a_source_fn_that_raises_writes_nothing(registry, bs_slot):
    def broken(batch, context):
        raise RuntimeError("no source today")

    registry.register_slot(bs_slot("x"))
    registry.register_slot(bs_slot("y", source_fn=broken))
    poison(registry)
    before = snapshot(registry)
    with pytest.raises(RuntimeError, match="no source today"):
        fill(registry, SimpleNamespace(x=torch.ones(2).long()), 2, 4)
    assert all(torch.equal(buffer, before[name]) for name, buffer in snapshot(registry).items())


def test_other_fixed_dimensions_are_refused(registry):
    registry.register_slot(GraphSlot("x", lambda bs, tokens: (bs, 4), torch.float32, axis="bs"))
    for shape in ((3, 1), (3, 5), (3, 3)):
        with pytest.raises(SlotMismatchError, match=rf"size 4 in dimension 1 .*brings {shape[1]}"):
            fill(registry, SimpleNamespace(x=torch.zeros(shape)), 3, 3)


def test_lossless_widening_is_copied_and_following_the_advice_works(registry):
    registry.register_slot(GraphSlot("i", lambda bs, tokens: (bs,), torch.int64, axis="bs"))
    registry.register_slot(GraphSlot("f", lambda bs, tokens: (bs,), torch.float32, axis="bs"))
    big = 2**31 - 1
    batch = SimpleNamespace(
        i=torch.tensor([big, -5], dtype=torch.int32), f=torch.tensor([1.5, -3]).bfloat16()
    )
    fill(registry, batch, 2, 2)
    assert registry.get_slot("i").buffer[:2].tolist() == [big, -5]
    assert registry.get_slot("f").buffer[:2].tolist() == [1.5, -3]
    lossy = SimpleNamespace(i=batch.i, f=torch.tensor([1, 2]))
    with pytest.raises(SlotMismatchError, match=r"convert the field to torch\.float32"):
        fill(registry, lossy, 2, 2)
    lossy.f = lossy.f.to(torch.float32)
    fill(registry, lossy, 2, 2)
    assert registry.get_slot("f").buffer[:2].tolist() == [1, 2]


# --- sources that lie in the buffer ----------------------------------------------------------


def test_a_batch_of_slot_views_is_not_copied_and_its_tail_is_reset(registry, bs_slot):
    slot = registry.register_slot(bs_slot("x"))
    fill(registry, SimpleNamespace(x=torch.arange(1, 6)), 5, 8)
    for rows in (5, 8):  # the live view, and the padded one
        poison_tail = slot.buffer[5:]
        poison_tail.fill_(POISON)
        version = slot.buffer._version
        fill(registry, SimpleNamespace(x=slot.buffer[:rows]), 5, 8)
        assert slot.buffer.tolist() == [1, 2, 3, 4, 5, 0, 0, 0]
        assert slot.buffer._version == version + 1  # the tail; a copy would have bumped it again


def test_a_source_that_overlaps_its_buffer_elsewhere_is_refused(registry, bs_slot):
    slot = registry.register_slot(bs_slot("x"))
    slot.buffer.copy_(torch.arange(8))
    for source in (slot.buffer[1:6], slot.buffer[3:8], slot.buffer[: 2 * 4 : 2]):
        raw = len(source)
        with pytest.raises(SlotMismatchError, match="clone the field"):
            fill(registry, SimpleNamespace(x=source), raw, 8)
        assert slot.buffer.tolist() == list(range(8))
    fill(registry, SimpleNamespace(x=slot.buffer[1:6].clone()), 5, 8)
    assert slot.buffer.tolist() == [1, 2, 3, 4, 5, 0, 0, 0]


def test_a_source_elsewhere_in_the_storage_of_a_bound_buffer_is_copied(registry, bs_slot):
    block = torch.arange(16)
    slot = registry.register_slot(bs_slot("x"), bind=block[:8])
    fill(registry, SimpleNamespace(x=block[8:11]), 3, 4)
    assert slot.buffer.tolist() == [8, 9, 10, 0, 4, 5, 6, 7]


# --- slice_fn contracts ----------------------------------------------------------------------


def test_a_slice_fn_that_copies_is_refused(registry):
    with pytest.raises(SlotDefinitionError, match="no view of the buffer"):
        registry.register_slot(
            GraphSlot(
                "x",
                lambda bs, tokens: (3, tokens),
                torch.int64,
                slice_fn=lambda buffer, bs, tokens: buffer[:, :tokens].contiguous(),
            )
        )


def test_a_slice_fn_that_ignores_its_axis_is_refused(registry):
    with pytest.raises(SlotDefinitionError, match="axis='none'"):
        registry.register_slot(
            GraphSlot(
                "x", lambda bs, tokens: (3, tokens), torch.int64, slice_fn=lambda buf, bs, n: buf
            )
        )


def test_a_slice_fn_that_does_not_cut_a_prefix_is_refused(registry):
    registry.register_slot(
        GraphSlot(
            "x",
            lambda bs, tokens: (tokens,),
            torch.int64,
            slice_fn=lambda buffer, bs, tokens: buffer[len(buffer) - tokens :],
        )
    )
    with pytest.raises(SlotDefinitionError, match="first rows"):
        fill(registry, SimpleNamespace(x=torch.zeros(2).long()), 2, 4)


# --- modes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("built_in", [False, True], ids=["built-normal", "built-inference"])
@pytest.mark.parametrize("sources_in", [False, True], ids=["src-normal", "src-inference"])
@pytest.mark.parametrize("filled_in", [False, True], ids=["fill-normal", "fill-inference"])
def test_fills_work_in_and_out_of_inference_mode(bs_slot, built_in, sources_in, filled_in):
    with torch.inference_mode(built_in):
        registry = CudaGraphBufferRegistry(device="cpu", max_bs=8, max_num_tokens=16)
        slot = registry.register_slot(bs_slot("x"))
        once = registry.register_slot(bs_slot("y", P.FILL_ONCE, pad_value=3))
    assert not slot.buffer.is_inference()
    for mode in (filled_in, not filled_in, filled_in):  # a plan made in one mode serves the other
        with torch.inference_mode(sources_in):
            live = torch.tensor([4, 5])
        with torch.inference_mode(mode):
            slot.buffer.fill_(POISON)
            fill(registry, SimpleNamespace(x=live, y=live), 2, 4)
            view = registry.view("x", {"bs": 4})
        assert view.tolist() == [4, 5, 0, 0]
        assert once.buffer.tolist() == [4, 5, 3, 3, 3, 3, 3, 3]


def test_a_source_that_requires_grad_leaves_the_buffer_free_of_it(registry):
    slot = registry.register_slot(GraphSlot("x", lambda bs, t: (bs,), torch.float32, axis="bs"))
    live = torch.ones(2, requires_grad=True)
    fill(registry, SimpleNamespace(x=live), 2, 4)
    registry.fill_tensors({"x": live * 2}, raw={"bs": 2}, padded={"bs": 4})
    assert not slot.buffer.requires_grad
    assert slot.buffer[:2].tolist() == [2, 2]
    assert torch.is_grad_enabled()


def test_reset_padding_restores_tails_without_a_batch(registry, bs_slot):
    registry.register_slot(bs_slot("zero"))
    registry.register_slot(bs_slot("two", P.FILL_SENTINEL, pad_value=2))
    registry.register_slot(bs_slot("kept", P.KEEP_PAD))
    poison(registry)
    registry.reset_padding(padded_bs=4, padded_num_tokens=4, raw_bs=1)
    assert registry.get_slot("zero").buffer.tolist() == [POISON, 0, 0, 0] + [POISON] * 4
    assert registry.get_slot("two").buffer.tolist() == [POISON, 2, 2, 2] + [POISON] * 4
    assert registry.get_slot("kept").buffer.tolist() == [POISON] * 8


def test_a_field_in_the_memory_of_another_slot_is_refused_before_anything_is_written():
    registry = CudaGraphBufferRegistry(device="cpu", max_bs=4, max_num_tokens=8)
    for name in ("first", "second"):
        registry.register_slot(
            GraphSlot(name, lambda bs, tokens: (tokens,), torch.int64, axis="tokens")
        )
    sizes = {"raw_bs": 1, "padded_bs": 1, "raw_num_tokens": 3, "padded_num_tokens": 4}
    first, second = torch.arange(3), torch.arange(3) + 10
    registry.fill_from(SimpleNamespace(first=first, second=second), **sizes)
    view = registry.view("first", {"bs": 1, "tokens": 3})
    before = [buffer.clone() for buffer in registry.buffers()]
    with pytest.raises(SlotMismatchError, match="'second' lies in the memory of another slot"):
        registry.fill_from(SimpleNamespace(first=second, second=view), **sizes)
    assert all(map(torch.equal, before, registry.buffers()))
    registry.fill_from(SimpleNamespace(first=view, second=view.clone()), **sizes)  # its own is fine
    assert registry.buffers()[1][:3].tolist() == [0, 1, 2]
