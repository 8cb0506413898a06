"""Outputs are eager's: shapes, strides, identity, and safe to keep."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from compile_backend import FallbackReason, explain
from tests.backend.conftest import assert_equal_runs, compiled

SIZES = (5, 3, 8, 5, 7, 3)


def rows(*sizes, width=4):
    return [(torch.randn(n, width),) for n in sizes]


@dataclass
class Result:
    hidden: torch.Tensor
    pair: tuple
    named: dict


def structured(x):
    y = (x * 2).relu()
    return Result(hidden=y, pair=(y.sum(-1), None), named={"flag": y > 1, "int": y.long()})


def strided(x):
    y = x.exp()
    return (
        y.t().contiguous().t(),
        y[:, :2],
        y.unsqueeze(1).expand(-1, 3, -1),
        y.unflatten(1, (2, 2)),
    )


def shared_storage(x):
    y = x + 1
    return y, y[:, 1:], y


@pytest.mark.parametrize("fn", [structured, strided, shared_storage])
def test_structures_strides_and_dtypes(setting, fn):
    if fn is structured:  # assert_close does not look into a dataclass
        run = compiled(fn, setting)
        with torch.inference_mode():
            kept = [(run(*args), fn(*args)) for args in rows(*SIZES)]
        for got, want in kept:
            assert got.pair[1] is None
            torch.testing.assert_close(got.hidden, want.hidden)
            torch.testing.assert_close(got.pair[0], want.pair[0])
            torch.testing.assert_close(got.named, want.named)
    else:
        assert_equal_runs(fn, setting, rows(*SIZES), min_hits=1)


def test_outputs_that_share_memory_in_eager_share_it_here(setting):
    run = compiled(shared_storage, setting)
    with torch.inference_mode():
        for args in rows(*SIZES):
            whole, part, again = run(*args)
            part.zero_()
            assert whole[:, 1:].eq(0).all()
            assert again.data_ptr() == whole.data_ptr()


def test_one_tensor_returned_twice_is_one_tensor(setting):
    def fn(x):
        y = (x * 2).relu()
        return y, y.contiguous(), y.detach(), {"again": y}

    run = compiled(fn, setting)
    with torch.inference_mode():
        for args in rows(*SIZES):
            got, want = run(*args), fn(*args)
            torch.testing.assert_close(got, want)
            assert want[1] is want[0]
            assert got[1] is got[0]
            assert got[3]["again"] is got[0]
            assert got[2].data_ptr() == got[0].data_ptr()


def test_outputs_of_three_steps_survive_the_later_ones(capturing):
    run = compiled(structured, capturing)
    calls = rows(8, 8, 5, 3, 7, 8)
    with torch.inference_mode():
        kept = [run(*args).hidden.detach()[:2] for args in calls]
        wanted = [structured(*args).hidden[:2] for args in calls]
    assert explain(run).hits >= 1
    for got, want in zip(kept, wanted, strict=True):
        torch.testing.assert_close(got, want)


def test_with_copy_outputs_off_the_next_replay_overwrites_the_last_one():
    options = {
        "compiler": "aot_eager",
        "engine": "host_strict",
        "cudagraph_capture_sizes": [4],
        "copy_outputs": False,
    }
    run = compiled(lambda x: x + 1, options)
    with torch.inference_mode():
        first = run(torch.zeros(3, 2))
        second = run(torch.full((3, 2), 9.0))
    assert first.shape == (3, 2)
    assert first.data_ptr() == second.data_ptr()
    assert first.eq(10).all()


def test_an_output_that_is_an_input_is_that_tensor(setting):
    run = compiled(lambda x, y: (x, x * y, y), setting)
    with torch.inference_mode():
        for n in SIZES:
            x, y = torch.randn(n, 4), torch.randn(n, 4)
            out = run(x, y)
            assert out[0] is x
            assert out[2] is y
            torch.testing.assert_close(out[1], x * y)


def test_a_view_of_an_input_is_a_view_of_the_callers_tensor(setting):
    run = compiled(lambda x: (x[:, :2], x * 2), setting)
    with torch.inference_mode():
        for n in SIZES:
            x = torch.randn(n, 4)
            view, _ = run(x)
            view.zero_()
            assert x[:, :2].eq(0).all()
    if "cudagraph_capture_sizes" in setting:
        assert explain(run).fallbacks[FallbackReason.ALIASED_OUTPUT] >= len(SIZES) - 1


class Assigns(nn.Module):
    """A "no-op" assignment of a buffer in forward: the buffer is an output of the graph."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x):
        self.scale = self.scale.to(x.dtype)
        return x * self.scale


def test_a_buffer_assigned_in_forward_stays_where_it_is(setting):
    model = Assigns()
    before = model.scale
    run = compiled(model, setting)
    with torch.inference_mode():
        for n in SIZES:
            x = torch.randn(n, 4)
            torch.testing.assert_close(run(x), x * 2)
            assert model.scale.data_ptr() == before.data_ptr()


def test_size_outputs_are_the_live_sizes(setting):
    run = compiled(lambda x: (x * 2, x.shape[0] * 3), setting)
    with torch.inference_mode():
        for n in SIZES:
            x = torch.randn(n, 4)
            got, number = run(x)
            assert number == 3 * n
            torch.testing.assert_close(got, x * 2)


def test_graph_without_operators_and_without_tensors(setting):
    assert_equal_runs(lambda x: x, setting, rows(*SIZES))
    assert_equal_runs(lambda x: (x, x), setting, rows(*SIZES))


def test_callers_in_inference_mode_and_no_grad_alternate(setting):
    run = compiled(lambda x: (x @ x.mT).relu(), setting)
    for step, n in enumerate((5, 5, 5, 3, 3, 8, 8)):
        x = torch.randn(n, 4, 4)
        with torch.inference_mode() if step % 2 else torch.no_grad():
            torch.testing.assert_close(run(x), (x @ x.mT).relu())
