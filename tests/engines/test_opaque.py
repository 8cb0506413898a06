"""Calls that stay whole: compiled pieces, break ops, Python custom operators."""

import threading
import weakref

import pytest
import torch
from torch import Tensor
from torch.library import custom_op
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from compile_backend.engines import (
    CompiledPiece,
    HostEngine,
    NoEngine,
    StrictHostEngine,
    record_opaque,
)
from compile_backend.engines.custom_ops import registered_kernel
from compile_backend.engines.opaque import current_recorder
from compile_backend.errors import CaptureError, FallbackReason

calls: list[str] = []


@custom_op("graphbuf_tests::scale_by_max", mutates_args=())
def scale_by_max(x: Tensor, factor: float = 1.0) -> Tensor:
    calls.append("scale_by_max")
    return x * (x.max().item() * factor)


@custom_op("graphbuf_tests::scale", mutates_args=())
def scale(x: Tensor, factor: float = 1.0) -> Tensor:
    return x * x.max() * factor


@custom_op("graphbuf_tests::store", mutates_args={"cache"})
def store(cache: Tensor, x: Tensor, row: int) -> None:
    cache[row].copy_(x)


@custom_op("graphbuf_tests::min_and_max", mutates_args=())
def min_and_max(parts: list[Tensor], dim: int) -> tuple[Tensor, Tensor]:
    joined = torch.cat(parts, dim)
    return joined.amin(dim), joined.amax(dim)


@custom_op("graphbuf_tests::longest", mutates_args=())
def longest(x: Tensor) -> int:
    return int(x.max())


@custom_op("graphbuf_tests::by_device", mutates_args=(), device_types="cpu")
def by_device(x: Tensor) -> Tensor:
    return x + 1


@custom_op("graphbuf_tests::replaced", mutates_args=())
def replaced(x: Tensor) -> Tensor:
    return x + 1


torch.library.impl("graphbuf_tests::replaced", "CPU")(lambda x: x + 100)


# --- compiled pieces ----------------------------------------------------------------------------


def _boxed(args):
    (x, weight), _ = list(args), args.clear()  # consumes its list
    return [x @ weight, None, x.shape[0], x.sum()]


@pytest.mark.usefixtures("mode")
def test_a_boxed_piece_is_one_entry_and_gets_a_fresh_list_each_time(engine, feed):
    weight = torch.randn(4, 4)
    piece = CompiledPiece(_boxed, "piece_0", boxed=True)

    def function(x):
        y, _, size, total = piece(x + 1, weight)
        return [y * size, total]

    x = torch.randn(2, 4)
    replay = engine.capture(function, static_inputs=[x])
    for _ in range(3):
        fresh = torch.randn(2, 4)
        got = feed(engine, replay, [x], [fresh])
        torch.testing.assert_close(got, function(fresh), rtol=0, atol=0)
    if engine.name != "none":
        assert "piece_0(" in replay.describe()
        assert replay.num_entries == 3  # add, piece, mul


@pytest.mark.usefixtures("mode")
def test_pieces_with_one_bare_result_and_aliased_results(engine, feed):
    bare = CompiledPiece(lambda x: x * 2, "bare")
    alias = CompiledPiece(lambda x: (x, x.view(-1), x + 1), "alias")

    def function(x):
        same, flat, more = alias(bare(x))
        same.add_(1)  # seen through the view
        return [same, flat, more, alias(x)[0]]

    x = torch.randn(2, 2)
    replay = engine.capture(function, static_inputs=[x])
    for _ in range(2):
        fresh = torch.randn(2, 2)
        got = feed(engine, replay, [x], [fresh])
        torch.testing.assert_close(got, function(fresh), rtol=0, atol=0)


@pytest.mark.usefixtures("mode")
def test_inside_a_piece_there_is_no_mode_and_host_reads_are_its_own(engine, feed):
    seen = []

    def inside(x):
        seen.append((_get_current_dispatch_mode_stack(), _get_current_function_mode_stack()))
        assert current_recorder() is None
        x.numpy()
        return x * x.max().item()

    piece = CompiledPiece(inside, "reads")
    x = torch.tensor([1.0, 2.0])
    replay = engine.capture(lambda x: [piece(x)], static_inputs=[x])
    assert feed(engine, replay, [x], [torch.tensor([1.0, 5.0])])[0].tolist() == [5, 25]
    assert seen == [([], [])] * 2


@pytest.mark.usefixtures("mode")
def test_a_constant_that_a_piece_writes_is_as_new_at_each_replay(engine):
    piece = CompiledPiece(lambda t: t.add_(1), "writes")
    replay = engine.capture(
        lambda x: [piece(torch.tensor([1.0])) + x], static_inputs=[torch.zeros(1)]
    )
    assert [replay()[0].item() for _ in range(3)] == [2, 2, 2]


