"""explain(): each number against what happened, and a text that a person can read."""

import re

import pytest

from compile_backend import FallbackReason
from tests.runners.models import HIDDEN, Decoder, make_world

FEW = {"cudagraph_capture_sizes": (2, 4), "prefill_capture_sizes": (4, 8)}


@pytest.fixture(scope="module", params=["host", "host_strict"])
def served(request):
    """A runner that has served 11 forwards. Only the last test that uses it runs another."""
    engine = request.param
    world = make_world(num_slots=1024, max_requests=64)
    runner = world.runner(engine=engine, **FEW)
    requests = world.cached(6)
    for n in (3, 4, 3, 1, 2, 5):  # the last is above every bucket
        world.serve(runner, requests[:n])
    for lengths, logprob in (((3,), False), ((2, 3), False), ((4, 4), True), ((9,), False)):
        pairs, batch = world.extend(lengths, return_logprob=logprob)
        world.check(runner.forward(batch), pairs)
    runner.forward(world.batch([]))
    return world, runner


def test_forwards_hits_and_rows_are_what_ran(served):
    _, runner = served
    explanation = runner.explain()
    assert explanation.paths == {"decode": 5, "prefill": 3, "eager": 2, "idle": 1}
    assert explanation.hits == 8
    assert explanation.fallbacks == {FallbackReason.ABOVE_LARGEST_BUCKET: 2}
    assert explanation.logits_fallbacks == {FallbackReason.ABOVE_LARGEST_BUCKET: 1}
    uses = {use.name: use for use in explanation.runners}
    rows = {
        name: {
            (getattr(b.key, use.unit), b.hits, b.num_rows, b.num_padded_rows)
            for b in use.buckets
            if b.hits
        }
        for name, use in uses.items()
    }
    assert rows == {
        "decode": {(4, 3, 10, 12), (2, 2, 3, 4)},
        "prefill": {(4, 1, 3, 4), (8, 2, 13, 16)},
        "logits": {(4, 3, 10, 12), (2, 4, 6, 8)},
    }
    assert uses["decode"].hits == 5
    assert uses["decode"].padding_waste == pytest.approx(3 / 16)
    assert uses["prefill"].padding_waste == pytest.approx(4 / 20)
    assert {use.unit for use in uses.values()} == {"bs", "tokens"}


def test_captured_graphs_and_pool_bytes_are_what_is_held(served):
    _, runner = served
    engine = runner.config.engine
    explanation = runner.explain()
    uses = {use.name: use for use in explanation.runners}
    # two sizes at each of two KV lengths
    assert {name: len(use.buckets) for name, use in uses.items()} == {
        "decode": 4, "prefill": 2, "logits": 2,
    }  # fmt: skip
    assert explanation.num_cudagraph_captured == 8 == runner.warmup_facts.num_captured
    assert {b.num_segments for b in uses["decode"].buckets} == {1}
    assert {b.num_segments for b in uses["prefill"].buckets} == {3}
    assert (uses["decode"].mode, uses["prefill"].mode) == ("FULL", "PIECEWISE")
    assert {use.engine for use in uses.values()} == {engine}
    graphs = [each.graphs for each in runner.graph_runners] + [runner.logits.graphs]
    assert explanation.pool_bytes == sum(each.pool_bytes for each in graphs)
    assert explanation.pool_bytes == runner.warmup_facts.pool_bytes
    assert (explanation.pool_bytes > 0) == (engine == "host_strict")
    facts = explanation.warmup
    captured = sum(use.capture_seconds for use in uses.values())
    assert 0 < captured <= facts.capture_seconds <= facts.total_seconds
    assert 0 < sum(trace.compile_seconds for trace in explanation.traces) <= facts.trace_seconds


def test_slots_count_shared_buffers_once(served):
    _, runner = served
    explanation = runner.explain()
    tokens, bs = runner.served.max_num_token, runner.served.max_bs
    by_name = {fact.name: fact for facts in explanation.slots.values() for fact in facts}
    assert by_name["input_ids"].num_bytes == tokens * 8
    assert by_name["seq_lens"].num_bytes == bs * 8
    assert by_name["mrope_positions"].num_bytes == 3 * tokens * 8
    assert by_name["hidden_states"].num_bytes == bs * HIDDEN * 4
    distinct = {
        registry.get_slot(name).layout.buffer.data_ptr(): registry.get_slot(name).layout.buffer
        for registry in (*runner.registries, runner.logits.graphs.registry)
        for name in registry.slot_names
    }
    assert explanation.slot_bytes == sum(buffer.nbytes for buffer in distinct.values())
    assert explanation.slots.keys() == {"eager", "decode", "prefill", "logits"}
    assert {fact.owner for fact in explanation.slots["eager"]} == {"pool"}


