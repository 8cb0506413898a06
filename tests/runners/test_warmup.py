"""Warm-up: captures happen there and only there, largest first, and it leaves nothing behind."""

import contextlib
import gc
import io
import logging
import re

import pytest
import torch

from compile_backend.attention import SCRATCH_SLOT
from tests.runners.models import Decoder, make_world

SIZES = {"cudagraph_capture_sizes": (2, 4, 8), "prefill_capture_sizes": (4, 8)}


def captured(runner):
    """Keys of all graphs in the order in which they were captured."""
    keys = [key for each in runner.graph_runners for key in each.graphs.keys]
    return keys, list(runner.logits.graphs.keys)


def test_buckets_are_captured_in_warm_up_alone_and_the_largest_first(engine):
    world = make_world(kv_len_buckets=(8, 16))
    runner = world.runner(warm=False, engine=engine, **SIZES)
    requests = world.cached(8)
    world.serve(runner, requests)
    assert runner.explain().num_cudagraph_captured == 0
    facts = runner.warmup()
    keys, logits = captured(runner)
    assert [(key.bs, key.attention) for key in keys if key.bs] == [
        (bs, (kv_len,)) for bs in (8, 4, 2) for kv_len in (64, 16, 8)
    ]
    assert [key.tokens for key in keys if not key.bs] == [8, 4]
    assert [key.bs for key in logits] == [8, 4, 2]
    assert facts.num_captured == 9 + 2 + 3
    assert facts.num_refused == 0
    for n in (1, 3, 5, 8, 2):
        world.serve(runner, requests[:n])
        runner.forward(world.extend((n,))[1])
    assert captured(runner) == (keys, logits)
    assert runner.warmup() is facts
    assert captured(runner) == (keys, logits)


# --- what it shows ----------------------------------------------------------------------------


def shown(**config):
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        make_world(kv_len_buckets=(64,)).runner(**SIZES, **config)
    return errors.getvalue()


def test_the_progress_bar_names_the_bucket_and_the_free_memory(capsys):
    text = shown(show_progress=True)
    lines = re.findall(r"Capturing batches \((\w+)=(\d+) avail_mem=\d+\.\d\d GB\)", text)
    seen = list(dict.fromkeys(lines))
    assert seen == [
        ("bs", "8"), ("bs", "4"), ("bs", "2"), ("tokens", "8"), ("tokens", "4"),
        ("logits", "8"), ("logits", "4"), ("logits", "2"),
    ]  # fmt: skip
    assert "8/8" in text
    assert capsys.readouterr().out == ""


QUIET = [
    {"show_progress": False},
    {"show_progress": True, "attn_tp_size": 2, "attn_tp_rank": 1},
    {"show_progress": True, "dp_size": 2, "dp_rank": 1},
    {"show_progress": True, "pp_size": 2, "pp_rank": 1},
]


@pytest.mark.parametrize("config", QUIET, ids=lambda c: ",".join(c))
def test_nothing_is_shown_when_switched_off_or_on_other_ranks(config):
    assert shown(**config) == ""


def test_the_closing_line_says_how_many_graphs_seconds_and_bytes(engine, caplog):
    caplog.set_level(logging.INFO, logger="compile_backend")
    runner = make_world().runner(engine=engine, **SIZES)
    line = caplog.messages[-1]
    found = re.search(r"captured (\d+) graphs in (\d+\.\d+) s \((\d+) bytes\)", line)
    assert found is not None
    facts, explanation = runner.warmup_facts, runner.explain()
    assert int(found[1]) == facts.num_captured == explanation.num_cudagraph_captured
    assert float(found[2]) == pytest.approx(facts.capture_seconds, abs=0.01)
    assert int(found[3]) == facts.pool_bytes == explanation.pool_bytes
    assert (facts.pool_bytes > 0) == (engine == "host_strict")
    assert facts.trace_seconds + facts.capture_seconds <= facts.total_seconds


# --- what it leaves ---------------------------------------------------------------------------


def slot_values(runner):
    return {
        (each.name, name): each.registry.get_slot(name).layout.buffer.clone()
        for each in (runner.eager, *runner.graph_runners)
        for name in each.registry.slot_names
    }


