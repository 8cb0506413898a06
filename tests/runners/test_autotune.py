"""FlashInfer's tuning: on which buffers, with which batch, at which sizes, and by whose result."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compile_backend import ForwardMode, PPProxyTensors, RunnerConfig
from compile_backend.attention import TorchNativeBackend
from compile_backend.errors import ConfigError, MissingExtraError, SlotOverflowError
from compile_backend.registry.capacity import mlp_sync_padded_tokens
from compile_backend.registry.mlp_sync import prepare_mlp_sync_batch
from compile_backend.runners.autotune import (
    autotune_flashinfer,
    tuned_sizes,
    tuning_buckets,
    why_not_tuned,
)
from compile_backend.runners.warmup import FLASHINFER
from tests.flashinfer_stand_in import AutoTuner, stand_in
from tests.runners.models import HIDDEN, Decoder, make_world

__all__ = ["stand_in"]

DECODE, EXTEND = ForwardMode.DECODE, ForwardMode.EXTEND
ROOT = Path(__file__).parents[2]


class Planned(TorchNativeBackend):
    """Keeps every batch that it planned, and may want another length of padded requests."""

    fill_value = 1

    def __init__(self, *args):
        super().__init__(*args)
        self.batches = []

    @property
    def seq_len_fill_value(self):
        return self.fill_value

    def init_forward_metadata(self, forward_batch, *, graph_key=None):
        self.batches.append(forward_batch)
        return super().init_forward_metadata(forward_batch, graph_key=graph_key)


class NewStorages(TorchDispatchMode):
    """Bytes of every storage that an operator made."""

    def __init__(self):
        super().__init__()
        self.num_bytes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        known = {storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **kwargs)
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and storage(each) not in known:
                self.num_bytes.append(each.untyped_storage().nbytes())
        return result


def storage(tensor):
    return tensor.untyped_storage()._cdata


def planned_world(model=Decoder, **options):
    return make_world(model, backend=Planned, **options)


def tensors_of(batch):
    return {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}


# --- the buffers ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["decode", "eager"])
def test_the_buffers_are_the_runners_own_slots_at_its_largest_batch_size(name):
    runner = getattr(make_world().runner(warm=False, max_running_requests=6), name)
    buffers, batch_size = runner._autotune_buffers()
    assert batch_size == buffers.batch_size == buffers.num_tokens == 6
    by_name = {fact.name: fact for fact in runner.registry.slot_facts()}
    slots = {n: t for n, t in tensors_of(buffers).items() if not n.startswith("extend_")}
    assert {"input_ids", "positions", "out_cache_loc", "seq_lens", "seq_lens_cpu"} <= set(slots)
    for field, tensor in slots.items():
        assert tensor.data_ptr() == by_name[field].address, field
    assert buffers.logits_buffer is None


def test_a_runner_without_buffers_says_what_to_return(stand_in):
    runner = make_world().runner(warm=False)
    assert runner.prefill._autotune_buffers() is None
    with pytest.raises(ConfigError, match=r"the prefill runner .* returned None; return \(buffers"):
        autotune_flashinfer(runner.prefill)
    autotune_flashinfer(runner.eager)  # the advice


@pytest.mark.parametrize("name", ["decode", "eager"])
@pytest.mark.parametrize("is_multimodal", [False, True])
def test_mrope_positions_are_absent_for_a_text_model(name, is_multimodal):
    world = planned_world()
    config = {"is_multimodal": True, "hidden_size": HIDDEN, "embed_dtype": torch.float32}
    runner = getattr(world.runner(warm=False, **(config if is_multimodal else {})), name)
    buffers, batch_size = runner._autotune_buffers()
    runner._dummy_run(batch_size, buffers)
    (batch,) = world.backend.batches
    if is_multimodal:
        assert batch.mrope_positions.shape == (3, batch_size)
    else:
        assert buffers.mrope_positions is batch.mrope_positions is None


@pytest.mark.parametrize(("fill_value", "length"), [(0, 1), (1, 1), (7, 7)])
@pytest.mark.parametrize("name", ["decode", "eager"])
def test_dummy_requests_are_as_long_as_the_backends_padding_and_never_empty(
    name, fill_value, length
):
    world = planned_world()
    world.backend.fill_value = fill_value
    runner = getattr(world.runner(warm=False), name)
    for slot in ("seq_lens", "seq_lens_cpu"):  # as an eager fill leaves its tails
        runner.registry.get_slot(slot).buffer.zero_()
    buffers, batch_size = runner._autotune_buffers()
    for bs in (batch_size, 3):
        runner._dummy_run(bs, buffers)
        batch = world.backend.batches[-1]
        assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == [length] * bs
        assert batch.seq_lens_sum == length * bs
        for field in ("req_pool_indices", "out_cache_loc", "positions"):
            assert getattr(batch, field).tolist() == [0] * bs


def test_what_the_eager_slots_lack_is_made_only_where_it_is_wanted():
    world = planned_world()
    target = {
        "speculative_algorithm": "EAGLE",
        "speculative_role": "target",
        "speculative_num_draft_tokens": 3,
    }
    runner = world.runner(warm=False, **target).eager
    buffers, batch_size = runner._autotune_buffers(vocab_size=5)
    assert buffers.logits_buffer.shape == (batch_size * 3, 5)
    runner._dummy_run(2, buffers, ForwardMode.TARGET_VERIFY)
    batch = world.backend.batches[-1]
    assert batch.spec_info.custom_mask.shape == (2 * 3 * 3,)
    assert batch.logits_buffer.shape == (6, 5)
    assert batch.extend_seq_lens_cpu == [3, 3]
    plain, _ = world.runner(warm=False).eager._autotune_buffers()
    assert plain.custom_mask is plain.logits_buffer is plain.pp_proxy_tensors is None


class LaterStage(Decoder):
    """Takes what the stage before it hands over."""

    def before(self, h, batch):
        return batch.pp_proxy_tensors["hidden_states"] + batch.pp_proxy_tensors["residual"]


@pytest.mark.parametrize("has_slots", [False, True])
@pytest.mark.parametrize("name", ["decode", "eager"])
def test_a_later_pipeline_stage_runs_on_proxies_of_its_own(has_slots, name):
    from compile_backend import ModelRunner

    world = planned_world(LaterStage)
    config = RunnerConfig(
        pp_size=2, pp_rank=1, hidden_size=HIDDEN, embed_dtype=torch.float32,
        max_running_requests=8, chunked_prefill_size=16, compiler="eager",
    )  # fmt: skip
    rows = {key: torch.zeros(1, HIDDEN) for key in ("hidden_states", "residual")}
    example = PPProxyTensors(rows) if has_slots else None
    runner = ModelRunner(world.model, world.backend, config, pp_proxy_example=example)
    runner = getattr(runner, name)
    buffers, batch_size = runner._autotune_buffers()
    for bs in (batch_size, 3):
        assert runner._dummy_run(bs, buffers).shape == (bs, HIDDEN)
        proxies = world.backend.batches[-1].pp_proxy_tensors
        assert {key: tuple(each.shape) for key, each in proxies.items()} == {
            "hidden_states": (bs, HIDDEN),
            "residual": (bs, HIDDEN),
        }
        if has_slots:
            slot = runner.registry.get_slot("pp_proxy_tensors.residual").buffer
            assert proxies["residual"].data_ptr() == slot.data_ptr()


# --- the dummy forward ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["decode", "eager"])
@pytest.mark.parametrize("mode", [DECODE, EXTEND], ids=lambda m: m.name)
def test_a_dummy_forward_makes_nothing_of_the_size_of_a_slot(name, mode):
    world = planned_world(num_slots=64)
    runner = getattr(
        world.runner(
            warm=False,
            max_running_requests=4096,
            chunked_prefill_size=8192,
            cudagraph_capture_sizes=(1,),
            prefill_capture_sizes=(4,),
        ),
        name,
    )
    buffers = runner._alloc_dummy_decode_buffers(4096)
    runner._dummy_run(2, buffers, mode)
    new = NewStorages()
    with torch.no_grad(), new:
        runner._dummy_run(2, buffers, mode)
    smallest = min(fact.num_bytes for fact in runner.registry.slot_facts())
    assert max(new.num_bytes) < smallest
    assert 0 < sum(new.num_bytes) < smallest


@pytest.mark.parametrize("name", ["decode", "eager"])
def test_a_dummy_forward_stays_within_the_buffers_at_every_size(name):
    world = planned_world()
    runner = getattr(world.runner(warm=False), name)
    buffers, batch_size = runner._autotune_buffers()
    slots = {f.name: (f.address, f.address + f.num_bytes) for f in runner.registry.slot_facts()}
    for bs in range(1, batch_size + 1):
        for mode, tokens in ((DECODE, bs), (EXTEND, bs), (EXTEND, batch_size)):
            result = runner._dummy_run(bs, buffers, mode, num_tokens=tokens)
            assert len(result) == tokens
            batch = world.backend.batches[-1]
            assert (batch.batch_size, batch.num_tokens) == (bs, tokens)
            for field, tensor in tensors_of(batch).items():
                if field in slots:
                    start, end = slots[field]
                    assert start <= tensor.data_ptr()
                    assert tensor.data_ptr() + tensor.nbytes <= end
            if mode is EXTEND:
                lengths = batch.extend_seq_lens_cpu
                assert sum(lengths) == tokens
                assert max(lengths) - min(lengths) <= 1
                assert batch.extend_seq_lens.tolist() == batch.seq_lens.tolist() == lengths
                starts = [sum(lengths[:i]) for i in range(bs)]
                assert batch.extend_start_loc.tolist() == starts
    for bs, tokens in ((batch_size + 1, None), (2, batch_size + 1), (2, 1)):
        with pytest.raises(SlotOverflowError, match=f"does not fit buffers of {batch_size}"):
            runner._dummy_run(bs, buffers, EXTEND, num_tokens=tokens)


@pytest.mark.parametrize("name", ["decode", "eager"])
def test_under_mlp_sync_the_dummy_batch_is_aligned_like_a_live_one(name):
    world = planned_world(max_requests=32)
    runner = world.runner(
        warm=False, enable_mlp_sync=True, attn_tp_size=4, attn_tp_rank=1, max_running_requests=9
    )
    buffers, batch_size = getattr(runner, name)._autotune_buffers()
    assert batch_size == 12
    for live in (1, 3, 4, 9):
        getattr(runner, name)._dummy_run(live, buffers)
        batch = world.backend.batches[-1]
        (padded,) = mlp_sync_padded_tokens(runner.config, [live], same_size=True)
        assert batch.batch_size == batch.num_tokens == padded
        arrived = prepare_mlp_sync_batch(world.decode(world.cached(live)), runner.config, [live])
        assert batch.global_num_tokens_cpu == arrived.global_num_tokens_cpu == [padded]
        assert batch.num_token_non_padded.tolist() == [padded // 4]  # this rank's share


# --- the sizes --------------------------------------------------------------------------------


def test_the_measured_sizes_are_the_captured_ones_within_the_capacity():
    def buckets(**config):
        return tuning_buckets(RunnerConfig(**config))

    sizes = {"cudagraph_capture_sizes": (1, 3, 200), "prefill_capture_sizes": (5, 64, 4096)}
    assert buckets(max_running_requests=16, **sizes) == (1, 3, 5, 16, 64, 2048)
    assert buckets(max_running_requests=16, role="decode", **sizes) == (1, 3, 16)
    assert buckets(max_running_requests=16, role="prefill", **sizes) == (5, 64, 2048)
    assert buckets(max_running_requests=4, dllm_block_size=8, role="decode", **sizes) == (8, 24, 32)
    aligned = buckets(enable_mlp_sync=True, attn_tp_size=4, max_running_requests=16, **sizes)
    assert aligned == (4, 8, 16, 64, 2048)


def test_one_forward_is_measured_at_those_sizes_and_the_context_is_left(stand_in, tmp_path):
    world = planned_world()
    path = tmp_path / "measured.json"
    config = {"flashinfer_autotune_cache": str(path), "deep_gemm_warmup": "never"}
    runner = world.runner(warm=False, **config)
    seen = []
    world.model.after = lambda h, batch: (
        seen.append((AutoTuner.get().is_tuning_mode, AutoTuner.get().buckets[:])),
        AutoTuner.get().measure("gemm", 3),
        h,
    )[-1]
    autotune_flashinfer(runner.decode)
    assert seen == [(True, [tuning_buckets(runner.config)])]
    assert [batch.batch_size for batch in world.backend.batches] == [8]
    assert path.read_text() == '{"gemm": 3}'
    with tuned_sizes(runner.config):
        assert not AutoTuner.get().is_tuning_mode
        assert AutoTuner.get().buckets == [tuning_buckets(runner.config)]
    assert AutoTuner.get().buckets == []
    world.model.after = lambda h, batch: 1 / 0
    with pytest.raises(ZeroDivisionError):
        autotune_flashinfer(runner.decode)
    assert not AutoTuner.get().is_tuning_mode
    assert AutoTuner.get().buckets == []


def test_a_prefill_worker_is_tuned_on_an_extend(stand_in):
    world = planned_world()
    runner = world.runner(warm=False, role="prefill", enable_decode_graph=False)
    autotune_flashinfer(runner.eager)
    assert [batch.forward_mode for batch in world.backend.batches] == [EXTEND]


def test_all_ranks_use_what_rank_0_measured(tmp_path):
    """Two processes: the first has a file, both measure something of their own."""
    path = tmp_path / "measured.json"
    path.write_text('{"old": "rank 0 knew"}')
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.runners.tuning_rank", str(rank), str(tmp_path)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in (0, 1)
    ]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert outputs == ["old: rank 0 knew, gemm: rank 0 measured\n"] * 2
    assert path.read_text() == '{"old": "rank 0 knew", "gemm": "rank 0 measured"}'
    assert not (tmp_path / "other.json").exists()


# --- in warm-up -------------------------------------------------------------------------------


class TunerSeen(Planned):
    """Notes what the tuner is doing whenever a batch is planned, and whether for a graph."""

    def init_forward_metadata(self, forward_batch, *, graph_key=None):
        tuner = AutoTuner.get()
        self.seen = [*getattr(self, "seen", []), (tuner.is_tuning_mode, bool(tuner.buckets))]
        return super().init_forward_metadata(forward_batch, graph_key=graph_key)


def test_warm_up_tunes_once_captures_at_the_tuned_sizes_and_takes_it_back(engine, stand_in):
    """As on a GPU, as far as warm-up asks what the model is on."""
    world = make_world(backend=TunerSeen)
    runner = world.runner(warm=False, engine=engine, deep_gemm_warmup="never")
    runner.served = dataclasses.replace(runner.served, device=torch.device("cuda"))
    facts = runner.warmup()
    assert list(facts.skipped) == ["deep_gemm_warmup"]
    assert [call for name, call, _ in stand_in if name == "autotune"] == [(True,), (False,)]
    dry, tuned, captured = world.backend.seen[:2], world.backend.seen[2], world.backend.seen[3:]
    assert dry == [(False, False)] * 2
    assert tuned == (True, True)
    assert set(captured) == {(False, True)}  # nothing is measured while graphs are recorded
    assert facts.num_captured > 0
    for name in runner.eager.registry.slot_names:
        slot = runner.eager.registry.get_slot(name)
        assert bool((slot.buffer == (slot.initial_value or 0)).all()), name
    for cache in (world.kv.k, world.kv.v):
        assert not cache[:, 1:].any()
        assert cache.isfinite().all()
    world.serve(runner, world.cached(3))


# --- skipping ---------------------------------------------------------------------------------


def test_warm_up_says_what_it_skipped_and_why():
    world = make_world()
    facts = world.runner().warmup_facts
    assert list(facts.skipped) == ["flashinfer_autotune", "deep_gemm_warmup"]
    assert facts.skipped[FLASHINFER] == "the model is on 'cpu'; FlashInfer measures on CUDA devices"
    facts = world.runner(enable_flashinfer_autotune=False).warmup_facts
    assert facts.skipped[FLASHINFER] == "enable_flashinfer_autotune is False"


def test_an_absent_package_is_a_reason_and_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.delitem(sys.modules, "flashinfer.autotuner", raising=False)
    reason = why_not_tuned(RunnerConfig(), torch.device("cuda"))
    assert "'flashinfer', which is not installed" in reason
    assert 'pip install "graphbuf[cuda]"' in reason
    with pytest.raises(MissingExtraError, match=r"graphbuf\[cuda\]"):
        autotune_flashinfer(make_world().runner(warm=False).decode)


def test_what_can_be_tuned_has_no_reason(stand_in):
    assert why_not_tuned(RunnerConfig(), torch.device("cuda")) is None
