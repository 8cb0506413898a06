"""One token per request, eagerly: values, lengths, keys and what is refused."""

import pytest
import torch

from compile_backend import ForwardMode
from compile_backend.attention import KVCache, RequestTable, TorchNativeBackend
from compile_backend.errors import ConfigError, ContextError
from tests.attention.conftest import World, assert_attends

DECODE = ForwardMode.DECODE


@pytest.mark.parametrize("ratio", [1, 2, 6])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_requests_of_different_lengths_decode_for_several_steps(ratio, kv_heads):
    world = World(ratio=ratio, kv_heads=kv_heads)
    requests = [world.request(cached) for cached in (5, 0, 70, 1)]
    for _ in range(3):
        world.check(world.step(requests, [1] * 4, DECODE))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_every_dtype(dtype):
    world = World(dtype=dtype)
    world.check(world.step([world.request(9), world.request(20)], [1, 1], DECODE))


def test_the_cache_may_have_another_dtype_than_the_model():
    world = World(dtype=torch.float32)
    for name in ("k", "v"):
        setattr(world.cache, name, getattr(world.cache, name).double())
    world.check(world.step([world.request(40)], [1], DECODE))


def test_the_scale_is_the_callers(world):
    world.check(world.step([world.request(9)], [1], DECODE, scale=0.7), scale=0.7)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 256])
@pytest.mark.parametrize("has_key", [False, True])
def test_lengths_round_bucket_edges(world, length, has_key):
    requests = [world.request(length - 1), world.request(2)]
    step = world.step(requests, [1, 1], DECODE)
    key = world.backend.graph_key(step.batch) if has_key else None
    metadata = world.backend.init_forward_metadata(step.batch, graph_key=key)
    longest = max(length, 3)
    assert metadata.kv_len == (longest if key is None else key[0])
    world.check(step, metadata=metadata)


def test_the_key_is_the_smallest_bucket_that_holds_the_longest_request(world):
    backend = world.backend
    step = world.step([world.request(), world.request()], [1, 1], DECODE)
    for length, bucket in ((1, 64), (63, 64), (64, 64), (65, 80), (129, 160), (256, 256)):
        for on_host in (True, False):
            lengths = torch.tensor([1, length])
            step.batch.seq_lens = lengths
            step.batch.seq_lens_cpu = lengths.clone() if on_host else None
            assert backend.graph_key(step.batch) == (bucket,)
    assert backend.capture_keys(DECODE, 2) == [
        (64,),
        (80,),
        (96,),
        (112,),
        (128,),
        (160,),
        (192,),
        (224,),
        (256,),
    ]
    step.batch.forward_mode = ForwardMode.EXTEND
    assert backend.graph_key(step.batch) == ()
    assert backend.capture_keys(ForwardMode.EXTEND, 2) == [()]


def test_the_lengths_on_the_host_are_read_where_there_are_any(world):
    step = world.step([world.request(3)], [1], DECODE)
    step.batch.seq_lens_cpu = torch.tensor([100])
    assert world.backend.graph_key(step.batch) == (112,)


def test_buckets_are_sorted_and_end_at_the_longest_context():
    table = RequestTable(2, 100, "cpu")
    cache = KVCache(4, 1, 1, 8, torch.float32, "cpu")
    assert TorchNativeBackend(cache, table).kv_len_buckets == (64, 80, 96, 100)
    assert TorchNativeBackend(cache, table, [32, 8, 32]).kv_len_buckets == (8, 32, 100)
    small = RequestTable(2, 64, "cpu")
    assert TorchNativeBackend(cache, small).kv_len_buckets == (64,)
    for wrong in (0, 101):
        with pytest.raises(ConfigError, match=rf"\[{wrong}\] are outside 1 to max_context_len 100"):
            TorchNativeBackend(cache, table, [8, wrong])


def test_a_row_of_length_zero_is_finite_and_leaves_others_alone(world):
    requests = [world.request(4), world.request(6)]
    step = world.step(requests, [1, 1], DECODE)
    step.batch.seq_lens[1] = step.batch.seq_lens_cpu[1] = 0
    for got, expected in zip(world.run(step), step.expected, strict=True):
        assert_attends(got[:1], expected[:1])
        assert got.isfinite().all()


