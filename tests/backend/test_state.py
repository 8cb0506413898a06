"""Weights, caches, numbers and mutations: what a captured graph must not freeze or repeat."""

import pytest
import torch
from torch import nn

from compile_backend import FallbackReason, explain
from tests.backend.conftest import assert_equal_runs, compiled

SIZES = (5, 3, 8, 5, 7, 3, 8)


def test_weights_updated_in_place_are_seen_at_once(setting):
    model = nn.Linear(4, 4).eval()
    run = compiled(model, setting)
    with torch.inference_mode():
        for n in SIZES:
            model.weight.add_(0.5)
            x = torch.randn(n, 4)
            torch.testing.assert_close(run(x), model(x))


def test_replaced_weights_are_noticed_before_the_replay(setting):
    model = nn.Linear(4, 4).eval()
    run = compiled(model, setting)
    x = torch.randn(5, 4)
    with torch.no_grad():
        for step in range(4):
            model.weight = nn.Parameter(torch.full((4, 4), float(step)))
            for _ in range(2):
                torch.testing.assert_close(run(x), model(x))
    explanation = explain(run)
    if setting["engine"] == "host_strict":
        assert explanation.recaptures == 3
        assert explanation.hits == 4
    elif setting["engine"] == "host":
        assert (explanation.recaptures, explanation.hits) == (0, 7)


def test_weights_that_keep_moving_run_uncaptured_with_a_reason():
    options = {
        "compiler": "aot_eager",
        "engine": "host_strict",
        "cudagraph_capture_sizes": [8],
        "max_recaptures": 2,
    }
    model = nn.Linear(4, 4).eval()
    run = compiled(model, options)
    with torch.no_grad():
        kept = []
        for step in range(6):
            kept.append(model.weight)
            model.weight = nn.Parameter(torch.full((4, 4), float(step)))
            x = torch.randn(5, 4)
            torch.testing.assert_close(run(x), model(x))
    assert explain(run).fallbacks == {FallbackReason.ADDRESS_CHANGED: 3}


def test_one_compiled_function_serves_two_models_of_one_class(setting):
    models = [nn.Linear(4, 4).eval() for _ in range(2)]
    runs = [compiled(model, setting) for model in models]
    with torch.inference_mode():
        for n in SIZES:
            for model, run in zip(models, runs, strict=True):
                x = torch.randn(n, 4)
                torch.testing.assert_close(run(x), model(x))
    assert sum(explain(run).calls for run in runs) >= 2 * len(SIZES)


class Counter(nn.Module):
    """Mutates a buffer of fixed size, and a cache at live rows."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x):
        self.steps.add_(1)
        return x * self.steps


def test_one_call_mutates_once(setting):
    model, reference = Counter(), Counter()
    run = compiled(model, setting)
    with torch.inference_mode():
        for n in SIZES:
            x = torch.randn(n, 4)
            torch.testing.assert_close(run(x), reference(x))
            torch.testing.assert_close(model.steps, reference.steps)


def test_a_mutated_argument_is_the_callers_tensor(setting):
    def fn(x, y):
        x.add_(1)
        return x * y

    run = compiled(fn, setting)
    with torch.inference_mode():
        for n in SIZES:
            x, y = torch.zeros(n, 4), torch.randn(n, 4)
            out = run(x, y)
            assert x.eq(1).all()
            torch.testing.assert_close(out, y)
    if "cudagraph_capture_sizes" in setting:
        assert explain(run).fallbacks[FallbackReason.MUTATED_INPUT] == len(SIZES)


def test_numbers_are_part_of_the_key(setting):
    def fn(x, k, scale):
        return (x + k) * scale

    calls = [(torch.randn(n, 4), k, s) for n in (5, 3) for k in (2, 3, 2) for s in (0.5, 2.5, 0.5)]
    assert_equal_runs(fn, setting, calls)


def test_a_number_that_takes_many_values_runs_uncaptured():
    options = {
        "compiler": "aot_eager",
        "engine": "host",
        "cudagraph_capture_sizes": [8],
        "max_number_values": 2,
    }
    run = compiled(lambda x, k: x + k, options, dynamic=True)
    with torch.inference_mode():
        for k in (2, 3, 4, 5, 2, 3):
            x = torch.randn(5, 4)
            torch.testing.assert_close(run(x, k), x + k)
    explanation = explain(run)
    assert explanation.fallbacks == {FallbackReason.NUMBER_VARIES: 2}
    assert (explanation.num_cudagraph_captured, explanation.hits) == (2, 2)


def test_guards_hold_at_the_padded_size(padding):
    def fn(x):
        return x * 2 if x.shape[0] <= 6 else x * 3

    run = compiled(fn, padding)
    with torch.inference_mode():
        for n in (5, 8, 6, 7, 3, 5):
            x = torch.randn(n, 4)
            torch.testing.assert_close(run(x), fn(x))
    assert explain(run).fallbacks[FallbackReason.GUARD_FAILED] >= 2


def test_a_view_that_eager_refuses_is_refused_here(padding):
    def fn(x):
        return x.view(-1, 8)

    run = compiled(fn, padding)
    with torch.inference_mode():
        for n in (8, 4, 6):
            x = torch.randn(n, 4)
            torch.testing.assert_close(run(x), fn(x))
        with pytest.raises(Exception, match=r"shape|view"):
            run(torch.randn(7, 4))


def test_a_row_that_a_small_batch_lacks_is_no_padded_row(padding):
    def fn(x):
        return x[3] * 2, x + 1

    run = compiled(fn, padding)
    with torch.inference_mode():
        for n in (8, 5, 4, 7):
            x = torch.randn(n, 4)
            torch.testing.assert_close(run(x), fn(x))
        with pytest.raises(Exception, match=r"index 3|out of (bounds|range)"):
            run(torch.randn(3, 4))


def test_a_non_contiguous_argument(setting):
    def fn(x):
        return (x * 2).sum(-1)

    calls = [(torch.randn(2 * n, 4)[::2],) for n in SIZES] + [
        (torch.randn(4, n).t(),) for n in SIZES
    ]
    assert_equal_runs(fn, setting, calls)


def test_random_operators_draw_anew_at_every_call(setting):
    run = compiled(lambda x: x + torch.rand_like(x), setting)
    x = torch.zeros(5, 4)
    with torch.inference_mode():
        draws = [run(x) for _ in range(3)]
    assert not torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[1], draws[2])
    assert all(((d >= 0) & (d < 1)).all() for d in draws)


def test_a_call_that_needs_gradients_takes_the_ordinary_path(setting, caplog):
    model = nn.Linear(4, 4)
    run = compiled(model, setting)
    for _ in range(2):
        x = torch.randn(5, 4)
        run(x).sum().backward()
        torch.testing.assert_close(model.weight.grad, x.sum(0).expand(4, 4))
        model.zero_grad()
    assert explain(run).fallbacks == {FallbackReason.GRAD_ENABLED: 2}
    advice = [r for r in caplog.records if "inference_mode" in r.message]
    assert len(advice) == 1
    with torch.inference_mode():
        x = torch.randn(5, 4)
        torch.testing.assert_close(run(x), model(x))
    assert explain(run).num_graphs == 2


def test_a_model_without_trainable_weights_is_captured_with_grad_mode_on(capturing):
    model = nn.Linear(4, 4).requires_grad_(False)
    run = compiled(model, capturing)
    for _ in range(3):
        x = torch.randn(5, 4)
        torch.testing.assert_close(run(x), model(x))
    assert explain(run).hits == 2
    assert not explain(run).fallbacks
