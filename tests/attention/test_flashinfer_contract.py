"""What we rely on of the real FlashInfer: its signatures, its contexts, its look-ups; its kernels
where there is a GPU."""

import inspect
import json
import sys

import pytest
import torch

from compile_backend import ForwardBatch, ForwardMode
from compile_backend.attention import (
    ForwardContext,
    KVCache,
    RequestTable,
    TorchNativeBackend,
)
from compile_backend.attention.flashinfer import FlashInferBackend
from compile_backend.runners.autotune import (
    autotune_flashinfer,
    share_file,
    tuned_sizes,
    tuning_buckets,
)
from tests import flashinfer_stand_in
from tests.attention.conftest import World
from tests.attention.test_flashinfer import backend_of
from tests.runners.models import make_world

REASON = "FlashInfer is not installed; the contract is checked where it is"
flashinfer = pytest.importorskip("flashinfer", reason=REASON)
autotuner = pytest.importorskip("flashinfer.autotuner", reason=REASON)

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DECODE, EXTEND = ForwardMode.DECODE, ForwardMode.EXTEND


# --- signatures -------------------------------------------------------------------------------


def bound(stand_in, real):
    """The stand-in of a wrapper, whose every call is held against the real one's signature."""
    calls = set()

    class Bound(stand_in):
        def __init__(self, *args, **kwargs):
            inspect.signature(real.__init__).bind(self, *args, **kwargs)
            calls.add("__init__")
            super().__init__(*args, **kwargs)

    def checked(name):
        def call(self, *args, **kwargs):
            inspect.signature(getattr(real, name)).bind(self, *args, **kwargs)
            if name == "plan" and hasattr(real, "_plan_impl"):  # plan(..., **kwargs) takes anything
                inspect.signature(real._plan_impl).bind(self, *args, **kwargs)
            calls.add(name)
            return getattr(stand_in, name)(self, *args, **kwargs)

        return call

    for name in ("plan", "run", "reset_workspace_buffer"):
        setattr(Bound, name, checked(name))
    return Bound, calls


def test_every_call_of_the_backend_fits_the_real_signatures(monkeypatch):
    modules = flashinfer_stand_in.modules()
    calls = {}
    for kind in ("Decode", "Prefill"):
        name = f"Batch{kind}WithPagedKVCacheWrapper"
        wrapper, calls[kind] = bound(getattr(flashinfer_stand_in, name), getattr(flashinfer, name))
        setattr(modules["flashinfer"], name, wrapper)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    world = World(dtype=torch.float16)
    world.backend = backend_of(world)
    world.backend.init_graph_state(max_bs=4, max_num_tokens=16)
    requests = [world.request(5), world.request(2)]
    world.check(world.step(requests, [2, 3], EXTEND))
    step = world.step(requests, [1, 1], DECODE)
    world.check(step)
    world.check(step, metadata=world.backend.init_forward_metadata(step.batch, graph_key=()))
    block = world.step(requests, [4, 4], ForwardMode.DLLM_EXTEND)
    world.check(block, metadata=world.backend.init_forward_metadata(block.batch, graph_key=()))
    tree = world.step(requests[:1], [2], ForwardMode.TARGET_VERIFY)
    num_keys = int(tree.batch.seq_lens[0])
    causal = torch.ones(2, num_keys, dtype=torch.bool).tril(num_keys - 2)
    tree.batch.spec_info = type("Tree", (), {"custom_mask": causal.flatten()})()
    world.check(tree)
    every = {"__init__", "plan", "run", "reset_workspace_buffer"}
    assert calls == {"Decode": every, "Prefill": every}


def test_the_stand_in_takes_no_argument_that_the_real_package_lacks():
    for name in ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"):
        mine, real = getattr(flashinfer_stand_in, name), getattr(flashinfer, name)
        for method in ("__init__", "run", "reset_workspace_buffer"):
            taken = inspect.signature(getattr(mine, method)).parameters
            assert set(taken) <= set(inspect.signature(getattr(real, method)).parameters)
    taken = inspect.signature(flashinfer_stand_in.autotune).parameters
    assert set(taken) <= set(inspect.signature(autotuner.autotune).parameters)


def test_the_calls_of_the_tuner_fit():
    inspect.signature(autotuner.autotune).bind(True, cache=None, tuning_buckets=(1, 2))
    inspect.signature(autotuner.autotune).bind(False, tuning_buckets=(1, 2))
    tuner = autotuner.AutoTuner.get()
    inspect.signature(tuner.clear_cache).bind()
    inspect.signature(tuner.load_configs).bind("path")


# --- the tuner --------------------------------------------------------------------------------


@pytest.fixture
def tuner():
    tuner = autotuner.AutoTuner.get()
    tuner.clear_cache()
    yield tuner
    tuner.clear_cache()


def test_the_dummy_forward_runs_in_the_tuning_context_which_is_left(tuner, tmp_path):
    world = make_world()
    runner = world.runner(warm=False, flashinfer_autotune_cache=str(tmp_path / "measured.json"))
    seen = []
    world.model.after = lambda h, batch: (
        seen.append((tuner.is_tuning_mode, tuner._override_tuning_buckets)),
        h,
    )[-1]
    with torch.no_grad():
        autotune_flashinfer(runner.decode)
    assert seen == [(True, tuning_buckets(runner.config))]
    assert (tuner.is_tuning_mode, tuner._override_tuning_buckets) == (False, None)
    world.model.after = lambda h, batch: 1 / 0
    with pytest.raises(ZeroDivisionError):
        autotune_flashinfer(runner.decode)
    assert (tuner.is_tuning_mode, tuner._override_tuning_buckets) == (False, None)


