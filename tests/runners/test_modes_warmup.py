"""What warm-up leaves behind: nothing but a finite scratch row."""

import torch

from compile_backend import ForwardMode
from tests.runners.mode_models import SMALL_GRAPHS, CountsSteps, Meeting
from tests.runners.models import HIDDEN, make_world
from tests.runners.test_modes_ranks import SYNC


def scratch_alone_changed(tensor: torch.Tensor, before: torch.Tensor, dim: int) -> bool:
    """Whether all but row 0 of ``dim`` is as it was, and row 0 is finite."""
    rest = tensor.shape[dim] - 1
    same = torch.equal(tensor.narrow(dim, 1, rest), before.narrow(dim, 1, rest))
    return same and bool(tensor.select(dim, 0).isfinite().all())


def test_cache_state_and_slots_are_as_before_warming_up(engine):
    world = make_world(CountsSteps, 1)
    torch.manual_seed(5)
    model, kv = world.model, world.kv
    for tensor in (kv.k, kv.v, model.state, model.num_prefills, model.num_steps):
        tensor.copy_(torch.rand(tensor.shape))
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    keys, values, table = kv.k.clone(), kv.v.clone(), world.table.req_to_token.clone()
    runner = world.runner(
        engine=engine,
        warm=False,
        enable_mamba_track=True,
        is_multimodal=True,
        hidden_size=HIDDEN,
        embed_dtype=torch.float32,
        **SMALL_GRAPHS,
    )
    for registry in runner.registries:
        registry.reset_slots()
    slots = [
        (registry.get_slot(name).buffer, registry.get_slot(name).initial_value)
        for registry in reversed(runner.registries)
        for name in registry.slot_names
    ]
    runner.warmup()
    assert len(runner.decode.graphs) > 0
    assert len(runner.prefill.graphs) > 0
    assert scratch_alone_changed(kv.k, keys, 1)
    assert scratch_alone_changed(kv.v, values, 1)
    assert torch.equal(world.table.req_to_token, table)
    for name, value in model.state_dict().items():
        if name in ("state", "num_prefills"):
            assert scratch_alone_changed(value, kept[name], 0), name
        else:
            assert torch.equal(value, kept[name]), name
    by_address = {buffer.data_ptr(): (buffer, initial) for buffer, initial in slots}
    for buffer, initial in by_address.values():  # of those that share one, the eager runner's
        assert (buffer == (initial or 0)).all()


def test_an_idle_replay_writes_the_scratch_row_alone(engine):
    world = make_world(Meeting, 1)
    runner = world.runner(engine=engine, **{**SYNC, "dp_size": 1}, **SMALL_GRAPHS)
    keys = world.kv.k.copy_(torch.rand(world.kv.k.shape)).clone()
    batch = world.batch([], ForwardMode.IDLE, can_run_dp_cuda_graph=True)
    batch.global_num_tokens_cpu = [3]
    out = runner.forward(batch)
    assert (out.path, out.bucket) == ("decode", 4)
    assert scratch_alone_changed(world.kv.k, keys, 1)
    assert not torch.equal(world.kv.k[:, 0], keys[:, 0])
