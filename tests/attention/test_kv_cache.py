"""Who owns which slot and row, and what the table says of them."""

import pytest
import torch

from compile_backend.attention import KVCache, RequestTable, TokenSlotAllocator
from compile_backend.errors import ConfigError, ContextError, KVCacheError


def test_the_allocator_hands_out_every_slot_but_the_scratch_slot_once():
    allocator = TokenSlotAllocator(6)
    assert allocator.num_free == 5
    slots = allocator.allocate(2) + allocator.allocate(0) + allocator.allocate(3)
    assert sorted(slots) == [1, 2, 3, 4, 5]
    assert allocator.num_free == 0


def test_an_allocator_that_is_short_takes_nothing_and_works_after_its_advice():
    allocator = TokenSlotAllocator(6)
    slots = allocator.allocate(4)
    with pytest.raises(KVCacheError, match="2 token slots were asked for and 1 of 5 are free"):
        allocator.allocate(2)
    with pytest.raises(KVCacheError, match="-1 token slots"):
        allocator.allocate(-1)
    assert allocator.num_free == 1
    allocator.free(slots[:1])
    assert slots[0] in allocator.allocate(2)


@pytest.mark.parametrize("wrong", [[0], [6], [-1], [5], "a used one twice", "one freed before"])
def test_freeing_what_is_not_in_use_raises_and_frees_nothing(wrong):
    allocator = TokenSlotAllocator(6)
    used = allocator.allocate(4)
    if wrong == "a used one twice":
        wrong = [used[1], used[1]]
    elif wrong == "one freed before":
        allocator.free(used[3:])
        wrong = used[3:]
    num_free = allocator.num_free
    with pytest.raises(KVCacheError, match="free every slot once"):
        allocator.free([used[0], *wrong])
    assert allocator.num_free == num_free
    allocator.free(used[:1])


def test_rows_are_written_at_their_place_and_point_at_the_scratch_slot_when_freed():
    table = RequestTable(2, 5, "cpu")
    assert table.req_to_token.shape == (3, 5)
    assert table.req_to_token.dtype is torch.int32
    row, other = table.allocate(), table.allocate()
    assert {row, other} == {1, 2}
    table.write(row, 0, [7, 8])
    table.write(row, 2, torch.tensor([9, 4, 3]))
    table.write(other, 1, [6])
    assert table.req_to_token[row].tolist() == [7, 8, 9, 4, 3]
    assert table.req_to_token[other].tolist() == [0, 6, 0, 0, 0]
    table.free(row)
    assert table.req_to_token[[0, row]].eq(0).all()
    assert table.allocate() == row


def test_a_table_without_free_rows_raises():
    table = RequestTable(1, 5, "cpu")
    table.allocate()
    with pytest.raises(KVCacheError, match="all 1 rows"):
        table.allocate()


def test_writes_outside_a_row_or_to_one_not_in_use_change_nothing():
    table = RequestTable(2, 5, "cpu")
    row = table.allocate()
    for start, slots in ((-1, [1]), (5, [1]), (3, [1, 2, 3])):
        with pytest.raises(KVCacheError, match=r"do not fit its 5 entries"):
            table.write(row, start, slots)
    for unused in (0, 2, 3, -1):
        with pytest.raises(KVCacheError, match=f"request row {unused} is not allocated"):
            table.write(unused, 0, [1])
        with pytest.raises(KVCacheError, match=f"request row {unused} is not allocated"):
            table.free(unused)
    assert table.req_to_token.eq(0).all()
    table.free(row)
    with pytest.raises(KVCacheError, match="not allocated"):
        table.free(row)


def test_the_cache_is_zeros_and_can_be_written_in_and_out_of_inference_mode():
    with torch.inference_mode():
        cache = KVCache(4, 3, 2, 8, torch.bfloat16, "cpu")
        table = RequestTable(2, 5, "cpu")
    assert cache.k.shape == cache.v.shape == (3, 4, 2, 8)
    assert cache.k.dtype is torch.bfloat16
    assert not cache.k.any()
    keys, values = cache.layer(2)
    keys[1], values[1] = 1, 2
    assert (cache.k[2, 1].mean(), cache.v[2, 1].mean()) == (1, 2)
    table.write(table.allocate(), 0, [1])
    for layer_id in (-1, 3):
        with pytest.raises(ContextError, match=f"layer_id {layer_id} is outside"):
            cache.layer(layer_id)


def test_sizes_that_hold_nothing_are_refused():
    with pytest.raises(ConfigError, match="empty dimension"):
        KVCache(4, 0, 2, 8, torch.float32, "cpu")
    with pytest.raises(ConfigError, match="num_slots is 0"):
        TokenSlotAllocator(0)
    with pytest.raises(ConfigError, match="max_requests=0"):
        RequestTable(0, 5, "cpu")