def test_a_piece_frees_its_arguments_as_soon_as_it_has_read_them():
    alive = []

    def inside(args):
        watched = weakref.ref(args[0])
        args.clear()
        alive.append(watched() is not None)
        return [torch.zeros(1)]

    piece = CompiledPiece(inside, "frees", boxed=True)
    replay = HostEngine().capture(lambda x: piece(x + 1), static_inputs=[torch.ones(2)])
    replay()
    assert alive == [True, False]  # the capture keeps every tensor, the replay none


@pytest.mark.usefixtures("mode")
def test_a_piece_of_fresh_memory_whose_elements_overlap(engine, feed):
    piece = CompiledPiece(lambda x: (x + 1).expand(3, 2), "expands")
    x = torch.zeros(2)
    replay = engine.capture(lambda x: [piece(x), piece(x) * 2], static_inputs=[x])
    got = feed(engine, replay, [x], [torch.tensor([1.0, 2.0])])
    assert got[0].tolist() == [[2, 3]] * 3
    assert got[1].tolist() == [[4, 6]] * 3


def test_a_compiled_function_that_is_not_marked_is_recorded_operator_by_operator(recorder):
    ran = []

    def backend(gm, _):
        ran.append("compiled")
        return gm

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x * 2 + 1, backend=backend)
    x = torch.ones(2)
    with torch.no_grad():
        compiled(x)
        replay = recorder.capture(lambda x: [compiled(x)], static_inputs=[x])
    assert ran == ["compiled"]
    assert replay.num_entries == 2
    torch._dynamo.reset()


def test_a_compiled_function_inside_a_piece_stays_compiled(recorder):
    ran = []

    def backend(gm, _):
        return lambda *args: ran.append("run") or gm(*args)

    torch._dynamo.reset()
    compiled = CompiledPiece(torch.compile(lambda x: x * 2 + 1, backend=backend), "compiled")
    x = torch.ones(2)
    with torch.no_grad():
        replay = recorder.capture(lambda x: [compiled(x)], static_inputs=[x])
        replay()
    assert ran == ["run", "run"]
    assert replay.num_entries == 1
    torch._dynamo.reset()


def test_a_piece_outside_a_capture_just_runs():
    assert CompiledPiece(lambda args: args[0] + 1, "p", boxed=True)(torch.ones(1)).item() == 2
    assert record_opaque(lambda x, add: x + add, torch.ones(1), add=3).item() == 4


def test_a_piece_may_return_only_tensors_and_sizes(recorder):
    piece = CompiledPiece(lambda x: {"a": object()}, "strange")
    with pytest.raises(CaptureError, match="strange returned object") as caught:
        recorder.capture(lambda x: [piece(x)], static_inputs=[torch.ones(1)])
    assert caught.value.reason is FallbackReason.CAPTURE_FAILED


# --- break ops ----------------------------------------------------------------------------------


def test_a_break_op_with_a_host_read_runs_anew_and_is_refused_as_a_device():
    def attend(x, *, lengths):
        return x[: int(lengths.max())].sum(0, keepdim=True) + x

    def function(x, lengths):
        return [record_opaque(attend, x + 1, lengths=lengths) * 2]

    x, lengths = torch.ones(4), torch.tensor([1, 2])
    replay = HostEngine().capture(function, static_inputs=[x, lengths])
    fresh, longer = torch.randn(4), torch.tensor([3, 4])
    assert torch.equal(replay([fresh, longer])[0], function(fresh, longer)[0])
    with pytest.raises(CaptureError) as caught:
        StrictHostEngine().capture(function, static_inputs=[x, lengths])
    assert caught.value.reason is FallbackReason.HOST_READ


def test_a_break_op_without_host_reads_is_entered_as_a_device_and_one_entry_otherwise():
    def function(x):
        return [record_opaque(lambda t: (t * 2) + 1, x)]

    x = torch.ones(2)
    assert HostEngine().capture(function, static_inputs=[x]).num_entries == 1
    assert StrictHostEngine().capture(function, static_inputs=[x]).num_entries == 2


def test_a_number_from_a_break_op_is_a_host_read(recorder):
    with pytest.raises(CaptureError) as caught:
        recorder.capture(
            lambda x: [x * record_opaque(lambda t: t.max().item(), x)],
            static_inputs=[torch.ones(2)],
        )
    assert caught.value.reason is FallbackReason.HOST_READ


def test_a_break_op_reads_what_python_holds_now(engine):
    context = {"bias": torch.zeros(2)}
    x = torch.ones(2)

    def function(x):
        return [record_opaque(lambda t: t + context["bias"], x)]

    replay = engine.capture(function, static_inputs=[x])
    context["bias"] = torch.full((2,), 5.0)
    expected = 1 if engine.name == "host_strict" else 6  # a device graph bakes the address
    assert replay()[0].tolist() == [expected] * 2


# --- custom operators ---------------------------------------------------------------------------


