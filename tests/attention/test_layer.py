"""The call in the model: eager, traced, and what it reads around it."""

import threading
from contextlib import suppress

import pytest
import torch

from compile_backend import ForwardMode
from compile_backend.attention import (
    ForwardContext,
    attention,
    forward_context,
    get_forward_context,
)
from compile_backend.engines import HostEngine
from compile_backend.errors import ContextError
from tests.attention.conftest import assert_attends


def test_outside_a_forward_pass_the_error_says_how_to_enter_one(world):
    q, k, v = world.random_qkv(2)
    with pytest.raises(ContextError, match="with forward_context"):
        attention(q, k, v, 0)


def test_contexts_nest_and_belong_to_their_thread(world):
    outer, inner = (ForwardContext(world.backend, None, each) for each in ("outer", "inner"))
    seen = []

    def look():
        try:
            seen.append(get_forward_context())
        except ContextError:
            seen.append(None)

    with forward_context(outer):
        with suppress(ZeroDivisionError), forward_context(inner):
            assert get_forward_context() is inner
            1 / 0
        assert get_forward_context() is outer
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert seen == [None]
    look()
    assert seen == [None, None]


def test_gradients_do_not_reach_the_cache(world):
    step = world.step([world.request()], [3], ForwardMode.EXTEND)
    step.qkv = [tuple(each.requires_grad_() for each in qkv) for qkv in step.qkv]
    outputs = world.run(step)
    assert not world.cache.k.requires_grad
    assert not any(each.requires_grad for each in outputs)
    with torch.no_grad():
        for got, expected in zip(outputs, step.expected, strict=True):
            assert_attends(got, expected)


def trace(function):
    """``function`` for Dynamo, and the graphs it will make of it, rid of dead code."""
    graphs = []

    def backend(gm, example_inputs):
        gm.graph.eliminate_dead_code()
        gm.recompile()
        graphs.append(gm)
        return gm

    return torch.compile(function, backend=backend, fullgraph=True, dynamic=True), graphs


def calls_of(gm):
    return gm.graph.find_nodes(
        op="call_function", target=torch.ops.graphbuf.attention.default, sort=True
    )


def test_a_traced_model_holds_the_operator_and_computes_the_same(world):
    step = world.step([world.request(5), world.request()], [1, 4], ForwardMode.MIXED)
    compiled, graphs = trace(lambda q, k, v: attention(q * 2, k, v, 0, 0.25))
    metadata = world.backend.init_forward_metadata(step.batch)
    with forward_context(ForwardContext(world.backend, step.batch, metadata)):
        got = compiled(*step.qkv[0])
        q, k, v = step.qkv[0]
        assert torch.equal(got, attention(q * 2, k, v, 0, 0.25))
    (gm,) = graphs
    assert [node.args[3:] for node in calls_of(gm)] == [(0, 0.25)]


def test_a_call_whose_result_nobody_reads_survives_dead_code_elimination(world):
    step = world.step([world.request()], [4], ForwardMode.EXTEND)

    def function(q, k, v):
        attention(q, k, v, 1)
        return attention(q + 0, k, v, 0)

    compiled, graphs = trace(function)
    metadata = world.backend.init_forward_metadata(step.batch)
    with forward_context(ForwardContext(world.backend, step.batch, metadata)):
        compiled(*step.qkv[0])
    assert [node.args[3] for node in calls_of(graphs[0])] == [1, 0]
    assert torch.equal(world.cache.k[1], world.cache.k[0])
    assert world.cache.k[1].any()


def test_a_call_whose_result_nobody_reads_survives_aot_autograd(world):
    step = world.step([world.request()], [4], ForwardMode.EXTEND)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(q, k, v):
        attention(q, k, v, 1)
        return attention(q * 2, k, v, 0)

    metadata = world.backend.init_forward_metadata(step.batch)
    with torch.no_grad(), forward_context(ForwardContext(world.backend, step.batch, metadata)):
        function(*step.qkv[0])
    assert torch.equal(world.cache.k[1], world.cache.k[0])
    assert world.cache.k[1].any()


def test_the_fake_result_is_laid_out_as_the_real_one(world):
    step = world.step([world.request()], [4], ForwardMode.EXTEND)
    q, k, v = (each.transpose(0, 1).contiguous().transpose(0, 1) for each in step.qkv[0])
    assert torch.empty_like(q).stride() == q.stride() != q.contiguous().stride()
    metadata = world.backend.init_forward_metadata(step.batch)
    with forward_context(ForwardContext(world.backend, step.batch, metadata)):
        real = torch.ops.graphbuf.attention(q, k, v, 0)
    fake = torch.ops.graphbuf.attention(q.to("meta"), k.to("meta"), v.to("meta"), 0)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    assert_attends(real, step.expected[0])


def test_a_capture_keeps_the_call_whole_and_a_replay_reads_the_context_of_then(world):
    steps = [world.step([world.request(n)], [2], ForwardMode.EXTEND) for n in (3, 30)]
    replay = None
    for step in steps:
        metadata = world.backend.init_forward_metadata(step.batch)
        with forward_context(ForwardContext(world.backend, step.batch, metadata)):
            if replay is None:
                replay = HostEngine().capture(
                    lambda *qkv: [attention(*qkv, 0)], static_inputs=step.qkv[0]
                )
                assert replay.num_entries == 1
                assert_attends(replay.outputs[0], step.expected[0])
            else:
                assert_attends(replay(step.qkv[0])[0], step.expected[0])
