"""Every forward equals the dense oracle and the model's own eager run, and graphs ran it."""

import random
from collections import Counter

import pytest
import torch

from compile_backend import ForwardMode
from tests.runners.models import HIDDEN, VOCAB, close, make_world

DECODE_ORDERS = [(3, 5, 3), (5, 3), (8, 1, 8), (1, 2, 3, 4, 5, 7, 8)]


@pytest.mark.parametrize("copy_outputs", [False, True])
def test_decode_of_every_size_in_any_order_equals_eager(engine, copy_outputs):
    world = make_world()
    runner = world.runner(engine=engine, copy_outputs=copy_outputs, enable_prefill_graph=False)
    requests = world.cached(8)
    steps = [n for order in DECODE_ORDERS for _ in range(2) for n in order]
    for n in steps:
        chosen = random.Random(n).sample(requests, n)
        batch = world.decode(chosen)
        want = world.eagerly(batch)
        out = runner.forward(batch)
        close(out.hidden_states, want)
        world.check(out, [(request, 1) for request in chosen])
        assert (out.path, out.reason, out.batch_size, out.num_tokens) == ("decode", None, n, n)
        assert out.bucket == next(size for size in (1, 2, 4, 8) if size >= n)
        assert out.hidden_states.shape == (n, HIDDEN)
        assert out.logits.shape == (n, VOCAB)
    explanation = runner.explain()
    assert explanation.hits == len(steps)
    assert not explanation.fallbacks


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.MIXED], ids=lambda m: m.name)
def test_extends_of_every_size_in_any_order_equal_eager(engine, mode):
    """Prompts whole and in chunks on top of a prefix, with decoding requests among them."""
    world = make_world(num_slots=2048)
    runner = world.runner(engine=engine, enable_decode_graph=False)
    decoding = world.cached(2, length=4)
    shapes = [(3,), (5,), (3,), (4,), (8, 8), (1,), (16,), (1, 2, 1), (7, 1), (2, 7), (15, 1)]
    for lengths in [*shapes, *reversed(shapes)]:
        pairs = [(world.request(n + 3), n) for n in lengths]
        world.eagerly(world.batch([(request, 3) for request, _ in pairs]), keep=True)
        if mode is ForwardMode.MIXED and sum(lengths) <= 14:
            for request in decoding:
                request.tokens.append(7)
            pairs += [(request, 1) for request in decoding]
        batch = world.batch(pairs, mode)
        want = world.eagerly(batch)
        out = runner.forward(batch)
        close(out.hidden_states, want)
        world.check(out, pairs)
        total = sum(n for _, n in pairs)
        assert (out.path, out.reason) == ("prefill", None)
        assert out.bucket == next(size for size in (4, 8, 16) if size >= total)
        assert out.logits.shape == (len(pairs), VOCAB)
        for request, _ in pairs:
            if request not in decoding:
                world.finish(request)
    assert runner.explain().hits == 2 * len(shapes)


def test_every_token_has_logits_where_logprobs_are_wanted(engine):
    world = make_world()
    runner = world.runner(engine=engine)
    for lengths in ((3, 2), (8,), (1, 1, 1), (3, 2)):
        pairs, batch = world.extend(lengths, return_logprob=True)
        out = runner.forward(batch)
        assert (out.path, len(out.logits)) == ("prefill", sum(lengths))
        world.check(out, pairs)
    logits = next(use for use in runner.explain().runners if use.name == "logits")
    assert logits.hits == 4


def test_the_cache_after_a_replay_is_the_one_after_an_eager_run(engine):
    """All slots but the scratch one: padded rows write nothing else."""
    world = make_world()
    runner = world.runner(engine=engine)
    requests = world.cached(5)
    for k in range(6):
        batch = world.decode(requests[: 5 - k % 3]) if k % 2 else world.extend((3, 2 + k))[1]
        before = world.kv.k.clone(), world.kv.v.clone()
        world.eagerly(batch, keep=True)
        want = world.kv.k.clone(), world.kv.v.clone()
        world.kv.k.copy_(before[0])
        world.kv.v.copy_(before[1])
        assert runner.forward(batch).path != "eager"
        close(world.kv.k[:, 1:], want[0][:, 1:])
        close(world.kv.v[:, 1:], want[1][:, 1:])
        assert torch.isfinite(world.kv.k[:, 0]).all()