@pytest.mark.usefixtures("mode")
def test_custom_operators_replay_on_every_engine(engine, feed):
    cache = torch.zeros(3, 4)

    def function(x):
        store(cache, x[0], 1)
        low, high = torch.ops.graphbuf_tests.min_and_max([x, cache], 0)
        return [scale(x, factor=2.0), low, high, by_device(x), cache.sum()]

    x = torch.randn(2, 4)
    replay = engine.capture(function, static_inputs=[x])
    assert torch.equal(cache[1], x[0])
    for _ in range(3):
        fresh = torch.randn(2, 4)
        got = [each.clone() for each in feed(engine, replay, [x], [fresh])]
        assert torch.equal(cache[1], fresh[0])
        torch.testing.assert_close(got, function(fresh), rtol=0, atol=0)


@pytest.mark.usefixtures("mode")
def test_a_host_read_in_a_custom_operator_runs_anew(feed):
    engine, x = HostEngine(), torch.tensor([1.0, 2.0])
    replay = engine.capture(lambda x: [scale_by_max(x, 2.0) + 1], static_inputs=[x])
    assert replay([torch.tensor([1.0, 3.0])])[0].tolist() == [7, 19]
    assert replay.num_entries == 2


@pytest.mark.usefixtures("mode")
def test_a_host_read_in_a_custom_operator_is_refused_as_a_device():
    with pytest.raises(CaptureError, match=r"Tensor\.item") as caught:
        StrictHostEngine().capture(lambda x: [scale_by_max(x)], static_inputs=[torch.ones(2)])
    assert caught.value.reason is FallbackReason.HOST_READ


@pytest.mark.usefixtures("mode")
def test_strict_records_the_operators_of_a_custom_kernel_and_host_calls_it_directly():
    def function(x):
        return [scale(x, 2.0)]

    x = torch.ones(2)
    strict = StrictHostEngine().capture(function, static_inputs=[x])
    assert strict.num_entries == 3
    assert "graphbuf_tests" not in strict.describe()
    host = HostEngine().capture(function, static_inputs=[x])
    assert host.num_entries == 1
    seen = []

    class See(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.namespace)
            return func(*args, **(kwargs or {}))

    with See():
        host()
    assert set(seen) == {"aten"}


def test_the_kernel_is_called_directly_only_where_the_dispatcher_would_choose_it():
    x = torch.ones(2)
    ops = torch.ops.graphbuf_tests
    assert registered_kernel(ops.by_device.default, (x,), {}) is by_device._init_fn
    assert registered_kernel(ops.replaced.default, (x,), {}) is None
    assert registered_kernel(ops.scale.default, (x.to("meta"),), {}) is None  # the fake kernel runs
    assert registered_kernel(ops.min_and_max.default, ([x, x.to("meta")], 0), {}) is None
    assert registered_kernel(torch.ops.aten.add.Tensor, (x, x), {}) is None

    class Special(Tensor):
        pass

    assert registered_kernel(ops.scale.default, (x.as_subclass(Special),), {}) is None
    with by_device.set_kernel_enabled("cpu", enabled=False):
        assert registered_kernel(ops.by_device.default, (x,), {}) is None
    replay = HostEngine().capture(lambda x: [replaced(x)], static_inputs=[x])
    assert replay()[0].tolist() == [101, 101]


def test_a_number_from_a_custom_operator_is_a_host_read(recorder):
    with pytest.raises(CaptureError) as caught:
        recorder.capture(lambda x: [x[: longest(x)]], static_inputs=[torch.ones(2)])
    assert caught.value.reason is FallbackReason.HOST_READ


# --- threads ------------------------------------------------------------------------------------


def test_two_threads_capture_at_once_and_each_sees_its_own_operators(recorder):
    barrier = threading.Barrier(2)
    replays: dict[int, object] = {}
    make = type(recorder)

    def capture(index: int) -> None:
        def function(x):
            barrier.wait(10)
            y = x + index
            barrier.wait(10)
            return [y * 2]

        replays[index] = make().capture(function, static_inputs=[torch.ones(2)])

    threads = [threading.Thread(target=capture, args=(index,)) for index in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [replays[index].num_entries for index in (1, 2)] == [2, 2]
    assert [replays[index]()[0].tolist() for index in (1, 2)] == [[4, 4], [6, 6]]
    assert torch.utils._python_dispatch.is_in_torch_dispatch_mode() is False
    ran = []
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x + 1, backend=lambda gm, _: ran.append(1) or gm)
    compiled(torch.ones(2))
    assert ran, "captures that overlapped left Dynamo switched off"


def test_another_thread_is_not_recorded(recorder):
    results = []

    def function(x):
        thread = threading.Thread(target=lambda: results.append(torch.ones(3).sum().item()))
        thread.start()
        thread.join()
        return [x + 1]

    replay = recorder.capture(function, static_inputs=[torch.ones(2)])
    assert results == [3]
    assert replay.num_entries == 1


def test_no_engine_calls_the_function_again():
    ran = []
    replay = NoEngine().capture(lambda x: ran.append(1) or [x + 1], static_inputs=[torch.ones(1)])
    assert replay.outputs[0].item() == 2
    assert replay([torch.ones(1) * 4])[0].item() == 5
    assert len(ran) == 2
