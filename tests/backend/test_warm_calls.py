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


class Lazy(nn.Module):
    """What it plans at its first run is not part of a recording of a later one."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).relu()


@pytest.mark.usefixtures("cold")
def test_the_first_call_of_a_bucket_runs_uncaptured_and_the_second_is_captured():
    model = Lazy().eval()
    options = {"engine": "host_strict", "compiler": "eager", "cudagraph_capture_sizes": [2, 4]}
    compiled = torch.compile(model, backend="graphbuf", options=options)
    with torch.inference_mode():
        for rows in (4, 3, 4, 2, 4, 2, 2):
            x = torch.randn(rows, 4)
            assert_close(compiled(x), model(x))
    report = explain(compiled)
    assert report.uncaptured == 2  # one for each bucket
    assert report.num_cudagraph_captured == 2
    assert report.hits == 3  # of 7 calls: 2 ran, 2 were captured
    assert report.fallbacks == {}
