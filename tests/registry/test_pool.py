"""Buffers shared between registries: what is shared, what is never replaced, whose tail counts."""

import gc
from types import SimpleNamespace

import pytest
import torch

from compile_backend.errors import SlotDefinitionError
from compile_backend.registry import (
    CudaGraphBufferRegistry,
    PaddingPolicy,
    build_decode_registry,
    build_eager_registry,
    input_pool,
    share_input_buffer,
)

P = PaddingPolicy
POISON = -77


def pooled_registry(max_bs=8, share_pool=True):
    return CudaGraphBufferRegistry(
        device="cpu", max_bs=max_bs, max_num_tokens=16, share_pool=share_pool
    )


def fill(registry, batch, raw, padded):
    registry.fill_from(
        batch, raw_bs=raw, padded_bs=padded, raw_num_tokens=raw, padded_num_tokens=padded
    )


def test_the_same_key_is_the_same_storage_whatever_the_shape():
    first = share_input_buffer("x", torch.arange(12))
    second = share_input_buffer("x", torch.zeros(3, 4, dtype=torch.int64))
    assert second.shape == (3, 4)
    assert second.data_ptr() == first.data_ptr()
    assert second.view(-1).tolist() == list(range(12))  # what was there, not what was offered
    second[2, 3] = 99
    assert first[11] == 99


@pytest.mark.parametrize(
    "other",
    [
        ("y", torch.zeros(12, dtype=torch.int64)),
        ("x", torch.zeros(13, dtype=torch.int64)),
        ("x", torch.zeros(11, dtype=torch.int64)),
        ("x", torch.zeros(12, dtype=torch.int32)),
        ("x", torch.zeros(12, dtype=torch.int64, device="meta")),
    ],
    ids=["name", "larger", "smaller", "dtype", "device"],
)
def test_another_key_gets_a_storage_of_its_own_and_displaces_nothing(other):
    first = share_input_buffer("x", torch.arange(12))
    name, tensor = other
    assert share_input_buffer(name, tensor).data_ptr() != first.data_ptr()
    assert share_input_buffer("x", torch.zeros(12).long()).data_ptr() == first.data_ptr()
    assert first.tolist() == list(range(12))


def test_tensors_that_cannot_be_shared_are_refused():
    before = len(input_pool)  # what graphs of other tests have captured stays for good
    with pytest.raises(SlotDefinitionError, match="contiguous"):
        share_input_buffer("x", torch.zeros(4, 2).t())
    with torch.inference_mode():
        inside = torch.zeros(4)
    with pytest.raises(SlotDefinitionError, match="inference mode"):
        share_input_buffer("x", inside)
    assert len(input_pool) == before


def test_registries_share_by_key_and_only_when_asked(bs_slot):
    before = input_pool.pool_bytes
    one, two = pooled_registry(), pooled_registry()
    larger, private = pooled_registry(max_bs=9), pooled_registry(share_pool=False)
    addresses = [
        registry.register_slot(bs_slot("x")).buffer.data_ptr()
        for registry in (one, two, larger, private)
    ]
    assert addresses[0] == addresses[1]
    assert len(set(addresses)) == 3
    assert [fact.owner for r in (one, private) for fact in r.slot_facts()] == ["pool", "registry"]
    assert input_pool.pool_bytes - before == 8 * 8 + 9 * 8


def test_a_captured_storage_is_never_dropped_grown_or_replaced(bs_slot):
    captured, other = pooled_registry(), pooled_registry()
    kept = captured.register_slot(bs_slot("x"))
    dropped = other.register_slot(bs_slot("y"))
    captured.mark_captured()
    kept.buffer.fill_(5)
    dropped_address = dropped.buffer.data_ptr()

    input_pool.clear()
    pooled_registry(max_bs=64).register_slot(bs_slot("x"))  # a larger consumer comes later
    again = pooled_registry()
    assert again.register_slot(bs_slot("x")).buffer.data_ptr() == kept.buffer.data_ptr()
    assert kept.buffer.tolist() == [5] * 8
    assert again.register_slot(bs_slot("y")).buffer.data_ptr() != dropped_address
    assert dropped.buffer.tolist() == [0] * 8  # its own registry keeps it alive


def test_a_buffer_found_in_the_pool_keeps_its_live_values(bs_slot):
    first = pooled_registry()
    first.register_slot(bs_slot("x", P.FILL_SENTINEL, pad_value=1))
    fill(first, SimpleNamespace(x=torch.arange(10, 14)), 4, 8)
    second = pooled_registry().register_slot(bs_slot("x", P.FILL_SENTINEL, pad_value=7))
    assert second.buffer.tolist() == [10, 11, 12, 13, 1, 1, 1, 1]


