"""Several tokens per request: prefixes, groups, padding, diffusion blocks."""

import pytest
import torch

from compile_backend import ForwardMode
from compile_backend.errors import ContextError
from tests.attention.conftest import World, assert_attends

EXTEND, MIXED = ForwardMode.EXTEND, ForwardMode.MIXED
NAN = float("nan")


@pytest.mark.parametrize("ratio", [1, 2, 6])
@pytest.mark.parametrize(
    ("cached", "new_lens"),
    [
        ([0], [1]),
        ([0], [40]),
        ([7], [40]),
        ([0, 0, 0], [16, 17, 17]),
        ([3, 0, 9, 9], [20, 20, 20, 20]),
        ([0, 5, 30, 30], [4, 4, 4, 2]),
        ([2, 0, 4], [0, 3, 0]),
        ([60, 63, 10], [3, 1, 60]),
    ],
)
def test_prefills_with_and_without_prefixes(ratio, cached, new_lens):
    world = World(ratio=ratio, kv_heads=1)
    requests = [world.request(each) for each in cached]
    world.check(world.step(requests, new_lens, EXTEND))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_every_dtype(dtype):
    world = World(dtype=dtype)
    world.check(world.step([world.request(5), world.request()], [4, 30], EXTEND))


def test_requests_that_decode_and_requests_that_extend_share_a_batch(world):
    requests = [world.request(cached) for cached in (9, 0, 70, 33, 5)]
    for _ in range(2):
        world.check(world.step(requests, [1, 20, 1, 1, 8], MIXED))


@pytest.mark.parametrize(
    "mode", [ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND], ids=lambda mode: mode.name
)
def test_speculative_modes_run_as_extend(world, mode):
    requests = [world.request(cached) for cached in (9, 30)]
    world.check(world.step(requests, [4, 4], mode))


@pytest.mark.parametrize("block", [1, 8, 32])
def test_a_diffusion_block_sees_its_prefix_and_all_of_itself(world, block):
    requests = [world.request(cached) for cached in (9, 0, 9)]
    world.check(world.step(requests, [block] * 3, ForwardMode.DLLM_EXTEND))


@pytest.mark.parametrize(
    "chunks", [[64], [1, 63], [63, 1], [30, 1, 33], [16] * 4, [17, 17, 17, 13]]
)
def test_chunks_of_a_prompt_give_what_the_whole_gives(world, chunks):
    whole = world.step([world.request()], [64], EXTEND)
    world.check(whole)
    other, start = world.request(), 0
    for chunk in chunks:
        step = world.step([other], [chunk], EXTEND)
        step.qkv = [tuple(each[start : start + chunk] for each in qkv) for qkv in whole.qkv]
        for got, expected in zip(world.run(step), whole.expected, strict=True):
            assert_attends(got, expected[start : start + chunk])
        start += chunk


@pytest.mark.parametrize("num_padded", [1, 5])
def test_padded_tokens_write_nothing_and_come_out_as_zeros(world, num_padded):
    requests = [world.request(5), world.request()]
    step = world.step(requests, [3, 20], EXTEND)
    victim = requests[0].slots[0]
    before = world.cache.k[:, [0, victim]].clone()
    pad = torch.full((num_padded,), victim)  # stale locations: they belong to somebody
    step.batch.out_cache_loc = torch.cat([step.batch.out_cache_loc, pad])
    for layer, qkv in enumerate(step.qkv):
        step.qkv[layer] = tuple(
            torch.cat([each, torch.full((num_padded, *each.shape[1:]), NAN).to(each)])
            for each in qkv
        )
    for got, expected in zip(world.run(step), step.expected, strict=True):
        assert_attends(got[:23].contiguous(), expected)
        assert got.shape[0] == 23 + num_padded
        assert torch.equal(got[23:], torch.zeros_like(got[23:]))
    assert torch.equal(world.cache.k[:, [0, victim]], before)


def test_a_batch_of_padding_only_writes_nothing(world):
    step = world.step([], [], EXTEND)
    step.qkv = [world.random_qkv(4) for _ in step.qkv]
    step.batch.out_cache_loc = torch.arange(1, 5)
    for got in world.run(step):
        assert torch.equal(got, torch.zeros(4, world.num_heads, world.head_dim).to(got))
    assert not world.cache.k.any()


@pytest.mark.parametrize("poison", [NAN, float("inf")])
def test_poison_in_the_scratch_slot_and_in_freed_slots_stays_out(world, poison):
    world.finish(world.request(100), poison)
    requests = [world.request(cached) for cached in (3, 40)]
    world.cache.k[:, 0] = world.cache.v[:, 0] = poison
    world.finish(world.request(64), poison)
    # One group of different lengths: the shorter is padded to the longer
    step = world.step(requests, [4, 4], EXTEND)
    assert len(world.backend.init_forward_metadata(step.batch).groups) == 1
    world.check(step)


def test_requests_of_one_shape_share_a_call(world):
    def num_groups(cached, new_lens):
        step = world.step([world.request(each) for each in cached], new_lens, EXTEND)
        groups = world.backend.init_forward_metadata(step.batch).groups
        world.check(step)
        return len(groups)

    assert num_groups([0, 0, 4], [20, 20, 20]) == 2
    assert num_groups([1, 40, 0, 2], [1, 1, 1, 3]) == 2


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["extend_seq_lens_cpu", "extend_prefix_lens_cpu"])
@pytest.mark.parametrize("wrong", [None, [3], [3, 1, 2], [3, -1]], ids=str)
def test_host_lengths_missing_or_not_one_per_request_are_named(world, field, wrong):
    step = world.step([world.request(), world.request()], [3, 3], EXTEND)
    setattr(step.batch, field, wrong)
    with pytest.raises(ContextError, match=f"EXTEND attention needs {field}, a list of 2"):
        world.backend.init_forward_metadata(step.batch)


def test_host_lengths_that_do_not_add_up_are_refused(world):
    step = world.step([world.request()], [3], EXTEND)
    step.batch.extend_seq_lens_cpu = [4]
    with pytest.raises(ContextError, match=r"extend_num_tokens is 3.*\[4\] adds up to 4"):
        world.backend.init_forward_metadata(step.batch)
    step.batch.extend_num_tokens = None
    with pytest.raises(ContextError, match="3 query rows, but extend_seq_lens_cpu adds up to 4"):
        world.run(step)
    step.qkv = [world.random_qkv(4)]
    with pytest.raises(ContextError, match=r"out_cache_loc for 4 tokens; the batch has \[3\]"):
        world.run(step)


def test_a_prompt_above_the_context_is_refused(world):
    step = world.step([world.request(5)], [3], EXTEND)
    step.batch.extend_prefix_lens_cpu = [254]
    with pytest.raises(ContextError, match="257 tokens; the request table holds 256"):
        world.backend.init_forward_metadata(step.batch)


def test_missing_rows_are_named(world):
    step = world.step([world.request()], [3], EXTEND)
    step.batch.req_pool_indices = None
    with pytest.raises(ContextError, match="needs req_pool_indices"):
        world.backend.init_forward_metadata(step.batch)