def test_pieces_and_cuts_are_those_of_the_model(served):
    _, runner = served
    model, head = runner.explain().traces
    assert (model.name, model.num_pieces, model.num_compiled_pieces) == ("model#0", 3, 3)
    assert (head.name, head.num_pieces, head.cuts) == ("lm_head#0", 1, ())
    assert [(cut.op, cut.why) for cut in model.cuts] == [
        ("graphbuf::attention", "named in splitting_ops")
    ] * 2
    assert model.not_padded is head.not_padded is None


def test_a_cut_names_the_line_of_the_model(served):
    """Two layers cut at one line of the model; the line inside our own wrapper tells nobody."""
    _, runner = served
    assert all("models.py" in cut.source for cut in runner.explain().traces[0].cuts)


def test_the_text_says_all_of_it(served):
    _, runner = served
    explanation = runner.explain()
    text = str(explanation)
    lines = text.splitlines()
    assert lines[0] == (
        f"forwards: decode 5  eager 2  idle 1  prefill 3  hits 8  captured 8  "
        f"slots {explanation.slot_bytes} B  pool {explanation.pool_bytes} B"
    )
    assert re.search(
        r"warm-up \d+\.\d\d s: .*trace and compile \d+\.\d\d s.*capture \d+\.\d\d s", text
    )
    assert "graph model#0: 3 piece(s) (3 compiled)" in text
    cuts = [line for line in lines if "break op graphbuf::attention" in line]
    assert len(cuts) == 2
    assert all(re.search(r"\.py:\d+", line) for line in cuts)
    assert all("named in splitting_ops" in line for line in cuts)
    waste = {"decode": "18.8%", "prefill": "20.0%", "logits": "20.0%"}
    for use in explanation.runners:
        (line,) = [each for each in lines if each.startswith(f"{use.name}: engine")]
        assert f"{use.hits} hits" in line
        assert f"waste {waste[use.name]}" in line
        assert f"pool {use.pool_bytes} B" in line
        for bucket in use.buckets:
            label = f"  {use.unit}={getattr(bucket.key, use.unit)}"
            of = [each for each in lines if each.startswith(label) and bucket.key.graph in each]
            rows = f"{bucket.hits} hits, rows {bucket.num_rows}/{bucket.num_padded_rows}"
            assert any(rows in each for each in of)
    for name, facts in explanation.slots.items():
        assert f"slots of {name}:" in lines
        for fact in facts:
            assert any(
                each.startswith(f"  {fact.name} ") and f"{fact.num_bytes} B ({fact.owner})" in each
                for each in lines
            )
    assert "ABOVE_LARGEST_BUCKET x2" in text
    assert "5 requests" in text
    assert "9 tokens" in text
    assert "8 rows" in text
    assert len(text) > 500


def test_a_snapshot_does_not_change_with_later_forwards(served):
    world, runner = served
    explanation = runner.explain()
    text = str(explanation)
    world.serve(runner, world.cached(3))
    assert str(explanation) == text
    assert runner.explain().hits == explanation.hits + 1


def test_before_warm_up_there_is_nothing_to_tell():
    runner = make_world(Decoder, 1).runner(warm=False, **FEW)
    explanation = runner.explain()
    assert explanation.hits == explanation.num_cudagraph_captured == explanation.pool_bytes == 0
    assert explanation.warmup is None
    assert explanation.traces == ()
    assert "warmup() has not been called" in str(explanation)
    assert "fallbacks: none" in str(explanation)


def test_debug_dump_path_receives_the_graphs(tmp_path):
    make_world(Decoder, 1).runner(debug_dump_path=str(tmp_path), **FEW)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any("graphbuf.attention" in path.read_text() for path in files)
    assert any("lm_head" in str(path) for path in files)
