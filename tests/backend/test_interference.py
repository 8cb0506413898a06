"""What may reach into a captured graph: nested calls, autocast, shared memory, time."""

import gc
import weakref

import pytest
import torch
from torch import nn

from compile_backend import FallbackReason, explain
from compile_backend.owners import backends_of
from tests import custom_ops as ops
from tests.backend.conftest import assert_equal_runs, compiled

SIZES = (5, 3, 8, 5, 7, 3)


def vouched(options, name):
    names = [f"graphbuf_test::{name}"]
    return {**options, "splitting_ops": names, "rowwise_ops": names}


def test_a_call_inside_a_step_leaves_its_slots_alone(capturing):
    def fn(x):
        return ops.calls_back(x + 1) + x

    run = compiled(fn, vouched(capturing, "calls_back"))
    nested = []
    with torch.inference_mode():
        for n in SIZES:
            x = torch.randn(n, 2)
            ops.hooks["call"] = lambda y: nested.append((run(y * 100), fn(y * 100)))
            torch.testing.assert_close(run(x), fn(x))
            ops.hooks.clear()
    for got, want in nested:
        torch.testing.assert_close(got, want)
    if capturing["engine"] == "host" or "cudagraph_mode" in capturing:
        # a whole graph of the strict engine calls no Python once it is captured
        assert explain(run).fallbacks[FallbackReason.NESTED_CALL] == len(nested) == len(SIZES)


def test_another_compiled_function_inside_a_step(capturing):
    inner = compiled(lambda x: x * 3, capturing)

    def fn(x):
        return ops.calls_back(x + 1) + x

    run = compiled(fn, vouched(capturing, "calls_back"))
    with torch.inference_mode():
        for n in SIZES:
            x, y = torch.randn(n, 2), torch.randn(n, 2)
            inner(y)
            seen = []
            ops.hooks["call"] = lambda _, y=y, seen=seen: seen.append(inner(y))
            torch.testing.assert_close(run(x), 2 * x + 1)
            ops.hooks.clear()
            assert all(torch.equal(value, y * 3) for value in seen)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_weights_cast_by_autocast_are_cast_anew_at_every_replay(setting, compiler):
    linear = nn.Linear(4, 4)
    options = {**setting, "compiler": compiler, "splitting_ops": ["aten::linear"]}
    run = compiled(lambda x: linear(x * 2) * 1, options)
    with torch.no_grad():
        for n in SIZES:
            x = torch.randn(n, 4)
            with torch.autocast("cpu", torch.bfloat16):
                want = linear(x * 2)  # fills autocast's cache
                torch.testing.assert_close(run(x), want, rtol=2e-2, atol=2e-2)
            linear.weight.mul_(1.5)
            with torch.autocast("cpu", torch.bfloat16):
                torch.testing.assert_close(run(x), linear(x * 2), rtol=2e-2, atol=2e-2)


