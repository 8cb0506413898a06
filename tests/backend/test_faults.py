"""Errors leave everything as found; host reads are refused where they would be baked."""

import gc
import threading

import pytest
import torch
from torch import nn

from compile_backend import FallbackError, FallbackReason, explain
from tests import custom_ops as ops
from tests.backend.conftest import compiled

SPLIT = {"splitting_ops": ["graphbuf_test::attend_short"]}
TRUSTED = {"rowwise_ops": ["graphbuf_test::attend_short", "graphbuf_test::attend"]}


def attention(x, cache, lens):
    return ops.attend_short(x * 2, cache, lens) + 1


def attention_calls():
    cache = torch.randn(16, 4)
    return [
        (torch.randn(n, 4), cache, torch.full((n,), longest))
        for n, longest in ((5, 2), (5, 9), (3, 1), (7, 16), (5, 3), (8, 8))
    ]


@pytest.mark.parametrize("engine", ["host", "host_strict"])
@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "PIECEWISE"])
def test_a_host_read_in_a_break_op_follows_the_live_values(engine, mode):
    options = {
        "compiler": "aot_eager",
        "engine": engine,
        "cudagraph_mode": mode,
        "cudagraph_capture_sizes": [8],
        **SPLIT,
        **TRUSTED,
    }
    run = compiled(attention, options)
    with torch.inference_mode():
        for args in attention_calls():
            # padded lengths are 0 here, so padded rows are NaN: none may reach a live row
            torch.testing.assert_close(run(*args), attention(*args))
    explanation = explain(run)
    (bucket,) = explanation.buckets
    assert bucket.hits == 5
    assert not explanation.fallbacks
    refused_whole = engine == "host_strict" or mode == "PIECEWISE"
    assert bucket.num_segments == (2 if refused_whole else 1)


def test_a_host_read_is_refused_in_a_full_graph_that_bakes():
    options = {
        "compiler": "aot_eager",
        "engine": "host_strict",
        "cudagraph_mode": "FULL",
        "cudagraph_capture_sizes": [8],
        **SPLIT,
        **TRUSTED,
    }
    run = compiled(attention, options)
    with torch.inference_mode():
        for args in attention_calls():
            torch.testing.assert_close(run(*args), attention(*args))
    assert explain(run).fallbacks == {FallbackReason.HOST_READ: 6}
    strict = compiled(attention, {**options, "strict": True})
    torch._dynamo.reset()
    with torch.inference_mode(), pytest.raises(FallbackError) as caught:
        strict(*attention_calls()[0])
    assert caught.value.reason is FallbackReason.HOST_READ


def test_a_number_read_from_a_tensor_makes_the_graph_run_uncaptured(capturing):
    def fn(x, n):
        return x * n.item() + 1

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        run = compiled(fn, capturing)
        with torch.inference_mode():
            for n in (5, 3, 5, 8):
                x = torch.randn(n, 4)
                torch.testing.assert_close(run(x, torch.tensor(n)), x * n + 1)
        assert explain(run).fallbacks == {FallbackReason.HOST_READ: 4}


def test_shapes_that_depend_on_values_make_the_graph_run_uncaptured(capturing):
    def fn(x):
        return x[x > 0] * 2

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = compiled(fn, capturing)
        with torch.inference_mode():
            for n in (5, 3, 5, 8):
                x = torch.randn(n)
                torch.testing.assert_close(run(x), x[x > 0] * 2)
        assert explain(run).fallbacks == {FallbackReason.DATA_DEPENDENT_SHAPE: 4}


class Fragile(nn.Module):
    def forward(self, x):
        return ops.fragile(x + 1) * 2


@pytest.mark.parametrize("fails_in", ["capture", "replay"])
def test_an_error_in_a_kernel_reaches_the_caller_and_the_next_call_works(capturing, fails_in):
    names = ["graphbuf_test::fragile"]
    options = {**capturing, "splitting_ops": names, "rowwise_ops": names}
    run = compiled(Fragile(), options)
    good, bad = torch.rand(5, 4), torch.full((5, 4), -3.0)
    full_strict = options["engine"] == "host_strict" and "cudagraph_mode" not in options
    with torch.inference_mode():
        if fails_in == "replay":
            run(good)
        if full_strict and fails_in == "replay":
            return  # a device graph runs no Python at replay
        collecting = gc.isenabled()
        with pytest.raises(ValueError, match="negative sum"):
            run(bad)
        assert gc.isenabled() == collecting
        assert torch.is_inference_mode_enabled()
        for _ in range(3):
            torch.testing.assert_close(run(good), (good + 1) * 2)
    if fails_in == "replay":
        assert explain(run).hits >= 3


def test_a_write_before_an_error_is_not_repeated(capturing):
    model = WritesThenFails()
    run = compiled(model, {**capturing, "splitting_ops": ["graphbuf_test::fragile"]})
    with torch.inference_mode():
        with pytest.raises(ValueError, match="negative sum"):
            run(torch.full((5, 4), -1.0))
        assert model.count.item() == 1  # as in eager
        for step in range(3):
            x = torch.rand(5, 4)
            torch.testing.assert_close(run(x), x)
            assert model.count.item() == 2 + step


class WritesThenFails(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count.add_(1)
        return ops.fragile(x)


def test_threads_that_share_slots_do_not_mix_their_rows(capturing):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    run = compiled(model, capturing)
    wrong: list[str] = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        with torch.inference_mode():
            for k in range(25):
                x = torch.randn(2 + (seed + k) % 7, 4, generator=generator)
                if not torch.allclose(run(x), model(x), atol=1e-5):
                    wrong.append(f"thread {seed} step {k}")

    with torch.inference_mode():
        run(torch.randn(5, 4))
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert explain(run).calls == 101


@pytest.mark.parametrize("sizes", [None, [4, 8]])
def test_a_device_without_an_engine_counts_no_hits(sizes, caplog):
    """The meta device stands for any that no engine captures on: shapes are right, nothing runs."""
    run = compiled(lambda x: x * 2, {"compiler": "aot_eager", "cudagraph_capture_sizes": sizes})
    with torch.inference_mode():
        for n in (5, 3, 5):
            assert run(torch.empty(n, 4, device="meta")).shape == (n, 4)
    explanation = explain(run)
    assert explanation.fallbacks == {FallbackReason.NO_ENGINE: 3}
    assert (explanation.hits, explanation.num_cudagraph_captured) == (0, 0)
    assert explanation.slot_bytes == 0
    assert "no engine captures on meta" in caplog.text


def test_invalidate_drops_what_was_captured(capturing):
    run = compiled(lambda x: x * 2, capturing)
    x = torch.randn(5, 4)
    with torch.inference_mode():
        run(x)
        (report,) = explain(run).reports
        report.served.invalidate()
        assert explain(run).num_cudagraph_captured == 0
        torch.testing.assert_close(run(x), x * 2)
        assert explain(run).num_cudagraph_captured == 1
