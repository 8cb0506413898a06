"""The eager runner: every mode at its exact sizes, idle ranks, and the caller's batch untouched."""

import copy

import pytest
import torch
from torch import Tensor

from compile_backend import ForwardMode
from compile_backend.runners import EagerRunner
from tests.runners.models import HIDDEN, VOCAB, close, make_world

NO_GRAPHS = {"enable_decode_graph": False, "enable_prefill_graph": False}


def snapshot(batch):
    """Fields by name: a tensor as itself, its version and its values; others as deep copies."""
    return {
        name: (value, value._version, value.clone())
        if isinstance(value, Tensor)
        else (value, copy.deepcopy(value))
        for name, value in vars(batch).items()
    }


def assert_unchanged(batch, before):
    assert vars(batch).keys() == before.keys()
    for name, was in before.items():
        value = getattr(batch, name)
        assert value is was[0], name
        if isinstance(value, Tensor):
            assert value._version == was[1], name
            assert torch.equal(value, was[2]), name
        elif not hasattr(value, "__dict__"):
            assert value == was[1], name


def test_each_mode_equals_the_model_itself():
    world = make_world()
    runner = world.runner(warm=False, **NO_GRAPHS)
    requests = world.cached(4)
    for n in (3, 4, 1):
        assert world.serve(runner, requests[:n]).path == "eager"
        requests[0].tokens.append(3)
        for mode, pairs in (
            (ForwardMode.EXTEND, [(world.request(n), n), (world.request(2), 2)]),
            (ForwardMode.MIXED, [(requests[0], 1), (world.request(n), n)]),
        ):
            out = runner.forward(world.batch(pairs, mode))
            world.check(out, pairs)
            assert (out.path, out.bucket) == ("eager", None)
            assert out.logits.shape == (len(pairs), VOCAB)


@pytest.mark.parametrize("is_warm", [False, True])
def test_an_idle_batch_has_no_rows_and_touches_nothing(engine, is_warm):
    """3, 0, 3 gives what 3, 3 gives."""
    results = {}
    for with_idle in (False, True):
        world = make_world()
        runner = world.runner(warm=is_warm, engine=engine, cudagraph_capture_sizes=(4,))
        requests = world.cached(3)
        torch.manual_seed(2)
        outputs = []
        for k in range(4):
            outputs.append(world.serve(runner, requests).logits.clone())
            if with_idle:
                idle = world.batch([], (ForwardMode.IDLE, ForwardMode.EXTEND)[k % 2])
                before = world.kv.k.clone(), world.kv.v.clone(), snapshot(idle)
                out = runner.forward(idle)
                assert (out.path, out.reason, out.bucket) == ("idle", None, None)
                assert out.hidden_states.shape == (0, HIDDEN)
                assert out.logits.shape == (0, VOCAB)
                assert torch.equal(world.kv.k, before[0])
                assert torch.equal(world.kv.v, before[1])
                assert_unchanged(idle, before[2])
        results[with_idle] = torch.stack(outputs)
        assert runner.explain().paths.get("idle", 0) == (4 if with_idle else 0)
        assert runner.explain().hits == (4 if is_warm else 0)
    assert torch.equal(results[False], results[True])


def test_an_idle_batch_enters_what_the_model_enters():
    """A rank without requests still runs the model, so that its collectives are entered."""
    world = make_world()
    runner = world.runner(warm=False)
    entered = []
    world.model.norm.register_forward_pre_hook(lambda *_: entered.append(1))
    runner.forward(world.batch([], ForwardMode.IDLE))
    assert len(entered) == 1


def test_no_runner_changes_the_callers_batch(engine):
    """Fields and tensor versions, for each path and also when the view is changed by the model."""
    world = make_world()
    runner = world.runner(engine=engine)
    requests = world.cached(8)
    mrope = torch.randint(0, 9, (3, 5))
    batches = [
        world.decode(requests[:5], mrope_positions=mrope, sampling_info={"top_p": [0.5]}),
        world.extend((3, 2))[1],
        world.extend((3, 2), ForwardMode.MIXED)[1],
        world.batch([], ForwardMode.IDLE),
    ]
    for _ in range(2):
        for batch in batches:
            before = snapshot(batch)
            runner.forward(batch)
            assert_unchanged(batch, before)
            for each in (runner.eager, *runner.graph_runners):
                if isinstance(each, EagerRunner) or each.can_run_graph(batch):
                    view = each.load_batch(batch)
                    assert view is not batch
                    assert_unchanged(batch, before)
                    view.batch_size, view.input_ids = 99, None
                    assert_unchanged(batch, before)
    assert {path for path, count in runner.explain().paths.items() if count} == {
        "decode", "prefill", "idle",
    }  # fmt: skip


def test_the_eager_buffers_are_the_ones_that_graphs_share(engine):
    world = make_world()
    runner = world.runner(warm=False, engine=engine)
    slots = runner.explain().slots
    eager = {fact.name: fact.address for fact in slots["eager"]}
    for name in ("decode", "prefill"):
        shared = {fact.name: fact.address for fact in slots[name]}
        assert shared.items() <= eager.items()
        assert {"input_ids", "positions", "out_cache_loc"} <= shared.keys()


def test_load_batch_holds_exactly_the_live_rows(engine):
    world = make_world()
    runner = world.runner(engine=engine)
    batch = world.decode(world.cached(3))
    view = runner.eager.load_batch(batch)
    for name in ("input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens"):
        assert torch.equal(getattr(view, name), getattr(batch, name))
    padded = runner.decode.load_batch(batch)
    assert padded.batch_size == 4
    assert torch.equal(padded.seq_lens[:3], batch.seq_lens)
    assert padded.seq_lens[3:].tolist() == [world.backend.seq_len_fill_value]
    assert padded.out_cache_loc[3:].tolist() == padded.req_pool_indices[3:].tolist() == [0]
    close(padded.positions[:3], batch.positions)
