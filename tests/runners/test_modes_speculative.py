"""Batches whose requests bring a fixed number of tokens: verification, drafting, denoising."""

import pytest
import torch

from compile_backend import ForwardMode
from compile_backend.errors import FallbackReason
from compile_backend.registry.capacity import max_bs
from tests.runners.mode_models import SMALL_GRAPHS, Stateless, forward_eagerly, hits
from tests.runners.models import Decoder, World, close, make_world

M = ForwardMode
EAGLE = {"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 3}
TARGET = {**EAGLE, "speculative_role": "target"}
DRAFT = {**EAGLE, "speculative_role": "draft", "speculative_num_steps": 2}


def stateless(**config) -> tuple[World, object]:
    """A world whose backend takes any number of tokens per request, whole graphs in any mode."""
    world = make_world(Decoder, 1)
    world.backend = Stateless()
    return world, world.runner(**config, **SMALL_GRAPHS)


def drafted(world, count: int, width: int, mode: ForwardMode = M.TARGET_VERIFY):
    """Cached requests with ``width`` drafted tokens each, and the batch that runs those."""
    requests = world.cached(count, 4)
    for request in requests:
        request.tokens += torch.randint(1, 40, (width,)).tolist()
    pairs = [(request, width) for request in requests]
    return pairs, world.batch(pairs, mode)


def test_a_target_verifies_from_graphs_by_batch_size(engine):
    world = make_world(Decoder, 1)
    runner = world.runner(engine=engine, **TARGET, **SMALL_GRAPHS)
    assert runner.decode.graphs.mode == "PIECEWISE"  # torch_native extends on the host
    assert [(key.bs, key.tokens) for key in runner.decode.graphs.keys] == [(4, 12), (2, 6)]
    for count, bucket in ((1, 2), (3, 4), (2, 2)):
        pairs, batch = drafted(world, count, 3)
        out = runner.forward(batch)
        assert (out.path, out.bucket, out.reason) == ("decode", bucket, None)
        assert out.logits.shape[0] == 3 * count  # every token is judged
        world.check(out, pairs)
    assert hits(runner, "decode") == 3
    assert not runner.counts.logits_fallbacks
    pairs, batch = world.extend([8])
    out = runner.forward(batch)
    assert out.path == "prefill"
    world.check(out, pairs)
    out = runner.forward(world.decode([pairs[0][0]]))
    assert (out.path, out.reason) == ("eager", FallbackReason.MODE_NOT_CAPTURED)


def test_a_backend_that_verifies_without_host_reads_has_whole_graphs(engine):
    world, runner = stateless(engine=engine, enable_prefill_graph=False, **TARGET)
    assert runner.decode.graphs.mode == "FULL"
    _, batch = drafted(world, 3, 3)
    assert forward_eagerly(world, batch, runner).bucket == 4
    assert world.backend.planned[-1] == (4, 12)  # on the static view


def test_a_target_of_adaptive_width_has_graphs_of_every_width(engine):
    world = make_world(Decoder, 1)
    runner = world.runner(
        engine=engine,
        speculative_adaptive_max_draft_tokens=4,
        enable_prefill_graph=False,
        **TARGET,
        **SMALL_GRAPHS,
    )
    assert {(key.bs, key.tokens) for key in runner.decode.graphs.keys} == {
        (bs, bs * width) for bs in (2, 4) for width in (3, 4)
    }
    for count, width in ((2, 3), (3, 4), (1, 3)):
        pairs, batch = drafted(world, count, width)
        out = runner.forward(batch)
        assert (out.path, out.bucket) == ("decode", 2 if count < 3 else 4)
        world.check(out, pairs)
    pairs, batch = drafted(world, 2, 2)
    out = runner.forward(batch)
    assert (out.path, out.reason) == ("eager", FallbackReason.LIVE_SIZES_DIFFER)
    world.check(out, pairs)
    assert hits(runner, "decode") == 3


def test_a_draft_worker_steps_from_graphs_and_takes_in_eagerly(engine):
    world = make_world(Decoder, 1)
    runner = world.runner(engine=engine, enable_prefill_graph=False, **DRAFT, **SMALL_GRAPHS)
    requests = world.cached(3, 4)
    for _ in range(2):
        out = world.serve(runner, requests)
        assert (out.path, out.bucket) == ("decode", 4)
    assert hits(runner, "decode") == 2
    for request in requests:
        request.tokens += [5, 6]
    pairs = [(request, 2) for request in requests]
    out = runner.forward(world.batch(pairs, M.DRAFT_EXTEND))
    assert (out.path, out.reason) == ("eager", FallbackReason.MODE_NOT_CAPTURED)
    world.check(out, pairs)


def test_a_draft_step_brings_a_token_of_each_branch(engine):
    world, runner = stateless(
        engine=engine, speculative_eagle_topk=2, enable_prefill_graph=False, **DRAFT
    )
    _, batch = drafted(world, 3, 2, M.DECODE)
    assert batch.num_tokens == 2 * batch.batch_size
    out = forward_eagerly(world, batch, runner)
    assert (out.bucket, out.num_tokens) == (4, 6)
    assert world.backend.planned[-1] == (4, 8)


def test_a_frozen_kv_draft_lays_out_branches_as_requests(engine):
    world = make_world(Decoder, 1)
    runner = world.runner(
        engine=engine,
        speculative_algorithm="FROZEN_KV_MTP",
        speculative_role="draft",
        speculative_num_draft_tokens=3,
        speculative_num_steps=2,
        speculative_eagle_topk=2,
        max_running_requests=2,
        enable_prefill_graph=False,
        **SMALL_GRAPHS,
    )
    assert max_bs(runner.config) == 4  # twice the requests
    out = world.serve(runner, world.cached(4))
    assert (out.path, out.bucket) == ("decode", 4)
    assert hits(runner, "decode") == 1


@pytest.mark.parametrize("lengths", [[4], [4, 4, 4]])
def test_a_diffusion_block_runs_from_graphs_and_sees_all_of_itself(engine, lengths):
    world = make_world(Decoder, 1)
    runner = world.runner(
        engine=engine, dllm_block_size=4, enable_prefill_graph=False, **SMALL_GRAPHS
    )
    pairs = [(world.cached(1, 4)[0], n) for n in lengths]
    for request, n in pairs:
        request.tokens += torch.randint(1, 40, (n,)).tolist()
    batch = world.batch(pairs, M.DLLM_EXTEND)
    out = forward_eagerly(world, batch, runner)
    assert (out.path, out.bucket) == ("decode", 2 if len(lengths) == 1 else 4)
    assert out.logits.shape[0] == batch.num_tokens
    causal = world.dense(pairs)
    assert not torch.allclose(out.hidden_states[0], causal[0], atol=1e-3)
    close(out.logits, world.model.lm_head(out.hidden_states).detach())
