"""The FlashInfer backend, on FlashInfer where there is a GPU and on its stand-in everywhere."""

import sys
from itertools import pairwise

import pytest
import torch

from compile_backend import ForwardBatch, ForwardMode
from compile_backend.attention import (
    ForwardContext,
    KVCache,
    forward_context,
)
from compile_backend.attention.flashinfer import FlashInferBackend
from compile_backend.attention.paged_indices import indptr_of, write_indices
from compile_backend.engines import HostEngine, StrictHostEngine
from compile_backend.errors import ConfigError, ContextError, MissingExtraError
from tests.attention.conftest import World, assert_attends
from tests.attention.test_replay import DecodeGraph
from tests.flashinfer_stand_in import stand_in
from tests.runners import models

__all__ = ["stand_in"]

DECODE, EXTEND, DLLM = ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.DLLM_EXTEND
WORKSPACE = {"workspace_bytes": 1 << 12}

pytestmark = pytest.mark.usefixtures("stand_in")


def flashinfer_world(**options):
    world = World(dtype=torch.float16, **options)
    world.native = world.backend
    world.backend = backend_of(world)
    world.backend.init_graph_state(max_bs=8, max_num_tokens=64)
    return world


def backend_of(world, **options):
    return FlashInferBackend(
        world.cache, world.table, num_qo_heads=world.num_heads, **WORKSPACE, **options
    )


@pytest.fixture
def world():
    return flashinfer_world()


@pytest.fixture(params=[HostEngine, StrictHostEngine], ids=lambda each: each.name)
def engine(request):
    return request.param()


# --- values -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [1, 2, 6])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_requests_prefill_in_chunks_and_decode(ratio, kv_heads):
    world = flashinfer_world(ratio=ratio, kv_heads=kv_heads)
    requests = [world.request(cached) for cached in (5, 0, 70, 1)]
    world.check(world.step(requests, [3, 1, 17, 2], EXTEND))
    for _ in range(2):
        world.check(world.step(requests, [1] * 4, DECODE))
    world.check(world.step(requests, [1, 20, 1, 4], ForwardMode.MIXED))


def test_a_request_without_new_tokens_and_a_block_that_sees_itself(world):
    requests = [world.request(cached) for cached in (5, 9, 0)]
    world.check(world.step(requests, [2, 0, 3], EXTEND))
    world.check(world.step(requests, [4, 4, 4], DLLM))


@pytest.mark.parametrize("mode", [DECODE, EXTEND], ids=lambda m: m.name)
def test_the_scale_is_the_callers(world, mode):
    world.check(world.step([world.request(9)], [1], mode, scale=0.7), scale=0.7)


def test_a_draft_tree_sees_by_its_mask(world):
    """Two branches of one token each, after a common token."""
    request = world.request(2)
    step = world.step([request], [3], ForwardMode.TARGET_VERIFY)
    sees = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 1]]).bool()
    step.batch.spec_info = type("Tree", (), {"custom_mask": sees.flatten()})()
    got = world.run(step)[0]
    keys = torch.stack(request.keys[0])
    values = torch.stack(request.values[0])
    for i, token in enumerate(step.qkv[0][0].double()):
        for head in range(world.num_heads):
            at = sees[i], head // 2
            scores = keys[at[0], at[1]] @ token[head] * world.head_dim**-0.5
            want = scores.softmax(0) @ values[at[0], at[1]]
            torch.testing.assert_close(got[i, head].double(), want, rtol=4e-3, atol=4e-3)


def test_padded_rows_of_an_extend_write_nothing_and_are_zeros(world):
    step = world.step([world.request(3)], [2], EXTEND)
    q, k, v = world.random_qkv(5)
    q[:2], k[:2], v[:2] = step.qkv[0]
    step.batch.out_cache_loc = torch.cat([step.batch.out_cache_loc, torch.zeros(3).long()])
    metadata = world.backend.init_forward_metadata(step.batch)
    context = ForwardContext(world.backend, step.batch, metadata)
    world.cache.k[:, 0] = 5
    got = world.backend.forward(q, k, v, layer_id=0, scale=None, context=context)
    assert_attends(got[:2].contiguous(), step.expected[0])
    assert not got[2:].any()
    assert bool((world.cache.k[:, 0] == 5).all())


