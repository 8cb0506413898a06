"""Decode out of a captured graph: one capture, then other lengths, rows and values."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from compile_backend import ForwardBatch, ForwardMode
from compile_backend.attention import ForwardContext, attention, forward_context
from compile_backend.engines import HostEngine, NoEngine, StrictHostEngine
from compile_backend.errors import ConfigError, ContextError
from tests.attention.conftest import LAYERS, World, assert_attends

DECODE = ForwardMode.DECODE
NAN = float("nan")
FIELDS = ("out_cache_loc", "req_pool_indices", "seq_lens", "seq_lens_cpu")


@pytest.fixture(params=[NoEngine, HostEngine, StrictHostEngine], ids=lambda each: each.name)
def engine(request):
    return request.param()


class DecodeGraph:
    """A decode of ``padded_bs`` rows, captured per key on static inputs, as a runner would."""

    def __init__(self, world, engine, padded_bs):
        self.world, self.engine = world, engine
        self.batch = ForwardBatch(
            forward_mode=DECODE,
            batch_size=padded_bs,
            out_cache_loc=torch.zeros(padded_bs, dtype=torch.int64),
            req_pool_indices=torch.zeros(padded_bs, dtype=torch.int64),
            seq_lens=torch.ones(padded_bs, dtype=torch.int64),
            seq_lens_cpu=torch.ones(padded_bs, dtype=torch.int64),
        )
        self.inputs = [each.clone() for _ in range(LAYERS) for each in world.random_qkv(padded_bs)]
        self.replays = {}

    def model(self, *inputs):
        return [attention(*inputs[3 * i : 3 * i + 3], i) for i in range(LAYERS)]

    def context(self, key):
        metadata = self.world.backend.init_forward_metadata(self.batch, graph_key=key)
        return forward_context(ForwardContext(self.world.backend, self.batch, metadata))

    def capture(self, key):
        with self.context(key):
            self.replays[key] = self.engine.capture(self.model, static_inputs=self.inputs)
        self.world.backend.reset_scratch()

    def fill(self, step, pad=0.5):
        live = step.batch.batch_size
        for name in FIELDS:
            getattr(self.batch, name).fill_(1 if name.startswith("seq_lens") else 0)
            getattr(self.batch, name)[:live] = getattr(step.batch, name)
        for slot, value in zip(
            self.inputs, [each for qkv in step.qkv for each in qkv], strict=True
        ):
            slot.fill_(pad)
            slot[:live] = value

    def __call__(self, step):
        """The live rows of every layer, and the padded ones."""
        self.fill(step)
        key = self.world.backend.graph_key(self.batch)
        with self.context(key):
            outputs = self.replays[key]()
        live = step.batch.batch_size
        return [each[:live].clone() for each in outputs], [each[live:].clone() for each in outputs]

    def check(self, step):
        live, padded = self(step)
        for got, rest, expected in zip(live, padded, step.expected, strict=True):
            assert_attends(got, expected)
            assert rest.isfinite().all()


@pytest.mark.parametrize("ratio", [1, 2, 6])
def test_a_graph_captured_at_length_one_replays_every_length_of_its_bucket(engine, ratio):
    world = World(ratio=ratio)
    graph = DecodeGraph(world, engine, 4)
    graph.capture((64,))
    requests = [world.request(cached) for cached in (0, 61, 20)]
    for _ in range(3):  # up to 64 tokens, and one padded row
        graph.check(world.step(requests, [1] * 3, DECODE))
    with pytest.raises(KeyError, match="80"):
        graph(world.step(requests, [1] * 3, DECODE))


def test_one_request_crosses_every_bucket_and_shorter_ones_come_after(engine):
    world = World()
    graph = DecodeGraph(world, engine, 2)
    for key in world.backend.capture_keys(DECODE, 2):
        graph.capture(key)
    long = world.request(62)
    for _ in range(4):
        graph.check(world.step([long], [1], DECODE))
    world.check(world.step([long], [61], ForwardMode.EXTEND))
    for _ in range(3):
        graph.check(world.step([long], [1], DECODE))
    graph.check(world.step([world.request(2), world.request(33)], [1, 1], DECODE))


def test_batches_come_and_go_in_any_order(engine):
    world = World()
    graph = DecodeGraph(world, engine, 5)
    graph.capture((64,))
    requests = [world.request(cached) for cached in (4, 8, 15, 16, 23)]
    for live in (3, 5, 1, 5, 2):
        graph.check(world.step(requests[-live:], [1] * live, DECODE))


@pytest.mark.parametrize("poison", [NAN, float("inf")])
@pytest.mark.parametrize("padded_bs", [2, 3])
def test_poison_in_the_scratch_slot_and_in_freed_slots_stays_out(engine, poison, padded_bs):
    world = World()
    graph = DecodeGraph(world, engine, padded_bs)
    graph.capture((64,))
    requests = [world.request(cached) for cached in (3, 30)]
    leaver = world.request(50)
    graph.check(world.step([leaver], [1], DECODE))
    world.finish(leaver, poison)
    for _ in range(2):  # where a row is padded, it writes the scratch slot before it reads it
        world.cache.k[:, 0] = world.cache.v[:, 0] = poison
        graph.check(world.step(requests, [1, 1], DECODE))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_mode_and_narrow_locations(engine, mode):
    world = World()
    graph = DecodeGraph(world, engine, 2)
    graph.batch.out_cache_loc = graph.batch.out_cache_loc.int()
    with mode():
        graph.capture((64,))
        request = world.request(7)
        for _ in range(2):
            graph.check(world.step([request], [1], DECODE))


def test_padding_does_not_change_live_rows(engine):
    world = World()
    graph = DecodeGraph(world, engine, 4)
    graph.capture((64,))
    requests = [world.request(cached) for cached in (3, 30)]
    step = world.step(requests, [1, 1], DECODE)
    before, _ = graph(step)
    graph.fill(step, pad=1e6)
    with graph.context((64,)):
        after = graph.replays[64,]()
    assert all(torch.equal(new[:2], old) for new, old in zip(after, before, strict=True))


def test_an_idle_step_replays_the_padded_graph_and_leaves_requests_alone(engine):
    world = World()
    graph = DecodeGraph(world, engine, 3)
    graph.capture((64,))
    request = world.request(10)
    before = world.cache.k[:, 1:].clone()
    step = world.step([], [], ForwardMode.IDLE)
    graph.batch.forward_mode = ForwardMode.IDLE
    _, padded = graph(step)
    assert all(each.isfinite().all() for each in padded)
    assert torch.equal(world.cache.k[:, 1:], before)
    graph.batch.forward_mode = DECODE
    graph.check(world.step([request], [1], DECODE))


def test_a_decode_is_recorded_without_host_reads_and_an_extend_is_not_claimed_to_be(world):
    assert world.backend.full_graph_modes == {DECODE}
    graph = DecodeGraph(world, StrictHostEngine(), 2)
    graph.capture((64,))
    text = graph.replays[64,].describe()
    assert "attend" not in text  # its operators are
    assert "scaled_dot_product" in text


# --- plans --------------------------------------------------------------------------------------


def test_plans_of_one_size_and_key_are_the_same_memory_and_own_plans_are_not(world):
    steps = [world.step([world.request(n), world.request()], [1, 1], DECODE) for n in (3, 40)]
    plan = world.backend.init_forward_metadata
    first, second = (plan(step.batch, graph_key=(64,)) for step in steps)
    other_key = plan(steps[0].batch, graph_key=(128,))
    assert first.slots.data_ptr() == second.slots.data_ptr() == other_key.slots.data_ptr()
    assert first.mask.data_ptr() == second.mask.data_ptr()
    assert first.slots.is_contiguous()
    assert first.mask.is_contiguous()
    own, again = plan(steps[0].batch), plan(steps[0].batch)
    assert len({each.slots.data_ptr() for each in (first, own, again)}) == 3
    assert world.backend.upgrade_metadata(first, second) is second


def test_an_entry_out_of_sight_is_the_requests_own_first_slot(world):
    short, long = world.request(2), world.request(9)
    step = world.step([short, long], [1, 1], DECODE)
    plan = world.backend.init_forward_metadata(step.batch, graph_key=(64,))
    table = plan.slots.view(2, 64)
    assert table[0].tolist() == short.slots + [short.slots[0]] * 61
    assert table[1].tolist() == long.slots + [long.slots[0]] * 54
    assert plan.mask.view(2, 64).sum(1).tolist() == [3, 10]


def test_a_request_longer_than_the_graph_is_refused_and_the_plan_left_as_it_was(world):
    request = world.request(63)
    fits = world.step([request], [1], DECODE)
    world.check(fits)
    plan = world.backend.init_forward_metadata(fits.batch, graph_key=(64,))
    before = plan.slots.clone()
    longer = world.step([request], [1], DECODE)
    for on_host in (longer.batch.seq_lens_cpu, None):
        longer.batch.seq_lens_cpu = on_host
        with pytest.raises(ContextError, match=r"65 tokens and the graph of key \(64,\) spans 64"):
            world.backend.init_forward_metadata(longer.batch, graph_key=(64,))
    assert torch.equal(plan.slots, before)
    key = world.backend.graph_key(longer.batch)  # the advice
    world.check(longer, metadata=world.backend.init_forward_metadata(longer.batch, graph_key=key))


def test_a_plan_at_replay_allocates_nothing_of_its_size():
    world = World(context=1024)
    step = world.step([world.request(cached) for cached in (3, 40, 7, 1)], [1] * 4, DECODE)
    plan = world.backend.init_forward_metadata
    plan(step.batch, graph_key=(1024,))

    def largest_allocation(key):
        with profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as profiled:
            plan(step.batch, graph_key=key)
        return max(event.cpu_memory_usage for event in profiled.events())

    assert largest_allocation((1024,)) < 1024
    assert largest_allocation(None) >= 4 * 41


def test_unknown_keys_and_sizes_above_the_buffers_are_refused(world):
    step = world.step([world.request(3)] + [world.request() for _ in range(2)], [1] * 3, DECODE)
    for key in ((), (65,), (64, 64)):
        with pytest.raises(ContextError, match="is none of"):
            world.backend.init_forward_metadata(step.batch, graph_key=key)
    small = type(world.backend)(world.cache, world.table)
    with pytest.raises(ContextError, match=r"call init_graph_state\(max_bs=3, ...\)"):
        small.init_forward_metadata(step.batch, graph_key=(64,))
    small.init_graph_state(max_bs=3, max_num_tokens=3)  # the advice
    small.init_forward_metadata(step.batch, graph_key=(64,))


def test_buffers_grow_until_a_plan_was_handed_out(world):
    backend = type(world.backend)(world.cache, world.table)
    backend.init_graph_state(max_bs=1, max_num_tokens=1)
    backend.init_graph_state(max_bs=2, max_num_tokens=2)
    step = world.step([world.request(3), world.request()], [1, 1], DECODE)
    plan = backend.init_forward_metadata(step.batch, graph_key=(64,))
    backend.init_graph_state(max_bs=1, max_num_tokens=1)
    assert backend.init_forward_metadata(step.batch, graph_key=(64,)) is plan
    with pytest.raises(ConfigError, match=r"max_bs=3\) after plans for up to 2 requests"):
        backend.init_graph_state(max_bs=3, max_num_tokens=3)
