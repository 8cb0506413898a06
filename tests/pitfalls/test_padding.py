"""Kinds of fault in which padded rows reach, or outlive, live ones.

Each test names its kind. What other tests hold already is not repeated:

==== ===========================================================================================
kind tests elsewhere
==== ===========================================================================================
B1   registry/test_fill.py ``a_buffer_holds_live_rows_then_its_tail`` (each policy, poisoned);
     registry/test_builders.py ``every_standard_slot_is_live_rows_then_its_fill``;
     registry/test_tensors.py ``every_position_outside_the_live_corner_is_reset``;
     backend/test_declared.py ``the_tail_is_reset_whatever_an_earlier_batch_left``
B3   backend/test_declared.py ``a_declared_batch_is_padded_around_its_break_ops`` (finite scratch
     row); registry/test_fill.py ``reset_padding_restores_tails_without_a_batch``.
     The dummy batches of warm-up are the serving runners' and are tested with those.
B4   passes/test_padding_safety.py (reductions over rows are refused);
     backend/test_declared.py ``the_poison_run_catches_a_broken_promise``
B5   registry/test_builders.py ``the_live_count_is_sharded_over_the_bucket``,
     ``the_live_count_is_plain_without_a_gathered_buffer``
==== ===========================================================================================
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from compile_backend import FallbackReason, GraphSlot, PaddingPolicy, explain
from compile_backend.engines import StrictHostEngine
from compile_backend.registry import build_decode_registry
from tests import custom_ops as ops
from tests.backend.conftest import compiled
from tests.pitfalls import operators as faulty
from tests.pitfalls.conftest import Pool, bucket_of, declare_step, make_step

POISON = 77


@pytest.fixture(autouse=True)
def declared_step():
    declare_step()


# --- B1: stale rows past the live batch ------------------------------------------------------


class Lookup(nn.Module):
    """Gathers from a table of its own."""

    def __init__(self, rows):
        super().__init__()
        self.register_buffer("table", torch.randn(rows, 4))

    def forward(self, batch):
        return self.table[batch.ids] * 2


def test_an_index_left_by_a_larger_batch_is_never_looked_up(padding):
    """B1: two graphs share the slot of ``ids``; 31 is out of range for the smaller table."""
    large, small = Lookup(32), Lookup(4)
    run_large, run_small = compiled(large, padding), compiled(small, padding)
    with torch.inference_mode():
        for n in (3, 5, 3, 7):
            full = make_step(8, ids=torch.full((8,), 31))
            torch.testing.assert_close(run_large(full), large(full))
            few = make_step(n, ids=torch.randint(0, 4, (n,)))
            torch.testing.assert_close(run_small(few), small(few))
    assert explain(run_small).hits == 2
    assert explain(run_large).hits == 3


@pytest.mark.parametrize("sizes", [(3, 5, 3), (5, 3), (8, 2, 8)], ids=str)
def test_slots_of_plain_arguments_hold_live_rows_then_zeros(padding, sizes):
    """B1: whatever the buffers held before each call."""

    def fn(x, ids, mask):
        return x.masked_fill(mask[:, None], 0.0) + ids[:, None]

    run = compiled(fn, padding)
    with torch.inference_mode():
        run(torch.randn(6, 4), torch.arange(6), torch.ones(6, dtype=torch.bool))
        slots = explain(run).reports[-1].served.facts.slots
        for n in sizes:
            for name in slots.derived.slot_names:
                slots.derived.get_slot(name).buffer.fill_(POISON)
            args = {
                "x": torch.randn(n, 4),
                "ids": torch.randint(1, 9, (n,)),
                "mask": torch.rand(n) > 0.5,
            }
            torch.testing.assert_close(run(**args), fn(**args))
            for name, live in args.items():
                view = slots.view(f"l_{name}_", {"batch": bucket_of(n)})
                tail = live.new_zeros(bucket_of(n) - n, *live.shape[1:])
                assert torch.equal(view, torch.cat([live, tail]))


# --- B3: capture writes into rows that are used later ----------------------------------------


class Accumulates(nn.Module):
    """Adds to a cache and a counter, so that a second run of one step shows."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 4)
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, batch):
        self.steps.add_(1)
        h = self.embed(batch.ids) * self.steps
        faulty.add_rows(h, batch.pool.k, batch.loc)
        # reads the longest length on the host: a whole graph is refused where that is baked
        return ops.attend_short(h, batch.pool.k[1:], batch.lens) * 2


@pytest.mark.parametrize("check_padding", [False, True])
def test_capturing_and_its_trial_runs_leave_state_as_one_step_would(padding, check_padding):
    """B3, B17: trial runs, a refused capture and the capture itself, on state that adds up."""
    model, reference = Accumulates().eval(), Accumulates().eval()
    reference.load_state_dict(model.state_dict())
    names = ["graphbuf_test::attend_short"]
    run = compiled(model, {**padding, "splitting_ops": names, "check_padding": check_padding})
    pool, reference_pool = Pool(torch.zeros(16, 4)), Pool(torch.zeros(16, 4))
    with torch.inference_mode():
        for n in (5, 3, 8, 2, 5, 7):
            batch = make_step(n, pool)
            want = reference(make_step(n, **{**vars(batch), "pool": reference_pool}))
            torch.testing.assert_close(run(batch), want)
            torch.testing.assert_close(pool.k[1:], reference_pool.k[1:])
            torch.testing.assert_close(model.steps, reference.steps)
            assert pool.k[0].isfinite().all()
    explanation = explain(run)
    assert (explanation.hits, explanation.fallbacks) == (3, {})
    assert {b.num_segments for b in explanation.buckets} == (
        {1} if padding["engine"] == "host" else {2}
    )