def test_an_idle_rank_gets_zeros_for_its_padding(world):
    batch = ForwardBatch(forward_mode=ForwardMode.IDLE, out_cache_loc=torch.zeros(3).long())
    plan = world.backend.init_forward_metadata(batch)
    context = ForwardContext(world.backend, batch, plan)
    q, k, v = world.random_qkv(3)
    assert not world.backend.forward(q, k, v, layer_id=0, scale=None, context=context).any()


# --- the indices ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_the_indices_are_the_slots_that_torch_native_reads_in_a_decode(seed, stand_in):
    world = flashinfer_world()
    rng = torch.Generator().manual_seed(seed)
    requests = [world.request(int(torch.randint(0, 200, (), generator=rng))) for _ in range(5)]
    step = world.step(requests, [1] * 5, DECODE)
    group = world.native.init_forward_metadata(step.batch)
    for key in (None, ()):
        stand_in.clear()
        world.backend.init_forward_metadata(step.batch, graph_key=key)
        _, (indptr, indices, last_page_len), _ = stand_in[-1]
        slots, mask = group.slots.view(5, -1), group.mask[:, 0, 0]
        assert last_page_len.tolist() == [1] * 5
        assert indptr.tolist() == [0, *mask.sum(1).cumsum(0).tolist()]
        assert indices.dtype == indptr.dtype == torch.int32
        assert indices.tolist() == slots[mask].tolist()


def test_the_indices_are_the_slots_that_torch_native_reads_in_an_extend(world, stand_in):
    requests = [world.request(cached) for cached in (40, 0, 7, 7)]
    step = world.step(requests, [3, 20, 3, 3], EXTEND)
    plan = world.native.init_forward_metadata(step.batch)
    stand_in.clear()
    world.backend.init_forward_metadata(step.batch)
    _, (qo_indptr, indptr, indices), _ = stand_in[-1]
    assert qo_indptr.tolist() == [0, 3, 23, 26, 29]
    want = []
    for group in plan.groups:
        last = None if group.mask is None else group.mask[:, 0, -1]  # the last token sees all
        for i, slots in enumerate(group.slots.view(group.num_requests, -1)):
            sees = slice(None) if last is None else last[i % len(last)]
            want.append(slots[sees].tolist())
    bounds = indptr.tolist()
    got = [indices[a:b].tolist() for a, b in pairwise(bounds)]
    assert got == want == [request.slots for request in requests]


def test_index_arithmetic_of_empty_and_single_requests():
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    indptr = indptr_of([3, 1, 0, 10])
    assert indptr.tolist() == [0, 3, 4, 4, 14]
    out = torch.full((20,), -1, dtype=torch.int32)
    written = write_indices(table, torch.tensor([2, 0, 1, 3]), indptr, 14, out)
    assert written.tolist() == [20, 21, 22, 0, *range(30, 40)]
    assert written.data_ptr() == out.data_ptr()
    assert out[14:].tolist() == [-1] * 6
    assert indptr_of([]).tolist() == [0]


# --- graphs -----------------------------------------------------------------------------------


def test_a_graph_captured_at_length_one_replays_every_length(engine):
    world = flashinfer_world()
    graph = DecodeGraph(world, engine, 4)
    graph.capture(())
    requests = [world.request(cached) for cached in (0, 200, 20)]
    for _ in range(3):
        graph.check(world.step(requests, [1] * 3, DECODE))


def test_batches_of_two_graphs_come_and_go_in_any_order(engine, stand_in):
    world = flashinfer_world()
    graphs = {size: DecodeGraph(world, engine, size) for size in (2, 5)}
    for graph in graphs.values():
        graph.capture(())
    requests = [world.request(cached) for cached in (4, 8, 15, 16, 23)]
    for live in (3, 5, 1, 2, 4, 1):
        step = world.step(requests[-live:], [1] * live, DECODE)
        stand_in.clear()
        graphs[2 if live <= 2 else 5].check(step)
        assert [name for name, _, _ in stand_in] == ["decode plan"]  # once for every replay


def test_poison_in_the_scratch_slot_and_in_freed_slots_stays_out(engine):
    world = flashinfer_world()
    graph = DecodeGraph(world, engine, 3)
    graph.capture(())
    requests = [world.request(cached) for cached in (3, 30)]
    world.finish(world.request(50), poison=float("nan"))
    for _ in range(2):
        live, _ = graph(step := world.step(requests, [1, 1], DECODE))
        for got, expected in zip(live, step.expected, strict=True):
            assert_attends(got, expected)