class CastsAndStores(nn.Module):
    """An autocast region around an operator that writes a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("cache", torch.zeros(8, 4))

    def forward(self, x, loc):
        with torch.autocast("cpu", torch.bfloat16):
            k = self.linear(x)
            ops.store(k.float(), self.cache, loc)
            with torch.autocast("cpu", enabled=False):
                exact = x @ x.mT
            return self.linear(x) + k, exact


@pytest.mark.parametrize("ambient", [False, True])
def test_an_autocast_region_around_a_break_op(setting, ambient):
    model, reference = CastsAndStores(), CastsAndStores()
    reference.load_state_dict(model.state_dict())
    run = compiled(model, setting)
    with torch.no_grad():
        for n in (*SIZES, *SIZES):
            x, loc = torch.randn(n, 4), torch.randperm(8)[:n]
            with torch.autocast("cpu", torch.bfloat16, enabled=ambient):
                got, want = run(x, loc), reference(x, loc)
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
            assert got[1].dtype is torch.float32
            torch.testing.assert_close(model.cache, reference.cache, rtol=2e-2, atol=2e-2)


def test_a_graph_with_nothing_to_capture_says_so():
    class Casts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.linear(ops.opaque(self.linear(x)))

    model = Casts()
    options = {"compiler": "eager", "cudagraph_mode": "PIECEWISE"}
    run = compiled(model, vouched(options, "opaque"))
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(5, 4)
            torch.testing.assert_close(run(x), model(x))
    assert explain(run).fallbacks == {FallbackReason.NOTHING_TO_CAPTURE: 3}
    assert explain(run).hits == 0


def complex_and_real(x):
    y = torch.complex(x, x * 2)
    return y[:, 1:], torch.view_as_real(y)[:, 1:]


def bytes_and_floats(x):
    y = x * 2
    return y.view(torch.uint8)[:, :2], y, y[:, 1:]


@pytest.mark.parametrize("fn", [complex_and_real, bytes_and_floats])
def test_outputs_of_two_dtypes_in_one_storage(setting, fn):
    assert_equal_runs(fn, setting, [(torch.randn(n, 3),) for n in SIZES], min_hits=1)


def test_zero_and_minus_zero_are_two_numbers(setting):
    """The number is baked where an operator outside the pieces takes it."""

    def fn(x, a):
        return 1 / torch.mul(x, a)

    run = compiled(fn, {**setting, "compiler": "eager", "splitting_ops": ["aten::mul"]})
    with torch.inference_mode():
        for a in (2.0, 3.0, 0.0, -0.0, 0.0, float("nan"), 2.0):
            x = torch.ones(5, 1)
            torch.testing.assert_close(run(x, a), fn(x, a), equal_nan=True)


def test_arguments_that_come_to_share_memory_later(setting):
    def fn(x, y):
        x.add_(1)
        return y * 2

    run = compiled(fn, setting)
    with torch.inference_mode():
        for n in (5, 6, 5):
            run(torch.randn(n, 3), torch.randn(n, 3))
            mine = torch.randn(12, 3)
            theirs = mine.clone()
            got = run(mine[:n], mine[2 : n + 2])
            torch.testing.assert_close(got, fn(theirs[:n], theirs[2 : n + 2]))
            torch.testing.assert_close(mine, theirs)
    assert explain(run).fallbacks[FallbackReason.ALIASED_INPUTS] == 3


def test_arguments_that_overlap_at_another_distance_later(setting):
    def fn(y, x):
        x.add_(1)
        return y * 2

    run = compiled(fn, setting)
    with torch.inference_mode():
        for start in (0, 1, 2, 0):
            mine = torch.randn(40, 3)
            theirs = mine.clone()
            got = run(mine[start : start + 5], mine[:7])
            torch.testing.assert_close(got, fn(theirs[start : start + 5], theirs[:7]))
            torch.testing.assert_close(mine, theirs)


def test_a_block_that_records_gradients_inside_the_model(setting):
    linear = nn.Linear(4, 4)

    def fn(x):
        with torch.enable_grad():
            return linear(x) * 2

    run = compiled(fn, setting)
    with torch.no_grad():
        for n in SIZES:
            x = torch.randn(n, 4)
            got = run(x)
            torch.testing.assert_close(got, fn(x))
            assert got.requires_grad
    assert set(explain(run).fallbacks) == {FallbackReason.GRAD_ENABLED}


@pytest.mark.parametrize("engine", ["host", "host_strict"])
def test_a_graph_that_only_writes_and_has_nothing_to_capture(engine):
    def fn(x):
        ops.bump(x)
        return ops.opaque(x)

    options = {"compiler": "eager", "engine": engine, "cudagraph_mode": "PIECEWISE"}
    run = compiled(fn, vouched(options, "opaque"))
    with torch.inference_mode():
        for n in SIZES:
            x = torch.zeros(n, 4)
            assert run(x).eq(2).all()
            assert x.eq(1).all()
    assert explain(run).fallbacks == {FallbackReason.NOTHING_TO_CAPTURE: len(SIZES)}


def test_keys_that_cannot_be_recorded_are_not_tried_for_ever():
    weight = torch.randn(16, 4)
    calls = []

    def fn(x, a):
        return ops.attend_short(x * a, weight, (x[:, 0] > 0).long() + 3) * a

    options = {
        "compiler": "eager",
        "engine": "host_strict",
        "cudagraph_mode": "FULL",
        "splitting_ops": ["graphbuf_test::attend_short"],
        "max_exact_captures": 100,
    }
    run = compiled(fn, options, dynamic=True)
    with torch.inference_mode():
        for n in range(2, 32):
            ops.calls.clear()
            x = torch.randn(n, 4)
            run(x, 0.5)
            calls.append(len(ops.calls))
    assert calls[:8] == [2] * 8  # the refused capture, and the call
    assert calls[8:] == [1] * 22
    assert explain(run).fallbacks == {FallbackReason.HOST_READ: 30}


def test_one_swap_of_a_weight_costs_each_bucket_one_capture():
    linear = nn.Linear(4, 4)
    options = {"compiler": "aot_eager", "engine": "host_strict", "max_recaptures": 2}
    run = compiled(linear, {**options, "cudagraph_capture_sizes": [2, 3, 4, 5, 6, 7, 8]})
    kept = []
    for _ in range(3):
        with torch.inference_mode():
            for n in range(2, 9):
                x = torch.randn(n, 4)
                torch.testing.assert_close(run(x), linear(x))
        kept.append(linear.weight.data)  # so that no new one takes its address
        linear.weight.data = torch.randn(4, 4)
    assert not explain(run).fallbacks
    assert explain(run).recaptures == 14


def test_an_expanded_argument(setting):
    calls = [(torch.randn(n, 3), torch.randn(1, 3).expand(n, 3)) for n in (*SIZES, *SIZES)]
    assert_equal_runs(lambda x, y: x + y, setting, calls)


def test_an_inference_mode_block_inside_the_model(setting):
    def fn(x):
        with torch.inference_mode():
            y = ops.opaque(x * 2)
        return y + 1

    run = compiled(fn, vouched(setting, "opaque"))
    with torch.no_grad():
        for n in SIZES:
            x = torch.randn(n, 3)
            torch.testing.assert_close(run(x), fn(x))


def test_many_outputs_with_names_like_the_graphs_own(setting):
    def fn(x):
        y, p, q, r = x * 2, x + 1, x + 2, x + 3
        ops.bump(y)
        s = ops.opaque(y[:, 0])
        z = p + q + r
        return s, [z[:, 0], z[:, 1], z[:, 2], z[:, 3], z[:, 1:], z[:, 2:]]

    assert_equal_runs(fn, setting, [(torch.randn(n, 4),) for n in SIZES])


def test_views_written_and_read_through_their_base(setting):
    class Pool(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kv", torch.zeros(2, 8, 4))

        def forward(self, x, loc):
            k, v = self.kv[0], self.kv[1]
            k[loc] = x
            v.index_copy_(0, loc, x * 2)
            return self.kv.sum(0)[loc] + k[loc]

    model, reference = Pool(), Pool()
    run = compiled(model, setting)
    with torch.inference_mode():
        for n in SIZES:
            x, loc = torch.randn(n, 4), torch.randperm(8)[:n]
            torch.testing.assert_close(run(x, loc), reference(x, loc))
            torch.testing.assert_close(model.kv, reference.kv)


def test_a_table_that_moves_is_staged_in_every_bucket(capturing):
    options = {**capturing, "max_recaptures": 1}
    run = compiled(lambda x, table: x + table.sum(), options)
    with torch.inference_mode():
        for k in range(24):
            x, table = torch.randn(2 + k % 7, 3), torch.randn(16, 3)
            torch.testing.assert_close(run(x, table), x + table.sum())
    assert not explain(run).fallbacks


def test_a_dropped_graph_is_freed():
    run = compiled(lambda x: x * 2, {"compiler": "eager", "cudagraph_capture_sizes": [8]})
    with torch.inference_mode():
        run(torch.randn(5, 3))
    (report,) = explain(run).reports
    served = weakref.ref(report.served)
    del report
    torch._dynamo.reset()
    gc.collect()
    assert served() is None
    (backend,) = backends_of(run)
    assert backend.reports == ()
