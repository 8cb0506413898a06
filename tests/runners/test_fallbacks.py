"""Every reason for which no graph runs: counted, logged once, raised under strict, with advice
that works when it is followed."""

import logging
import re

import pytest
import torch

from compile_backend import FallbackError, FallbackReason, ForwardMode
from tests import custom_ops as ops
from tests.runners.models import Decoder, World, close, make_world

FEW = {"cudagraph_capture_sizes": (2, 4), "prefill_capture_sizes": (4, 8)}


class Case:
    """A world whose runner has a reason to fall back, and the batch that shows it."""

    def __init__(
        self, world: World, config, make_batch, *, prepare=None, follow=None, path="eager"
    ):
        self.world, self.config, self.make_batch = world, config, make_batch
        self.prepare = prepare  # called with the warm runner
        self.follow = follow  # the config that the advice asks for
        self.path = path

    def runner(self, **config):
        runner = self.world.runner(warm=False, **{**FEW, **self.config, **config})
        (self.prepare or (lambda each: each.warmup()))(runner)
        return runner


def decode_of(n):
    return lambda world: world.decode(world.cached(n))


def extend_of(*lengths, **fields):
    return lambda world: world.extend(lengths, **fields)[1]


def draft_extend(world):
    return world.extend((3,), ForwardMode.DRAFT_EXTEND)[1]


class Branches(Decoder):
    """Branches on how many tokens there are."""

    def after(self, h, batch):
        return h * 2 if h.shape[0] > 3 else h


class Centres(Decoder):
    """Mixes rows."""

    def after(self, h, batch):
        return h - h.mean(0)


class Flagged(Decoder):
    """Branches on an optional field that no config tells of."""

    def after(self, h, batch):
        return h if batch.spec_info is None else h * 2


def warm_and_invalidate(runner):
    runner.warmup()
    runner.invalidate()


Reason = FallbackReason
CASES = {
    "decode above": (
        Reason.ABOVE_LARGEST_BUCKET,
        lambda: Case(
            make_world(Decoder, 1), {}, decode_of(6), follow={"cudagraph_capture_sizes": (2, 6)}
        ),
        r"6 requests .* 4; give cudagraph_capture_sizes with a size of 6",
    ),
    "prefill above": (
        Reason.ABOVE_LARGEST_BUCKET,
        lambda: Case(
            make_world(Decoder, 1), {}, extend_of(7, 5), follow={"prefill_capture_sizes": (4, 12)}
        ),
        r"12 tokens .* 8; give prefill_capture_sizes with a size of 12",
    ),
    "prefill above the chunk": (
        Reason.ABOVE_LARGEST_BUCKET,
        lambda: Case(
            make_world(Decoder, 1),
            {"chunked_prefill_size": 8, "max_running_requests": 16},
            extend_of(12),
            follow={"chunked_prefill_size": 12, "prefill_capture_sizes": (4, 12)},
        ),
        r"12 tokens .* 8; .*chunked_prefill_size",
    ),
    "padding waste": (
        Reason.PADDING_WASTE,
        lambda: Case(
            make_world(Decoder, 1),
            {"max_padding_waste": 1.5},
            extend_of(5),
            follow={"max_padding_waste": 1.6},
        ),
        r"5 tokens would run as 8, .* 1\.5 .* or raise it",
    ),
    "padding waste, another size": (
        Reason.PADDING_WASTE,
        lambda: Case(
            make_world(Decoder, 1),
            {"max_padding_waste": 1.5},
            extend_of(5),
            follow={"max_padding_waste": 1.5, "prefill_capture_sizes": (4, 6, 8)},
        ),
        r"give prefill_capture_sizes with a size nearer to 5",
    ),
    "mode": (
        Reason.MODE_NOT_CAPTURED,
        lambda: Case(make_world(Decoder, 1), {}, draft_extend),
        r"DRAFT_EXTEND",
    ),
    "before warm-up": (
        Reason.NOT_CAPTURED,
        lambda: Case(make_world(Decoder, 1), {}, decode_of(3), prepare=lambda runner: None),
        r"warmup\(\)",
    ),
    "after invalidate": (
        Reason.NOT_CAPTURED,
        lambda: Case(make_world(Decoder, 1), {}, decode_of(3), prepare=warm_and_invalidate),
        r"call capture\(\)",
    ),
    "guard": (
        Reason.GUARD_FAILED,
        lambda: Case(
            make_world(Branches, 1),
            {"cudagraph_capture_sizes": (4, 8)},
            decode_of(3),
        ),
        r"4 <= ",
    ),
    "mixing rows": (
        Reason.PADDING_UNSAFE,
        lambda: Case(
            make_world(Centres, 1), {}, decode_of(3), follow={"cudagraph_capture_sizes": (2, 3, 4)}
        ),
        r"mean.*\(models.py|mean.*test_fallbacks.py:\d+",
    ),
    "opaque operator": (
        Reason.PADDING_UNSAFE,
        lambda: Case(
            make_world(Opaque, 1),
            {},
            decode_of(3),
            follow={"rowwise_ops": ("graphbuf_test::opaque",)},
        ),
        r"graphbuf_test.opaque.*rowwise_ops",
    ),
    "variant": (
        Reason.VARIANT_NOT_TRACED,
        lambda: Case(
            make_world(Flagged, 1), {}, lambda w: w.decode(w.cached(3), spec_info=object())
        ),
        r"examples",
    ),
    "another batch type": (
        Reason.VARIANT_NOT_TRACED,
        lambda: Case(make_world(Decoder, 1), {}, lambda w: subclassed(w.decode(w.cached(3)))),
        r"examples",
    ),
}  # fmt: skip


