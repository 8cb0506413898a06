"""A capture that fails leaves the process as it was; a replay that cannot run says so first."""

import gc
import weakref

import pytest
import torch
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from compile_backend.engines import (
    CompiledPiece,
    HostEngine,
    StrictHostEngine,
    engine_by_name,
    record_opaque,
)
from compile_backend.errors import CaptureError, ConfigError, FallbackReason, ReplayError


class Boom(Exception):  # noqa: N818 - short, it is everywhere
    """The user's own exception."""


class Fault:
    """A function with a fault at one place, until it is mended."""

    def __init__(self, place: str) -> None:
        self.place: str | None = place

    def at(self, place: str) -> None:
        if self.place == place:
            raise Boom(place)

    def piece(self, x):
        self.at("inside a piece")
        return x * 2

    def break_op(self, x):
        self.at("inside a break op")
        return x + torch.rand(2)

    def __call__(self, x):
        self.at("before the first operator")
        gc.disable()
        torch.set_grad_enabled(True)
        y = x + torch.rand(2)
        self.at("after an operator")
        y = CompiledPiece(self.piece, "piece")(y)
        y = record_opaque(self.break_op, y)
        with torch.enable_grad():
            self.at("in a grad block")
        return [y, object() if self.place == "at an output" else None]


PLACES = [
    "before the first operator",
    "after an operator",
    "inside a piece",
    "inside a break op",
    "in a grad block",
    "at an output",
]


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("place", PLACES)
def test_a_failure_leaves_everything_as_found_and_a_retry_works(
    recorder, feed, found_as_left, place
):
    x = torch.ones(2)
    healthy = recorder.capture(lambda x: [x * 3], static_inputs=[x])
    function = Fault(place)
    with found_as_left(), pytest.raises(CaptureError) as caught:
        recorder.capture(function, static_inputs=[x])
    assert caught.value.reason is FallbackReason.CAPTURE_FAILED
    if place != "at an output":
        assert isinstance(caught.value.__cause__, Boom)
        assert place in str(caught.value)
    assert healthy()[0].tolist() == [3, 3]

    function.place = None
    torch.manual_seed(7)
    replay = recorder.capture(function, static_inputs=[x])
    torch.manual_seed(7)
    torch.testing.assert_close(replay()[0], replay.outputs[0] if _overwrites(recorder) else _run(x))
    assert gc.isenabled()


def _overwrites(engine) -> bool:
    return not engine.fresh_outputs


def _run(x):
    torch.manual_seed(7)
    with torch.no_grad():
        return (x + torch.rand(2)) * 2 + torch.rand(2)


@pytest.mark.usefixtures("mode")
def test_a_failing_warm_up_is_a_capture_error(recorder, found_as_left):
    runs = []

    def function(x):
        runs.append(torch.rand(1))
        if len(runs) == 2:
            raise Boom("second")
        return [x]

    with found_as_left(), pytest.raises(CaptureError, match="warm-up run 2 of 3") as caught:
        recorder.capture(function, static_inputs=[torch.ones(1)], warmups=3)
    assert isinstance(caught.value.__cause__, Boom)
    assert len(runs) == 2


def test_a_capture_error_after_a_mutation_does_not_run_the_function_again(recorder):
    count = torch.zeros(1)

    def function(count):
        count.add_(1)
        raise Boom

    with pytest.raises(CaptureError):
        recorder.capture(function, static_inputs=[count])
    assert count.item() == 1


def test_an_operators_own_error_is_chained(recorder, found_as_left):
    with found_as_left(), pytest.raises(CaptureError, match="while it was recorded") as caught:
        recorder.capture(lambda x: [x @ torch.ones(5)], static_inputs=[torch.ones(2)])
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_interrupt_passes_and_restores(recorder, found_as_left):
    def function(x):
        torch.rand(1)
        raise KeyboardInterrupt

    with found_as_left(), pytest.raises(KeyboardInterrupt):
        recorder.capture(function, static_inputs=[torch.ones(1)])


