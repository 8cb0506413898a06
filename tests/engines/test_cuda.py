"""The CUDA engine; and, on any machine, the parts of it that are plain logic."""

import gc
import threading
import weakref

import pytest
import torch
from torch import Tensor

from compile_backend import GraphbufConfig
from compile_backend.engines import (
    CompiledPiece,
    CudaEngine,
    StrictHostEngine,
    TreesEngine,
    engine_by_name,
    no_graph,
    record_opaque,
    resting_collector,
)
from compile_backend.engines.device_calls import FixedInputs, capture_error, check_outputs
from compile_backend.engines.graph_pool import capture_stream, non_owning, shared_pool
from compile_backend.engines.pool_use import PoolUse, block_state, segments_of_pool
from compile_backend.errors import CaptureError, ConfigError, FallbackReason, ReplayError

MIB = 1 << 20


# --- snapshots ----------------------------------------------------------------------------------


def _segment(address, blocks, *, pool=(0, 7), device=0, kind="large"):
    """A segment as torch.cuda.memory_snapshot() gives it; ``blocks`` are (bytes, state)."""
    return {
        "address": address,
        "total_size": sum(size for size, _ in blocks),
        "allocated_size": sum(size for size, state in blocks if state == "active_allocated"),
        "active_size": sum(size for size, state in blocks if state != "inactive"),
        "stream": 0,
        "device": device,
        "segment_type": kind,
        "segment_pool_id": pool,
        "is_expandable": False,
        "blocks": [{"size": size, "state": state} for size, state in blocks],
    }


BEFORE = [
    _segment(0x10000000, [(2 * MIB, "active_allocated")], pool=(0, 0)),
    _segment(0x20000000, [(512, "active_allocated"), (2 * MIB - 512, "inactive")], kind="small"),
    _segment(0x30000000, [(20 * MIB, "inactive")]),
    _segment(0x40000000, [(20 * MIB, "active_allocated")], device=1),
]
AFTER = [
    *BEFORE[:2],
    _segment(0x30000000, [(8 * MIB, "active_allocated"), (12 * MIB, "inactive")]),
    BEFORE[3],
    _segment(0x50000000, [(4 * MIB, "inactive"), (2 * MIB, "active_pending_free")]),
]


def test_a_pools_growth_is_the_difference_of_two_snapshots():
    before, after = (PoolUse.of(segments_of_pool(each, (0, 7), 0)) for each in (BEFORE, AFTER))
    assert before == PoolUse(22 * MIB, 512, 20 * MIB)
    assert after.since(before) == PoolUse(6 * MIB, 8 * MIB, 6 * MIB)
    assert before.since(after) == PoolUse(0, 0, 0)
    assert PoolUse.of(segments_of_pool(AFTER, (0, 7), 1)).reserved_bytes == 20 * MIB
    assert PoolUse.of(segments_of_pool(AFTER, (0, 8), 0)) == PoolUse(0, 0, 0)


def test_the_state_of_the_block_at_an_address():
    segments = segments_of_pool(AFTER, (0, 7), 0)
    assert block_state(segments, 0x30000000) == "used"
    assert block_state(segments, 0x30000000 + 8 * MIB - 1) == "used"
    assert block_state(segments, 0x30000000 + 8 * MIB) == "free"
    assert block_state(segments, 0x50000000 + 5 * MIB) == "free"
    assert block_state(segments, 0x30000000 + 20 * MIB) is None
    assert block_state(segments, 0x10000000) is None, "another pool"


# --- outputs that own nothing -------------------------------------------------------------------