class Opaque(Decoder):
    """Ends in a custom operator that nothing vouches for."""

    def after(self, h, batch):
        return ops.opaque(h)


def subclassed(batch):
    """The same batch, of a type of its own."""
    return type("TaggedBatch", (type(batch),), {})(**vars(batch))


@pytest.mark.parametrize("name", CASES)
def test_a_fall_back_is_counted_logged_once_and_right(name, caplog):
    reason, make, message = CASES[name]
    case = make()
    runner = case.runner(engine="host_strict")
    batch = case.make_batch(case.world)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="compile_backend"):
        for _ in range(3):
            want = case.world.eagerly(batch)
            out = runner.forward(batch)
            close(out.hidden_states, want)
            assert (out.path, out.reason, out.bucket) == ("eager", reason, None)
    explanation = runner.explain()
    assert explanation.fallbacks == {reason: 3}
    assert explanation.paths == {"eager": 3}
    assert explanation.hits == 0
    assert len([m for m in caplog.messages if reason.name in m]) == 1
    (logged,) = (text for (_, why), text in explanation.messages.items() if why is reason)
    assert logged in caplog.text
    assert re.search(message, logged), logged
    assert f"{reason.name} x3" in str(explanation)
    assert logged in str(explanation)


@pytest.mark.parametrize("name", CASES)
def test_strict_raises_the_reason_and_writes_nothing(name):
    reason, make, message = CASES[name]
    case = make()
    runner = case.runner(engine="host_strict", strict=True)
    batch = case.make_batch(case.world)
    before = case.world.kv.k.clone()
    with pytest.raises(FallbackError, match=message) as error:
        runner.forward(batch)
    assert error.value.reason is reason
    assert reason.name in str(error.value)
    assert torch.equal(case.world.kv.k, before)
    assert runner.explain().paths == {}


FOLLOWED = [
    "decode above",
    "prefill above",
    "prefill above the chunk",
    "padding waste",
    "padding waste, another size",
    "mixing rows",
    "opaque operator",
]


@pytest.mark.parametrize("name", FOLLOWED)
def test_the_advice_works_when_it_is_followed(name, engine):
    _, make, _ = CASES[name]
    case = make()
    runner = case.runner(engine=engine, strict=True, **case.follow)
    batch = case.make_batch(case.world)
    want = case.world.eagerly(batch)
    out = runner.forward(batch)
    close(out.hidden_states, want)
    assert (out.reason, runner.explain().hits) == (None, 1)


@pytest.mark.parametrize("name", ["variant", "another batch type"])
@pytest.mark.parametrize("is_warm", [False, True])
def test_warming_up_with_examples_serves_their_kind(name, is_warm, engine):
    """Before the first warm-up and, as the message of a live runner says, after it."""
    case = CASES[name][1]()
    runner = case.runner(engine=engine) if is_warm else case.world.runner(
        warm=False, engine=engine, **FEW
    )  # fmt: skip
    example = case.make_batch(case.world)
    if is_warm:
        assert runner.forward(example).reason is FallbackReason.VARIANT_NOT_TRACED
    runner.warmup(examples=[example])
    requests = case.world.cached(4)
    for n in (3, 4, 1):
        batch = case.world.decode(requests[:n], spec_info=example.spec_info)
        if name == "another batch type":
            batch = subclass_like(batch, example)
        want = case.world.eagerly(batch)
        out = runner.forward(batch)
        close(out.hidden_states, want)
        assert (out.path, out.reason) == ("decode", None)
    assert case.world.serve(runner, requests).path == "decode"  # the kinds of before


def subclass_like(batch, example):
    return type(example)(**vars(batch))


