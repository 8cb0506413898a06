"""The DeepGEMM sweep: its sizes by role and capacity, its one set of buffers, what it leaves."""

import sys

import pytest
import torch

from compile_backend import ForwardMode, ModelRunner, PPProxyTensors, RunnerConfig
from compile_backend.errors import ConfigError
from compile_backend.runners.deep_gemm import (
    pp_parallel_deep_gemm_warmup,
    sweep,
    why_not_swept,
)
from compile_backend.runners.warmup import DEEP_GEMM
from tests.runners.models import HIDDEN, make_world
from tests.runners.test_autotune import LaterStage, Planned, planned_world

DECODE, EXTEND = ForwardMode.DECODE, ForwardMode.EXTEND
ROOMY = {"max_running_requests": 10_000, "chunked_prefill_size": 10_000}


def sizes(num_sms, mode=None, **config):
    runs = sweep(RunnerConfig(**{**ROOMY, **config}), num_sms)
    return [size for each, size in runs if mode in (None, each)]


# --- the sizes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_sms", "wanted"),
    [
        (132, [1, 128, 1024, 2112, 8448]),
        (78, [1, 128, 576, 1216, 4992]),
        (1, [1, 64, 128, 256]),
    ],
)
def test_the_sizes_fill_an_eighth_a_quarter_and_all_of_the_multiprocessors(num_sms, wanted):
    assert sizes(num_sms, DECODE) == sizes(num_sms, EXTEND) == wanted


def test_sizes_above_the_capacity_become_the_capacity_once():
    small = {"max_running_requests": 100, "chunked_prefill_size": 2000}
    assert sizes(132, DECODE, **small) == [1, 100]
    assert sizes(132, EXTEND, **small) == [1, 128, 1024, 2000]


def test_sizes_are_aligned_as_live_batches_are():
    """For 2 attention-TP ranks and 3 context-parallel ones: to 6, once each."""
    aligned = {"enable_mlp_sync": True, "attn_tp_size": 2, "attn_cp_size": 3}
    assert sizes(132, DECODE, **aligned) == [6, 132, 1026, 2112, 8448]
    assert sizes(132, EXTEND, chunked_prefill_size=2000, **aligned) == [6, 132, 1026, 2004]


def test_a_worker_sweeps_only_what_its_role_runs():
    modes = [mode for mode, _ in sweep(RunnerConfig(role="decode", **ROOMY), 132)]
    assert modes == [DECODE] * 5
    modes = [mode for mode, _ in sweep(RunnerConfig(role="prefill", **ROOMY), 132)]
    assert modes == [EXTEND] * 5
    modes = {mode for mode, _ in sweep(RunnerConfig(dllm_block_size=4, **ROOMY), 132)}
    assert modes == {ForwardMode.DLLM_EXTEND, EXTEND}
    with pytest.raises(ConfigError, match="'role' is 'train'"):
        RunnerConfig(role="train")


# --- the sweep --------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["both", "prefill", "decode"])
@pytest.mark.parametrize("num_sms", [132, 78, 1])
def test_every_size_runs_on_one_set_of_buffers(role, num_sms):
    world = planned_world(context=128, num_slots=64)
    config = {"max_running_requests": 70, "chunked_prefill_size": 300, "role": role}
    runner = world.runner(warm=False, cudagraph_capture_sizes=(1,), **config)
    with torch.no_grad():
        pp_parallel_deep_gemm_warmup(runner.eager, num_sms=num_sms)
    batches = world.backend.batches
    ran = [
        (b.forward_mode, b.num_tokens if b.forward_mode is EXTEND else b.batch_size)
        for b in batches
    ]
    assert ran == list(sweep(runner.config, num_sms))
    slots = {fact.name: fact.address for fact in runner.eager.registry.slot_facts()}
    for batch in batches:
        for field in ("input_ids", "positions", "out_cache_loc", "seq_lens", "seq_lens_cpu"):
            assert getattr(batch, field).data_ptr() == slots[field]
    starts = {b.extend_seq_lens.data_ptr() for b in batches if b.extend_seq_lens is not None}
    assert len(starts) <= 1
    assert not world.kv.k[:, 1:].any()
    assert world.kv.k.isfinite().all()