def test_a_long_random_trace_equals_eager_and_every_step_is_a_hit(engine):
    """2,000 steps of admitting, prefilling by chunks, decoding, cancelling and finishing."""
    world = make_world(num_slots=1024, kv_len_buckets=(8, 24))
    runner = world.runner(
        engine=engine, prefill_capture_sizes=(1, 2, 4, 8, 16), max_padding_waste=2.0
    )
    rng = random.Random(20)
    running, rows = [], {}  # request -> [(position, logits of that token)]
    ran: Counter[str] = Counter()
    keys = set()
    num_checked = 0

    def take(out, pairs):
        for request, logits in zip((r for r, _ in pairs), out.logits, strict=True):
            rows[request].append((request.num_cached - 1, logits.clone()))
            if request.num_cached == len(request.tokens):
                request.tokens.append(int(logits.argmax()))

    def leave(request):
        nonlocal num_checked
        running.remove(request)
        if request.num_cached:
            hidden = world.model.dense(request.tokens[: request.num_cached])
            with torch.no_grad():
                want = world.model.lm_head(hidden)
            for position, logits in rows.pop(request):
                close(logits, want[position])
                if position + 1 < request.num_cached and position + 1 >= request.prompt_len:
                    assert request.tokens[position + 1] == int(logits.argmax())
                num_checked += 1
        world.finish(request)

    for _ in range(2000):
        while len(running) < 8 and rng.random() < 0.3:
            request = world.request(rng.randint(1, 20))
            request.prompt_len = len(request.tokens)
            running.append(request)
            rows[request] = []
        if running and rng.random() < 0.01:
            leave(rng.choice(running))  # cancelled
        waiting = [r for r in running if r.num_cached < r.prompt_len]
        decoding = [r for r in running if r.num_cached >= r.prompt_len]
        if waiting and (not decoding or rng.random() < 0.4):
            budget, pairs = rng.randint(1, 16), []
            for request in waiting:
                n = min(budget, request.prompt_len - request.num_cached)
                if n:
                    pairs.append((request, n))
                    budget -= n
            mode = ForwardMode.EXTEND
            if decoding and budget and rng.random() < 0.5:
                mode = ForwardMode.MIXED
                pairs += [(request, 1) for request in decoding[:budget]]
            out = runner.forward(world.batch(pairs, mode))
            path = "prefill"
        elif decoding:
            chosen = rng.sample(decoding, rng.randint(1, len(decoding)))
            pairs, path = [(request, 1) for request in chosen], "decode"
            out = runner.forward(world.decode(chosen))
        else:
            continue
        assert (out.path, out.reason) == (path, None)
        keys.add((path, out.bucket))
        ran[path] += 1
        take(out, pairs)
        for request in [r for r in running if r.num_cached >= 40 or rng.random() < 0.004]:
            leave(request)
    while running:
        leave(running[-1])

    explanation = runner.explain()
    assert dict(explanation.paths) == dict(ran)
    assert {use.name: use.hits for use in explanation.runners} == {
        **ran, "logits": ran["decode"] + ran["prefill"],
    }  # fmt: skip
    assert not explanation.fallbacks
    assert not explanation.logits_fallbacks
    assert ran["decode"] > 700
    assert ran["prefill"] > 300
    assert num_checked > 4000
    assert len(keys) == 4 + 5
    used = {u.key.attention for r in explanation.runners if r.name == "decode" for u in r.buckets
            if u.hits}  # fmt: skip
    assert used == {(8,), (24,), (64,)}


def test_two_runners_of_one_process_take_turns(engine):
    """Two models with weights of their own on the same slots."""
    worlds = [make_world(), make_world()]
    torch.manual_seed(5)
    for parameter in worlds[1].model.parameters():
        parameter.data.normal_(std=0.3)
    runners = [world.runner(engine=engine) for world in worlds]
    requests = [world.cached(8) for world in worlds]
    rng = random.Random(3)
    hits = [0, 0]
    for _ in range(40):
        i = rng.randrange(2)
        if rng.random() < 0.6:
            worlds[i].serve(runners[i], rng.sample(requests[i], rng.randint(1, 8)))
        else:
            pairs, batch = worlds[i].extend((rng.randint(1, 3), rng.randint(1, 5)))
            worlds[i].check(runners[i].forward(batch), pairs)
            for request, _ in pairs:
                worlds[i].finish(request)
        hits[i] += 1
    assert [runner.explain().hits for runner in runners] == hits
    shared = [{f.name: f.address for f in r.explain().slots["eager"]} for r in runners]
    assert shared[0] == shared[1]
