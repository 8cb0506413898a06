"""What only the real compiler shows. Few compilations: each takes seconds."""

import pytest
import torch
from torch import nn

from compile_backend import FallbackReason, explain
from tests import custom_ops as ops
from tests.backend.conftest import compiled

pytestmark = pytest.mark.inductor
SIZES = (5, 3, 8, 5, 7, 3, 8)


class Small(nn.Module):
    """Four elements in each slot, a break op, a clone before a write."""

    def forward(self, x):
        y = x * 2 + 1
        kept = y.clone()
        ops.bump(y)
        return kept, y.relu() - kept


@pytest.mark.parametrize("engine", ["host", "host_strict"])
def test_a_small_slot_is_read_anew_at_every_replay(engine):
    """Inductor bakes a buffer of up to 8 elements that it is given as an attribute."""
    options = {"engine": engine, "cudagraph_capture_sizes": [4], "rowwise_ops": ["aten::relu"]}
    run = compiled(lambda x: (x * 2 + 1).relu(), options)
    with torch.inference_mode():
        for n in (3, 4, 2, 3, 4):
            x = torch.randn(n)
            torch.testing.assert_close(run(x), (x * 2 + 1).relu())
    assert explain(run).hits == 4
    assert explain(run).slot_bytes == 16


def test_a_clone_before_a_mutating_operator_is_kept():
    options = {"rowwise_ops": ["graphbuf_test::bump"], "cudagraph_capture_sizes": [4, 8]}
    model = Small()
    run = compiled(model, options)
    with torch.inference_mode():
        for n in SIZES:
            x = torch.randn(n, 2)
            torch.testing.assert_close(run(x), model(x))
    assert explain(run).hits >= 3
    assert explain(run).num_graphs == 1


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, scale):
        h = ops.opaque(self.norm(x))
        return x + self.down(nn.functional.silu(self.up(h))) * scale, h[:, :2]


@pytest.mark.parametrize("sizes", [None, [2, 4, 8]], ids=["exact", "padded"])
def test_a_block_with_float_settings_equals_eager(sizes):
    options = {
        "cudagraph_capture_sizes": sizes,
        "splitting_ops": ["graphbuf_test::opaque"],
        "rowwise_ops": ["graphbuf_test::opaque"],
    }
    model = Block().eval()
    run = compiled(model, options, dynamic=None if sizes else True)
    with torch.inference_mode():
        kept = [(run(x, 0.5), model(x, 0.5)) for x in (torch.randn(n, 8) for n in SIZES)]
    for got, want in kept:
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    explanation = explain(run)
    assert explanation.hits >= 3, str(explanation)
    assert FallbackReason.HOST_READ not in explanation.fallbacks


def test_training_takes_the_ordinary_compile_path():
    model = nn.Linear(4, 4)
    run = compiled(model, {})
    x = torch.randn(5, 4)
    run(x).sum().backward()
    torch.testing.assert_close(model.weight.grad, x.sum(0).expand(4, 4))
    assert explain(run).fallbacks == {FallbackReason.GRAD_ENABLED: 1}
