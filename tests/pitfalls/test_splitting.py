"""Kinds of fault in splitting a program and in what its break ops return and write.

Each test names its kind. What other tests hold already is not repeated:

==== ===========================================================================================
kind tests elsewhere
==== ===========================================================================================
B13  backend/test_split.py ``a_split_program_is_the_same_program`` (allocating break ops);
     engines/test_strict.py ``a_fresh_tensor_between_two_recordings_does_not_reach_the_second``
B14  backend/test_split.py ``a_split_program_is_the_same_program`` (only a break op, first, last,
     twice in a row, an unused output), ``a_write_without_a_reader_edge_stays_in_its_place``;
     backend/test_outputs.py ``graph_without_operators_and_without_tensors``
B16  backend/test_outputs.py ``a_buffer_assigned_in_forward_stays_where_it_is``,
     ``an_output_that_is_an_input_is_that_tensor``
B17  backend/test_state.py ``one_call_mutates_once``, ``a_mutated_argument_is_the_callers_tensor``;
     backend/test_faults.py ``a_write_before_an_error_is_not_repeated``; test_padding.py here
==== ===========================================================================================
"""

import pytest
import torch
from torch import nn

from compile_backend import explain
from tests import custom_ops as ops
from tests.backend.conftest import compiled
from tests.pitfalls import operators as faulty

# Where addresses are baked, the first calls of one size find out which arguments move.
TURNS = (5, 5, 5, 5, 3, 8, 5, 3, 8, 7, 7)


def rows(*sizes):
    """Arguments that all live at once, so that no two lie at one address."""
    return [torch.randn(n, 4) for n in sizes]


# --- B13: the operator between two pieces ----------------------------------------------------


def in_place_between(x):
    y = x * 2
    ops.bump(y)
    z = y + 1
    ops.bump(z[:, :2])
    return z * y, y


def in_place_and_allocating(x):
    y = ops.opaque(x + 1)
    y.mul_(3)
    z = (x * 2).relu()
    ops.bump(y)
    return ops.opaque(y) - y + z


@pytest.mark.parametrize("fn", [in_place_between, in_place_and_allocating])
def test_a_break_op_in_place_on_what_a_piece_made(capturing, fn):
    """B13, B17: the write is seen by the next piece, once, wherever the tensor lies by then."""
    names = ["graphbuf_test::bump", "graphbuf_test::opaque"]
    run = compiled(fn, {**capturing, "splitting_ops": names, "rowwise_ops": names})
    with torch.inference_mode():
        for x in rows(*TURNS):
            torch.testing.assert_close(run(x), fn(x))
    assert explain(run).hits >= 5


@pytest.mark.parametrize("order", [(0, 1, 0, 2, 1, 0), (0, 0, 1, 1, 0, 2)], ids=str)
def test_a_break_op_that_returns_memory_of_its_own(capturing, order):
    """B13: now one tensor, now another, none of them made for the call and none ours to write."""
    faulty.tables[:] = [torch.full((4,), float(k)) for k in range(3)]
    kept = [table.clone() for table in faulty.tables]
    names = ["graphbuf_pitfalls::picked"]
    run = compiled(
        lambda x, which: (x + 1) * faulty.picked(x, which),
        {**capturing, "splitting_ops": names, "rowwise_ops": names},
    )
    with torch.inference_mode():
        for which, x in zip(order, rows(*[5] * len(order)), strict=True):
            torch.testing.assert_close(run(x, torch.tensor(which)), (x + 1) * which)
    for table, want in zip(faulty.tables, kept, strict=True):
        assert torch.equal(table, want)
    assert explain(run).hits >= 4


# --- B14: the split itself changes the program -----------------------------------------------


