"""Splitting keeps the program: order, aliasing, unpacking, at every place a break op can stand."""

import pytest
import torch

from compile_backend import FallbackReason, explain
from tests import custom_ops as ops
from tests.backend.conftest import assert_equal_runs, compiled

SIZES = (5, 3, 8, 5, 7, 3, 8)
SPLIT = ["graphbuf_test::halves", "graphbuf_test::opaque", "graphbuf_test::bump"]


def rows(width=4):
    return [(torch.randn(n, width),) for n in SIZES]


def only_a_break(x):
    return ops.opaque(x)


def break_first(x):
    return ops.opaque(x).relu() * 2


def break_last(x):
    return ops.opaque(x.relu() * 2)


def breaks_in_a_row(x):
    return ops.opaque(ops.opaque(x + 1)) + 1


def unused_output(x):
    first, _ = ops.halves(x * 2)
    return first.relu()


def both_outputs(x):
    first, second = ops.halves(x * 2)
    return first.relu() + second, second


def single_output_pieces(x):
    y = (x + 1).relu()
    return ops.opaque(y).sum(-1)


def unpacked_later(x):
    parts = (x * 2).split(2, dim=1)
    y = ops.opaque(x)
    return parts[0] + y[:, :2], parts[1]


def view_written_after_a_break(x):
    y = x + 1
    view = y[:, :2]
    z = ops.opaque(x)
    view.add_(z[:, :2])
    return y, view * 1


def view_made_before_and_base_written_after(x):
    y = x.relu()
    view = y.view(-1)
    z = ops.opaque(y)
    y.mul_(2)
    return view + z.reshape(-1), y


def input_returned_across_a_break(x):
    return x, ops.opaque(x) + 1


def sizes_across_a_break(x):
    shape = (x * 1).shape
    y = ops.opaque(x)
    return y.reshape(shape[0], 2, -1) + 1


def size_of_an_argument_across_a_break(x):
    shape = x.shape
    return ops.opaque(x + 1).tanh().reshape(shape) * 2


def unpacked_after_a_write(x):
    values, places = torch.sort(x, -1)
    shifted = places + 1
    values.mul_(2)
    y = ops.opaque(values)
    values.add_(y)
    return shifted, values, y


def view_of_a_break_ops_result(x):
    y = ops.opaque(x + 1)
    z = y.narrow(1, 1, 3)
    w = z.relu()
    ops.bump(y)
    return z * 2 + w


def view_of_a_result_written_in_place(x):
    y = ops.opaque(x + 1)
    z = y[:, 1:]
    u = ops.opaque(x)
    y.mul_(2)
    return u[:, 1:] * z


def returned_view_of_a_result(x):
    y = ops.opaque(x + 1)
    z = y.view(-1, 2, 2)
    w = x.relu()
    ops.bump(y)
    return z, w


FUNCTIONS = [
    size_of_an_argument_across_a_break,
    unpacked_after_a_write,
    view_of_a_break_ops_result,
    view_of_a_result_written_in_place,
    returned_view_of_a_result,
    only_a_break,
    break_first,
    break_last,
    breaks_in_a_row,
    unused_output,
    both_outputs,
    single_output_pieces,
    unpacked_later,
    view_written_after_a_break,
    view_made_before_and_base_written_after,
    input_returned_across_a_break,
    sizes_across_a_break,
]


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_a_split_program_is_the_same_program(setting, fn):
    options = {**setting, "splitting_ops": SPLIT, "rowwise_ops": SPLIT}
    nothing_left = fn is only_a_break and setting.get("cudagraph_mode") == "PIECEWISE"
    explanation = assert_equal_runs(fn, options, rows(), min_hits=0 if nothing_left else 1)
    if nothing_left:
        assert explanation.fallbacks == {FallbackReason.NOTHING_TO_CAPTURE: len(SIZES)}
    assert any("named in splitting_ops" in str(r.built.cuts) for r in explanation.reports)


