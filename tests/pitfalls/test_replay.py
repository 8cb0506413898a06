"""Kinds of fault in keys, outputs, numbers, weights and errors of captured graphs.

Each test names its kind. What other tests hold already is not repeated:

==== ===========================================================================================
kind tests elsewhere
==== ===========================================================================================
B18  backend/test_outputs.py ``outputs_of_three_steps_survive_the_later_ones`` (a dataclass,
     ``detach()``, a slice, other buckets); engines/test_values.py
     ``fresh_outputs_are_safe_to_keep_and_others_are_overwritten``
B19  backend/test_sizes.py ``captures_stay_within_the_buckets_whatever_comes``,
     ``the_order_of_captures_does_not_matter``, ``exact_sizes_are_captured_up_to_a_limit...``;
     engines/test_failures.py ``a_capture_leaves_no_tensor_alive_but_its_own`` and the collector in
     ``a_failure_leaves_everything_as_found...``. One memory pool for all graphs is a device's.
B20  backend/test_faults.py ``a_host_read_in_a_break_op_follows_the_live_values`` (short at
     capture, long at replay); backend/test_state.py ``numbers_are_part_of_the_key``
B21  backend/test_sizes.py ``a_bucket_is_captured_once_and_every_size_below_it_replays``.
     Which runner's state a batch reads is the serving runners' and is tested with those.
B23  backend/test_sizes.py ``every_size_equals_eager_and_replays``; registry/test_fill.py
     ``a_buffer_holds_live_rows_then_its_tail`` (0 rows between others)
B24  engines/test_failures.py (a fault at each place of a capture); backend/test_faults.py
     ``an_error_in_a_kernel_reaches_the_caller_and_the_next_call_works``
B25  backend/test_state.py ``weights_updated_in_place_are_seen_at_once``,
     ``replaced_weights_are_noticed_before_the_replay``; backend/test_faults.py
     ``invalidate_drops_what_was_captured``
==== ===========================================================================================
"""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from compile_backend import CudaGraphBufferRegistry, FallbackReason, GraphSlot, explain
from tests import custom_ops as ops
from tests.backend.conftest import compiled
from tests.pitfalls import operators as faulty
from tests.pitfalls.conftest import Pool, declare_step, make_step

TURNS = (5, 3, 8, 5, 7, 3, 8)


@pytest.fixture(autouse=True)
def declared_step():
    declare_step()


# --- B18: results overwritten by the next run ------------------------------------------------


class Remembers(nn.Module):
    """Assigns a plain attribute anew in every forward and, if asked, a buffer that it reads."""

    def __init__(self, recurrent):
        super().__init__()
        self.recurrent = recurrent
        self.register_buffer("state", torch.zeros(4))
        self.angles = None

    def forward(self, x, frequencies):
        if self.recurrent:
            self.state = self.state * 0.5 + 1
        self.angles = torch.cos(frequencies + self.state)
        return x * self.angles


@pytest.mark.parametrize("recurrent", [False, True])
def test_what_forward_keeps_on_the_module_outlives_later_steps(capturing, recurrent):
    """B18, B16: the state and the cached table of every step, compared at the end."""
    model, reference = Remembers(recurrent), Remembers(recurrent)
    run = compiled(model, capturing)
    inputs = [(torch.randn(n, 4), torch.rand(4)) for n in (*TURNS, *TURNS)]
    kept, wanted = [], []
    with torch.inference_mode():
        for args in inputs:
            kept.append((run(*args), model.state, model.angles))
            wanted.append((reference(*args), reference.state, reference.angles))
    for got, want in zip(kept, wanted, strict=True):
        torch.testing.assert_close(got, want)
    explanation = explain(run)
    # a state that lies elsewhere after each step is recorded anew where addresses are baked
    assert explanation.hits + (explanation.recaptures if recurrent else 0) >= 6


# --- B19: too many graphs, and memory that adds up -------------------------------------------


