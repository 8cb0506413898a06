"""The demo's verdict on two runs whose tokens differ."""

import pytest
import torch

from examples.llama.demo import LOGIT_TOLERANCE, find_departures
from examples.llama.generate import generate
from examples.llama.scheduler import Request

REQUESTS = [Request(prompt=p, max_new_tokens=8) for p in ("In the", "And", "Woe unto")]


@pytest.fixture
def serve(model):
    def run(forward, forced=None):
        return generate(forward, model.cache, REQUESTS, forced=forced, keep_logits=True)

    return run


def test_equal_tokens_need_no_second_look(model, serve):
    def never(_: list[list[int]]):
        raise AssertionError("nothing to rerun")

    assert find_departures(REQUESTS, serve(model), serve(model), never) == []


def test_a_wrong_forward_is_found_where_it_first_departs(model, serve):
    def wrong(batch):
        return model(batch).flip(-1)

    eager = serve(model)
    departures = find_departures(REQUESTS, eager, serve(wrong), lambda led: serve(wrong, led))
    assert [d.prompt for d in departures] == [r.prompt for r in REQUESTS]
    assert all(d.position == 0 and not d.is_within_tolerance for d in departures)
    assert "eager's top-2 logit gap" in str(departures[0])
    assert "FAILED" in str(departures[0])


def test_a_near_tie_that_falls_the_other_way_is_accepted(model, serve):
    """Both models see the two likeliest tokens of the first request closer than rounding."""
    eager = serve(model)
    first, second = eager.logits[1][0].topk(2).indices.tolist()

    def tied(sign: float):
        def forward(batch):
            logits = model(batch)
            middle = logits[:, [first, second]].mean(-1)
            is_tie = (logits.argmax(-1) == first) & (batch.positions == 3)
            logits[:, first] = torch.where(is_tie, middle + sign * 1e-5, logits[:, first])
            logits[:, second] = torch.where(is_tie, middle, logits[:, second])
            return logits

        return forward

    a, b = tied(+1), tied(-1)
    departures = find_departures(REQUESTS, serve(a), serve(b), lambda led: serve(b, led))
    assert [d.prompt for d in departures] == [REQUESTS[1].prompt]
    assert departures[0].is_within_tolerance
    assert departures[0].top2_gap < LOGIT_TOLERANCE


def test_a_near_tie_does_not_excuse_wrong_logits_elsewhere(model, serve):
    eager = serve(model)

    def drifting(batch):
        logits = model(batch)
        logits[batch.positions > 8] = 0.0
        return logits

    departures = find_departures(REQUESTS, eager, serve(drifting), lambda led: serve(drifting, led))
    assert departures
    assert not any(d.is_within_tolerance for d in departures)


def test_a_nan_fails(model, serve):
    def broken(batch):
        return model(batch) * float("nan")

    departures = find_departures(REQUESTS, serve(model), serve(broken), lambda f: serve(broken, f))
    assert departures
    assert not any(d.is_within_tolerance for d in departures)