def test_no_tokens_give_an_empty_tensor_and_leave_the_state_alone(world):
    world.request(4)
    before = world.cache.k.clone(), world.cache.v.clone()
    for mode in (DECODE, ForwardMode.IDLE, ForwardMode.EXTEND, ForwardMode.MIXED):
        step = world.step([], [], mode)
        for got in world.run(step):
            assert got.shape == (0, world.num_heads, world.head_dim)
    assert torch.equal(world.cache.k, before[0])
    assert torch.equal(world.cache.v, before[1])


def test_an_idle_rank_with_padded_rows_gets_zeros_and_writes_nothing(world):
    step = world.step([], [], ForwardMode.IDLE)
    step.qkv = [world.random_qkv(4) for _ in step.qkv]
    for got in world.run(step):
        assert got.shape == (4, world.num_heads, world.head_dim)
        assert not got.any()
    assert not world.cache.k.any()


def test_reset_scratch_zeroes_the_scratch_slot_only(world):
    world.cache.k.fill_(float("nan"))
    world.cache.v.fill_(float("nan"))
    world.backend.reset_scratch()
    for cache in (world.cache.k, world.cache.v):
        assert not cache[:, 0].any()
        assert cache[:, 1:].isnan().all()


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["seq_lens", "req_pool_indices"])
def test_a_missing_field_or_one_of_another_size_is_named(world, field):
    step = world.step([world.request(3)], [1], DECODE)
    for wrong in (None, torch.ones(2, dtype=torch.int64)):
        setattr(step.batch, field, wrong)
        with pytest.raises(ContextError, match=rf"DECODE attention needs {field} of shape \[1\]"):
            world.backend.init_forward_metadata(step.batch)


def test_without_lengths_there_is_no_key(world):
    step = world.step([world.request(3)], [1], DECODE)
    step.batch.seq_lens = step.batch.seq_lens_cpu = None
    with pytest.raises(ContextError, match="needs seq_lens of shape"):
        world.backend.graph_key(step.batch)


def test_a_request_above_the_context_is_refused(world):
    step = world.step([world.request(3)], [1], DECODE)
    step.batch.seq_lens_cpu = torch.tensor([257])
    for call in (world.backend.graph_key, world.backend.init_forward_metadata):
        with pytest.raises(ContextError, match="257 tokens; the request table holds 256"):
            call(step.batch)


def test_tensors_that_do_not_fit_are_refused_before_anything_is_written(world):
    step = world.step([world.request(3)], [1], DECODE)
    q, k, v = step.qkv[0]
    good, before = step.qkv, world.cache.k.clone()
    for wrong in (
        (q[:, :3], k, v),  # 3 heads over 2
        (q, k[:, :1], v[:, :1]),
        (q, k, v[:, :1]),
        (q[..., :4], k, v),
        (q, k[:0], v[:0]),
    ):
        step.qkv = [wrong]
        with pytest.raises(ContextError, match="do not fit a KV cache of 2 heads of 8"):
            world.run(step)
    step.qkv = [tuple(each.repeat(2, 1, 1) for each in good[0])]
    with pytest.raises(ContextError, match="2 query rows for a decode that was planned for 1"):
        world.run(step)
    step.qkv = [*good, good[0]]
    with pytest.raises(ContextError, match="layer_id 2 is outside the KV cache of 2 layers"):
        world.run(step)
    step.qkv, step.batch.out_cache_loc = good, None
    with pytest.raises(ContextError, match="needs out_cache_loc for 1 tokens"):
        world.run(step)
    free = torch.ones(2048, dtype=torch.bool)
    free[world.table.req_to_token.unique()] = False
    assert torch.equal(world.cache.k[:, free], before[:, free])


def test_a_plan_of_another_mode_is_refused(world):
    decode = world.step([world.request(3)], [1], DECODE)
    extend = world.step([world.request()], [1], ForwardMode.EXTEND)
    for step, other in ((decode, extend), (extend, decode)):
        plan = world.backend.init_forward_metadata(other.batch)
        with pytest.raises(ContextError, match=f"no plan for {step.batch.forward_mode.name}"):
            world.run(step, metadata=plan)