def test_memory_does_not_grow_with_traffic(padding):
    """B19: once each bucket is captured; slots are one buffer of the largest bucket."""
    model = nn.Linear(4, 6).eval()
    run = compiled(model, padding)
    held = []
    with torch.inference_mode():
        for k in range(60):
            x = torch.randn(2 + (5 * k) % 7, 4)
            torch.testing.assert_close(run(x), model(x))
            if k >= 6:  # every size has come
                held.append((explain(run).slot_bytes, explain(run).pool_bytes))
    assert len(set(held)) == 1
    assert held[0][0] == 8 * 4 * 4
    assert explain(run).num_cudagraph_captured == 3


@pytest.mark.parametrize("what", ["argument", "result", "weight"])
def test_a_captured_graph_keeps_no_tensor_of_the_caller_alive(capturing, what):
    """B19, B25: neither the batch it was captured with, nor a result, nor a replaced weight."""
    model = nn.Linear(4, 4).eval()
    run = compiled(model, capturing)
    with torch.no_grad():
        x = torch.randn(5, 4)
        watched = {"argument": x, "result": run(x), "weight": model.weight}
        gone = weakref.ref(watched[what])
        model.weight = nn.Parameter(torch.randn(4, 4))
        del watched, x
        for _ in range(2):
            x = torch.randn(5, 4)
            torch.testing.assert_close(run(x), model(x))
    gc.collect()
    assert gone() is None
    assert explain(run).hits >= 1


# --- B20: numbers and plans frozen at capture ------------------------------------------------


@pytest.mark.parametrize("check_padding", [False, True])
def test_a_plan_that_the_caller_resets_is_made_anew_by_every_replay(padding, check_padding):
    """B20: an operator keeps its plan until the caller resets it, as before each step."""
    names = ["graphbuf_pitfalls::planned"]
    run = compiled(
        lambda x, weights: faulty.planned(x + 1, weights) * 2,
        {**padding, "splitting_ops": names, "rowwise_ops": names, "check_padding": check_padding},
    )
    with torch.inference_mode():
        for n in (3, 4, 3, 5, 8, 7):
            x, weights = torch.randn(n, 4), torch.randint(1, 9, (n,))
            faulty.plan.clear()
            torch.testing.assert_close(run(x, weights), (x + 1) * 2 * weights[:, None] * 2)
    assert explain(run).hits == 4


def test_a_flag_that_picks_a_branch_is_part_of_the_key(capturing):
    """B20: a branch is baked by a capture; each value of the flag has graphs of its own."""

    def fn(x, negate, power):
        return (-x if negate else x + 1) ** power

    run = compiled(fn, capturing)
    with torch.inference_mode():
        for n in (5, 3, 5):
            for negate in (False, True, False):
                for power in (2, 3, 2):
                    x = torch.randn(n, 4)
                    torch.testing.assert_close(run(x, negate, power), fn(x, negate, power))
    assert explain(run).hits >= 6


# --- B21: the key at look-up is not the key at capture ---------------------------------------


