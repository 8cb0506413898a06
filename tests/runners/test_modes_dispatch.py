"""Which runner takes a batch, with which padding, and with which attention metadata."""

import pytest
import torch

from compile_backend.errors import FallbackReason
from compile_backend.registry.registry import CudaGraphBufferRegistry
from tests.runners.mode_models import (
    SMALL_GRAPHS,
    FillsThree,
    RicherPlan,
    Scales,
    ScalesBetweenSegments,
    forward_eagerly,
    hits,
)
from tests.runners.models import Decoder, close, make_world


def test_context_parallelism_takes_the_graphs_of_prefill_alone(engine):
    world = make_world(Decoder, 1)
    runner = world.runner(engine=engine, attn_cp_size=2, **SMALL_GRAPHS)
    assert len(runner.prefill.graphs) == 0  # none that nothing would replay
    pairs, batch = world.extend([8])
    out = runner.forward(batch)
    assert (out.path, out.reason) == ("eager", FallbackReason.CONTEXT_PARALLEL)
    world.check(out, pairs)
    for _ in range(2):
        assert world.serve(runner, [pairs[0][0]]).path == "decode"
    assert (hits(runner, "decode"), hits(runner, "prefill")) == (2, 0)


def test_a_prefill_padded_to_more_than_twice_its_tokens_runs_eagerly(engine):
    world = make_world(Decoder, 1)
    runner = world.runner(engine=engine, max_padding_waste=2.0, **SMALL_GRAPHS)
    assert runner.config.max_padding_waste == type(runner.config)().max_padding_waste
    for num_tokens, path in ((4, "prefill"), (3, "eager"), (8, "prefill")):
        pairs, batch = world.extend([num_tokens])
        out = runner.forward(batch)
        world.check(out, pairs)
        assert out.path == path
        assert out.reason is (FallbackReason.PADDING_WASTE if path == "eager" else None)
    assert hits(runner, "prefill") == 2
    assert runner.counts.fallbacks == {FallbackReason.PADDING_WASTE: 1}


# --- one buffer, several tails ------------------------------------------------------------------


def tail(registry: CudaGraphBufferRegistry, name: str, live: int, padded: int) -> list[int]:
    return registry.view(name, {"bs": padded, "tokens": padded})[live:].tolist()


def poison(registry: CudaGraphBufferRegistry) -> None:
    for name in registry.slot_names:
        registry.get_slot(name).buffer.fill_(1)
    registry.get_slot("seq_lens").buffer.fill_(11)
    registry.get_slot("seq_lens_cpu").buffer.fill_(11)


def test_shared_lengths_have_the_tail_of_whoever_runs(engine):
    world = make_world(Decoder, 1, backend=FillsThree)
    runner = world.runner(engine=engine, **SMALL_GRAPHS)
    eager, decode = runner.eager.registry, runner.decode.registry
    for name in ("seq_lens", "seq_lens_cpu"):  # one buffer, and the eager runner made it
        assert eager.get_slot(name).buffer.data_ptr() == decode.get_slot(name).buffer.data_ptr()
        assert eager.get_slot(name).initial_value == 0
    requests = world.cached(3, 4)
    for _ in range(2):
        poison(eager)
        _, prompt = world.extend([1])
        assert runner.forward(prompt).path == "eager"
        poison(eager)
        batch = world.decode(requests)
        world.backend.planned.clear()
        out = runner.forward(batch)
        assert (out.path, out.bucket) == ("decode", 4)
        world.check(out, [(request, 1) for request in requests])
        lengths = [*batch.seq_lens.tolist(), 3]
        assert world.backend.planned[-1][1:] == (lengths, lengths)
        for name in ("positions", "out_cache_loc", "req_pool_indices"):
            assert tail(decode, name, 3, 4) == [0], name
        poison(eager)
        eager.fill_from(batch, raw_bs=3, padded_bs=5, raw_num_tokens=3, padded_num_tokens=5)
        assert tail(eager, "seq_lens", 3, 5) == tail(eager, "seq_lens_cpu", 3, 5) == [0, 0]
    assert hits(runner, "decode") == 2


# --- metadata -----------------------------------------------------------------------------------


def test_metadata_is_planned_on_the_static_view_at_capture_and_before_every_replay(engine):
    world = make_world(Decoder, 1, backend=FillsThree)
    runner = world.runner(engine=engine, **SMALL_GRAPHS)
    # A key per captured decode graph; prefill attention runs between segments, without one.
    captured = [key for key, _, _ in world.backend.planned if key is not None]
    assert captured == [key.attention for key in runner.decode.graphs.keys]
    requests = world.cached(2, 3)
    world.backend.planned.clear()
    for step in (4, 5):
        assert world.serve(runner, requests[:1]).path == "decode"
        key, on_device, on_host = world.backend.planned.pop()
        assert not world.backend.planned  # once per replay
        assert (key, on_device) == ((16,), [step - 1, 3])
        assert on_host == on_device
    pairs, batch = world.extend([5, 3])
    world.check(runner.forward(batch), pairs)
    assert world.backend.planned == [(None, [5, 3], [5, 3])]  # the requests that there are
    assert (hits(runner, "decode"), hits(runner, "prefill")) == (2, 1)


@pytest.mark.parametrize("backend", [Scales, ScalesBetweenSegments])
def test_a_replay_has_richer_metadata_than_its_capture_and_the_graph_sees_it(engine, backend):
    world = make_world(Decoder, 1, backend=backend)
    runner = world.runner(engine=engine, enable_prefill_graph=False, **SMALL_GRAPHS)
    whole = runner.decode.graphs.mode == "FULL"
    assert whole is (backend is Scales)
    requests = world.cached(2, 3)
    seen = []
    for _ in range(3):
        batch = world.decode(requests)
        want = world.eagerly(batch)
        world.backend.used.clear()
        out = runner.forward(batch)
        close(out.hidden_states, want)
        seen.append(out.hidden_states.clone())
        # A strict engine replays operators, so the backend's own code runs at capture only.
        expected = [] if whole and engine == "host_strict" else [RicherPlan]
        assert world.backend.used == expected
    assert hits(runner, "decode") == 3
    assert not torch.equal(seen[0], seen[1])


def test_without_the_upgrade_a_strict_graph_would_keep_the_captured_factor():
    class Forgets(Scales):
        def upgrade_metadata(self, captured, fresh):
            return fresh

    world = make_world(Decoder, 1, backend=Forgets)
    runner = world.runner(engine="host_strict", enable_prefill_graph=False, **SMALL_GRAPHS)
    batch = world.decode(world.cached(2, 9))
    want = world.eagerly(batch)
    out = runner.forward(batch)
    assert out.path == "decode"
    assert not torch.allclose(out.hidden_states, want, atol=1e-3)


def test_a_prefill_between_segments_reads_the_live_lengths(engine):
    world = make_world(Decoder, 1, backend=ScalesBetweenSegments)
    runner = world.runner(engine=engine, enable_decode_graph=False, **SMALL_GRAPHS)
    for lengths in ([5, 3], [7], [2, 2, 2]):
        _, batch = world.extend(lengths)
        assert forward_eagerly(world, batch, runner).path == "prefill"