# --- B4: padded rows change live rows through cross-row work ---------------------------------


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 4)
        self.register_buffer("cache", torch.randn(8, 4))

    def forward(self, batch):
        return ops.attend(self.embed(batch.ids), self.cache, batch.lens).relu() + 1


def test_the_fill_value_of_lengths_does_not_reach_live_rows(padding):
    """B4: bit-equal live rows for any fill; with 0 every padded row is NaN."""
    model = Attends().eval()
    batches = [make_step(n) for n in (5, 3, 8, 5, 7)]
    options = {**padding, "splitting_ops": ["graphbuf_test::attend"]}
    outputs = []
    for fill in (1, 3, 7, 0):
        torch._dynamo.reset()
        declare_step(len_fill=fill)
        run = compiled(model, options)
        with torch.inference_mode():
            outputs.append([run(batch) for batch in batches])
        slot = explain(run).reports[-1].served.facts.slots.declared.get_slot("lens")
        assert slot.buffer[7] == fill  # the last batch was 7 of 8 rows
        assert explain(run).hits >= 2
    for batch, *same in zip(batches, *outputs, strict=True):
        torch.testing.assert_close(same[0], model(batch))
        assert all(torch.equal(same[0], other) for other in same)


def test_a_scale_shared_by_all_rows_is_computed_over_live_rows_only(padding):
    """B4: rows of length 0 are NaN in ``attend``, and the scale would carry that to every row."""
    cache = torch.randn(6, 4)

    def fn(q, lens):
        h = ops.attend(q, cache, lens)
        scale = h.abs().amax() / 127
        return (h / scale).round() * scale

    run = compiled(fn, {**padding, "rowwise_ops": ["graphbuf_test::attend"]})
    with torch.inference_mode():
        for n in (5, 3, 8, 5):
            q, lens = torch.randn(n, 4), torch.randint(1, 7, (n,))
            torch.testing.assert_close(run(q, lens), fn(q, lens))
    assert set(explain(run).fallbacks) == {FallbackReason.PADDING_UNSAFE}


# --- B5: the boundary of the live rows -------------------------------------------------------


def test_the_live_count_is_right_at_capture_and_at_every_replay(padding):
    """B5: short at capture and long at replay, and the other way round."""
    declare_step(
        GraphSlot(
            "num_live",
            lambda max_bs, max_num_tokens: (1,),
            torch.int64,
            axis="none",
            padding_policy=PaddingPolicy.KEEP_PAD,
        )
    )
    embed = nn.Embedding(32, 4).requires_grad_(False)

    def fn(batch):
        return faulty.centre_live(embed(batch.ids) + 1, batch.num_live) * 2

    names = ["graphbuf_pitfalls::centre_live"]
    run = compiled(fn, {**padding, "splitting_ops": names, "check_padding": True})
    with torch.inference_mode():
        for n in (3, 7, 5, 8, 4, 6, 3):
            batch = make_step(n, num_live=torch.tensor([n]))
            torch.testing.assert_close(run(batch), fn(batch))
    explanation = explain(run)
    assert (explanation.hits, explanation.fallbacks) == (5, {})


def test_a_break_op_sees_one_length_in_all_fields(padding):
    """B5: the bucket's rows in a padded run, the caller's rows above the largest bucket."""
    embed = nn.Embedding(32, 4).requires_grad_(False)

    def fn(batch):
        h = embed(batch.ids)
        return faulty.same_rows(h, batch.positions, batch.loc) + batch.positions[:, None]

    run = compiled(fn, {**padding, "splitting_ops": ["graphbuf_pitfalls::same_rows"]})
    with torch.inference_mode():
        for n in (5, 3, 8, 9, 5, 2, 7):
            batch = make_step(n)
            faulty.row_counts.clear()
            got = run(batch)
            rows = set(faulty.row_counts)
            torch.testing.assert_close(got, fn(batch))
            # a whole strict graph holds what the operator does and never calls it again
            assert rows <= {(n,) * 3 if n > 8 else (bucket_of(n),) * 3}
            assert rows or padding["engine"] == "host_strict"
    assert explain(run).hits == 3
    assert explain(run).fallbacks == {FallbackReason.ABOVE_LARGEST_BUCKET: 1}


def test_a_registrys_computed_count_follows_every_fill():
    """B5: the same hook at the fill before a capture and at those before replays."""
    registry = build_decode_registry(
        device="cpu",
        max_bs=8,
        max_num_token=8,
        seq_len_fill_value=1,
        cache_loc_dtype=torch.int64,
        enable_num_token_non_padded=True,
        share_pool=False,
    )

    def fill(n):
        live = torch.arange(1, n + 1)
        fields = ("input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens")
        batch = SimpleNamespace(
            **dict.fromkeys(fields, live), seq_lens_cpu=live, mrope_positions=None
        )
        registry.fill_from(batch, raw_bs=n, padded_bs=8, raw_num_tokens=n, padded_num_tokens=8)

    positions = registry.get_slot("positions").slice_for(8, 8)
    num_live = registry.get_slot("num_token_non_padded").buffer
    fill(3)
    replay = StrictHostEngine().capture(
        lambda x, count: [faulty.centre_live(x[:, None].float(), count)],
        static_inputs=[positions, num_live],
    )
    for n in (3, 7, 2):
        fill(n)
        live = torch.arange(1.0, n + 1)
        torch.testing.assert_close(replay()[0][:n, 0], live - live.mean())
