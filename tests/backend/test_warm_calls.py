"""On an engine whose kernels must have run before they are recorded, each key has a first call
that is neither captured nor a fall-back."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from compile_backend import explain
from compile_backend.engines import StrictHostEngine, lookup


class ColdEngine(StrictHostEngine):
    """The strict engine with the needs of a device: its first runs settle lazy state."""

    needs_warmup = True


@pytest.fixture
def cold(monkeypatch):
    monkeypatch.setitem(lookup._ENGINES, "host_strict", ColdEngine)


rows_that_ran = []


@torch.library.custom_op("graphbuf_test::seen", mutates_args=())
def seen(x: torch.Tensor) -> torch.Tensor:
    rows_that_ran.append(x.shape[0])
    return x.relu()


@seen.register_fake
def _(x):
    return torch.empty_like(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.ops.graphbuf_test.seen(self.linear(x))


@pytest.mark.usefixtures("cold")
def test_the_first_call_of_a_bucket_runs_uncaptured_and_the_second_is_captured():
    model = Model().eval()
    options = {
        "engine": "host_strict",
        "compiler": "eager",
        "cudagraph_capture_sizes": [2, 4],
        "rowwise_ops": ["graphbuf_test::seen"],
    }
    compiled = torch.compile(model, backend="graphbuf", options=options)
    with torch.inference_mode():
        for rows in (3, 4, 3, 2, 4, 2, 2):
            x = torch.randn(rows, 4)
            rows_that_ran.clear()
            got = compiled(x)
            assert set(rows_that_ran) <= {2, 4}  # never 3: kernels are settled at the bucket's size
            assert_close(got, model(x))
    report = explain(compiled)
    assert report.uncaptured == 2  # one for each bucket
    assert report.num_cudagraph_captured == 2
    assert report.hits == 3  # of 7 calls: 2 ran, 2 were captured
    assert report.fallbacks == {}