def test_a_generator_of_the_function_goes_back_too(recorder):
    generator = torch.Generator().manual_seed(4)
    state = generator.get_state()

    def function(x):
        torch.rand(1, generator=generator)
        raise Boom

    with pytest.raises(CaptureError):
        recorder.capture(function, static_inputs=[torch.ones(1)])
    assert torch.equal(generator.get_state(), state)


def test_modes_the_function_leaves_behind_are_removed_and_the_callers_stay(recorder, found_as_left):
    class Mine(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def function(x):
        torch._C._push_on_torch_dispatch_stack(Mine())
        torch._C._push_on_torch_function_stack(BaseTorchFunctionMode())
        return [x + 1]

    with Mine(), BaseTorchFunctionMode(), found_as_left():
        replay = recorder.capture(function, static_inputs=[torch.ones(1)], warmups=1)
        assert replay()[0].item() == 2
        with pytest.raises(CaptureError):
            recorder.capture(lambda x: [function(x), 1 / 0], static_inputs=[torch.ones(1)])


def test_a_function_with_its_own_modes_is_recorded(engine, feed):
    def function(x):
        with BaseTorchFunctionMode():
            return [CompiledPiece(lambda t: t * 2, "p")(x + 1)]

    x = torch.ones(1)
    replay = engine.capture(function, static_inputs=[x])
    assert feed(engine, replay, [x], [torch.full((1,), 4.0)])[0].item() == 10


def test_a_default_device_mode_does_not_disturb_a_capture(engine, feed):
    x = torch.ones(2)
    with torch.device("cpu"):
        replay = engine.capture(lambda x: [x + torch.arange(2)], static_inputs=[x])
        assert feed(engine, replay, [x], [torch.zeros(2)])[0].tolist() == [0, 1]


@pytest.mark.parametrize("make_failing", [False, True], ids=["done", "failed"])
def test_a_capture_leaves_no_tensor_alive_but_its_own(recorder, make_failing):
    watched = []

    def function(x):
        y = x + 1
        watched.append(weakref.ref(y))
        z = y * 2
        if make_failing:
            raise Boom
        return [z]

    gc.collect()
    gc.disable()
    try:
        if make_failing:
            with pytest.raises(CaptureError):
                recorder.capture(function, static_inputs=[torch.ones(2)])
        else:
            replay = recorder.capture(function, static_inputs=[torch.ones(2)])
            assert (watched[0]() is None) is recorder.fresh_outputs
            replay.reset()
        assert watched[0]() is None, "a reference cycle holds the tape"
    finally:
        gc.enable()


def test_a_refused_capture_leaves_no_tensor_alive(recorder):
    watched = []

    def function(x):
        y = x + 1
        watched.append(weakref.ref(y))
        return [y * y.max().item()]

    gc.collect()
    gc.disable()
    try:
        with pytest.raises(CaptureError):
            recorder.capture(function, static_inputs=[torch.ones(2)])
        assert watched[0]() is None
    finally:
        gc.enable()


def test_a_capture_inside_a_capture_is_refused(recorder, found_as_left):
    def function(x):
        recorder.capture(lambda y: [y], static_inputs=[x])
        return [x]

    with found_as_left(), pytest.raises(CaptureError, match="inside another capture"):
        recorder.capture(function, static_inputs=[torch.ones(1)])


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.ones(1), "returned Tensor, not a list"),
        ([[torch.ones(1)]], "output 0 is list"),
        ([1, "a"], "output 1 is str"),
    ],
)
def test_outputs_must_be_flat(recorder, result, message):
    with pytest.raises(CaptureError, match=message):
        recorder.capture(lambda x: result, static_inputs=[torch.ones(1)])


def test_static_inputs_must_be_tensors(recorder):
    with pytest.raises(CaptureError, match=r"static input 1 of .* is int"):
        recorder.capture(lambda x, n: [x], static_inputs=[torch.ones(1), 3])


# --- replays that cannot run --------------------------------------------------------------------