class Layer(torch.nn.Module):
    """Stores a value in a cache of fixed size, then attends to it: a mutation, no reader edge."""

    def __init__(self, layers=2, view_of_pool=False):
        super().__init__()
        self.proj = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(layers))
        self.view_of_pool = view_of_pool
        self.register_buffer("pool", torch.zeros(layers, 16, 4))

    def forward(self, x, loc, lens):
        for i, proj in enumerate(self.proj):
            cache = self.pool[i]
            h = proj(x)
            ops.store(h * 2, cache, loc)
            x = x + ops.attend(h, cache, lens)
        return x


def layer_calls():
    return [(torch.randn(n, 4), torch.randperm(16)[:n], torch.randint(1, 16, (n,))) for n in SIZES]


def test_a_write_without_a_reader_edge_stays_in_its_place(setting):
    model, reference = Layer().eval(), Layer().eval()
    reference.load_state_dict(model.state_dict())
    options = {**setting, "rowwise_ops": ["graphbuf_test::store", "graphbuf_test::attend"]}
    run = compiled(model, options)
    with torch.inference_mode():
        for args in layer_calls():
            torch.testing.assert_close(run(*args), reference(*args))
            torch.testing.assert_close(model.pool, reference.pool)
    if setting["engine"] != "none":
        assert explain(run).hits + explain(run).recaptures >= 1, str(explain(run))


def test_views_of_an_input_do_not_cut_pieces():
    run = compiled(Layer(layers=3).eval(), {"compiler": "aot_eager"})
    with torch.inference_mode():
        run(*layer_calls()[0])
    (report,) = explain(run).reports
    assert len(report.built.pieces) == 4
    assert [cut.op for cut in report.built.cuts] == ["graphbuf_test.store.default"] * 3


def test_break_ops_run_once_per_call(setting):
    options = {**setting, "splitting_ops": SPLIT, "rowwise_ops": SPLIT}
    run = compiled(breaks_in_a_row, options)
    with torch.inference_mode():
        for args in rows():
            run(*args)
            ops.calls.clear()
        run(*rows()[0])
    # The strict engine records what the kernel does, as a device graph would.
    strict_full = setting["engine"] == "host_strict" and "cudagraph_mode" not in setting
    assert ops.calls.count("opaque") == (0 if strict_full else 2)


def test_a_region_of_autocast_is_not_cut_in_two(setting):
    def fn(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = ops.opaque(x @ x.mT)
            z = y @ y
        return z.float() + x

    options = {**setting, "splitting_ops": SPLIT, "rowwise_ops": SPLIT}
    run = compiled(fn, options)
    with torch.inference_mode():
        for n in SIZES:
            x = torch.randn(n, 4, 4)
            torch.testing.assert_close(run(x), fn(x), rtol=2e-2, atol=2e-2)
            assert run(x).dtype is torch.float32


def test_aten_operators_can_be_splitting_ops():
    def fn(q):
        return torch.nn.functional.scaled_dot_product_attention(q + 1, q, q) * 2

    options = {"compiler": "aot_eager", "splitting_ops": ["aten::scaled_dot_product_attention"]}
    run = compiled(fn, options)
    with torch.inference_mode():
        q = torch.randn(3, 2, 5, 4)
        torch.testing.assert_close(run(q), fn(q))
    (report,) = explain(run).reports
    assert [cut.why for cut in report.built.cuts] == ["named in splitting_ops"]
    assert len(report.built.pieces) == 2


def test_graph_breaks_are_reported_with_their_line():
    def fn(x):
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    run = compiled(fn, {"compiler": "eager"})
    with torch.inference_mode():
        run(torch.ones(3))
    text = str(explain(run))
    assert "ended by a graph break at" in text
    assert "test_split.py" in text


def test_cuts_name_the_source_line_and_the_reason():
    run = compiled(Layer(layers=1).eval(), {"compiler": "eager"})
    with torch.inference_mode():
        run(*layer_calls()[0])
    (report,) = explain(run).reports
    (cut,) = report.built.cuts
    assert "ops.store(h * 2, cache, loc)" in cut.source
    assert "mutates its arguments" in cut.why