def test_capturing_again_follows_the_advice_after_invalidate(engine):
    world = make_world(Decoder, 1)
    runner = world.runner(engine=engine, **FEW)
    requests = world.cached(4)
    world.serve(runner, requests)
    num_compiled = len(runner.traced.graphs)
    runner.invalidate()
    assert runner.explain().num_cudagraph_captured == 0
    for batch in (world.decode(requests), world.extend((4,))[1]):
        assert runner.forward(batch).reason is FallbackReason.NOT_CAPTURED
    runner.capture()
    assert world.serve(runner, requests).path == "decode"
    pairs, batch = world.extend((4,))
    out = runner.forward(batch)
    world.check(out, pairs)
    assert out.path == "prefill"
    assert len(runner.traced.graphs) == num_compiled
    assert runner.explain().hits == 3  # the one before counts on


def test_rows_that_are_mixed_replay_at_their_exact_size(engine):
    world = make_world(Centres, 1)
    runner = world.runner(engine=engine, **FEW)
    requests = world.cached(4)
    paths = {}
    for n in (2, 3, 4, 1, 2):
        batch = world.decode(requests[:n])
        want = world.eagerly(batch)
        out = runner.forward(batch)
        close(out.hidden_states, want)
        paths[n] = out.path
    assert paths == {1: "eager", 2: "decode", 3: "eager", 4: "decode"}
    for n, path in ((8, "prefill"), (7, "eager"), (4, "prefill")):
        batch = world.extend((n - 1, 1))[1]
        want = world.eagerly(batch)
        out = runner.forward(batch)
        close(out.hidden_states, want)
        assert out.path == path


@pytest.mark.parametrize(
    "threshold",
    [
        1,
        3,
        5,
        6,
        9,
    ],
)
def test_a_branch_on_the_number_of_tokens_is_never_taken_at_the_padded_size(threshold):
    """The live size decides, wherever the threshold lies among buckets and sizes of the trace."""

    class Branch(Decoder):
        def after(self, h, batch):
            return h * 2 if h.shape[0] > threshold else h

    world = make_world(Branch, 1)
    runner = world.runner(
        engine="host", cudagraph_capture_sizes=(1, 4, 8), prefill_capture_sizes=(12,)
    )
    requests = world.cached(8)
    for n in range(1, 9):
        batch = world.decode(requests[:n])
        want = world.eagerly(batch)
        out = runner.forward(batch)
        close(out.hidden_states, want)
        assert out.reason in (None, FallbackReason.GUARD_FAILED)
    assert runner.explain().hits >= 3


# --- logits ------------------------------------------------------------------------------------


def test_logits_of_too_many_rows_are_made_without_a_graph(engine):
    """The model's graph runs all the same; what the message asks for helps."""
    world = make_world(Decoder, 1)
    runner = world.runner(engine=engine, **FEW)
    pairs, batch = world.extend((4, 3), return_logprob=True)
    out = runner.forward(batch)
    world.check(out, pairs)
    assert (out.path, out.reason, len(out.logits)) == ("prefill", None, 7)
    explanation = runner.explain()
    assert explanation.logits_fallbacks == {FallbackReason.ABOVE_LARGEST_BUCKET: 1}
    assert explanation.fallbacks == {}
    message = explanation.messages["logits", FallbackReason.ABOVE_LARGEST_BUCKET]
    assert "cudagraph_capture_sizes with a size of 7" in message
    followed = world.runner(engine=engine, **{**FEW, "cudagraph_capture_sizes": (2, 7)})
    out = followed.forward(batch)
    world.check(out, pairs)
    assert followed.explain().logits_fallbacks == {}
    assert {use.name: use.hits for use in followed.explain().runners}["logits"] == 1


def test_logits_above_what_may_run_name_the_limit(engine):
    world = make_world(Decoder, 1)
    runner = world.runner(engine=engine, max_running_requests=4, **FEW)
    pairs, batch = world.extend((4, 3), return_logprob=True)
    world.check(runner.forward(batch), pairs)
    message = runner.explain().messages["logits", FallbackReason.ABOVE_LARGEST_BUCKET]
    assert "max_running_requests" in message
    sizes = {**FEW, "cudagraph_capture_sizes": (2, 7)}
    world = make_world(Decoder, 1)
    followed = world.runner(engine=engine, max_running_requests=7, **sizes)
    pairs, batch = world.extend((4, 3), return_logprob=True)
    world.check(followed.forward(batch), pairs)
    assert followed.explain().logits_fallbacks == {}


