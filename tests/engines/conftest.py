"""Engines to run a test on, and how to give each of them new values."""

import gc
from collections.abc import Callable, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from compile_backend.engines import Engine, HostEngine, NoEngine, Replay, StrictHostEngine
from compile_backend.engines.opaque import current_recorder

Feed = Callable[[Engine, Replay, Sequence[Tensor], Sequence[Tensor]], list]


@pytest.fixture(autouse=True)
def _one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(params=[NoEngine, HostEngine, StrictHostEngine], ids=lambda each: each.name)
def engine(request) -> Engine:
    """Every engine: what a replay computes is the same on all."""
    return request.param()


@pytest.fixture(params=[HostEngine, StrictHostEngine], ids=lambda each: each.name)
def recorder(request) -> Engine:
    """Engines that record."""
    return request.param()


@pytest.fixture(params=[torch.no_grad, torch.inference_mode], ids=["no_grad", "inference"])
def mode(request):
    """The two ways of running without gradients; composites reach a capture whole in the second."""
    with request.param():
        yield request.param


@pytest.fixture
def feed() -> Feed:
    """``feed(engine, replay, captured, values)``: replay with the values of other tensors.

    With late binding those tensors themselves, else copied into the captured ones.
    """

    def give(engine: Engine, replay: Replay, captured: Sequence[Tensor], values: Sequence[Tensor]):
        if engine.late_binding:
            return replay(list(values))
        for static, value in zip(captured, values, strict=True):
            static.copy_(value)
        return replay()

    return give


@pytest.fixture
def found_as_left():
    """``with found_as_left():`` checks that a block leaves the process as it found it."""

    @contextmanager
    def check():
        before = _process_state()
        yield
        after = _process_state()
        generator, generator_after = before.pop("generator"), after.pop("generator")
        assert before == after
        assert torch.equal(generator, generator_after)

    return check


def _process_state() -> dict[str, object]:
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "dispatch modes": _get_current_dispatch_mode_stack(),
        "function modes": _get_current_function_mode_stack(),
        "in a mode": torch.utils._python_dispatch.is_in_torch_dispatch_mode(),
        "collector": gc.isenabled(),
        "recorder": current_recorder(),
        "generator": torch.get_rng_state(),
    }
