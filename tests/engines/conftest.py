"""Engines to run a test on, and how to give each of them new values."""

import gc
from collections.abc import Callable, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from compile_backend.engines import (
    CudaEngine,
    Engine,
    HostEngine,
    NoEngine,
    Replay,
    StrictHostEngine,
    TreesEngine,
)
from compile_backend.engines.opaque import current_recorder

Feed = Callable[[Engine, Replay, Sequence[Tensor], Sequence[Tensor]], list]


needs_cuda = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
DEVICE_ENGINES = [pytest.param(each, marks=needs_cuda) for each in (CudaEngine, TreesEngine)]

# The tests of this directory that hold for a graph on a device as they are. The others are about
# what a tape sees (host reads by name, pieces as entries), or copy Python numbers to the device
# inside the captured function, which a device graph cannot hold.
HOLD_ON_A_DEVICE = {
    "test_a_failing_warm_up_is_a_capture_error",
    "test_a_failure_leaves_everything_as_found_and_a_retry_works",
    "test_a_function_with_its_own_modes_is_recorded",
    "test_a_refused_capture_leaves_no_tensor_alive",
    "test_a_replay_without_inputs_reads_the_captured_tensors_anew",
    "test_an_external_is_mutated_once_per_call",
    "test_an_external_that_changes_in_place_is_read_anew",
    "test_an_input_is_mutated_once_per_call_and_once_by_the_capture",
    "test_an_interrupt_passes_and_restores",
    "test_an_operators_own_error_is_chained",
    "test_an_output_that_is_an_input_or_an_external_is_that_tensor",
    "test_a_capture_inside_a_capture_is_refused",
    "test_a_capture_with_grad_enabled_records_without_gradients",
    "test_modes_the_function_leaves_behind_are_removed_and_the_callers_stay",
    "test_outputs_must_be_flat",
    "test_random_operators_draw_anew_and_match_eager_for_the_same_seed",
    "test_static_inputs_must_be_tensors",
    "test_warm_ups_run_first_and_leave_the_generator_alone",
    # of breakable captures
    "test_a_capture_without_a_break_is_one_segment",
    "test_a_marked_function_may_call_another",
    "test_a_marked_function_reads_this_replays_values_and_so_does_the_next_segment",
    "test_a_method_is_marked_like_a_function",
    "test_a_replay_that_returns_a_new_tensor_is_an_error",
    "test_a_replay_that_returns_another_argument_than_the_capture_is_an_error",
    "test_a_reset_recording_runs_no_marked_function",
    "test_a_result_that_would_go_stale_is_refused",
    "test_an_argument_may_be_a_view_of_what_a_segment_made",
    "test_an_argument_that_is_given_other_memory_or_shape_is_refused",
    "test_an_exception_at_a_replay_reaches_the_caller_and_the_next_replay_is_whole",
    "test_an_exception_at_the_capture_leaves_nothing_behind",
    "test_an_exception_that_the_captured_function_swallows_still_counts",
    "test_an_input_may_be_written_by_a_marked_function",
    "test_arguments_may_be_returned",
    "test_breaks_in_a_loop",
    "test_state_of_a_marked_function_goes_on",
    "test_tensors_reach_a_marked_function_in_containers_and_by_keyword",
}


def _on_its_device(request):
    """The engine of a parameter; tests of engines on a device make their tensors there."""
    engine = request.param()
    if engine.name not in ("cuda", "trees"):
        yield engine
        return
    if request.function.__name__ not in HOLD_ON_A_DEVICE:
        pytest.skip("about what a tape records, not what a device graph does")
    with torch.device("cuda"):
        yield engine
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def _one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(
    params=[NoEngine, HostEngine, StrictHostEngine, *DEVICE_ENGINES], ids=lambda each: each.name
)
def engine(request):
    """Every engine: what a replay computes is the same on all."""
    yield from _on_its_device(request)


@pytest.fixture(params=[HostEngine, StrictHostEngine, *DEVICE_ENGINES], ids=lambda each: each.name)
def recorder(request):
    """Engines that record."""
    yield from _on_its_device(request)


BREAKABLE = [HostEngine, StrictHostEngine, pytest.param(CudaEngine, marks=needs_cuda)]


@pytest.fixture(params=BREAKABLE, ids=lambda each: each.name)
def breakable_recorder(request):
    """Engines that record, and can be interrupted."""
    yield from _on_its_device(request)


@pytest.fixture(params=[NoEngine, *BREAKABLE], ids=lambda each: each.name)
def breakable_engine(request):
    """These, and the one that just calls the function."""
    yield from _on_its_device(request)


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
        generators, generators_after = before.pop("generators"), after.pop("generators")
        assert before == after
        assert all(map(torch.equal, generators, generators_after))

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
        "frozen": gc.get_freeze_count() > 0,
        "stream": torch.cuda.current_stream() if torch.cuda.is_initialized() else None,
        "generators": [torch.get_rng_state(), *_device_generators()],
    }


def _device_generators() -> list[Tensor]:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