def test_the_plan_of_a_bucket_is_one_object_in_fixed_memory(world):
    backend = world.backend
    plans = {}
    for size in (2, 3, 2, 3):
        requests = [world.request(size * 10) for _ in range(size)]
        step = world.step(requests, [1] * size, DECODE)
        plan = backend.init_forward_metadata(step.batch, graph_key=())
        addresses = [each.data_ptr() for each in plan.wrapper.buffers]
        known, where = plans.setdefault(size, (plan, addresses))
        assert known is plan
        assert where == addresses
        assert backend.upgrade_metadata(known, plan) is plan
        for request in requests:
            world.finish(request)
    assert plans[2][1] == plans[3][1]  # sizes share the buffers


def test_a_diffusion_block_runs_from_a_graph_with_padded_requests(engine):
    world = flashinfer_world()
    requests = [world.request(cached) for cached in (5, 9)]
    batch = ForwardBatch(
        forward_mode=DLLM,
        batch_size=3,
        input_ids=torch.zeros(12, dtype=torch.int64),
        out_cache_loc=torch.zeros(12, dtype=torch.int64),
        req_pool_indices=torch.zeros(3, dtype=torch.int64),
        seq_lens_cpu=torch.ones(3, dtype=torch.int64),
    )
    q, k, v = (each.clone() for each in world.random_qkv(12))

    def run(q, k, v):
        return [world.backend.forward(q, k, v, layer_id=0, scale=None, context=context)]

    plan = world.backend.init_forward_metadata(batch, graph_key=())
    context = ForwardContext(world.backend, batch, plan)
    with forward_context(context):
        replay = engine.capture(run, static_inputs=[q, k, v])
    for _ in range(2):
        step = world.step(requests, [4, 4], DLLM)
        for slot, live in zip((q, k, v), step.qkv[0], strict=True):
            slot[:8] = live
        batch.out_cache_loc[:8] = step.batch.out_cache_loc
        batch.req_pool_indices[:2] = step.batch.req_pool_indices
        batch.seq_lens_cpu[:2] = step.batch.seq_lens
        batch.extend_seq_lens_cpu = [4, 4]
        assert world.backend.init_forward_metadata(batch, graph_key=()) is plan
        with forward_context(context):
            (out,) = replay()
        assert_attends(out[:8].clone(), step.expected[0])
        assert out[8:].isfinite().all()


def test_an_eager_plan_is_the_callers_own_until_it_is_dropped(world, stand_in):
    first = world.step([world.request(3)], [1], DECODE)
    second = world.step([world.request(60)], [1], DECODE)
    backend = world.backend
    stand_in.clear()
    outer = backend.init_forward_metadata(first.batch)
    inner = backend.init_forward_metadata(second.batch)
    world.check(second, metadata=inner)
    world.check(first, metadata=outer)
    made = sum(name == "decode" for name, _, _ in stand_in)
    assert outer.wrapper is not inner.wrapper
    del outer, inner
    for _ in range(3):
        backend.init_forward_metadata(first.batch)
    assert sum(name == "decode" for name, _, _ in stand_in) == made


def test_a_runner_serves_from_graphs_on_this_backend(engine):
    model = models.Decoder().half()
    world = models.World(
        model,
        dtype=torch.float16,
        backend=lambda kv, table, _: FlashInferBackend(
            kv, table, num_qo_heads=models.HEADS, **WORKSPACE
        ),
    )
    runner = world.runner(engine=engine.name)
    assert not world.kv.k.any()
    pairs, batch = world.extend((5, 3, 2))
    out = runner.forward(batch)
    assert (out.path, out.bucket) == ("prefill", 16)
    world.check(out, pairs, tolerance=3e-2)
    requests = [request for request, _ in pairs]
    for n in (3, 1, 2, 3):
        chosen = requests[:n]
        out = runner.forward(world.decode(chosen))
        assert (out.path, out.reason) == ("decode", None)
        world.check(out, [(request, 1) for request in chosen], tolerance=3e-2)


# --- what is refused --------------------------------------------------------------------------


