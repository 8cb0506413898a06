"""How long outputs live, and what a model may return."""

import random

import pytest
import torch
from torch.utils._pytree import tree_flatten

from tests.runners.models import Decoder, close, make_world

FEW = {"cudagraph_capture_sizes": (2, 4), "prefill_capture_sizes": (8,)}


def test_outputs_are_overwritten_by_the_next_forward_unless_they_are_copied():
    """Without copies an engine that bakes addresses hands out views of graph memory."""
    world = make_world()
    runner = world.runner(engine="host_strict", copy_outputs=False, **FEW)
    requests = world.cached(4)
    first, second = world.decode(requests), world.decode(requests)
    out = runner.forward(first)
    kept = out.hidden_states, out.logits
    copies = [tensor.clone() for tensor in kept]
    again = runner.forward(second)
    for tensor, copy, new in zip(kept, copies, (again.hidden_states, again.logits), strict=True):
        assert tensor.data_ptr() == new.data_ptr()
        assert torch.equal(tensor, new)
        assert not torch.equal(tensor, copy)


class Shapes(Decoder):
    """Returns its hidden states in other company; ``shape`` says which."""

    shape = "tensor"

    def after(self, h, batch):
        half = h.narrow(1, 0, 4)
        return {
            "tensor": h,
            "tuple": (h, h * 2, batch.positions),
            "dict": {"hidden_states": h, "aux": [half, half.detach()], "ids": batch.input_ids},
            "nested": (h, {"deep": (batch.positions, None, "text")}),
            "weight": (h, self.norm.weight),
            "view of input": (h, batch.positions.view(-1, 1), batch.positions[:1]),
            "same twice": (h, h),
        }[self.shape]


SHAPES = [
    "tensor",
    "tuple",
    "dict",
    "nested",
    "weight",
    "view of input",
    "same twice",
]


@pytest.mark.parametrize("shape", SHAPES)
def test_copied_outputs_of_all_steps_survive_the_later_ones(engine, shape):
    """B18: the same bucket, other buckets, prefill and eager in between; compared at the end."""
    world = make_world(Shapes)
    world.model.shape = shape
    runner = world.runner(engine=engine, copy_outputs=True, **FEW)
    requests = world.cached(7)
    kept = []
    for n in (4, 3, 4, 2, 1, 4):
        batches = [world.decode(requests[:n]), world.extend((n + 3,))[1]]
        if n == 3:
            batches.append(world.decode(requests[:7]))  # above the largest bucket
        for batch in batches:
            want = world.eagerly(batch)
            out = runner.forward(batch)
            kept.append((out.hidden_states, want, out.logits, out.path))
    for got, want, logits, path in kept:
        (got_leaves, got_spec), (leaves, spec) = tree_flatten(got), tree_flatten(want)
        assert got_spec == spec
        for got_leaf, leaf in zip(got_leaves, leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                torch.testing.assert_close(got_leaf, leaf, rtol=2e-4, atol=2e-4, msg=path)
            else:
                assert got_leaf == leaf
        hidden = want if isinstance(want, torch.Tensor) else (
            want["hidden_states"] if isinstance(want, dict) else want[0]
        )  # fmt: skip
        with torch.no_grad():
            wanted = world.model.lm_head(hidden)
        close(logits, wanted if len(logits) == len(wanted) else wanted[-1:])
    graphs_ran = sum(path != "eager" for *_, path in kept)
    assert runner.explain().hits == graphs_ran
    assert graphs_ran == 12 or shape == "view of input"  # which is not padded


def test_an_input_returned_as_it_is_has_the_live_rows(engine):
    world = make_world(Shapes)
    world.model.shape = "tuple"
    runner = world.runner(engine=engine, **FEW)
    requests = world.cached(4)
    for n in (3, 4, 1, 2):
        batch = world.decode(requests[:n])
        out = runner.forward(batch)
        assert torch.equal(out.hidden_states[2], batch.positions)
        close(out.hidden_states[1], out.hidden_states[0] * 2)


def test_a_weight_returned_as_it_is_is_that_very_tensor(engine):
    world = make_world(Shapes)
    world.model.shape = "weight"
    runner = world.runner(engine=engine, **FEW)
    out = runner.forward(world.decode(world.cached(3)))
    assert out.path == "decode"
    assert out.hidden_states[1].data_ptr() == world.model.norm.weight.data_ptr()


def test_a_model_without_an_lm_head_gives_hidden_states_alone(engine):
    world = make_world()
    del world.model.lm_head
    runner = world.runner(engine=engine, **FEW)
    requests = world.cached(3)
    out = world.serve(runner, requests)
    assert out.path == "decode"
    assert out.logits is None
    assert [use.name for use in runner.explain().runners] == ["decode", "prefill"]


def test_copies_are_made_before_another_bucket_runs(engine):
    """Results of 30 steps in random buckets, all kept."""
    world = make_world()
    runner = world.runner(engine=engine, copy_outputs=True, **FEW)
    requests, rng = world.cached(4), random.Random(1)
    kept = []
    for _ in range(30):
        batch = world.decode(rng.sample(requests, rng.randint(1, 4)))
        want = world.eagerly(batch)
        out = runner.forward(batch)
        kept.append((out.hidden_states[1:], out.logits.detach(), want))
    for hidden, logits, want in kept:
        close(hidden, want[1:])
        with torch.no_grad():
            close(logits, world.model.lm_head(want))