def test_a_reset_recording_refuses_and_keeps_nothing(engine):
    weight = torch.ones(3)
    replay = engine.capture(
        lambda x: [x * weight + torch.tensor([1.0, 2.0, 3.0])], static_inputs=[torch.ones(3)]
    )
    kept = replay.outputs[0]
    replay.reset()
    replay.reset()
    for ask in (replay, lambda: replay([torch.ones(3)]), lambda: replay.outputs):
        with pytest.raises(ReplayError):
            ask()
    assert replay.externals == []
    assert replay.pool_bytes == 0
    assert kept.tolist() == [2, 3, 4]
    assert replay.describe()


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(3, 4),
        torch.ones(2, 4, dtype=torch.float64),
        torch.ones(4, 2).t(),
        torch.ones(2, 8)[:, ::2],
    ],
    ids=["shape", "dtype", "transposed", "stride"],
)
def test_a_late_bound_input_must_have_the_captured_layout(other):
    replay = HostEngine().capture(lambda x: [x.view(-1)], static_inputs=[torch.ones(2, 4)])
    with pytest.raises(ReplayError, match=r"input 0 is .* capture that layout on its own"):
        replay([other])
    with pytest.raises(ReplayError, match="2 inputs were given to a recording of 1"):
        replay([torch.ones(2, 4)] * 2)
    assert HostEngine().capture(lambda x: [x.view(-1)], static_inputs=[other.contiguous()])


def test_strides_of_dimensions_without_a_second_element_do_not_matter():
    one_row = torch.ones(4, 3)[::2][:1]
    assert one_row.stride() != torch.ones(1, 3).stride()
    replay = HostEngine().capture(lambda x: [x + 1], static_inputs=[torch.ones(1, 3)])
    assert replay([one_row])[0].tolist() == [[2, 2, 2]]


def test_a_caller_that_checks_layouts_itself_may_leave_the_check_out():
    engine = HostEngine(check_inputs=False)
    replay = engine.capture(lambda x: [x + 1], static_inputs=[torch.ones(2)])
    assert replay([torch.ones(3)])[0].tolist() == [2, 2, 2]


def test_an_input_given_twice_must_be_given_twice_again():
    x = torch.ones(2)
    replay = HostEngine().capture(lambda a, b: [a.add_(1) + b], static_inputs=[x, x])
    y = torch.zeros(2)
    assert replay([y, y])[0].tolist() == [2, 2]
    with pytest.raises(ReplayError, match="inputs 0 and 1 were one tensor"):
        replay([y, torch.zeros(2)])


def test_a_baked_input_must_be_the_captured_memory():
    x = torch.ones(2, 2)
    replay = StrictHostEngine().capture(lambda x: [x + 1], static_inputs=[x])
    assert replay([x])[0].tolist() == [[2, 2]] * 2
    assert replay([x.view(2, 2)])[0].tolist() == [[2, 2]] * 2
    for other in (x.clone(), x.t(), x[:1]):
        with pytest.raises(ReplayError, match=r"input 0 is at .* copy the values"):
            replay([other])
    with pytest.raises(ReplayError, match="recording of 1"):
        replay([])


def test_an_error_in_a_replay_shows_the_recorded_call_and_restores_grad_mode(engine):
    import traceback

    fail = []

    def step(x):
        if fail:
            raise Boom
        return x + 1

    piece = CompiledPiece(step, "piece_7")
    replay = engine.capture(lambda x: [piece(x)], static_inputs=[torch.ones(1)])
    fail.append(1)
    with torch.enable_grad(), pytest.raises(Boom) as caught:
        replay()
    assert torch.is_grad_enabled()
    if engine.name != "none":
        shown = "".join(traceback.format_exception(caught.value))
        assert "piece_7(" in shown
    fail.clear()
    assert replay()[0].item() == 2


# --- names --------------------------------------------------------------------------------------


def test_engines_by_name():
    names = ["none", "host", "host_strict"]
    assert [engine_by_name(name).name for name in names] == names
    with pytest.raises(ConfigError, match="unknown engine 'hots'"):
        engine_by_name("hots")