def _as_pool(*tensors: Tensor):
    return [
        _segment(t.untyped_storage().data_ptr(), [(t.untyped_storage().nbytes(), "inactive")])
        for t in tensors
    ]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_released_output_is_the_same_memory_and_keeps_nothing_alive(mode):
    with mode():
        owner = torch.arange(12.0).view(3, 4)
        part = owner[1:, ::2]
        weak, weak_part, again = non_owning([owner, part, owner], _as_pool(owner))
    assert again is weak
    assert weak is not owner
    assert (weak.data_ptr(), weak_part.data_ptr()) == (owner.data_ptr(), part.data_ptr())
    assert (weak_part.shape, weak_part.stride()) == (part.shape, part.stride())
    assert weak_part.tolist() == [[4, 6], [8, 10]]
    assert weak.untyped_storage().data_ptr() == weak_part.untyped_storage().data_ptr()
    with torch.inference_mode():
        owner.fill_(7)
    assert weak_part.tolist() == [[7, 7], [7, 7]]
    storage = weakref.ref(owner.untyped_storage())
    assert storage() is not None
    del owner, part
    assert storage() is None


def test_what_a_recording_did_not_make_stays_as_it_is():
    made, weight, static = torch.ones(3), torch.ones(3), torch.ones(3)
    conjugate = torch.ones(3, dtype=torch.complex64).conj()
    values = [weight, None, 3, static, conjugate, made]
    segments = _as_pool(made, static, conjugate)
    released = non_owning(values, segments, except_for=[static])
    assert all(new is old for new, old in zip(released[:-1], values[:-1], strict=True))
    assert released[-1] is not made


# --- the collector ------------------------------------------------------------------------------


class Collections:
    """Counts the collections that happen while it is installed."""

    def __init__(self):
        self.count = 0

    def __call__(self, phase, info):
        self.count += phase == "start"

    def __enter__(self):
        gc.callbacks.append(self)
        return self

    def __exit__(self, *_):
        gc.callbacks.remove(self)


def test_the_collector_runs_once_before_many_captures_and_not_inside():
    with Collections() as collections:
        with resting_collector():
            for _ in range(3):
                with resting_collector():
                    assert not gc.isenabled()
                    assert gc.get_freeze_count() > 0
                    [[] for _ in range(20_000)]
        assert collections.count == 1
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_found_after_an_error(enabled):
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ZeroDivisionError), resting_collector():  # noqa: PT012
            gc.enable()
            1 / 0
        assert gc.isenabled() is enabled
        assert gc.get_freeze_count() == 0
    finally:
        gc.enable()


def test_what_somebody_else_has_frozen_stays_frozen():
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with resting_collector():
            pass
        assert gc.get_freeze_count() == count
    finally:
        gc.unfreeze()


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")
@pytest.mark.parametrize("name", ["cuda", "trees"])
def test_without_a_device_the_error_says_what_is_missing_and_what_to_use(name):
    missing = "is built without CUDA" if torch.version.cuda is None else "sees no CUDA device"
    with pytest.raises(ConfigError, match=rf"engine '{name}' .* {missing}") as caught:
        engine_by_name(name)
    advised = [each for each in ("host", "host_strict") if f"'{each}'" in str(caught.value)]
    assert [engine_by_name(each).name for each in advised] == ["host", "host_strict"]
    assert GraphbufConfig.check({"engine": "auto"}).engine == "auto"


def test_the_options_know_the_engines():
    for engine in (CudaEngine, TreesEngine):
        assert GraphbufConfig.check({"engine": engine.name}).engine == engine.name
        assert not engine.late_binding
        assert not engine.fresh_outputs
    with pytest.raises(ConfigError, match="capture_error_mode is 'strict'; choose one of global"):
        CudaEngine(capture_error_mode="strict")


@pytest.mark.parametrize(
    ("text", "reason", "advice"),
    [
        # cudaGetErrorString of 900 and 901
        ("CUDA error: operation not permitted when stream is capturing", "HOST_READ", "break op"),
        (
            "CUDA error: operation failed due to a previous error during capture",
            "HOST_READ",
            "item",
        ),
        (
            "Attempt to increase offset for a CUDA generator not in capture mode.",
            "CAPTURE_FAILED",
            r"capture\(generators=\[...\]\)",
        ),
        ("anything else", "CAPTURE_FAILED", "anything else"),
    ],
)
def test_a_drivers_error_becomes_advice(text, reason, advice):
    with pytest.raises(CaptureError, match=advice) as caught:
        raise capture_error("'decode bs=8'", RuntimeError(text), warmups=0)
    assert caught.value.reason is FallbackReason[reason]
    assert str(caught.value).startswith("'decode bs=8' raised RuntimeError while it was recorded")


