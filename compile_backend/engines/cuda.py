"""The CUDA engine: a ``torch.cuda.CUDAGraph`` for each recording, all in one pool per device.

Nothing runs while a graph is captured, so the capture is followed by one replay: that is the
recorded run, which writes the outputs, moves the random generators and mutates what the function
mutates, once. Inputs that the function writes are not cloned, and neither is anything else that it
reaches: a KV cache may be most of the memory.

**Outputs and memory.** ``Replay.outputs`` own their memory, so that no later capture takes it: what
reads them (the next segment of the same program) can be captured at any time. A recording whose
readers are all captured may give that memory back with :meth:`CudaReplay.release_outputs`; its
outputs then are tensors on the same addresses that own nothing, made with torch's own
``_construct_storage_from_data_pointer`` (of which ``torch._inductor.cudagraph_trees`` builds its
outputs; no native code of ours). One output buffer for all buckets would cost a copy per replay,
and would need the outputs' shapes before the first capture; addresses in the pool cost nothing. An
input in released memory is refused at the next capture, so that no intermediate can fall on it.

Either way outputs are valid until the next replay of *any* recording of the device's pool: a
recording that was captured earlier had its intermediates in what was then free.

A breakable recording is several graphs, with the marked functions between them
(:mod:`.cuda_segments`). What it passes from one to the next lies in the pool: while one runs, a
capture or replay of another recording, in a marked function or on another thread, is refused.

**Random generators.** The default generator of the device is known to every graph. Others are named
at the capture (``generators=[...]``), or drawing from them is an error that says so.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from compile_backend.engines.autocast import no_autocast_cache
from compile_backend.engines.base import Captured, Engine, Replay, name_of
from compile_backend.engines.collector import resting_collector
from compile_backend.engines.cuda_segments import GraphStep, MarkedStep, SegmentRecorder
from compile_backend.engines.device_calls import (
    FixedInputs,
    check_call,
    device_of,
    inside_a_capture,
    require_cuda,
    warm_up,
)
from compile_backend.engines.graph_pool import (
    CaptureErrorMode,
    GraphPool,
    capture_lock,
    non_owning,
    on_side_stream,
    shared_pool,
)
from compile_backend.engines.pool_use import PoolUse
from compile_backend.engines.process_state import GeneratorStates, unchanged_process_state
from compile_backend.errors import CaptureError, ConfigError, ReplayError

__all__ = ["CudaEngine", "CudaReplay"]


class CudaEngine(Engine):
    """Baked inputs, outputs that the next replay overwrites. Recordings replay on any thread.

    ``capture_error_mode`` is CUDA's: "thread_local" refuses what may not happen during a capture
    on the capturing thread only, which a host with other threads at work on the device needs;
    "global" refuses it on all threads, "relaxed" on none. ``weak_outputs`` releases the outputs of
    each recording at its capture: for whole graphs, which nothing reads inside the pool.
    ``precarve`` measures the first capture's last warm-up run (so it needs ``warmups`` of at least
    1, and the largest bucket first) and takes that much memory as one span.

    Raises ConfigError where there is no CUDA device, or for an unknown error mode.
    """

    name = "cuda"
    late_binding = False
    fresh_outputs = False
    needs_warmup = True
    runs_while_recording = False

    def __init__(
        self,
        *,
        capture_error_mode: CaptureErrorMode = "thread_local",
        weak_outputs: bool = False,
        precarve: bool = False,
    ) -> None:
        if capture_error_mode not in get_args(CaptureErrorMode):
            raise ConfigError(
                f"capture_error_mode is {capture_error_mode!r}; choose one of "
                f"{', '.join(get_args(CaptureErrorMode))}"
            )
        require_cuda(self.name)
        self._error_mode: CaptureErrorMode = capture_error_mode
        self._weak_outputs = weak_outputs
        self._precarve = precarve

    def capture(
        self,
        fn: Captured,
        *,
        static_inputs: Sequence[Tensor],
        warmups: int = 0,
        label: str | None = None,
        generators: Sequence[torch.Generator] = (),
    ) -> "CudaReplay":
        """As :meth:`Engine.capture`, on the device of the static inputs.

        ``generators`` are the random generators
        that ``fn`` draws from besides the default one. Kernels that are tuned, loaded or given
        handles at their first call need ``warmups=1``, or a call before. Compiled pieces and break
        ops inside ``fn`` just run; all that they launch is in the graph.
        """
        return self._capture(fn, static_inputs, warmups, label, generators, breakable=False)

    def capture_breakable(
        self,
        fn: Captured,
        *,
        static_inputs: Sequence[Tensor],
        warmups: int = 0,
        label: str | None = None,
        generators: Sequence[torch.Generator] = (),
    ) -> "CudaReplay":
        """As :meth:`Engine.capture_breakable`; the other arguments as in :meth:`capture`.

        A marked function runs on the stream of the caller. What it launches on other streams has to
        be waited for there before it returns. It may not capture, nor replay what was captured in
        the same pool.
        """
        return self._capture(fn, static_inputs, warmups, label, generators, breakable=True)

    def _capture(
        self,
        fn: Captured,
        static_inputs: Sequence[Tensor],
        warmups: int,
        label: str | None,
        generators: Sequence[torch.Generator],
        *,
        breakable: bool,
    ) -> "CudaReplay":
        name = name_of(fn, label)
        check_call(name, static_inputs)
        device = device_of(name, static_inputs)
        states = GeneratorStates()
        for generator in generators:
            states.save(generator)
        with (
            capture_lock,
            inside_a_capture(),
            resting_collector(),
            unchanged_process_state(states),
            no_autocast_cache(),
            torch.cuda.device(device),
        ):
            torch._C._set_grad_enabled(False)
            pool = shared_pool(device, generators)
            if why := pool.why_not_now():
                raise CaptureError(f"{name} cannot be captured now: {why}")
            if warmups:
                self._warm_up(pool, name, fn, static_inputs, warmups)
                states.restore()
            pool.check_inputs(name, static_inputs)
            before = pool.use()
            recorder = SegmentRecorder(
                pool,
                name,
                breakable=breakable,
                error_mode=self._error_mode,
                generators=generators,
                warmups=warmups,
            )
            outputs = recorder.run(fn, static_inputs)
            use = pool.use().since(before)
            replay = CudaReplay(name, fn, static_inputs, outputs, recorder.steps, pool, use)
        if self._weak_outputs:
            replay.release_outputs()
        return replay

    def _warm_up(
        self,
        pool: GraphPool,
        name: str,
        fn: Captured,
        static_inputs: Sequence[Tensor],
        warmups: int,
    ) -> None:
        measured: list[int] = []
        measure = self._precarve and not pool.use().reserved_bytes
        with on_side_stream(pool.device):
            warm_up(
                name,
                fn,
                static_inputs,
                warmups,
                around_last=partial(pool.measuring, measured) if measure else nullcontext,
            )
        for num_bytes in measured:
            pool.carve(num_bytes)


class CudaReplay(Replay):
    """Instantiated graphs, marked functions between them, and what must stay where it is."""

    def __init__(
        self,
        name: str,
        fn: Captured,
        static_inputs: Sequence[Tensor],
        outputs: list[Any],
        steps: Sequence[GraphStep | MarkedStep],
        pool: GraphPool,
        use: PoolUse,
    ) -> None:
        self._name = name
        # The graphs read what the function reaches (weights, caches) at baked addresses: with the
        # function they stay allocated.
        self._fn: Captured | None = fn
        self._inputs = FixedInputs(static_inputs)
        self._outputs = outputs
        self._steps = tuple(steps)
        self._is_broken = any(isinstance(step, MarkedStep) for step in steps)
        self._pool: GraphPool | None = pool
        self._use = use
        self._released = False

    def __call__(self, inputs: Sequence[Tensor] | None = None) -> list[Any]:
        """Launch each graph on the current stream, after earlier replays on other streams, and call
        each marked function in between. Whatever that raises ends the replay."""
        if self._pool is None:
            raise self._was_reset()
        if why := self._pool.why_not_now():
            raise ReplayError(f"{self._name} cannot be replayed now: {why}")
        if inputs is not None:
            self._inputs.check(inputs)
        self._pool.order()
        with self._pool.kept_for(self._name) if self._is_broken else nullcontext():
            for step in self._steps:
                step()
        return list(self._outputs)

    def _was_reset(self) -> ReplayError:
        return ReplayError(f"the recording of {self._name} was reset; capture the function again")

    @property
    def outputs(self) -> list[Any]:
        if self._pool is None:
            raise self._was_reset()
        return list(self._outputs)

    def release_outputs(self) -> None:
        """Give the memory of the outputs back to the pool; call it when their readers are captured.

        Inputs that lie in the pool, outputs of a recording before, are not kept alive either.

        From then on ``outputs``, and what replays return, are tensors on the same addresses that do
        not own them, valid until the next replay or capture in the pool and never after
        ``reset()``. Tensors that were returned before keep what they own. Outputs that are inputs,
        or were not made by the recording, stay as they are. Idempotent.
        """
        if self._pool is None:
            raise self._was_reset()
        if not self._released:
            segments = self._pool.segments()
            self._outputs = non_owning(self._outputs, segments, except_for=self._inputs.tensors)
            self._inputs.tensors = non_owning(self._inputs.tensors, segments)
            self._released = True

    @property
    def externals(self) -> list[Tensor]:
        """Empty: a graph holds addresses, and does not say which tensors they were.

        Whoever may replace a parameter or a cache passes it as a static input, whose address can
        be compared. The rest lives as long as the recording, which keeps its function.
        """
        return []

    @property
    def pool_bytes(self) -> int:
        """By how many bytes this capture made the pool grow; over all recordings of a pool these
        add up to its size (less what was carved in advance)."""
        return self._use.reserved_bytes

    @property
    def output_bytes(self) -> int:
        """Bytes that the capture left allocated in the pool: its outputs, until released."""
        return self._use.allocated_bytes

    @property
    def num_entries(self) -> int:
        """Launches of graphs, and calls of marked functions."""
        return len(self._steps)

    @property
    def num_segments(self) -> int:
        """Graphs; stretches without a launch have none."""
        return sum(isinstance(step, GraphStep) for step in self._steps)

    def reset(self) -> None:
        """Destroy the graphs; their memory is the pool's again, and with the pool's last recording
        the device's, at the next ``torch.cuda.empty_cache()``."""
        for step in self._steps:
            step.reset()
        self._steps = ()
        self._pool = self._fn = None
        self._inputs, self._outputs = FixedInputs([]), []
        self._use = PoolUse(0, 0, 0)

    def describe(self) -> str:
        if self._pool is None:
            return "a recording that was reset"
        graphs = "one graph" if self.num_segments == 1 else f"{self.num_segments} graphs"
        header = (
            f"# cuda engine: {self._name} as {graphs} of {len(self._inputs.tensors)} static "
            f"inputs and {len(self._outputs)} outputs; the pool grew by {self.pool_bytes} bytes, "
            f"{self.output_bytes} of the outputs"
        )
        return "\n".join([header, *map(str, self._steps)]) if self._is_broken else header
