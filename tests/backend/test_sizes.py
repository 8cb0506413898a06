"""Any size gives eager's values and shapes; the number of graphs and captures stays bounded."""

import pytest
import torch
from torch import nn

from compile_backend import FallbackError, FallbackReason, explain
from tests.backend.conftest import assert_equal_runs, compiled

EDGES = [5, 3, 8, 1, 7, 0, 2, 4, 5, 3, 8, 1, 0, 9, 6]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 6)

    def forward(self, x):
        return self.down(self.norm(self.up(x)).relu()) + x


def batches(sizes, *shape):
    return [(torch.randn(n, *shape),) for n in sizes]


def test_every_size_equals_eager_and_replays(setting):
    explanation = assert_equal_runs(Mlp().eval(), setting, batches(EDGES, 6), min_hits=3)
    assert explanation.calls == len(EDGES)


@pytest.mark.parametrize("first", [5, 1, 0])
def test_at_most_three_graphs_over_all_sizes(setting, first):
    sizes = [first, 5, 3, 1, 0, 8, 7, 2, 4, 64]
    explanation = assert_equal_runs(Mlp().eval(), setting, batches(sizes, 6))
    assert explanation.num_graphs <= 3, str(explanation)


def test_a_bucket_is_captured_once_and_every_size_below_it_replays(padding):
    explanation = assert_equal_runs(Mlp().eval(), padding, batches([8, 7, 6, 5, 8, 5], 6))
    (bucket,) = explanation.buckets
    assert (bucket.label, bucket.hits) == ("batch=8", 5)
    assert (bucket.num_rows, bucket.num_padded_rows) == (39, 48)
    assert explanation.padding_waste == pytest.approx(9 / 48)


def test_captures_stay_within_the_buckets_whatever_comes(padding):
    sizes = [1 + (7 * k) % 12 for k in range(60)]
    explanation = assert_equal_runs(Mlp().eval(), padding, batches(sizes, 6))
    buckets = [b for b in explanation.buckets if b.label.startswith("batch=")]
    assert len(buckets) == 3
    above = sum(size > 8 for size in sizes)
    assert explanation.fallbacks == {FallbackReason.ABOVE_LARGEST_BUCKET: above}
    captures = explanation.num_cudagraph_captured + explanation.recaptures
    assert explanation.hits + captures + above == 60


@pytest.mark.parametrize("order", [[2, 4, 8], [8, 4, 2], [4, 8, 2]])
def test_the_order_of_captures_does_not_matter(padding, order):
    assert_equal_runs(Mlp().eval(), padding, batches([*order, 3, 7, 2, 5], 6), min_hits=4)


def test_exact_sizes_are_captured_up_to_a_limit_and_then_run_uncaptured():
    options = {"compiler": "aot_eager", "engine": "host", "max_exact_captures": 3}
    sizes = [5, 3, 8, 7, 6, 5, 3, 8]
    explanation = assert_equal_runs(Mlp().eval(), options, batches(sizes, 6))
    assert (explanation.num_cudagraph_captured, explanation.hits) == (3, 3)
    assert explanation.fallbacks == {FallbackReason.TOO_MANY_SIZES: 2}
    assert "cudagraph_capture_sizes" in explanation.messages[FallbackReason.TOO_MANY_SIZES]


def test_strict_raises_above_the_largest_bucket_and_the_advice_helps(padding):
    model = Mlp().eval()
    run = compiled(model, {**padding, "strict": True})
    with torch.inference_mode():
        run(torch.randn(8, 6))
        with pytest.raises(FallbackError, match="largest captured size is 8") as caught:
            run(torch.randn(9, 6))
        assert caught.value.reason is FallbackReason.ABOVE_LARGEST_BUCKET
        torch._dynamo.reset()
        wider = compiled(
            model, {**padding, "strict": True, "cudagraph_capture_sizes": [2, 4, 8, 16]}
        )
        x = torch.randn(9, 6)
        torch.testing.assert_close(wider(x), model(x))


def attend_causally(x):
    q = x.view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2)
    out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    return out.transpose(1, 2).reshape(x.shape)


@pytest.mark.parametrize("fn", [Mlp().eval(), attend_causally], ids=["mlp", "causal attention"])
def test_two_padded_axes(setting, fn):
    width = 6 if isinstance(fn, nn.Module) else 8
    shapes = [(5, 3), (3, 7), (8, 8), (2, 5), (7, 2), (5, 3), (6, 4), (3, 6), (4, 9)]
    calls = [(torch.randn(*shape, width),) for shape in shapes]
    explanation = assert_equal_runs(fn, setting, calls)
    if setting.get("cudagraph_capture_sizes"):
        assert any("seq=" in bucket.label for bucket in explanation.buckets), str(explanation)
        assert explanation.hits >= 1


def test_arguments_padded_together_that_come_apart_run_at_their_own_sizes(padding):
    def fn(x, y):
        return x * 2, y + 1

    run = compiled(fn, padding)
    with torch.inference_mode():
        for n, m in ((5, 5), (3, 3), (5, 2), (3, 7), (4, 4)):
            x, y = torch.randn(n, 3), torch.randn(m, 3)
            torch.testing.assert_close(run(x, y), fn(x, y))
    assert explain(run).fallbacks.get(FallbackReason.LIVE_SIZES_DIFFER, 0) >= 1


def test_a_square_input_does_not_tie_batch_and_feature(setting):
    weight = torch.randn(3, 3)
    calls = [(torch.randn(n, 3), weight) for n in (3, 5, 3, 2, 8, 7, 3)]
    assert_equal_runs(lambda x, w: (x @ w).tanh(), setting, calls)


def test_the_explanation_is_readable(padding):
    explanation = assert_equal_runs(Mlp().eval(), padding, batches([5, 3, 9], 6))
    text = str(explanation)
    for part in ("slot l_x_ [8, 6]", "batch=8", "ABOVE_LARGEST_BUCKET x1", "piece(s)"):
        assert part in text