def test_an_output_on_the_host_is_refused_unless_it_is_an_input():
    x = torch.ones(2)
    assert check_outputs("'f'", (x, None, 3), [x]) == [x, None, 3]
    with pytest.raises(CaptureError, match=r"output 1 of 'f' is on cpu") as caught:
        check_outputs("'f'", [x, x + 1], [x])
    assert caught.value.reason is FallbackReason.OTHER_DEVICE


def test_a_baked_input_must_be_the_captured_memory():
    x = torch.ones(2, 2)
    fixed = FixedInputs([x])
    fixed.check([x.view(2, 2)])
    for other in (x.clone(), x.t(), x[:1]):
        with pytest.raises(ReplayError, match=r"input 0 is at .* copy the values"):
            fixed.check([other])
    with pytest.raises(ReplayError, match="0 inputs were given to a recording of 1"):
        fixed.check([])


def test_the_engines_modules_load_without_a_device_and_without_inductors_trees():
    import subprocess
    import sys

    code = (
        "import sys\nfrom compile_backend.engines import CudaEngine, TreesEngine\n"
        "assert 'torch._inductor.cudagraph_trees' not in sys.modules\n"
        "import torch; assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


# --- on a device --------------------------------------------------------------------------------


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


def on_device(test):
    return pytest.mark.cuda(needs_cuda(test))


@pytest.fixture
def device():
    """A device without a pool of recordings, and with as little cached memory as possible."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    with torch.device("cuda"):
        yield torch.cuda.current_device()


class Boom(Exception):  # noqa: N818 - short, it is everywhere
    """The user's own exception."""


@no_graph()
def add_the_mean(x, out):
    """Reads the host, which no graph may."""
    out.copy_(x + x.mean().item())


def averaged(x):
    out = torch.empty_like(x)
    add_the_mean(x, out)
    return out


def _use(device: int) -> PoolUse:
    return shared_pool(device).use()


@on_device
def test_pieces_and_break_ops_are_in_the_graph(device):
    def function(x):
        y = CompiledPiece(lambda args: args.pop() * 2, "piece", boxed=True)(x)
        return [record_opaque(lambda t: t + 1, y), 3, None]

    x = torch.ones(4)
    replay = CudaEngine().capture(function, static_inputs=[x], label="decode bs=4")
    assert replay.outputs[0].tolist() == [3] * 4
    for value in (5.0, 6.0):
        x.fill_(value)
        out = replay()
        assert out[0].tolist() == [2 * value + 1] * 4
        assert out[0] is replay.outputs[0]
        assert out[1:] == [3, None]
    assert "decode bs=4" in replay.describe()


@on_device
@pytest.mark.parametrize("place", ["warm-up", "capture", "synchronisation", "end"])
def test_a_failure_at_any_point_restores_all_and_a_retry_works(device, found_as_left, place):
    x = torch.ones(4)
    engine = CudaEngine()
    healthy = engine.capture(lambda x: [x * 3], static_inputs=[x])
    other = torch.cuda.Stream()
    runs = []

    def function(x):
        runs.append(torch.rand(4))
        torch.set_grad_enabled(True)
        gc.disable()
        if place == "warm-up" and len(runs) == 2:
            raise Boom
        if len(runs) == 4:
            if place == "capture":
                raise Boom
            if place == "synchronisation":
                torch.cuda.synchronize()
            if place == "end":  # work of another stream that never comes back
                other.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(other):
                    x + 1
        return [x + torch.rand(4)]

    free_before = _use(device).allocated_bytes
    with found_as_left(), pytest.raises(CaptureError) as caught:
        engine.capture(function, static_inputs=[x], warmups=3)
    if place in ("warm-up", "capture"):
        assert isinstance(caught.value.__cause__, Boom)
    else:
        assert isinstance(caught.value.__cause__, RuntimeError)
    assert not torch.cuda.is_current_stream_capturing()
    torch.rand(4)  # the generator is not left in capture state
    torch.cuda.synchronize()
    torch.empty(MIB).fill_(1)  # nor the allocator in the pool
    assert healthy()[0].tolist() == [3] * 4

    runs[:] = [None] * 10
    replay = engine.capture(function, static_inputs=[x])
    torch.manual_seed(7)
    out = replay()[0].clone()
    torch.manual_seed(7)
    torch.rand(4)
    assert torch.equal(out, x + torch.rand(4))
    del caught
    runs.clear()
    if place in ("warm-up", "capture"):
        replay.reset()
        assert _use(device).allocated_bytes == free_before


@on_device
def test_the_capture_is_one_call_and_a_written_cache_is_not_cloned(device):
    cache = torch.zeros(64 * MIB // 4)

    def append(x, at):
        cache.index_copy_(0, at, x)
        return [cache[:4].sum()]

    x, at = torch.ones(2), torch.tensor([1, 2])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    replay = CudaEngine().capture(append, static_inputs=[x, at])
    assert torch.cuda.max_memory_allocated() - before < 32 * MIB, "the cache was cloned"
    assert cache[:4].tolist() == [0, 1, 1, 0]
    assert replay.outputs[0].item() == 2
    x.fill_(5)
    at.copy_(torch.tensor([0, 3]))
    assert replay()[0].item() == 12
    assert cache[:4].tolist() == [5, 1, 1, 5]
    assert replay.externals == []


@on_device
def test_externals_live_as_long_as_the_recording(device):
    weight = torch.full((4,), 3.0)
    watched = weakref.ref(weight)

    def make(weight):
        return lambda x: [x * weight]

    replay = CudaEngine().capture(make(weight), static_inputs=[torch.ones(4)])
    del weight
    gc.collect()
    assert watched() is not None
    replay.reset()
    gc.collect()
    assert watched() is None


def _bucket(rows: int):
    """A function with intermediates much larger than its output, and its input."""

    def function(x):
        wide = x.repeat(1, 64)
        return [(wide * 2 + 1).view(rows, 64, -1).sum(1)]

    return function, torch.ones(rows, 1024)


@on_device
@pytest.mark.parametrize("weak", [False, True])
def test_many_buckets_need_little_more_than_the_largest(device, weak):
    engine = CudaEngine(weak_outputs=weak)
    sizes = [256, 192, 128, 64, 32, 8, 1]
    replays, inputs = [], []
    with resting_collector():
        for rows in sizes:
            function, x = _bucket(rows)
            replays.append(engine.capture(function, static_inputs=[x], warmups=1))
            inputs.append(x)
            if rows == sizes[0]:
                alone = _use(device).reserved_bytes
    outputs = 0 if weak else sum(each.output_bytes for each in replays)
    together = _use(device).reserved_bytes
    assert together <= 1.1 * alone + outputs
    assert sum(each.pool_bytes for each in replays) == together
    for index in [3, 0, 6, 5, 1, 2, 4, 0]:
        inputs[index].fill_(index + 1.0)
        expected = _bucket(sizes[index])[0](inputs[index])[0]
        assert torch.equal(replays[index]()[0], expected)


@on_device
def test_a_carved_pool_holds_the_largest_bucket_in_one_span(device):
    engine = CudaEngine(precarve=True)
    function, x = _bucket(256)
    replay = engine.capture(function, static_inputs=[x], warmups=2)
    large = [each for each in shared_pool(device).segments() if each["segment_type"] == "large"]
    assert len(large) == 1
    assert replay.pool_bytes < large[0]["total_size"]
    assert torch.equal(replay()[0], function(x)[0])


@on_device
def test_reset_returns_memory_to_the_pool_and_with_the_last_recording_to_the_device(device):
    engine = CudaEngine()
    function, x = _bucket(256)
    start = torch.cuda.memory_reserved()
    first = engine.capture(function, static_inputs=[x])
    second = engine.capture(lambda x: [x + 1], static_inputs=[x])
    kept = first.outputs[0]
    in_use = _use(device).allocated_bytes
    first.reset()
    first.reset()
    assert kept[0, 0].item() == 192, "what was returned stays"
    del kept
    assert _use(device).allocated_bytes < in_use
    reserved = _use(device).reserved_bytes
    third = engine.capture(function, static_inputs=[x])
    assert _use(device).reserved_bytes == reserved
    assert torch.equal(second()[0], x + 1)
    for ask in (first, lambda: first.outputs, first.release_outputs):
        with pytest.raises(ReplayError, match="was reset; capture the function again"):
            ask()
    second.reset()
    third.reset()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= start + 4 * MIB


@on_device
def test_released_outputs_are_seen_where_they_were_and_are_refused_as_inputs(device):
    engine = CudaEngine()
    x = torch.ones(4 * MIB)
    replay = engine.capture(lambda x: [x * 2, x, x[:2]], static_inputs=[x])
    address = replay.outputs[0].data_ptr()
    allocated = _use(device).allocated_bytes
    replay.release_outputs()
    replay.release_outputs()
    assert _use(device).allocated_bytes < allocated
    x.fill_(4)
    out = replay()
    assert out[0] is replay.outputs[0]
    assert out[0].data_ptr() == address
    assert out[0][:2].tolist() == [8, 8]
    assert out[1] is x
    with pytest.raises(CaptureError, match=r"static input 0 .* free to use again"):
        engine.capture(lambda y: [y + 1], static_inputs=[out[0]])
    assert replay()[0][0].item() == 8


@on_device
def test_an_output_read_by_the_next_segment_is_left_alone(device):
    engine = CudaEngine()
    x = torch.ones(MIB)
    first = engine.capture(lambda x: [x * 2], static_inputs=[x])
    second = engine.capture(lambda y: [(y.sin() + y.cos()) + y], static_inputs=first.outputs)
    for each in (first, second):
        each.release_outputs()
    assert _use(device).allocated_bytes == 0
    for value in (2.0, 3.0):
        x.fill_(value)
        first()
        y = x * 2
        torch.testing.assert_close(second()[0], y.sin() + y.cos() + y)


@on_device
def test_generators_are_named_at_the_capture(device, found_as_left):
    engine = CudaEngine()
    generator = torch.Generator("cuda").manual_seed(3)
    x = torch.ones(8)

    def noisy(x):
        return [x * torch.rand(8, generator=generator)]

    state = generator.get_state()
    with found_as_left(), pytest.raises(CaptureError, match=r"generators=\[...\]"):
        engine.capture(noisy, static_inputs=[x])
    assert torch.equal(generator.get_state(), state)
    replay = engine.capture(noisy, static_inputs=[x], generators=[generator])
    generator.manual_seed(5)
    first, second = (replay()[0].clone() for _ in range(2))
    generator.manual_seed(5)
    assert torch.equal(first, torch.rand(8, generator=generator))
    assert torch.equal(second, torch.rand(8, generator=generator))


@on_device
@pytest.mark.parametrize("weak", [False, True])
def test_any_thread_and_any_stream_may_replay(device, weak):
    x = torch.ones(MIB)
    engine = CudaEngine(weak_outputs=weak)
    replays = [engine.capture(lambda x, k=k: [x.sin() * k], static_inputs=[x]) for k in range(4)]
    results = {}

    def serve(k):
        with torch.cuda.stream(torch.cuda.Stream()):
            results[k] = replays[k]()[0].clone()
            torch.cuda.current_stream().synchronize()

    torch.cuda.synchronize()
    for k in range(4):
        thread = threading.Thread(target=serve, args=(k,))
        thread.start()
        thread.join()
        assert torch.equal(results[k], x.sin() * k)


@on_device
def test_other_threads_may_use_the_device_during_a_capture(device):
    stop, errors = threading.Event(), []

    def work():
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                while not stop.is_set():
                    torch.ones(1024, device="cuda").sum().item()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        x = torch.ones(1024)
        for _ in range(5):
            replay = CudaEngine().capture(lambda x: [(x * 2).cumsum(0)], static_inputs=[x])
            assert replay()[0][-1].item() == 2048
    finally:
        stop.set()
        thread.join()
    assert errors == []


@on_device
def test_captures_share_a_stream_and_leave_the_callers(device):
    mine = torch.cuda.Stream()
    seen = []

    def function(x):
        seen.append(torch.cuda.current_stream())
        torch.cuda.set_stream(mine) if len(seen) == 1 else None
        return [x + 1]

    with torch.cuda.stream(mine):
        replay = CudaEngine().capture(function, static_inputs=[torch.ones(2)], warmups=1)
        assert torch.cuda.current_stream() == mine
    assert seen == [capture_stream(device)] * 2
    torch.cuda.synchronize()
    assert replay.outputs[0].tolist() == [2, 2]


@on_device
def test_a_host_read_has_its_reason(device, found_as_left):
    with found_as_left(), pytest.raises(CaptureError, match="host read") as caught:
        CudaEngine().capture(lambda x: [x * x.max().item()], static_inputs=[torch.ones(2)])
    assert caught.value.reason is FallbackReason.HOST_READ


@on_device
def test_a_graph_of_nothing_is_a_recording(device):
    x = torch.ones(2)
    replay = CudaEngine().capture(lambda x: [x, 4], static_inputs=[x])
    assert replay([x])[0] is x
    assert replay()[1] == 4


@on_device
def test_the_device_computes_what_the_strict_emulator_does(device):
    def step(x):
        y = x + 1
        x.mul_(2)
        return [y, y[1:], x]

    with torch.device("cpu"):
        x = torch.arange(4.0)
        emulated = StrictHostEngine().capture(step, static_inputs=[x])
    on_gpu = torch.arange(4.0)
    replay = CudaEngine().capture(step, static_inputs=[on_gpu])
    for _ in range(3):
        torch.testing.assert_close([each.cpu() for each in replay()], emulated())


# --- captures that marked functions interrupt ---------------------------------------------------


@on_device
@pytest.mark.parametrize("weak", [False, True])
def test_segments_pass_values_on_and_those_without_a_launch_are_left_out(device, weak):
    def function(x):
        first, second = torch.empty_like(x), torch.empty_like(x)
        add_the_mean(x, first)  # after no launch
        add_the_mean(first, second)
        y = averaged(second * 2)
        add_the_mean(y, second)  # nor between these two
        return [y + second, x]

    x = torch.randn(3, 4)
    expected = function(x)
    engine = CudaEngine(weak_outputs=weak)
    replay = engine.capture_breakable(function, static_inputs=[x], warmups=1)
    assert torch.equal(replay.outputs[0], expected[0])
    assert (replay.num_segments, replay.num_entries) == (2, 6)
    assert replay.describe().splitlines()[1:] == [*["call add_the_mean"] * 2, "graph",
        *["call add_the_mean"] * 2, "graph"]  # fmt: skip
    for _ in range(3):
        x.copy_(torch.randn(3, 4))
        out = replay()
        assert torch.equal(out[0], function(x)[0])
        assert out[1] is x


@on_device
def test_layers_of_a_breakable_recording_share_memory(device):
    def layers(count):
        def function(x):
            for _ in range(count):
                x = averaged(x * 2 - x) * 0.5
            return [x]

        return function

    x = torch.ones(4 * MIB)
    engine = CudaEngine()
    few = engine.capture_breakable(layers(2), static_inputs=[x])
    reserved = _use(device).reserved_bytes
    many = engine.capture_breakable(layers(12), static_inputs=[x])
    assert _use(device).reserved_bytes <= reserved + 1.1 * many.output_bytes
    assert many.num_segments == 13
    for replay, count in ((few, 2), (many, 12), (few, 2)):
        x.uniform_()
        assert torch.equal(replay()[0], layers(count)(x)[0])
    few.reset()
    many.reset()
    assert _use(device).allocated_bytes == 0


@on_device
@pytest.mark.parametrize(
    "place", ["first segment", "read", "break", "swallowed", "later segment", "end"]
)
def test_a_failure_in_a_breakable_capture_restores_all(device, found_as_left, place):
    x = torch.ones(4)
    engine, other = CudaEngine(), torch.cuda.Stream()
    healthy = engine.capture(lambda x: [x * 3], static_inputs=[x])
    made = []

    @no_graph()
    def marked(y, out):
        if place in ("break", "swallowed"):
            raise Boom
        out.copy_(y + y.sum().item())

    def function(x):
        y = x + torch.rand(4)
        made.append(weakref.ref(y))
        torch.set_grad_enabled(True)
        gc.disable()
        if place == "first segment":
            raise Boom
        if place == "read":
            y.sum().item()
        out = torch.empty_like(y)
        try:
            with torch.cuda.stream(torch.cuda.current_stream()):
                marked(y, out)
        except Boom:
            if place == "break":
                raise
        out = out + torch.rand(4)
        if place == "later segment":
            raise Boom
        if place == "end":  # work of another stream that never comes back
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                x + 1
        return [out]

    number = 2 if place in ("later segment", "end") else 1
    with (
        found_as_left(),
        pytest.raises(CaptureError, match=rf"^'b4' \(segment {number}\)") as caught,
    ):
        engine.capture_breakable(function, static_inputs=[x], label="b4")
    if place == "read":
        assert caught.value.reason is FallbackReason.HOST_READ
    elif place != "end":
        assert "Boom" in str(caught.value)
    assert not torch.cuda.is_current_stream_capturing()
    torch.rand(4)  # the generator is not left in capture state
    torch.cuda.synchronize()
    del caught
    assert [each() for each in made] == [None]
    assert healthy()[0].tolist() == [3] * 4

    place = "nowhere"
    replay = engine.capture_breakable(function, static_inputs=[x])
    torch.manual_seed(7)
    out = replay()[0].clone()
    torch.manual_seed(7)
    assert torch.equal(out, function(x)[0])
    torch.set_grad_enabled(True)
    gc.enable()


@on_device
def test_a_marked_function_draws_random_numbers_in_its_turn(device):
    @no_graph()
    def noise(x, out):
        out.copy_(x + torch.rand(8))

    def function(x):
        noise(x + torch.rand(8), out := torch.empty(8))
        return [out + torch.rand(8)]

    x = torch.ones(8)
    torch.manual_seed(1)
    expected = [function(x)[0] for _ in range(3)]
    torch.manual_seed(1)
    replay = CudaEngine().capture_breakable(function, static_inputs=[x])
    assert torch.equal(replay.outputs[0], expected[0])
    for each in expected[1:]:
        assert torch.equal(replay()[0], each)


@on_device
def test_a_marked_function_runs_on_the_stream_of_the_caller(device):
    seen = []

    @no_graph()
    def look(x, out):
        seen.append(torch.cuda.current_stream())
        out.copy_(x)

    def function(x):
        look(x * 2, out := torch.empty_like(x))
        return [out + 1]

    x = torch.ones(MIB)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        replay = CudaEngine().capture_breakable(function, static_inputs=[x])
    for value, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            x.fill_(value)
            assert replay()[0][-1].item() == 2 * value + 1
    assert seen == [streams[0], *streams]


@on_device
def test_nothing_else_uses_the_pool_between_two_segments(device):
    engine, x = CudaEngine(), torch.ones(4)
    other = engine.capture(lambda x: [x * 3], static_inputs=[x])
    does = []

    @no_graph()
    def marked(y):
        for act in does:
            act()

    def function(x):
        marked(y := x + 1)
        return [y * 2]

    def capture():
        engine.capture(lambda x: [x], static_inputs=[x])

    does[:] = [other]
    with pytest.raises(CaptureError, match=r"marked.*cannot be replayed now: 'b4' is between"):
        engine.capture_breakable(function, static_inputs=[x], label="b4")
    does[:] = []
    replay = engine.capture_breakable(function, static_inputs=[x], label="b4")
    for act, error in ((other, ReplayError), (replay, ReplayError), (capture, CaptureError)):
        does[:] = [act]
        with pytest.raises(error, match="'b4' is between two of its segments"):
            replay()
    does[:] = []
    assert replay()[0].tolist() == [4] * 4
    assert other()[0].tolist() == [3] * 4
