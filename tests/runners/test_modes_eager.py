"""The runner without graphs: every mode, one preparation, and prefills that run layer by layer."""

import pytest
import torch

from compile_backend import ForwardBatch, ForwardMode
from compile_backend.errors import ConfigError, FallbackReason
from tests.runners.mode_models import (
    PLANNED,
    SMALL_GRAPHS,
    Meeting,
    NotesPlans,
    Split,
    fields_of,
    hits,
    met,
    same_fields,
)
from tests.runners.models import HIDDEN, Decoder, close, make_world

M = ForwardMode


@pytest.fixture(autouse=True)
def nothing_met():
    met.clear()


def batch_of(world, mode: ForwardMode) -> tuple[list, ForwardBatch]:
    """Requests with how many tokens each runs, and their batch."""
    if mode is M.IDLE:
        return [], world.batch([], mode)
    if mode is M.DECODE:
        requests = world.cached(3)
        return [(request, 1) for request in requests], world.decode(requests)
    if mode in (M.EXTEND, M.DLLM_EXTEND):
        return world.extend([3, 1, 4], mode)
    pairs = [(world.cached(1, 6)[0], 1), (world.request(4), 4)]
    if mode is not M.MIXED:
        pairs = [(request, 2) for request in world.cached(2, 3)]
        for request, _ in pairs:
            request.tokens.append(7)
    return pairs, world.batch(pairs, mode)


@pytest.mark.parametrize("mode", list(M), ids=lambda mode: mode.name)
def test_every_mode_runs_eagerly_with_the_collectives_in_one_order(mode):
    world = make_world(Meeting)
    runner = world.runner(warm=False, engine="none")
    pairs, batch = batch_of(world, mode)
    want = world.eagerly(batch)
    met.clear()
    out = runner.forward(batch)
    num_tokens = sum(n for _, n in pairs)
    assert met == [(0, num_tokens), (1, num_tokens)]
    assert out.path == ("idle" if mode is M.IDLE else "eager")
    assert out.hidden_states.shape == (num_tokens, HIDDEN)
    close(out.hidden_states, want)
    if mode is not M.DLLM_EXTEND:  # whose tokens see the later ones
        world.check(out, pairs)


def test_a_batch_is_filled_planned_and_run_in_the_same_order_in_every_mode():
    world = make_world(Meeting, backend=NotesPlans, max_requests=32)
    runner = world.runner(warm=False, engine="none")
    for mode in M:
        _, batch = batch_of(world, mode)
        met.clear()
        runner.forward(batch)
        assert [layer_id for layer_id, _ in met] == [PLANNED, 0, 1], mode
        seen = world.backend.ids_when_planned
        assert torch.equal(seen, batch.input_ids), mode  # the slots were filled by then
        if len(seen):
            slot = runner.eager.registry.get_slot("input_ids")
            assert seen.data_ptr() == slot.buffer.data_ptr(), mode


def test_mixed_runs_as_extend_does():
    world = make_world()
    runner = world.runner(warm=False, engine="none")
    pairs, batch = batch_of(world, M.MIXED)
    mixed = runner.forward(batch)
    batch.forward_mode = M.EXTEND
    extended = runner.forward(batch)
    assert torch.equal(mixed.hidden_states, extended.hidden_states)
    assert torch.equal(mixed.logits, extended.logits)
    assert mixed.logits.shape[0] == len(pairs)


@pytest.mark.parametrize("mode", list(M), ids=lambda mode: mode.name)
def test_loading_gives_a_new_view_and_leaves_the_batch_as_it_was(mode):
    world = make_world()
    eager = world.runner(warm=False, engine="none").eager
    _, batch = batch_of(world, mode)
    before = fields_of(batch)
    view = eager.load_batch(batch)
    assert view is not batch
    assert eager.load_batch(batch) is not view
    assert same_fields(before, fields_of(batch))
    for name in ("input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens"):
        mine, theirs = getattr(view, name), getattr(batch, name)
        assert torch.equal(mine, theirs)
        if len(theirs):
            assert mine.data_ptr() == eager.registry.get_slot(name).buffer.data_ptr()
    assert view.mrope_positions is None


def test_a_runner_says_why_it_declines_a_batch(engine):
    world = make_world(Decoder, 1)
    runner = world.runner(engine=engine, **SMALL_GRAPHS)
    _, prompt = world.extend([8])
    decode = world.decode(world.cached(2))
    assert runner.eager.decline(prompt) is None
    assert runner.prefill.decline(prompt) is None
    assert runner.decode.decline(prompt) is FallbackReason.MODE_NOT_CAPTURED
    assert runner.decode.decline(decode) is None
    assert runner.prefill.decline(decode) is FallbackReason.MODE_NOT_CAPTURED
    _, short = world.extend([1])
    assert runner.prefill.decline(short) is FallbackReason.PADDING_WASTE
    with pytest.raises(Exception, match=r"DECODE is not served by the prefill graphs"):
        runner.prefill.load_batch(decode)
    assert [runner.decode.can_run_graph(each) for each in (prompt, decode)] == [False, True]


def test_a_split_prefill_equals_one_forward_with_other_forwards_in_between(engine):
    world = make_world(Split, 4)
    runner = world.runner(engine=engine, **SMALL_GRAPHS, splitting_ops=("graphbuf_modes::meet",))
    decoding = world.cached(2)
    pairs, batch = world.extend([5, 2])
    before = fields_of(batch)
    split = runner.split_prefill(batch)
    assert runner.continue_prefill(split, 1) is None
    assert world.serve(runner, decoding).path == "decode"
    others, other = world.extend([8])
    world.check(runner.forward(other), others)
    assert runner.continue_prefill(split, 2) is None
    assert not split.is_finished
    world.serve(runner, decoding)
    out = runner.continue_prefill(split, 7)
    assert split.is_finished
    assert (out.path, out.batch_size, out.num_tokens) == ("eager", 2, 7)
    world.check(out, pairs)
    assert same_fields(before, fields_of(batch))
    assert hits(runner, "decode") == 2
    world.serve(runner, [request for request, _ in pairs])  # its cache is complete


def test_a_split_prefill_asks_for_layers_until_it_is_finished():
    world = make_world(Split)
    runner = world.runner(warm=False, engine="none")
    _, batch = world.extend([3])
    split = runner.split_prefill(batch)
    with pytest.raises(ConfigError, match=r"0 layers were asked for at layer 0 of 2"):
        runner.continue_prefill(split, 0)
    assert runner.continue_prefill(split, 2) is not None
    with pytest.raises(ConfigError, match=r"at layer 2 of 2; ask for at least one, until"):
        runner.continue_prefill(split, 1)


def test_a_model_that_cannot_be_split_says_what_it_lacks():
    world = make_world()
    runner = world.runner(warm=False, engine="none")
    _, batch = world.extend([3])
    with pytest.raises(ConfigError, match=r"give it num_split_layers and forward_split"):
        runner.split_prefill(batch)
