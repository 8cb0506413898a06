"""What is around a forward, or has become of the model, since it was traced: a graph that no longer
says what eager does is not replayed, and one odd forward is not held against the next."""

import pytest
import torch
from torch import nn

from compile_backend.errors import FallbackReason, ReplayError, SlotMismatchError
from compile_backend.runners import ForwardOutput
from tests.runners.models import HIDDEN, Decoder, make_world
from tests.runners.test_fallbacks import FEW


def close(out: ForwardOutput, want: torch.Tensor) -> None:
    torch.testing.assert_close(out.hidden_states, want, rtol=1e-4, atol=1e-5)


def test_a_forward_under_autocast_equals_eager_and_the_next_one_is_a_hit(engine):
    world = make_world()
    runner = world.runner(engine=engine, **FEW)
    requests = world.cached(2)
    for is_cast in (True, False, True, False):
        batch = world.decode(requests)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            want = world.eagerly(batch)
            out = runner.forward(batch)
        torch.testing.assert_close(out.hidden_states, want, rtol=2e-2, atol=2e-2)
        assert out.hidden_states.dtype == want.dtype
        assert out.reason is (FallbackReason.AUTOCAST if is_cast else None)
    assert runner.explain().hits == 2


def test_warming_up_under_autocast_captures_what_runs_without(engine):
    world = make_world()
    runner = world.runner(warm=False, engine=engine, **FEW)
    with torch.autocast("cpu", torch.bfloat16):
        runner.warmup()
    batch = world.decode(world.cached(2))
    want = world.eagerly(batch)
    out = runner.forward(batch)
    close(out, want)
    assert out.path == "decode"


def test_a_first_forward_in_an_odd_state_is_not_held_against_the_next(engine):
    world = make_world()
    runner = world.runner(engine=engine, **FEW)
    requests = world.cached(2)
    threads = torch.get_num_threads()
    for num_threads in (threads + 1, threads):
        batch = world.decode(requests, seq_lens_sum=7)  # another kind than warm-up has looked up
        torch.set_num_threads(num_threads)
        try:
            want = world.eagerly(batch)
            out = runner.forward(batch)
        finally:
            torch.set_num_threads(threads)
        close(out, want)
    assert out.path == "decode"


@pytest.mark.parametrize("change", ["replaced", "train"])
def test_a_model_that_was_changed_runs_as_it_is_now(engine, change):
    world = make_world()
    runner = world.runner(engine=engine, **FEW)
    requests = world.cached(2)
    assert world.serve(runner, requests).path == "decode"
    if change == "replaced":
        world.model.norm = nn.LayerNorm(HIDDEN)
    else:
        world.model.train()
    batch = world.decode(requests)
    want = world.eagerly(batch)
    out = runner.forward(batch)
    close(out, want)
    assert (out.path, out.reason) == ("eager", FallbackReason.MODEL_CHANGED)


def test_weights_of_another_dtype_are_refused_by_the_bucket_that_reads_them():
    world = make_world()
    runner = world.runner(engine="host", **FEW)
    requests = world.cached(2)
    assert world.serve(runner, requests).path == "decode"
    world.model.to(torch.float64)
    with pytest.raises(
        ReplayError, match=r"decode bs=\d+ .* another dtype.*make a new ModelRunner"
    ):
        runner.forward(world.decode(requests))


@pytest.mark.parametrize(
    "lengths",
    [torch.tensor([3, 2]), torch.tensor([3, 2, 1]), torch.tensor([3.0, 2.0, 4.0])],
    ids=["too few", "others", "float"],
)
def test_lengths_on_the_device_that_contradict_the_host_are_refused_before_anything_runs(lengths):
    world = make_world()
    runner = world.runner(engine="host", **FEW)
    before = world.kv.k.clone()
    _, batch = world.extend((3, 2, 4), extend_seq_lens=lengths)
    with pytest.raises(SlotMismatchError, match=r"extend_seq_lens .* extend_seq_lens_cpu"):
        runner.forward(batch)
    assert torch.equal(world.kv.k, before)


def test_a_list_in_the_place_of_a_tensor_is_named():
    world = make_world()
    runner = world.runner(engine="host", **FEW)
    batch = world.decode(world.cached(2))
    batch.positions = batch.positions.tolist()
    with pytest.raises(SlotMismatchError, match="'positions' is a list"):
        runner.forward(batch)


class RunningSum(Decoder):
    """Its rows depend on a state that all rows are added to."""

    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("mean", torch.zeros(HIDDEN))

    def after(self, h, batch):
        self.mean.mul_(0.9).add_(h.sum(0))
        return h + self.mean


def test_a_breakable_bucket_whose_state_mixes_rows_is_not_padded(engine):
    world = make_world(RunningSum)
    runner = world.runner(engine=engine, prefill_backend="breakable", enable_decode_graph=False)
    state = world.model.mean.clone()
    _, batch = world.extend((3, 2))
    out = runner.forward(batch)
    assert (out.path, out.reason) == ("eager", FallbackReason.PADDING_UNSAFE)
    got = world.model.mean.clone()
    world.model.mean.copy_(state)
    torch.testing.assert_close(out.hidden_states, world.eagerly(batch), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got, world.model.mean)