@pytest.mark.parametrize("order", ["ab", "ba", "aabba", "bab"])
def test_each_registry_restores_its_own_tail_on_a_shared_buffer(bs_slot, order):
    registries = {"a": pooled_registry(), "b": pooled_registry()}
    registries["a"].register_slot(bs_slot("seq_lens", P.FILL_SENTINEL, pad_value=1))
    slot = registries["b"].register_slot(bs_slot("seq_lens", P.ZERO))
    assert registries["a"].get_slot("seq_lens").buffer.data_ptr() == slot.buffer.data_ptr()
    for step, who in enumerate(order):
        for raw in (5, 2):
            slot.buffer.fill_(POISON)
            live = torch.full((raw,), 10 + step)
            fill(registries[who], SimpleNamespace(seq_lens=live), raw, 6)
            tail = {"a": 1, "b": 0}[who]
            assert slot.buffer.tolist() == [10 + step] * raw + [tail] * (6 - raw) + [POISON] * 2


def test_decode_and_eager_share_lengths_and_want_different_tails():
    options = {"device": "cpu", "max_bs": 8, "max_num_token": 8, "cache_loc_dtype": torch.int64}
    eager = build_eager_registry(**options)
    decode = build_decode_registry(seq_len_fill_value=1, **options)
    for name in ("seq_lens", "seq_lens_cpu", "input_ids", "mrope_positions"):
        addresses = {r.get_slot(name).buffer.data_ptr() for r in (eager, decode)}
        assert len(addresses) == 1, name
    batch = SimpleNamespace(
        **dict.fromkeys(decode.slot_names), seq_lens_sum=0
    )  # every field absent but lengths
    batch.seq_lens = torch.tensor([9, 9])
    for registry, tail in ((eager, 0), (decode, 1), (eager, 0)):
        fill(registry, batch, 2, 4)
        assert registry.get_slot("seq_lens").buffer[:4].tolist() == [9, 9, tail, tail]
    decode.reset_padding(padded_bs=4, padded_num_tokens=4, raw_bs=2, raw_num_tokens=2)
    assert eager.get_slot("seq_lens").buffer[:4].tolist() == [9, 9, 1, 1]


# --- FILL_ONCE -------------------------------------------------------------------------------

ONCE_1 = {"policy": P.FILL_ONCE, "pad_value": 1}


@pytest.mark.parametrize(
    "other",
    [
        {"policy": P.FILL_ONCE, "pad_value": 0},
        {"policy": P.FILL_SENTINEL, "pad_value": 2},
        {"policy": P.ZERO},
    ],
    ids=["once-0", "sentinel-2", "zero"],
)
@pytest.mark.parametrize("is_swapped", [False, True])
def test_fill_once_with_another_value_on_one_buffer_is_refused(bs_slot, other, is_swapped):
    first, second = (other, ONCE_1) if is_swapped else (ONCE_1, other)
    one, two = pooled_registry(), pooled_registry()
    kept = one.register_slot(bs_slot("x", **first))
    before = kept.buffer.clone()
    with pytest.raises(SlotDefinitionError, match="share_pool=False"):
        two.register_slot(bs_slot("x", **second))
    assert torch.equal(kept.buffer, before)
    assert not two.has_slot("x")
    pooled_registry(share_pool=False).register_slot(bs_slot("x", **second))  # as advised


@pytest.mark.parametrize(
    "other",
    [ONCE_1, {"policy": P.FILL_SENTINEL, "pad_value": 1}, {"policy": P.FOREACH_COPY}],
    ids=["once-1", "sentinel-1", "foreach-copy"],
)
def test_fill_once_shares_with_slots_that_do_not_undo_it(bs_slot, other):
    one, two = pooled_registry(), pooled_registry()
    first, second = (r.register_slot(bs_slot("x", **o)) for r, o in ((one, ONCE_1), (two, other)))
    assert first.buffer.data_ptr() == second.buffer.data_ptr()
    assert first.buffer.tolist() == [1] * 8


def test_nan_agrees_with_nan(bs_slot):
    nan = {"policy": P.FILL_ONCE, "pad_value": float("nan"), "dtype": torch.float32}
    pooled, again = pooled_registry(), pooled_registry()
    assert pooled.register_slot(bs_slot("x", **nan)).buffer.isnan().all()
    again.register_slot(bs_slot("x", **nan))


def test_a_conflict_ends_with_the_registry_that_made_it(bs_slot):
    one = pooled_registry()
    one.register_slot(bs_slot("x", **ONCE_1))
    del one
    gc.collect()
    two = pooled_registry()
    slot = two.register_slot(bs_slot("x", P.FILL_ONCE, pad_value=0))
    assert slot.buffer.tolist() == [0] * 8


def test_bound_buffers_that_overlap_conflict_too(bs_slot):
    block = torch.zeros(12, dtype=torch.int64)
    one, two = pooled_registry(), pooled_registry()
    one.register_slot(bs_slot("x", **ONCE_1), bind=block[:8])
    with pytest.raises(SlotDefinitionError, match="FILL_ONCE"):
        two.register_slot(bs_slot("y", P.FILL_ONCE, pad_value=0), bind=block[4:])
