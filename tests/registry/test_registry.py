"""Registering slots, their buffers, and the batch of views."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from compile_backend.errors import (
    SlotDefinitionError,
    SlotMismatchError,
    SlotNotAllocatedError,
    SlotNotFoundError,
    SlotOverflowError,
)
from compile_backend.forward_batch import ForwardBatch, ForwardMode
from compile_backend.registry import CudaGraphBufferRegistry, GraphSlot, PaddingPolicy

P = PaddingPolicy


def extract(registry, template, bs=4, tokens=4):
    return registry.extract_buffer(
        padded_bs=bs, padded_num_tokens=tokens, forward_batch_template=template
    )


# --- slots -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"padding_policy": P.FILL_SENTINEL}, "needs a pad_value"),
        ({"padding_policy": P.FILL_ONCE}, "needs a pad_value"),
        ({"padding_policy": P.ZERO, "pad_value": 3}, "FILL_SENTINEL"),
        ({"padding_policy": P.FILL_SENTINEL, "pad_value": 0.5}, "cannot hold pad_value=0.5"),
        ({"padding_policy": P.FILL_SENTINEL, "pad_value": 2**63}, "cannot hold"),
        ({"padding_policy": P.FILL_SENTINEL, "pad_value": float("nan")}, "cannot hold"),
        ({"name": "a.b"}, "source_fn"),
        ({"name": ""}, "needs a name"),
        ({"axis": ""}, "empty axis"),
        ({"axis": ("dim0",), "slice_fn": lambda buffer, bs, tokens: buffer}, "dim0"),
    ],
)
def test_a_description_that_cannot_work_is_refused(options, words):
    with pytest.raises(SlotDefinitionError, match=words):
        GraphSlot(**{"name": "x", "shape_fn": lambda b, t: (b,), "dtype": torch.int64} | options)


def test_a_sentinel_must_be_a_value_of_the_dtype():
    for dtype, good, bad in (
        (torch.uint8, 255, -1),
        (torch.bool, 1, 2),
        (torch.int32, -(2**31), 2**31),
    ):
        options = {"padding_policy": P.FILL_SENTINEL}
        GraphSlot("x", lambda b, t: (b,), dtype, pad_value=good, **options)
        with pytest.raises(SlotDefinitionError, match="cannot hold"):
            GraphSlot("x", lambda b, t: (b,), dtype, pad_value=bad, **options)


def test_slice_for_is_the_head_of_the_buffer_by_axis(registry):
    for axis, rows in (("bs", 3), ("tokens", 7), ("none", 16)):
        slot = registry.register_slot(
            GraphSlot(axis, lambda bs, tokens: (tokens, 2), torch.float32, axis=axis)
        )
        view = slot.slice_for(3, 7)
        assert view.shape == (rows, 2)
        assert view.data_ptr() == slot.buffer.data_ptr()
        view.fill_(1)
        assert slot.buffer[:rows].eq(1).all()


def test_a_slice_past_the_end_raises_instead_of_returning_fewer_rows(registry, bs_slot):
    slot = registry.register_slot(bs_slot("x"))
    assert slot.slice_for(8, 0).shape == (8,)
    with pytest.raises(SlotOverflowError, match=r"'x' holds 8 rows .* 9 are asked for"):
        slot.slice_for(9, 0)
    with pytest.raises(SlotOverflowError, match="'x'"):
        extract(registry, SimpleNamespace(x=torch.zeros(3)), bs=9)


def test_slots_without_a_buffer_say_why(registry, bs_slot):
    disabled = registry.register_slot(bs_slot("x", enabled=False))
    with pytest.raises(SlotNotAllocatedError, match="enabled=True"):
        disabled.slice_for(1, 1)
    with pytest.raises(SlotNotAllocatedError, match="register it"):
        bs_slot("y").slice_for(1, 1)
    assert disabled.buffer is None


def test_names_are_looked_up_and_suggested(registry, bs_slot):
    registry.register_slot(bs_slot("positions"))
    registry.register_slot(bs_slot("off", enabled=False))
    assert registry.slot_names == ("positions", "off")
    assert registry.has_slot("positions")
    assert not registry.has_slot("position")
    with pytest.raises(SlotNotFoundError, match="did you mean 'positions'"):
        registry.get_slot("position")


def test_a_name_is_registered_once_and_a_slot_in_one_registry(registry, bs_slot):
    slot = registry.register_slot(bs_slot("x"))
    with pytest.raises(SlotDefinitionError, match="registered already"):
        registry.register_slot(bs_slot("x"))
    other = CudaGraphBufferRegistry(device="cpu", max_bs=8, max_num_tokens=16)
    with pytest.raises(SlotDefinitionError, match=r"dataclasses\.replace"):
        other.register_slot(slot)
    copy = other.register_slot(replace(slot))  # as the message advises
    assert copy.buffer.data_ptr() != slot.buffer.data_ptr()


def test_axis_maxima_must_make_sense():
    for sizes in ({"none": 3}, {"dim0": -1}):
        with pytest.raises(SlotDefinitionError, match="maximum size"):
            CudaGraphBufferRegistry(device="cpu", max_bs=1, max_num_tokens=1, max_sizes=sizes)


@pytest.mark.parametrize("share_pool", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.complex128])
def test_buffers_are_aligned_to_256_bytes_and_are_no_views(share_pool, dtype):
    registry = CudaGraphBufferRegistry(
        device="cpu", max_bs=3, max_num_tokens=7, share_pool=share_pool
    )
    for index in range(8):
        slot = registry.register_slot(GraphSlot(f"x{index}", lambda bs, t: (t, 3), dtype))
        assert slot.buffer.data_ptr() % 256 == 0
        assert slot.buffer.is_contiguous()
        assert not slot.buffer._is_view()
        assert not slot.buffer.any()


def test_addresses_stay_through_fills_and_further_registrations(registry, bs_slot):
    slot = registry.register_slot(bs_slot("x"))
    address = slot.buffer.data_ptr()
    for raw in (8, 1, 5):
        batch = SimpleNamespace(x=torch.arange(raw), y=None)
        registry.fill_from(batch, raw_bs=raw, padded_bs=8, raw_num_tokens=raw, padded_num_tokens=8)
        assert slot.buffer.data_ptr() == address
        assert extract(registry, batch, bs=8).x.data_ptr() == address
        if raw == 8:
            registry.register_slot(bs_slot("y"))


def test_facts_name_shape_bytes_and_owner(registry, bs_slot):
    registry.register_slot(bs_slot("own"))
    bound = torch.zeros(8, dtype=torch.int64)
    registry.register_slot(bs_slot("bound"), bind=bound)
    registry.register_slot(bs_slot("off", enabled=False))
    own, adopted = registry.slot_facts()
    assert (own.name, own.shape, own.dtype, own.axis) == ("own", (8,), torch.int64, "bs")
    assert (own.policy, own.num_bytes, own.owner, own.is_shared) == (P.ZERO, 64, "registry", False)
    assert (adopted.owner, adopted.is_shared) == ("bound", True)
    assert adopted.address == bound.data_ptr()
    assert registry.slot_bytes() == {"own": 64, "bound": 64}


# --- bind ------------------------------------------------------------------------------------


def test_a_bound_tensor_is_the_buffer_and_keeps_its_values(registry, bs_slot):
    mine = torch.arange(10)
    slot = registry.register_slot(bs_slot("x"), bind=mine)
    assert slot.buffer is mine
    assert mine.tolist() == list(range(10))
    registry.fill_from(
        SimpleNamespace(x=torch.tensor([7])),
        raw_bs=1,
        padded_bs=3,
        raw_num_tokens=1,
        padded_num_tokens=3,
    )
    assert mine.tolist() == [7, 0, 0, *range(3, 10)]


def test_a_bound_fill_once_buffer_is_filled(registry, bs_slot):
    mine = torch.arange(8)
    registry.register_slot(bs_slot("x", P.FILL_ONCE, pad_value=5), bind=mine)
    assert mine.tolist() == [5] * 8


@pytest.mark.parametrize(
    ("tensor", "error", "words"),
    [
        (torch.zeros(8, dtype=torch.int32), SlotMismatchError, "torch.int32"),
        (torch.zeros(8, dtype=torch.int64, device="meta"), SlotMismatchError, "meta"),
        (torch.zeros(7, dtype=torch.int64), SlotDefinitionError, "at least"),
        (torch.zeros(8, 1, dtype=torch.int64), SlotDefinitionError, "at least"),
        (torch.zeros(1, dtype=torch.int64).expand(8), SlotDefinitionError, "expanded"),
    ],
    ids=["dtype", "device", "short", "rank", "expanded"],
)
def test_a_tensor_that_cannot_be_the_buffer_is_refused(registry, bs_slot, tensor, error, words):
    with pytest.raises(error, match=words):
        registry.register_slot(bs_slot("x"), bind=tensor)
    assert not registry.has_slot("x")
    registry.register_slot(bs_slot("x"))


def test_inference_and_grad_tensors_cannot_be_bound(registry):
    with torch.inference_mode():
        made_inside = torch.zeros(8)
    for tensor, words in (
        (made_inside, r"inference_mode\(False\)"),
        (torch.zeros(8, requires_grad=True), "requires grad"),
    ):
        with pytest.raises(SlotDefinitionError, match=words):
            registry.register_slot(
                GraphSlot("x", lambda bs, tokens: (bs,), torch.float32, axis="bs"), bind=tensor
            )


# --- the batch of views ----------------------------------------------------------------------


def decode_registry(bs_slot):
    registry = CudaGraphBufferRegistry(device="cpu", max_bs=8, max_num_tokens=8)
    registry.register_slot(bs_slot("seq_lens"))
    registry.register_slot(bs_slot("encoder_lens"))
    registry.register_slot(bs_slot("num_token_non_padded", copy_from_fb=False))
    registry.register_slot(bs_slot("pp_proxy_tensors.h", source_fn=lambda batch, ctx: None))
    return registry


def test_the_view_is_a_new_batch_and_the_template_is_not_changed(bs_slot):
    registry = decode_registry(bs_slot)
    live, spec = torch.tensor([1, 2, 3]), object()
    template = ForwardBatch(
        forward_mode=ForwardMode.DECODE, batch_size=3, seq_lens=live, spec_info=spec
    )
    before = dict(vars(template))
    one, two = extract(registry, template), extract(registry, template)
    assert vars(template) == before
    assert type(one) is ForwardBatch
    assert one is not template
    assert one is not two
    assert one.seq_lens.data_ptr() == registry.get_slot("seq_lens").buffer.data_ptr()
    assert one.seq_lens.shape == (4,)
    assert one.seq_lens is two.seq_lens
    assert (one.spec_info, one.forward_mode) == (spec, ForwardMode.DECODE)
    assert one.batch_size == 4
    assert one.encoder_lens is None
    assert one.num_token_non_padded.shape == (4,)  # computed: there although the template has None
    assert one.pp_proxy_tensors is None
    assert not hasattr(one, "pp_proxy_tensors.h")


@dataclass(frozen=True, slots=True)
class SlottedBatch:
    seq_lens: torch.Tensor
    encoder_lens: torch.Tensor | None
    num_token_non_padded: torch.Tensor | None
    batch_size: int
    num_tokens: int


class PropertyBatch:
    encoder_lens = None  # a class attribute
    num_token_non_padded = None

    def __init__(self, seq_lens, num_tokens):
        self._lens = seq_lens
        self.batch_size = 3
        self.num_tokens = num_tokens

    @property
    def seq_lens(self):
        return self._lens

    @seq_lens.setter
    def seq_lens(self, value):
        self._lens = value


@pytest.mark.parametrize(
    "make",
    [
        lambda lens: SlottedBatch(lens, None, None, 3, 3),
        lambda lens: PropertyBatch(lens, 3),
        lambda lens: SimpleNamespace(
            seq_lens=lens, encoder_lens=None, num_token_non_padded=None, batch_size=3, num_tokens=3
        ),
    ],
    ids=["frozen-slots", "properties", "namespace"],
)
def test_batches_of_any_class_are_viewed(bs_slot, make):
    registry = decode_registry(bs_slot)
    live = torch.tensor([1, 2, 3])
    template = make(live)
    registry.fill_from(template, raw_bs=3, padded_bs=4, raw_num_tokens=3, padded_num_tokens=4)
    view = extract(registry, template)
    assert type(view) is type(template)
    assert view.seq_lens.tolist() == [1, 2, 3, 0]
    assert view.encoder_lens is None
    assert view.num_token_non_padded.shape == (4,)
    assert (view.batch_size, view.num_tokens) == (4, 4)
    assert template.seq_lens is live
    assert (template.batch_size, template.num_tokens) == (3, 3)
    assert template.num_token_non_padded is None


class PlainBatch:
    def __init__(self, **fields):
        self.__dict__.update(fields)


def test_slots_registered_later_take_part_in_shapes_seen_before(registry, bs_slot):
    registry.register_slot(bs_slot("x"))
    batch = PlainBatch(x=torch.tensor([1, 2]), y=None)
    sizes = {"raw_bs": 2, "padded_bs": 4, "raw_num_tokens": 2, "padded_num_tokens": 4}
    registry.fill_from(batch, **sizes)
    assert extract(registry, batch).y is None
    late = registry.register_slot(bs_slot("y", copy_from_fb=False))
    late.buffer.fill_(7)
    registry.fill_from(batch, **sizes)
    assert late.buffer.tolist() == [7, 7, 0, 0, 7, 7, 7, 7]
    assert extract(registry, batch).y.tolist() == [7, 7, 0, 0]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_view_is_writable_in_every_mode_and_never_joins_an_autograd_graph(registry, mode):
    slot = GraphSlot("x", lambda bs, tokens: (bs,), torch.float32, axis="bs")
    registry.register_slot(slot)
    with mode():
        view = registry.view("x", {"bs": 2})
    for write_mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with write_mode():
            view.add_(1)
    assert slot.buffer.tolist() == [3, 3] + [0] * 6
    with pytest.raises(RuntimeError, match="inplace"):
        view.copy_(torch.ones(2, requires_grad=True))
    assert not slot.buffer.requires_grad


def test_size_fields_that_are_not_integers_are_carried(registry, bs_slot):
    registry.register_slot(bs_slot("x"))
    sizes = torch.tensor([3])
    view = extract(registry, SimpleNamespace(x=torch.zeros(3).long(), batch_size=sizes))
    assert view.batch_size is sizes
    assert not hasattr(view, "num_tokens")


@pytest.mark.parametrize("batch_type", [PlainBatch, SimpleNamespace])
def test_a_sourced_slot_is_exposed_unless_the_last_fill_skipped_it(registry, bs_slot, batch_type):
    registry.register_slot(bs_slot("x", source_fn=lambda batch, ctx: batch.other))
    for other in (torch.tensor([1, 2]), None, torch.tensor([3, 4])):
        batch = batch_type(x=None, other=other)
        registry.fill_from(batch, raw_bs=2, padded_bs=3, raw_num_tokens=2, padded_num_tokens=3)
        view = extract(registry, batch, bs=3, tokens=3)
        assert (view.x is None) == (other is None)
        if other is not None:
            assert view.x.tolist() == [*other.tolist(), 0]
