"""One rank of several that meet in collectives: what it runs is what all of them agreed on."""

import pytest

from compile_backend import ForwardMode
from compile_backend.errors import ConfigError, FallbackReason
from compile_backend.registry.mlp_sync import prepare_mlp_sync_batch
from tests.runners.mode_models import (
    SMALL_GRAPHS,
    Meeting,
    Split,
    fields_of,
    finite,
    hits,
    met,
    same_fields,
)
from tests.runners.models import HIDDEN, make_world

M = ForwardMode
SYNC = {
    "enable_mlp_sync": True,
    "require_mlp_tp_gather": True,
    "dp_size": 2,
    "splitting_ops": ("graphbuf_modes::meet",),
}


@pytest.fixture(autouse=True)
def nothing_met():
    met.clear()
    finite.clear()


def agreed(runner, batch, *others: int, graph: bool = True, same_size: bool = True):
    """The batch of rank 0, as the scheduler prepares it beside ranks of ``others`` tokens."""
    batch.can_run_dp_cuda_graph = graph
    counts = [batch.num_tokens, *others]
    return prepare_mlp_sync_batch(batch, runner.config, counts, same_size=same_size)


def test_preparing_says_what_every_rank_runs_and_shares_the_tensors():
    world = make_world(Meeting, 1)
    runner = world.runner(warm=False, engine="none", attn_tp_size=2, **SYNC)
    batch = world.decode(world.cached(3))
    before = fields_of(batch)
    prepared = agreed(runner, batch, 5)
    assert prepared.global_num_tokens_cpu == prepared.global_num_tokens_gpu.tolist() == [6, 6]
    assert prepared.num_token_non_padded_cpu == 3
    assert prepared.input_ids is batch.input_ids
    assert same_fields(before, fields_of(batch), ignore=("can_run_dp_cuda_graph",))
    assert agreed(runner, batch, 5, same_size=False).global_num_tokens_cpu == [4, 6]


def test_every_rank_replays_the_bucket_of_the_largest(engine):
    world = make_world(Meeting, 1)
    runner = world.runner(engine=engine, **SYNC, **SMALL_GRAPHS)
    assert runner.decode.graphs.mode == "FULL"
    requests = world.cached(3)
    cache = world.kv.k.clone()
    for count, other, bucket in ((1, 4, 4), (3, 1, 4), (0, 4, 4), (1, 2, 2), (0, 2, 2), (3, 0, 4)):
        pairs = [(request, 1) for request in requests[:count]]
        batch = world.decode(requests[:count]) if count else world.batch([], M.IDLE)
        met.clear()
        out = runner.forward(agreed(runner, batch, other))
        assert (out.path, out.bucket, out.reason) == ("decode", bucket, None)
        assert out.hidden_states.shape == (count, HIDDEN)
        assert out.logits.shape[0] == count
        if count:
            world.check(out, pairs)
        else:
            written = (world.kv.k != cache).flatten(2).any(-1).any(0)
            assert not written[1:].any()  # padding alone: nothing but the scratch slot
        if engine == "host":  # a strict engine replays what the operator did
            assert met == [(0, bucket)]
        cache = world.kv.k.clone()
    assert hits(runner, "decode") == 6
    assert all(finite)


def test_ranks_that_run_no_graph_run_eagerly_at_the_agreed_size(engine):
    world = make_world(Meeting, 1)
    runner = world.runner(engine=engine, **SYNC, **SMALL_GRAPHS)
    assert len(runner.prefill.graphs) == 0
    requests = world.cached(2)
    batches = [
        ([(request, 1) for request in requests], world.decode(requests), 5),
        (*world.extend([3, 1]), 7),
        (*world.extend([5]), 2),
        ([], world.batch([], M.IDLE), 6),
    ]
    for pairs, batch, other in batches:
        met.clear()
        out = runner.forward(agreed(runner, batch, other, graph=False))
        assert met == [(0, max(other, batch.num_tokens))], batch.forward_mode
        assert out.path == ("eager" if pairs else "idle")
        assert out.reason is (FallbackReason.RANKS_DIFFER if pairs else None)
        assert out.hidden_states.shape[0] == batch.num_tokens
        if pairs:
            world.check(out, pairs)
    assert all(finite)  # what is gathered from padded rows reaches the other ranks
    assert hits(runner, "decode") == 0


def test_an_idle_rank_that_has_no_graph_says_so():
    world = make_world(Meeting, 1)
    runner = world.runner(warm=False, engine="host", **SYNC, **SMALL_GRAPHS)
    out = runner.forward(agreed(runner, world.batch([], M.IDLE), 2))
    assert (out.path, out.reason) == ("eager", FallbackReason.NOT_CAPTURED)
    assert met == [(0, 2)]


def test_ranks_of_unequal_sizes_each_run_their_own():
    world = make_world(Meeting, 1)
    runner = world.runner(warm=False, engine="none", attn_tp_size=2, **SYNC)
    pairs, batch = world.extend([3])
    out = runner.forward(agreed(runner, batch, 8, graph=False, same_size=False))
    world.check(out, pairs)
    out = runner.forward(agreed(runner, world.batch([], M.IDLE), 8, graph=False, same_size=False))
    assert met == [(0, 4), (0, 0)]


@pytest.mark.parametrize(
    "mode", [M.DECODE, M.EXTEND, M.IDLE, M.TARGET_VERIFY], ids=lambda m: m.name
)
def test_a_batch_that_no_rank_agreed_on_is_refused_with_the_advice(mode):
    world = make_world(Split, 1)
    runner = world.runner(warm=False, engine="none", **SYNC)
    if mode is M.DECODE:
        batch = world.decode(world.cached(2))
    else:
        batch = world.batch([], mode) if mode is M.IDLE else world.extend([3], mode)[1]
    met.clear()
    for graph in (False, True):
        batch.can_run_dp_cuda_graph = graph
        with pytest.raises(ConfigError, match="pass it through prepare_mlp_sync_batch"):
            runner.forward(batch)
    with pytest.raises(ConfigError, match="pass it through prepare_mlp_sync_batch"):
        runner.split_prefill(batch)
    assert met == []
    assert runner.forward(agreed(runner, batch, 1)).num_tokens == batch.num_tokens
