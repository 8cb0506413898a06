"""What an error calls a recording: by its label, which says runner or graph, bucket and segment."""

import re

import pytest
import torch

from compile_backend import explain
from compile_backend.engines import HostEngine, StrictHostEngine, no_graph
from compile_backend.errors import CaptureError
from tests.runners.models import Decoder, make_world


@pytest.fixture(params=[HostEngine, StrictHostEngine], ids=lambda each: each.name)
def host(request):
    return request.param()


@torch.library.custom_op("graphbuf_labels::no_fours", mutates_args=())
def no_fours(x: torch.Tensor) -> torch.Tensor:
    """A copy, unless there are four rows."""
    if x.shape[0] == 4:
        raise ValueError("no fours")
    return x.clone()


@no_fours.register_fake
def _(x):
    return torch.empty_like(x)


def raises_by_hand(x):
    raise ValueError("by hand")


def sums_on_the_host(x):
    return [x * x.sum().item()]


@pytest.mark.parametrize(
    ("fn", "inputs", "options"),
    [
        (raises_by_hand, [torch.ones(2)], {}),
        (raises_by_hand, [torch.ones(2)], {"warmups": 1}),
        (sums_on_the_host, [torch.ones(2)], {}),
        (lambda x: x, [torch.ones(2)], {}),
        (raises_by_hand, [3], {}),
    ],
    ids=["raises", "warm-up", "refused", "outputs", "inputs"],
)
def test_a_label_takes_the_place_of_the_functions_name(host, fn, inputs, options):
    for name, label in (("decode bs=8 of model#0", "decode bs=8 of model#0"), (None, None)):
        with pytest.raises(CaptureError) as caught:
            host.capture(fn, static_inputs=inputs, label=label, **options)
        assert str(caught.value).count(repr(name or fn.__qualname__)) == 1
        assert (fn.__qualname__ in str(caught.value)) == (name is None)


def test_a_capture_inside_a_capture_names_both(host):
    def fn(x):
        return host.capture(lambda x: [x], static_inputs=[x], label="inner").outputs

    with pytest.raises(CaptureError, match=r"^'outer': cannot capture 'inner' inside another"):
        host.capture(fn, static_inputs=[torch.ones(1)], label="outer")


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("first", r"^'b8' \(segment 1\) raised ValueError"),
        ("marked", r"^'b8'.*: marked, which is marked no_graph, raised ValueError"),
        (
            "returns",
            r"^'b8' \(segment 1\): marked, which is marked no_graph, returned the number 3",
        ),
        ("begins", r"^'b8' \(segment 2\) raised ValueError"),
        ("read", r"^'b8' \(segment 2\): Tensor.item reads"),
    ],
)
def test_an_error_of_a_breakable_capture_says_which_segment(host, place, message):
    @no_graph()
    def marked(x):
        if place == "marked":
            raise ValueError
        return 3 if place == "returns" else None

    def fn(x):
        y = x + 1
        if place == "first":
            raise ValueError
        marked(y)
        if place == "begins":
            raise ValueError
        return [x * (y + 1).sum().item() if place == "read" else x]

    with pytest.raises(CaptureError, match=message):
        host.capture_breakable(fn, static_inputs=[torch.ones(2)], label="b8")


def test_a_refused_capture_of_a_compiled_graph_names_graph_and_sizes():
    def fn(x):
        return no_fours(x + 1) * 2

    options = {
        "compiler": "aot_eager",
        "engine": "host",
        "cudagraph_capture_sizes": [4, 8],
        "rowwise_ops": ("graphbuf_labels::no_fours",),
    }
    run = torch.compile(fn, backend="graphbuf", options=options, dynamic=True)
    with torch.inference_mode():
        for rows in (7, 3):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(run(x), fn(x))
    (message,) = explain(run).messages.values()
    assert re.match(r"'graph fn\S* at batch=4, seq=4' raised ValueError", message)


@pytest.mark.parametrize("engine", ["host", "host_strict"])
def test_a_refused_bucket_is_named_with_its_runner(engine):
    class NoFours(Decoder):
        def after(self, h, batch):
            return no_fours(h)

    world = make_world(NoFours, 1)
    world.model.lm_head = None
    runner = world.runner(
        engine=engine,
        cudagraph_capture_sizes=(2, 4),
        prefill_capture_sizes=(4, 8),
        rowwise_ops=("graphbuf_labels::no_fours",),
    )
    refused = {
        use.name: [why for _, why in use.refused] for use in runner.explain().runners if use.refused
    }
    assert set(refused) == {"decode", "prefill"}
    assert all("'decode bs=4 " in each for each in refused["decode"])
    assert all("'prefill tokens=4 of model#" in each for each in refused["prefill"])
    assert all("(segment 2)'" in each for each in refused["prefill"])


@pytest.mark.parametrize("engine", ["host", "host_strict"])
def test_a_refused_breakable_bucket_is_named_with_its_segment(engine):
    class Reads(Decoder):
        def after(self, h, batch):
            return h * (1 + 0 * h.sum().item())

    world = make_world(Reads, 1)
    world.model.lm_head = None
    runner = world.runner(
        engine=engine,
        prefill_backend="breakable",
        prefill_capture_sizes=(4,),
        enable_decode_graph=False,
    )
    ((_, why),) = next(use.refused for use in runner.explain().runners if use.name == "prefill")
    assert "'prefill tokens=4 of recorded#0' (segment 2): " in why