@pytest.mark.parametrize("has_slots", [False, True])
def test_a_pipeline_stage_sweeps_without_its_neighbours(has_slots):
    world = planned_world(LaterStage)
    rows = {key: torch.zeros(1, HIDDEN) for key in ("hidden_states", "residual")}
    config = RunnerConfig(
        pp_size=3, pp_rank=1, hidden_size=HIDDEN, embed_dtype=torch.float32,
        max_running_requests=8, chunked_prefill_size=16,
    )  # fmt: skip
    runner = ModelRunner(
        world.model,
        world.backend,
        config,
        pp_proxy_example=PPProxyTensors(rows) if has_slots else None,
    )
    with torch.no_grad():
        pp_parallel_deep_gemm_warmup(runner.eager, num_sms=132)
    shapes = [tuple(b.pp_proxy_tensors["residual"].shape) for b in world.backend.batches]
    assert shapes == [(1, HIDDEN), (8, HIDDEN), (1, HIDDEN), (16, HIDDEN)]


# --- in warm-up -------------------------------------------------------------------------------


class InOrder(Planned):
    """Also keeps which plans were for graphs, and how many graphs there were then."""

    runner = None

    def init_forward_metadata(self, forward_batch, *, graph_key=None):
        self.events = getattr(self, "events", [])
        runner = self.runner
        if runner is not None:
            captured = sum(len(each.graphs) for each in runner.graph_runners)
            is_traced = any(each.is_warm for each in runner.graph_runners)
            self.events.append((forward_batch.forward_mode, graph_key, is_traced, captured))
        return super().init_forward_metadata(forward_batch, graph_key=graph_key)


def test_the_sweep_comes_after_the_dry_run_and_before_anything_is_traced_or_captured(engine):
    world = make_world(backend=InOrder)
    runner = world.runner(warm=False, engine=engine, deep_gemm_warmup="always")
    world.backend.runner = runner
    facts = runner.warmup()
    assert list(facts.skipped) == ["flashinfer_autotune"]
    assert facts.tune_seconds > 0
    swept = [DECODE, DECODE, EXTEND, EXTEND]  # 1 and the capacity of each
    before = [event for event in world.backend.events if not event[2]]
    assert before == [(mode, None, False, 0) for mode in [DECODE, EXTEND, *swept]]
    sizes = [(b.batch_size, b.num_tokens) for b in world.backend.batches[2:6]]
    assert sizes == [(1, 1), (8, 8), (1, 1), (8, 16)]
    after = world.backend.events[len(before) :]
    assert {mode for mode, _, _, _ in after} == {DECODE, EXTEND}
    assert facts.num_captured > 0


def test_warm_up_leaves_slots_as_they_were_and_scratch_finite(engine):
    world = make_world()
    runner = world.runner(warm=False, engine=engine, deep_gemm_warmup="always")
    before = {
        (registry_of.name, name): registry_of.registry.get_slot(name).initial_value or 0
        for registry_of in (runner.eager, runner.decode)
        for name in registry_of.registry.slot_names
    }
    runner.warmup()
    for (owner, name), value in before.items():
        buffer = getattr(runner, owner).registry.get_slot(name).buffer
        shared = runner.eager.registry.get_slot(name).buffer
        if owner == "eager" or buffer.data_ptr() != shared.data_ptr():
            assert bool((buffer == value).all()), (owner, name)
    for cache in (world.kv.k, world.kv.v):
        assert not cache[:, 1:].any()
        assert cache.isfinite().all()
    requests = world.cached(3)
    world.serve(runner, requests)


def test_skipping_has_a_reason(monkeypatch):
    assert "the model is on 'cpu'" in make_world().runner().warmup_facts.skipped[DEEP_GEMM]
    cuda = torch.device("cuda")
    never = RunnerConfig(deep_gemm_warmup="never")
    assert why_not_swept(never, cuda) == "deep_gemm_warmup is 'never'"
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    reason = why_not_swept(RunnerConfig(), cuda)
    assert "'deep_gemm', which is not installed" in reason
    assert 'pip install "graphbuf[deepgemm]"' in reason
    monkeypatch.setitem(sys.modules, "deep_gemm", type(sys)("deep_gemm"))
    assert why_not_swept(RunnerConfig(), cuda) is None
    assert why_not_swept(RunnerConfig(deep_gemm_warmup="always"), torch.device("cpu")) is None