ARGUMENTS = {
    "sizes": lambda n: (torch.randn(n, 4),),
    "two axes": lambda n: (torch.randn(n, n + 1, 4),),
    "an integer": lambda n: (torch.randn(n, 4), n % 2 + 2),
    "a float": lambda n: (torch.randn(n, 4), n / 2),
    "a flag": lambda n: (torch.randn(n, 4), n == 3),
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_a_call_like_an_earlier_one_finds_its_graph(capturing, kind):
    """B21: a hit is counted for every repeated call, not only the right numbers returned."""

    def fn(x, number=1):
        return (x * 2).relu() * number

    run = compiled(fn, capturing)
    made = [ARGUMENTS[kind](n) for n in (5, 3, 7)]
    with torch.inference_mode():
        for _ in range(3):  # tracing settles what varies, and which arguments move
            for args in made:
                run(*args)
        before = explain(run)
        for args in (*made, *made):
            torch.testing.assert_close(run(*args), fn(*args))
    after = explain(run)
    assert after.hits - before.hits == 6
    assert after.num_cudagraph_captured == before.num_cudagraph_captured
    assert not after.fallbacks


def test_two_compiled_models_report_their_own_buckets_and_rows(padding):
    """B21: in turns, on slots that they share; bucket and live rows are those of who ran."""
    embed = nn.Embedding(32, 4).requires_grad_(False)
    models = [lambda batch: embed(batch.ids) * 2, lambda batch: embed(batch.ids) + 3]
    runs = [compiled(models[0], padding), compiled(models[1], padding)]
    with torch.inference_mode():
        for sizes in ((3, 7), (4, 8), (3, 5)):
            for model, run, n in zip(models, runs, sizes, strict=True):
                batch = make_step(n)
                torch.testing.assert_close(run(batch), model(batch))
    uses = [explain(run).buckets for run in runs]
    assert [[(u.label, u.hits, u.num_rows, u.num_padded_rows) for u in use] for use in uses] == [
        [("tokens=4", 2, 10, 12)],
        [("tokens=8", 2, 20, 24)],
    ]


# --- B23: empty batch ------------------------------------------------------------------------


class Appends(nn.Module):
    """Adds to a cache and counts its calls, as state that an empty step must leave alone."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 4)

    def forward(self, batch):
        h = self.embed(batch.ids)
        faulty.add_rows(h, batch.pool.k, batch.loc)
        return ops.attend(h, batch.pool.k[1:], batch.lens) + h


@pytest.mark.parametrize("sizes", [(3, 0, 3), (0, 3, 0, 5), (8, 0, 0, 8)], ids=str)
def test_an_empty_batch_changes_nothing_and_enters_its_break_ops(padding, sizes):
    """B23: 0 rows out, state untouched, operators between the pieces run as for any batch."""
    calls_no_kernel = padding["engine"] == "host_strict" and "cudagraph_mode" not in padding
    model = Appends().eval()
    names = ["graphbuf_test::attend"]
    run = compiled(model, {**padding, "splitting_ops": names})
    pool, reference_pool = Pool(torch.zeros(16, 4)), Pool(torch.zeros(16, 4))
    with torch.inference_mode():
        for n in sizes:
            batch = make_step(n, pool)
            if n:  # the reference never sees the empty steps
                want = model(make_step(n, **{**vars(batch), "pool": reference_pool}))
            ops.calls.clear()
            got = run(batch)
            if n:
                torch.testing.assert_close(got, want)
            else:
                assert got.shape == (0, 4)
                assert "attend" in ops.calls or calls_no_kernel
            torch.testing.assert_close(pool.k[1:], reference_pool.k[1:])


# --- B24: an exception leaves state behind ---------------------------------------------------


def test_an_error_in_a_fill_hook_reaches_the_caller_and_leaves_no_trace():
    """B24: the hook of a slot raises once; the registry serves the next batch."""
    failing = []

    def hook(buffer, batch, ctx):
        if failing:
            raise RuntimeError("the hook failed")
        buffer[ctx.raw_bs :].fill_(-1)

    registry = CudaGraphBufferRegistry(device="cpu", max_bs=8, max_num_tokens=8)
    slot = GraphSlot("ids", lambda bs, tokens: (bs,), torch.int64, axis="bs", post_fill=hook)
    registry.register_slot(slot)

    def fill(n):
        ids = torch.randint(0, 9, (n,))
        registry.fill_from(
            SimpleNamespace(ids=ids), raw_bs=n, padded_bs=8, raw_num_tokens=n, padded_num_tokens=8
        )
        assert slot.buffer[:n].equal(ids)
        assert slot.buffer[n:].eq(-1).all()

    fill(5)
    failing.append(True)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="the hook failed"):
        fill(3)
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
    failing.clear()
    for n in (4, 8, 3):
        fill(n)


class ThreePieces(nn.Module):
    """The last of three pieces looks up ids that may be out of range."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x, ids):
        self.steps.add_(1)
        h = ops.opaque(x + 1)
        h = ops.opaque(h * 2)
        return h + self.embed(ids) * self.steps


@pytest.mark.parametrize("fails_at", ["capture", "replay"])
def test_an_error_in_the_last_piece_is_the_callers_and_the_bucket_works_on(capturing, fails_at):
    """B24, B17: the same error as eager, the writes before it made once, and a retry that works."""
    model, reference = ThreePieces().eval(), ThreePieces().eval()
    reference.load_state_dict(model.state_dict())
    run = compiled(model, {**capturing, "splitting_ops": ["graphbuf_test::opaque"]})
    good = [(torch.randn(n, 4), torch.randint(0, 8, (n,))) for n in (3, 5, 5, 5, 3, 5, 5)]
    bad = torch.randn(5, 4), torch.full((5,), 99)
    with torch.inference_mode():
        for step, args in enumerate(good):
            if step == (1 if fails_at == "capture" else 4):
                random = torch.get_rng_state()
                for each in (run, reference):
                    with pytest.raises(IndexError, match="out of range"):
                        each(*bad)
                assert torch.equal(torch.get_rng_state(), random)
                assert torch.is_inference_mode_enabled()
                assert torch.equal(model.steps, reference.steps)
            torch.testing.assert_close(run(*args), reference(*args))
            assert torch.equal(model.steps, reference.steps)
    assert explain(run).hits >= 1
    assert FallbackReason.CAPTURE_FAILED not in explain(run).fallbacks


# --- B25: weights or adapters change after capture -------------------------------------------


def replace_parameter(model, value):
    model.linear.weight = nn.Parameter(value)


def swap_data(model, value):
    model.linear.weight.data = value


def load_in_place(model, value):
    model.load_state_dict({**model.state_dict(), "linear.weight": value})


def load_by_assignment(model, value):
    model.load_state_dict({**model.state_dict(), "linear.weight": value}, assign=True)


def rebind_plain_tensor(model, value):
    model.table = value


def rebuild_derived(model, value):
    model.linear.weight.copy_(value)
    model.derived = model.linear.weight.t().contiguous()


def refresh_derived(model, value):
    model.linear.weight.copy_(value)
    model.derived.copy_(model.linear.weight.t())


UPDATES = [
    replace_parameter,
    swap_data,
    load_in_place,
    load_by_assignment,
    rebind_plain_tensor,
    rebuild_derived,
    refresh_derived,
]


class Weighted(nn.Module):
    """A weight, a buffer derived from it, and a tensor that is neither parameter nor buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("derived", self.linear.weight.detach().t().contiguous())
        self.table = torch.randn(4, 4)

    def forward(self, x):
        return self.linear(x) + x @ self.derived + x @ self.table


@pytest.mark.parametrize("update", UPDATES)
def test_an_update_of_any_kind_is_used_at_the_next_call(capturing, update):
    """B25: in place, replaced, reloaded, derived; the old values stay alive meanwhile."""
    model = Weighted().eval()
    run = compiled(model, capturing)
    kept = []
    with torch.no_grad():
        for _ in range(3):
            for n in (5, 3, 5):
                x = torch.randn(n, 4)
                torch.testing.assert_close(run(x), model(x))
            kept.append([model.linear.weight.data, model.derived, model.table])
            update(model, torch.randn(4, 4))
            x = torch.randn(5, 4)
            torch.testing.assert_close(run(x), model(x))
    assert explain(run).hits >= 3


class Adapted(nn.Module):
    """A weight and, while there is one, a low-rank adapter."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.adapter = None

    def forward(self, x):
        y = self.linear(x)
        if self.adapter is not None:
            down, up = self.adapter
            y = y + (x @ down) @ up
        return y


def test_adapters_come_change_and_go(capturing):
    """B25: none, A, none, B, A, another rank, none; a branch not taken at capture is taken."""
    model = Adapted().eval()
    run = compiled(model, capturing)
    a, b = ((torch.randn(4, 2), torch.randn(2, 4)) for _ in range(2))
    wider = torch.randn(4, 3), torch.randn(3, 4)
    with torch.inference_mode():
        for model.adapter in (None, a, None, b, a, wider, None):
            for n in (5, 3, 5):
                x = torch.randn(n, 4)
                torch.testing.assert_close(run(x), model(x))
    assert explain(run).hits >= 5