class Gemm(autotuner.TunableRunner):
    """Something that can be tuned, with tactics 1 to 4."""

    def get_valid_tactics(self, inputs, profile):
        return [1, 2, 3, 4]

    def forward(self, inputs, *, tactic=-1, do_preparation=False, **kwargs):
        return inputs[0]


def chosen(num_tokens):
    """The tactic that a kernel with FlashInfer's usual powers of two gets for that size."""
    spec = autotuner.DynamicTensorSpec(
        input_idx=(0,),
        dim_idx=(0,),
        gen_tuning_buckets=(1, 2, 4, 8, 16, 32),
        map_to_tuning_buckets=lambda n: 1 << (n.bit_length() - 1),
    )
    config = autotuner.TuningConfig(dynamic_tensor_specs=(spec,))
    inputs = [torch.zeros(num_tokens, 4)]
    return autotuner.AutoTuner.get().choose_one("mm", [Gemm()], config, inputs)[1]


def write_measurements(path, **tactics):
    """A file as FlashInfer writes it: tactics by token count."""
    keys = {n: str(("mm", "Gemm", ((int(n.removeprefix("n")), 4),), ())) for n in tactics}
    path.write_text(json.dumps({keys[n]: ["Gemm", tactic] for n, tactic in tactics.items()}))


def test_measurements_of_a_captured_size_are_found_only_within_tuned_sizes(tuner, tmp_path):
    config = make_world().runner(warm=False, cudagraph_capture_sizes=(1, 6, 8)).config
    assert 6 in tuning_buckets(config)
    write_measurements(tmp_path / "measured.json", n4=1, n6=2, n8=3)
    tuner.load_configs(str(tmp_path / "measured.json"))
    assert [chosen(n) for n in (4, 6, 8)] == [1, 1, 3]  # 6 counts as 4
    with tuned_sizes(config):
        assert not tuner.is_tuning_mode
        assert [chosen(n) for n in (4, 6, 8)] == [1, 2, 3]
    assert chosen(6) == 1


def test_a_file_that_is_loaded_after_clearing_decides(tuner, tmp_path):
    """What a rank other than 0 does with rank 0's file."""
    path = tmp_path / "measured.json"
    write_measurements(path, n8=4)
    with autotuner.autotune(True, cache=str(path), tuning_buckets=(8,)):
        pass
    assert share_file(str(path))
    tuner.clear_cache()
    assert chosen(8) == -1
    assert tuner.load_configs(str(path))
    assert chosen(8) == 4


# --- on a GPU ---------------------------------------------------------------------------------


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("ratio", [1, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_kernels_attend_as_torch_native_does(ratio, dtype):
    """Extends in chunks, then decodes eagerly and out of a graph that was captured at length 1."""
    heads, head_dim, device = 2, 64, "cuda"
    worlds = []
    for _ in range(2):
        cache = KVCache(2048, 1, heads, head_dim, dtype, device)
        table = RequestTable(8, 512, device)
        worlds.append((cache, table))
    native = TorchNativeBackend(*worlds[0])
    backend = FlashInferBackend(*worlds[1], num_qo_heads=heads * ratio)
    backend.init_graph_state(max_bs=4, max_num_tokens=64)
    slots = (torch.randperm(2000) + 1).tolist()
    rows = [[table.allocate() for _ in range(3)] for _, table in worlds]
    assert rows[0] == rows[1]
    lengths = [0, 0, 0]

    def step(new, mode):
        taken = []
        for i, n in enumerate(new):
            mine = [slots.pop() for _ in range(n)]
            for _, table in worlds:
                table.write(rows[0][i], lengths[i], mine)
            taken += mine
        prefixes = list(lengths)
        lengths[:] = [a + b for a, b in zip(lengths, new, strict=True)]
        seq_lens = torch.tensor(lengths)
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=3,
            input_ids=torch.zeros(sum(new), dtype=torch.int64, device=device),
            out_cache_loc=torch.tensor(taken, device=device),
            req_pool_indices=torch.tensor(rows[0], device=device),
            seq_lens=seq_lens.to(device),
            seq_lens_cpu=seq_lens,
        )
        if mode is EXTEND:
            batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu = list(new), prefixes
        qkv = torch.randn(sum(new), heads * (ratio + 2), head_dim, dtype=dtype, device=device)
        return batch, qkv.split([heads * ratio, heads, heads], dim=1)

    def attend(on, batch, qkv, metadata):
        context = ForwardContext(on, batch, metadata)
        return on.forward(*qkv, layer_id=0, scale=None, context=context)

    def check(got, batch, qkv):
        want = attend(native, batch, qkv, native.init_forward_metadata(batch))
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)

    for new in ([5, 40, 1], [30, 2, 200]):
        batch, qkv = step(new, EXTEND)
        check(attend(backend, batch, qkv, backend.init_forward_metadata(batch)), batch, qkv)
    batch, qkv = step([1, 1, 1], DECODE)
    check(attend(backend, batch, qkv, backend.init_forward_metadata(batch)), batch, qkv)

    static, static_qkv = batch, [each.clone() for each in qkv]
    for field in ("seq_lens", "seq_lens_cpu"):
        getattr(static, field).fill_(1)
    plan = backend.init_forward_metadata(static, graph_key=())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        attend(backend, static, static_qkv, plan)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(backend, static, static_qkv, plan)
    for _ in range(3):
        batch, qkv = step([1, 1, 1], DECODE)
        for field in ("seq_lens", "seq_lens_cpu", "out_cache_loc", "req_pool_indices"):
            getattr(static, field).copy_(getattr(batch, field))
        for slot, live in zip(static_qkv, qkv, strict=True):
            slot.copy_(live)
        assert backend.init_forward_metadata(static, graph_key=()) is plan
        graph.replay()
        check(out, batch, qkv)