def assert_warm_up_left_nothing(world, runner, before, poison):
    for cache in (world.kv.k, world.kv.v):
        assert torch.equal(cache[:, 1:], torch.full_like(cache[:, 1:], poison))
        assert torch.isfinite(cache[:, SCRATCH_SLOT]).all()
    after = slot_values(runner)
    assert after.keys() == before.keys()
    for name, values in before.items():
        assert torch.equal(after[name], values), name
    assert not world.table.req_to_token.any()


@pytest.mark.parametrize("poison", [1234.5, float("inf")])
def test_warm_up_writes_nothing_but_the_scratch_row(engine, poison):
    world = make_world()
    before = slot_values(world.runner(warm=False, engine=engine, **SIZES))
    for cache in (world.kv.k, world.kv.v):
        cache.fill_(poison)
        cache[:, SCRATCH_SLOT] = float("nan")  # as if an earlier user had left it
    state = {name: value.clone() for name, value in world.model.state_dict().items()}
    runner = world.runner(warm=False, engine=engine, **SIZES)
    random, grad = torch.get_rng_state(), torch.is_grad_enabled()
    runner.warmup()
    assert_warm_up_left_nothing(world, runner, before, poison)
    assert all(torch.equal(state[name], value) for name, value in world.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.is_grad_enabled() == grad
    assert gc.isenabled()


def test_capturing_again_leaves_no_more_than_warm_up_did(engine):
    world = make_world()
    runner = world.runner(engine=engine, **SIZES)
    before = slot_values(runner)
    runner.invalidate()
    runner.capture()
    assert_warm_up_left_nothing(world, runner, before, 0.0)
    assert not world.kv.k[:, SCRATCH_SLOT].any()


def test_padded_rows_write_the_scratch_row_which_is_nobodys(engine):
    world = make_world(num_slots=64)
    runner = world.runner(engine=engine, cudagraph_capture_sizes=(8,), prefill_capture_sizes=(8,))
    assert not world.kv.k[:, SCRATCH_SLOT].any()
    requests = world.cached(3)
    taken = [slot for request in requests for slot in request.slots]
    free = world.kv.k.clone()
    batch = world.decode(requests)
    runner.forward(batch)
    assert world.kv.k[:, SCRATCH_SLOT].any()
    assert torch.isfinite(world.kv.k[:, SCRATCH_SLOT]).all()
    written = [*batch.out_cache_loc.tolist(), SCRATCH_SLOT]
    others = [slot for slot in range(64) if slot not in written]
    assert torch.equal(world.kv.k[:, others], free[:, others])
    rest = world.allocator.allocate(world.allocator.num_free)
    assert sorted([*taken, *batch.out_cache_loc.tolist(), *rest]) == list(range(1, 64))
    assert world.table.allocate() != 0


class Counts(Decoder):
    """Counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("num_calls", torch.zeros(1))

    def after(self, h, batch):
        self.num_calls.add_(1)
        return h


def test_a_buffer_that_counts_is_written_once_per_call_and_never_by_warm_up(engine):
    """B17: also where a bucket is captured again because a weight moved."""
    world = make_world(Counts)
    runner = world.runner(engine=engine, **SIZES)
    assert world.model.num_calls.item() == 0
    requests = world.cached(8)
    world.model.num_calls.zero_()
    for k, n in enumerate((3, 4, 8, 1, 5), start=1):
        if k == 3:
            world.model.norm.weight = torch.nn.Parameter(torch.rand_like(world.model.norm.weight))
        assert world.serve(runner, requests[:n]).path == "decode"
        assert world.model.num_calls.item() == k
    for k, n in enumerate((3, 8, 16), start=6):
        pairs, batch = world.extend((n,))
        world.check(runner.forward(batch), pairs)
        assert world.model.num_calls.item() == k
    runner.invalidate()
    runner.capture()
    assert world.model.num_calls.item() == 8


@pytest.mark.parametrize("prefill_backend", ["piecewise", "breakable"])
def test_a_prefill_bucket_may_hold_more_tokens_than_one_request(engine, prefill_backend):
    world = make_world(context=6, kv_len_buckets=None)
    runner = world.runner(engine=engine, prefill_backend=prefill_backend)
    assert runner.warmup().num_refused == 0
    for lengths in ((6, 6, 4), (5, 5, 5), (6, 3)):
        pairs, batch = world.extend(lengths)
        out = runner.forward(batch)
        world.check(out, pairs)
        assert (out.path, out.bucket) == ("prefill", 16)
        for request, _ in pairs:
            world.finish(request)