def test_without_the_package_the_error_names_the_extra(world, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(MissingExtraError, match=r'pip install "graphbuf\[cuda\]"') as error:
        backend_of(world)
    assert isinstance(error.value, ImportError)


def test_heads_and_dtypes_that_do_not_fit_are_refused(world):
    with pytest.raises(ConfigError, match=r"num_qo_heads is 3, which is no multiple"):
        FlashInferBackend(world.cache, world.table, num_qo_heads=3, **WORKSPACE)
    with pytest.raises(ConfigError, match=r"queries of torch\.float64.*pass one as q_dtype"):
        backend_of(world, q_dtype=torch.float64)
    cache = KVCache(8, 1, 2, 8, torch.float32, "cpu")
    FlashInferBackend(cache, world.table, num_qo_heads=4, q_dtype=torch.bfloat16, **WORKSPACE)
    step = world.step([world.request(3)], [1], DECODE)
    step.qkv[0] = tuple(each.double() for each in step.qkv[0])
    with pytest.raises(ContextError, match=r"layer 0: q \[1, 4, 8\] of torch\.float64"):
        world.run(step)


def test_graph_state_grows_only_before_the_first_plan():
    world = World(dtype=torch.float16)
    backend = world.backend = backend_of(world)
    step = world.step([world.request()], [1], DECODE)
    with pytest.raises(ContextError, match=r"call init_graph_state\(max_bs=1"):
        backend.init_forward_metadata(step.batch, graph_key=())
    backend.init_graph_state(max_bs=2, max_num_tokens=8)
    backend.init_graph_state(max_bs=4, max_num_tokens=8)
    backend.init_forward_metadata(step.batch, graph_key=())
    backend.init_graph_state(max_bs=3, max_num_tokens=8)
    with pytest.raises(ConfigError, match=r"init_graph_state\(max_bs=5\) after plans for up to 4"):
        backend.init_graph_state(max_bs=5, max_num_tokens=8)


def test_batches_that_cannot_be_planned_are_refused_before_anything_is_written(world, stand_in):
    backend = world.backend
    step = world.step([world.request(3), world.request(4)], [1, 1], DECODE)
    batch = step.batch
    extend = world.step([world.request(3), world.request(4)], [2, 3], DLLM).batch
    masked = world.step([world.request(3)], [2], ForwardMode.DLLM_EXTEND).batch
    masked.spec_info = type("Tree", (), {"custom_mask": torch.ones(10, dtype=torch.bool)})()
    before = backend._indptr.clone()
    stand_in.clear()

    def refused(batch, match, key=None):
        with pytest.raises(ContextError, match=match):
            backend.init_forward_metadata(batch, graph_key=key)

    refused(batch, r"graph_key \(64,\) is not \(\)", (64,))
    batch.seq_lens_cpu[1] = 300
    refused(batch, "a request of the batch has 300 tokens; the request table holds 256")
    batch.seq_lens = batch.seq_lens_cpu = None
    refused(batch, "DECODE attention needs seq_lens of shape \\[2\\]")
    refused(extend, r"has 5 tokens for 2 requests .* give each the same number", ())
    refused(masked, "brings a custom_mask", ())
    extend.extend_prefix_lens_cpu = None
    refused(extend, "needs extend_prefix_lens_cpu, a list of 2 lengths")
    assert stand_in == []
    assert torch.equal(backend._indptr, before)


def test_a_plan_for_another_mode_and_too_few_rows_are_refused(world):
    step = world.step([world.request(3), world.request(4)], [1, 1], DECODE)
    extend = world.step([world.request(3)], [4], EXTEND)
    with pytest.raises(ContextError, match="which is no plan for DECODE"):
        world.run(step, metadata=world.backend.init_forward_metadata(extend.batch))
    step.qkv = [tuple(each[:1] for each in qkv) for qkv in step.qkv]
    with pytest.raises(ContextError, match="1 query rows for a decode that was planned for 2"):
        world.run(step)
    extend.qkv = [tuple(each[:3] for each in qkv) for qkv in extend.qkv]
    with pytest.raises(ContextError, match="3 query rows, but 4 tokens were planned"):
        world.run(extend)


def test_scratch_is_reset_and_the_graph_names_what_it_reads(world):
    world.cache.k.fill_(float("nan"))
    world.backend.reset_scratch()
    assert not world.cache.k[:, 0].any()
    assert world.cache.k[:, 1:].isnan().all()
    assert world.backend.captured_tensors() == (world.cache.k, world.cache.v)
    assert world.backend.capture_keys(DECODE, 4) == [()]