class WritesAndReads(nn.Module):
    """Two layers, each a write without a reader edge, a read, and another write over it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(2, 8, 4))

    def forward(self, x, loc, lens):
        for layer in range(2):
            cache = self.cache[layer]
            ops.store(x * 2, cache, loc)
            first, second = ops.halves(ops.attend(x, cache, lens))
            ops.store(x + 1, cache, loc)
            x = torch.cat([second, first], dim=-1) + ops.attend(x, cache, lens)
        return x


def test_break_ops_run_in_program_order_at_every_replay(capturing):
    """B14: the same operators in the same order as eager, and the values of that order."""
    model, reference = WritesAndReads(), WritesAndReads()
    names = [f"graphbuf_test::{name}" for name in ("store", "attend", "halves")]
    run = compiled(model, {**capturing, "splitting_ops": names})
    calls_no_kernel = capturing["engine"] == "host_strict" and "cudagraph_mode" not in capturing
    with torch.inference_mode():
        for x in rows(*TURNS):
            args = x, torch.randperm(8)[: len(x)], torch.randint(1, 9, (len(x),))
            ops.calls.clear()
            want = reference(*args)
            in_eager = list(ops.calls)
            ops.calls.clear()
            got, hits = run(*args), explain(run).hits
            torch.testing.assert_close(got, want)
            torch.testing.assert_close(model.cache, reference.cache)
            if not calls_no_kernel:
                assert ops.calls == in_eager
    assert in_eager[:4] == ["store", "attend", "halves", "store"]
    assert hits >= 3


# --- B16: an assignment in forward moves a buffer --------------------------------------------


class AssignsNothingNew(nn.Module):
    """Buffers that forward assigns to themselves, beside one that it writes and a weight."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.register_buffer("shift", torch.ones(4))
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x):
        self.scale = self.scale.to(x.dtype)
        self.shift = self.shift.contiguous()
        self.steps.add_(1)
        return self.linear(x) * self.scale + self.shift * self.steps


def test_parameters_and_buffers_stay_at_their_address(capturing):
    """B16: before and after every step; updates in place reach the graph."""
    model, reference = AssignsNothingNew().eval(), AssignsNothingNew().eval()
    reference.load_state_dict(model.state_dict())
    addresses = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    run = compiled(model, capturing)
    with torch.inference_mode():
        for x in rows(*TURNS):
            torch.testing.assert_close(run(x), reference(x))
            for each in (model, reference):
                each.scale.mul_(1.5)
            found = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
            assert found == addresses
    assert explain(run).hits >= 5


# --- B17: mutated inputs ---------------------------------------------------------------------


class Counts(nn.Module):
    """Writes one buffer in a piece and one in a break op that reads it on the host."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.steps.add_(1)
        return faulty.count(x * self.steps, self.calls) * self.weight


def test_a_refused_capture_and_a_later_one_write_once_each(capturing):
    """B17: a whole graph is refused after its first write; a moved weight has it recorded anew."""
    model, reference = Counts(), Counts()
    run = compiled(model, capturing)
    heavier = [torch.full((4,), 3.0) for _ in range(2)]
    with torch.inference_mode():
        for turn, x in enumerate(rows(5, 5, 3, 5, 5, 3, 5, 3)):
            if turn == 3:
                model.weight.data, reference.weight.data = heavier
            torch.testing.assert_close(run(x), reference(x))
            assert model.steps.item() == model.calls.item() == turn + 1
    explanation = explain(run)
    # the argument and the weight for size 5, the weight for size 3
    recaptures = 3 if capturing["engine"] == "host_strict" else 0
    assert (explanation.recaptures, explanation.hits) == (recaptures, 6 - recaptures)


@pytest.mark.parametrize("dynamic_batch", [False, True])
def test_arguments_that_overlap_see_each_others_writes(dynamic_batch):
    """B17: the first size, for which stock ``torch.compile`` is right too."""

    def fn(b, a):
        a.add_(1)
        return b * 2

    base = torch.zeros(6, 4)
    want_base = base.clone()
    options = {"compiler": "aot_eager", "engine": "host_strict", "dynamic_batch": dynamic_batch}
    run = compiled(fn, options)
    with torch.inference_mode():
        for _ in range(3):
            want = fn(want_base[1:], want_base[:5])
            torch.testing.assert_close(run(base[1:], base[:5]), want)
            torch.testing.assert_close(base, want_base)
    assert explain(run).hits == 2
