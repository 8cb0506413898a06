"""Captures that functions marked ``no_graph`` interrupt: they run as written at every replay."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from compile_backend.engines import (
    CompiledPiece,
    Engine,
    HostEngine,
    NoEngine,
    StrictHostEngine,
    is_in_segment,
    no_graph,
    record_opaque,
)
from compile_backend.errors import CaptureError, FallbackReason, ReplayError


@pytest.fixture
def engine(breakable_engine) -> Engine:
    return breakable_engine


@pytest.fixture
def recorder(breakable_recorder) -> Engine:
    return breakable_recorder


@no_graph()
def add_the_sum(x, out):
    """Reads the host, which no segment may."""
    out.copy_(x + x.sum().item())


def summed(x):
    out = torch.empty_like(x)
    add_the_sum(x, out)
    return out


def check_replays(engine, feed, fn, *, num_segments=None, inputs=None):
    """Capture ``fn`` and compare replays of fresh values with calls of it."""
    captured = [torch.randn(3, 4)] if inputs is None else inputs
    expected = fn(*[each.clone() for each in captured])
    replay = engine.capture_breakable(fn, static_inputs=captured)
    assert_equal(replay.outputs, expected)
    for _ in range(3):
        values = [torch.randn_like(each) for each in captured]
        expected = fn(*[each.clone() for each in values])
        assert_equal(feed(engine, replay, captured, values), expected)
    if num_segments is not None and not isinstance(engine, NoEngine):
        assert replay.num_segments == num_segments
    return replay


def assert_equal(got, expected):
    torch.testing.assert_close(list(got), list(expected), rtol=0, atol=0)


# --- where the breaks are ---------------------------------------------------------------------


def test_a_marked_function_reads_this_replays_values_and_so_does_the_next_segment(
    engine, feed, mode
):
    check_replays(engine, feed, lambda x: [summed(x * 2) + x], num_segments=2)


def test_two_breaks_in_a_row(engine, feed):
    def fn(x):
        first, second = torch.empty_like(x), torch.empty_like(x)
        add_the_sum(x, first)
        add_the_sum(first, second)
        return [second * 2]

    check_replays(engine, feed, fn, num_segments=2)


def test_a_break_before_any_operator_and_one_after_all(engine, feed):
    first, last = torch.zeros(3, 4), torch.zeros(3, 4)

    def begins(x):
        add_the_sum(x, first)
        return [first * 2]

    def ends(x):
        add_the_sum(x * 2, last)
        return [last]

    check_replays(engine, feed, begins, num_segments=1)
    replay = engine.capture_breakable(ends, static_inputs=[x := torch.ones(3, 4)])
    feed(engine, replay, [x], [torch.full((3, 4), 2.0)])
    assert torch.equal(last, torch.full((3, 4), 4.0 + 48.0))


def test_breaks_in_a_loop(engine, feed):
    def fn(x):
        for i in range(4):
            x = summed(x + i) * 0.5
        return [x, x + 1]

    check_replays(engine, feed, fn, num_segments=5)


def test_a_capture_without_a_break_is_one_segment(engine, feed):
    check_replays(engine, feed, lambda x: [x + 1], num_segments=1)


def test_tensors_reach_a_marked_function_in_containers_and_by_keyword(engine, feed):
    @no_graph
    def mix(parts, *, by_name, outs):
        outs[0].copy_(parts[0] + by_name["b"][0])
        outs[1].copy_(parts[1] * 2)

    def fn(x):
        outs = (torch.empty_like(x), torch.empty_like(x))
        mix([x + 1, x + 2], by_name={"b": (x * 3,)}, outs=outs)
        return [outs[0] - outs[1]]

    check_replays(engine, feed, fn, num_segments=2)


def test_an_argument_may_be_a_view_of_what_a_segment_made(engine, feed):
    def fn(x):
        out = torch.zeros(4, *x.shape)
        add_the_sum(x.t(), out[2].t())
        return [out.sum(0)]

    check_replays(engine, feed, fn, num_segments=2)


def test_an_input_may_be_written_by_a_marked_function(engine):
    @no_graph()
    def bump(x):
        x.add_(1)

    def fn(x):
        y = x * 2
        bump(x)
        return [y + x]

    x = torch.zeros(3)
    replay = engine.capture_breakable(fn, static_inputs=[x])
    assert torch.equal(x, torch.ones(3))
    assert_equal(replay([x]), [torch.full((3,), 4.0)])
    assert torch.equal(x, torch.full((3,), 2.0))


def test_addresses_that_a_marked_function_is_given_stay_the_same():
    seen = []

    @no_graph()
    def look(q, out):
        seen.append((q.data_ptr(), out.data_ptr()))
        out.copy_(q)

    def fn(x):
        q = x + 1
        out = torch.empty_like(q)
        look(q, out)
        return [out + 1]

    x = torch.zeros(3)
    replay = StrictHostEngine().capture_breakable(fn, static_inputs=[x])
    for value in range(3):
        x.fill_(value)
        assert_equal(replay(), [torch.full((3,), value + 2.0)])
    assert len(seen) == 4
    assert len(set(seen)) == 1


# --- what a marked function is ------------------------------------------------------------------


def test_state_of_a_marked_function_goes_on(engine, feed):
    history = torch.zeros(3, 4)
    calls = []

    @no_graph()
    def accumulate(x, out):
        calls.append(len(calls))
        history.add_(x)
        out.copy_(history)

    def fn(x):
        out = torch.empty_like(x)
        accumulate(x * 2, out)
        return [out + history]

    x = torch.ones(3, 4)
    replay = engine.capture_breakable(fn, static_inputs=[x])
    for turn in (2, 3, 4):
        (got,) = feed(engine, replay, [x], [torch.ones(3, 4)])
        assert torch.equal(got, torch.full((3, 4), 4.0 * turn))
    assert calls == [0, 1, 2, 3]


def test_a_method_is_marked_like_a_function(engine, feed):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(3.0))

        @no_graph()
        def apply_to(self, x, out):
            """By its own weight."""
            out.copy_(x * self.weight.item())

        def forward(self, x):
            out = torch.empty_like(x)
            self.apply_to(x, out)
            return [out + 1]

    scale = Scale()
    assert Scale.apply_to.__doc__ == "By its own weight."
    with torch.no_grad():
        check_replays(engine, feed, lambda x: scale(x * 2), num_segments=2)


def test_a_marked_function_may_call_another(engine, feed):
    @no_graph()
    def outer(x, out):
        assert not is_in_segment()
        between = torch.empty_like(x)
        add_the_sum(x, between)
        add_the_sum(between, out)

    def fn(x):
        out = torch.empty_like(x)
        outer(x + 1, out)
        return [out * 2]

    check_replays(engine, feed, fn, num_segments=2)


def test_inside_what_a_recording_keeps_whole_it_is_part_of_that(engine, feed):
    piece = CompiledPiece(lambda x: [summed(x)], "piece")

    def fn(x):
        return [piece(x + 1)[0] * 2]

    check_replays(engine, feed, fn, num_segments=1)
    host = HostEngine()
    check_replays(host, feed, lambda x: [record_opaque(summed, x + 1) * 2], num_segments=1)


def test_outside_of_a_breakable_capture_it_is_a_plain_function(recorder, feed):
    assert not is_in_segment()
    x = torch.ones(2)
    assert torch.equal(summed(x), torch.full((2,), 3.0))

    @no_graph()
    def double(x):
        return x * 2

    replay = recorder.capture(lambda x: [double(x) + 1], static_inputs=[x])
    assert_equal(replay([x]), [torch.full((2,), 3.0)])
    with pytest.raises(CaptureError) as caught:
        recorder.capture(lambda x: [summed(x)], static_inputs=[x])
    assert caught.value.reason is FallbackReason.HOST_READ


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_dynamo_traces_through_it(backend):
    @no_graph(enable=lambda: True)
    def double(x, out):
        out.copy_(x * 2)

    def fn(x):
        out = torch.empty_like(x)
        double(x + 1, out)
        return out - 1

    compiled = torch.compile(fn, backend=backend, fullgraph=True)
    for _ in range(2):
        x = torch.randn(3)
        torch.testing.assert_close(compiled(x), fn(x))


def test_gradients_autocast_and_inference_mode_are_as_at_the_capture(recorder):
    seen = []

    @no_graph()
    def look(x, out):
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        out.copy_(x @ x)

    def fn(x):
        out = torch.empty_like(x)
        look(x + 0, out)
        return [out + 1]

    x = torch.randn(3, 3, requires_grad=True)
    plain = recorder.capture_breakable(fn, static_inputs=[x])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = recorder.capture_breakable(fn, static_inputs=[x])
        precise = plain([x])
    rough = cast([x])
    with torch.no_grad():
        assert_equal(precise, [x @ x + 1])
        product = (x.bfloat16() @ x.bfloat16()).float()
        assert_equal(rough, [product + 1])
    assert not precise[0].requires_grad
    assert seen == [(False, False), (False, True), (False, False), (False, True)]


def test_state_made_at_a_replay_is_no_inference_tensor_unless_the_caller_says_so(recorder):
    made = []

    @no_graph()
    def make(x):
        made.append(x + 1)

    def fn(x):
        y = x * 2
        make(y)
        return [y]

    x = torch.ones(3)
    with torch.no_grad():
        replay = recorder.capture_breakable(fn, static_inputs=[x])
        replay([x])
    assert not any(each.is_inference() for each in made)
    made[1].add_(1)
    assert torch.equal(made[1], torch.full((3,), 4.0))


# --- options ------------------------------------------------------------------------------------


def test_a_stub_is_called_once_at_the_capture_and_never_after(recorder):
    calls = []

    def stub(x, out):
        calls.append("stub")

    @no_graph(capture_stub=stub)
    def real(x, out):
        calls.append("real")
        out.copy_(x)

    def fn(x):
        out = torch.zeros_like(x)
        real(x + 1, out)
        return [out * 2]

    x = torch.ones(3)
    replay = recorder.capture_breakable(fn, static_inputs=[x])
    assert calls == ["stub"]
    assert_equal(replay.outputs, [torch.zeros(3)])
    for turn in (1, 2):
        assert_equal(replay([x]), [torch.full((3,), 4.0)])
        assert calls == ["stub"] + ["real"] * turn
    fn(x)
    assert calls[-1] == "real"


def test_a_disabled_function_is_part_of_the_segment(recorder):
    enabled = [True]

    @no_graph(enable=lambda: enabled[0])
    def double(x, out):
        out.copy_(x * 2)

    def fn(x):
        out = torch.empty_like(x)
        double(x, out)
        return [out + 1]

    x = torch.ones(3)
    for enabled[0], num_segments in ((True, 2), (False, 1), (True, 2)):
        replay = recorder.capture_breakable(fn, static_inputs=[x])
        assert replay.num_segments == num_segments
        assert_equal(replay([x]), [torch.full((3,), 3.0)])
    off = no_graph(enable=False)(double.__wrapped__)
    replay = recorder.capture_breakable(lambda x: [off(x, out := x + 0), out], static_inputs=[x])
    assert replay.num_segments == 1
    assert_equal(replay([x])[1:], [torch.full((3,), 2.0)])


def test_an_engine_that_cannot_interrupt_a_capture_says_what_to_use():
    with pytest.raises(CaptureError, match=r"'none' cannot interrupt the capture.*host_strict"):
        Engine.capture_breakable(NoEngine(), lambda x: [x], static_inputs=[torch.ones(1)])


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "reason", "advice"),
    [
        (lambda x: x * 2, FallbackReason.CAPTURE_FAILED, "pass it as an argument `out`"),
        (lambda x: x[:2], FallbackReason.CAPTURE_FAILED, "pass it as an argument `out`"),
        (lambda x: (None, [x + 1]), FallbackReason.CAPTURE_FAILED, "pass it as an argument `out`"),
        (lambda x: {"x": x * 2}, FallbackReason.CAPTURE_FAILED, "dict.*write tensors into arg"),
        (lambda x: 3, FallbackReason.HOST_READ, "the number 3.*write it into a tensor"),
        (lambda x: True, FallbackReason.HOST_READ, "the number True.*return None"),
        (lambda x: "text", FallbackReason.CAPTURE_FAILED, "str"),
    ],
    ids=["tensor", "view", "nested", "dict", "number", "flag", "object"],
)
def test_a_result_that_would_go_stale_is_refused(recorder, found_as_left, result, reason, advice):
    @no_graph()
    def marked(x):
        return result(x)

    def fn(x):
        marked(x + 1)
        return [x]

    with found_as_left(), pytest.raises(CaptureError, match=advice) as caught:
        recorder.capture_breakable(fn, static_inputs=[torch.ones(4)])
    assert caught.value.reason is reason
    assert "marked" in str(caught.value)


def test_arguments_may_be_returned(engine, feed):
    @no_graph()
    def fill(x, out):
        out.copy_(x * x.sum().item())
        return out, [None, x]

    def fn(x):
        out, (_, y) = fill(x + 1, torch.empty_like(x))
        return [out + y]

    check_replays(engine, feed, fn, num_segments=2)


def test_a_replay_that_returns_another_argument_than_the_capture_is_an_error(recorder):
    results = iter([0, 0, 1, None, 0])

    @no_graph()
    def choose(a, b):
        choice = next(results)
        return None if choice is None else (a, b)[choice]

    x = torch.ones(3)
    replay = recorder.capture_breakable(lambda x: [choose(x + 1, x + 2) * 2], static_inputs=[x])
    assert_equal(replay([x]), [torch.full((3,), 4.0)])
    for _ in range(2):
        with pytest.raises(ReplayError, match="choose returned other arguments"):
            replay([x])
    assert_equal(replay([x]), [torch.full((3,), 4.0)])


def test_a_replay_that_returns_a_new_tensor_is_an_error(recorder):
    calls = []

    @no_graph()
    def late(x):
        calls.append(x)
        return x * 2 if len(calls) > 1 else None

    def fn(x):
        late(x + 1)
        return [x + 2]

    replay = recorder.capture_breakable(fn, static_inputs=[x := torch.ones(3)])
    with pytest.raises(ReplayError, match=r"at a replay late.*pass it as an argument `out`"):
        replay([x])


@pytest.mark.parametrize("change", ["resize_", "transpose_", "set_", "data"])
def test_an_argument_that_is_given_other_memory_or_shape_is_refused(recorder, change):
    @no_graph()
    def grow(out):
        if change == "resize_":
            out.resize_(64)
        elif change == "transpose_":
            out.transpose_(0, 1)
        elif change == "set_":
            out.set_(torch.ones(2, 3))
        else:
            out.data = torch.ones(2, 3)

    def fn(x):
        out = torch.empty(2, 3)
        grow(out)
        return [out + x]

    with pytest.raises(CaptureError, match=r"grow.*other memory.*write into it as it is"):
        recorder.capture_breakable(fn, static_inputs=[torch.ones(1)])


@dataclass
class Holder:
    tensor: torch.Tensor


class Keeps(nn.Module):
    """Keeps an intermediate in an attribute that a marked method reads, or is given it."""

    def __init__(self, passes):
        super().__init__()
        self.passes = passes

    @no_graph()
    def read(self, out, hidden=None):
        out.copy_((self.hidden if hidden is None else hidden) * 2)

    def forward(self, x):
        self.hidden = x + 1
        out = torch.empty_like(x)
        self.read(out, self.hidden if self.passes else None)
        return [out]


def through_a_closure(x):
    hidden, out = x + 1, torch.empty_like(x)

    @no_graph()
    def read(out):
        out.copy_(hidden * 2)

    read(out)
    return [out]


@no_graph()
def read_holder(holder, out):
    out.copy_(holder.tensor * 2)


def in_an_object(x):
    out = torch.empty_like(x)
    read_holder(Holder(x + 1), out)
    return [out]


def an_input_in_an_object(x):
    out = torch.empty_like(x)
    read_holder(Holder(x), out)
    return [out]


@pytest.mark.parametrize(
    "fn", [Keeps(passes=False), through_a_closure, in_an_object, an_input_in_an_object]
)
def test_with_fresh_intermediates_one_that_is_no_argument_is_refused(fn):
    with pytest.raises(CaptureError, match=r"holds a tensor of shape .3. .*as an argument"):
        HostEngine().capture_breakable(fn, static_inputs=[torch.ones(3)])


@pytest.mark.parametrize("fn", [Keeps(passes=False), through_a_closure, in_an_object])
def test_with_fixed_memory_one_that_is_no_argument_is_read_where_it_is(feed, fn):
    check_replays(StrictHostEngine(), feed, fn)


def test_one_that_is_passed_is_fine_wherever_else_it_is_kept(engine, feed):
    check_replays(engine, feed, Keeps(passes=True))


def test_tensors_from_outside_may_be_held(engine, feed):
    weight = torch.full((3, 4), 2.0)

    @no_graph()
    def scale(holder, x, out):
        out.copy_(x * holder.tensor * weight)

    def fn(x):
        out = torch.empty_like(x)
        scale(Holder(weight), x + 1, out)
        return [out]

    check_replays(engine, feed, fn)


# --- exceptions ---------------------------------------------------------------------------------


def test_an_exception_at_the_capture_leaves_nothing_behind(recorder, feed, found_as_left):
    fails = True

    @no_graph()
    def flaky(x, out):
        torch.rand(1)
        if fails:
            raise ZeroDivisionError("by hand")
        out.copy_(x)

    def fn(x):
        out = torch.empty_like(x)
        flaky(x + 1, out)
        return [out * 2]

    with found_as_left(), pytest.raises(CaptureError, match=r"flaky.*by hand") as caught:
        recorder.capture_breakable(fn, static_inputs=[torch.ones(3)])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert not is_in_segment()
    fails = False
    check_replays(recorder, feed, fn, num_segments=2)


def test_an_exception_that_the_captured_function_swallows_still_counts(recorder):
    @no_graph()
    def fails(x):
        raise ValueError("not today")

    def fn(x):
        try:
            fails(x)
        except ValueError:
            return [x * 2]
        return [x]

    with pytest.raises(CaptureError, match=r"fails.*not today"):
        recorder.capture_breakable(fn, static_inputs=[torch.ones(3)])


def test_an_exception_at_a_replay_reaches_the_caller_and_the_next_replay_is_whole(
    recorder, found_as_left
):
    fails = False
    calls = []

    @no_graph()
    def flaky(x, out):
        calls.append(x.sum().item())
        if fails:
            raise ZeroDivisionError("by hand")
        out.copy_(x)

    def fn(x):
        first, second = torch.empty_like(x), torch.empty_like(x)
        flaky(x + 1, first)
        flaky(first * 2, second)
        return [second + 1]

    x = torch.ones(3)
    replay = recorder.capture_breakable(fn, static_inputs=[x])
    fails = True
    for mode in (torch.no_grad, torch.enable_grad):
        with mode(), found_as_left(), pytest.raises(ZeroDivisionError, match="by hand"):
            replay([x])
    fails = False
    x.fill_(4)
    assert_equal(replay([x]), [torch.full((3,), 11.0)])
    assert calls == [6.0, 12.0, 6.0, 6.0, 15.0, 30.0]


def test_a_reset_recording_runs_no_marked_function(recorder):
    calls = []
    count = no_graph(lambda x: calls.append(1))

    def fn(x):
        count(x)
        return [x + 1]

    replay = recorder.capture_breakable(fn, static_inputs=[x := torch.ones(1)])
    replay.reset()
    with pytest.raises(ReplayError):
        replay([x])
    assert calls == [1]


def test_a_capture_inside_a_marked_function_is_one_of_its_own(recorder):
    inner = []

    @no_graph()
    def captures(x, out):
        inner.append(recorder.capture(lambda x: [x * 3], static_inputs=[x]))
        out.copy_(inner[-1].outputs[0])

    def fn(x):
        out = torch.empty_like(x)
        captures(x + 1, out)
        return [out]

    x = torch.ones(3)
    replay = recorder.capture_breakable(fn, static_inputs=[x])
    assert_equal(replay([x]), [torch.full((3,), 6.0)])
    assert_equal(
        inner[0]([inner[0].outputs[0]] if recorder.late_binding else None),
        [torch.full((3,), 18.0 if recorder.late_binding else 6.0)],
    )