def test_strict_refuses_logits_without_a_graph_before_anything_runs():
    world = make_world(Decoder, 1)
    runner = world.runner(engine="host_strict", strict=True, **FEW)
    batch = world.extend((4, 3), return_logprob=True)[1]
    before = world.kv.k.clone()
    with pytest.raises(FallbackError, match="logits") as error:
        runner.forward(batch)
    assert error.value.reason is FallbackReason.ABOVE_LARGEST_BUCKET
    assert torch.equal(world.kv.k, before)
    assert runner.explain().paths == {}


def test_each_runner_logs_its_own_reason(caplog):
    """Decode, prefill and logits above their largest sizes: three messages."""
    world = make_world(Decoder, 1)
    runner = world.runner(engine="host", **FEW)
    requests = world.cached(6)
    with caplog.at_level(logging.WARNING, logger="compile_backend"):
        for _ in range(2):
            world.serve(runner, requests)
            for lengths, logprob in (((12,), False), ((4, 3), True)):
                pairs, batch = world.extend(lengths, return_logprob=logprob)
                world.check(runner.forward(batch), pairs)
    logged = [m for m in caplog.messages if "ABOVE_LARGEST_BUCKET" in m]
    assert len(logged) == 3
    assert sum("6 requests" in m for m in logged) == 1
    assert sum("12 tokens" in m for m in logged) == 1
    assert sum("7 rows" in m for m in logged) == 1
    text = str(runner.explain())
    for part in ("6 requests", "12 tokens", "7 rows"):
        assert text.count(part) == 1


# --- switched off, nested -----------------------------------------------------------------------


def test_without_an_engine_every_forward_is_eager_and_says_so():
    world = make_world(Decoder, 1)
    runner = world.runner(engine="none", strict=True, **FEW)
    requests = world.cached(4)
    for _ in range(2):
        out = world.serve(runner, requests)
        assert (out.path, out.reason) == ("eager", FallbackReason.DISABLED)
    pairs, batch = world.extend((3,))
    out = runner.forward(batch)
    world.check(out, pairs)
    assert (out.path, out.reason) == ("eager", FallbackReason.DISABLED)
    assert runner.explain().fallbacks == {FallbackReason.DISABLED: 3}
    assert len(runner.traced.graphs) == 0
    assert "engine" in runner.explain().messages["decode", FallbackReason.DISABLED]


@pytest.mark.parametrize("off", ["decode", "prefill"])
def test_a_graph_that_is_switched_off_is_no_failure(engine, off, caplog):
    world = make_world(Decoder, 1)
    runner = world.runner(engine=engine, strict=True, **FEW, **{f"enable_{off}_graph": False})
    requests = world.cached(4)
    outs = {}
    with caplog.at_level(logging.WARNING, logger="compile_backend"):
        outs["decode"] = world.serve(runner, requests)
        pairs, batch = world.extend((3,))
        outs["prefill"] = runner.forward(batch)
        world.check(outs["prefill"], pairs)
    for name, out in outs.items():
        expected = ("eager", FallbackReason.DISABLED) if name == off else (name, None)
        assert (out.path, out.reason) == expected
    assert caplog.messages == []
    mode = {"decode": "decode", "prefill": "extend"}[off]
    assert f"enable_{off}_graph" in runner.explain().messages[mode, FallbackReason.DISABLED]


class CallsBack(Decoder):
    """Calls whatever a test has put there, between two pieces."""

    def after(self, h, batch):
        return ops.calls_back(h)


@pytest.mark.parametrize("strict", [False, True])
def test_a_forward_inside_a_forward_leaves_the_slots_alone(engine, strict):
    """From an operator between the segments of a prefill; the outer one is not disturbed."""
    world = make_world(CallsBack, 1)
    inner_world = make_world(Decoder, 1)
    options = {"splitting_ops": ("graphbuf_test::calls_back",), **FEW}
    runner = world.runner(engine=engine, copy_outputs=True, **options)
    inner = inner_world.runner(engine=engine, strict=strict, **FEW)
    nested = inner_world.decode(inner_world.cached(4))
    want_inner = inner_world.eagerly(nested)
    batch = world.extend((5, 3))[1]
    want = world.eagerly(batch)
    seen = []

    def call(_):
        if strict:
            with pytest.raises(FallbackError) as error:
                inner.forward(nested)
            seen.append(error.value.reason)
        else:
            seen.append(inner.forward(nested))

    ops.hooks["call"] = call
    out = runner.forward(batch)
    close(out.hidden_states, want)
    assert out.path == "prefill"
    if strict:
        assert seen == [FallbackReason.NESTED_CALL]
    else:
        (inner_out,) = seen
        close(inner_out.hidden_states, want_inner)
        assert (inner_out.path, inner_out.reason) == ("eager", FallbackReason.NESTED_CALL)
        assert inner.explain().fallbacks == {FallbackReason.NESTED_CALL: 1}
    assert inner.forward(nested).path == "decode"
