"""The trees engine: recordings kept by ``torch._inductor.cudagraph_trees``.

Against the ``cuda`` engine it adds one safety: an output that a later recording took the memory of
raises when it is read, and the message names the recording and the output. It costs a pool of its
own (``pool_bytes`` counts that one), and replays on the capturing thread only, since trees keep
their state per thread.

Every static input (slots, parameters) is declared static, so nothing is copied. Each capture is one
function of the trees, recorded at its first call.

**Steps.** Trees free the outputs of a *generation* when the next begins. By default every capture
and every replay begins one: a decode step is one whole graph. Where a step has several recordings
that read each other's outputs, ``TreesEngine(mark_steps=False)`` leaves it to the caller, who calls
:meth:`TreesEngine.begin_step` before each step: then a recording inside a step is a child of the
one before, whose live outputs it leaves alone. Its replay is given the outputs of that step
(``second(first())``), since those of the step before may not be read any more.
"""

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compile_backend.engines.autocast import no_autocast_cache
from compile_backend.engines.base import Captured, Engine, Replay, about, name_of
from compile_backend.engines.collector import resting_collector
from compile_backend.engines.device_calls import (
    FixedInputs,
    capture_error,
    check_call,
    check_outputs,
    device_of,
    inside_a_capture,
    require_cuda,
    warm_up,
)
from compile_backend.engines.graph_pool import capture_lock, on_side_stream, pool_segments
from compile_backend.engines.pool_use import PoolUse, block_state
from compile_backend.engines.process_state import GeneratorStates, unchanged_process_state
from compile_backend.engines.trees_adapter import (
    TreeFunction,
    begin_step,
    load_trees,
    tree_pool,
)
from compile_backend.errors import CaptureError, ReplayError

__all__ = ["TreesEngine", "TreesReplay"]


class TreesEngine(Engine):
    """Baked inputs, outputs that the next step overwrites; replays on the capturing thread.

    Make it on a thread that lives as long as the process, such as the main one. Raises ConfigError
    where there is no CUDA device.
    """

    name = "trees"
    late_binding = False
    fresh_outputs = False
    needs_warmup = True
    runs_while_recording = False

    def __init__(self, *, mark_steps: bool = True) -> None:
        require_cuda(self.name)
        load_trees()
        self._mark_steps = mark_steps

    def begin_step(self) -> None:
        """Allow the outputs of the step before to be overwritten; for ``mark_steps=False``."""
        begin_step()

    def capture(
        self,
        fn: Captured,
        *,
        static_inputs: Sequence[Tensor],
        warmups: int = 0,
        label: str | None = None,
    ) -> "TreesReplay":
        """As :meth:`Engine.capture`.

        Only the default random generator may be used. Kernels that are tuned, loaded or given
        handles at their first call need ``warmups=1``, or a call before.
        """
        name = name_of(fn, label)
        check_call(name, static_inputs)
        device = device_of(name, static_inputs)
        states = GeneratorStates()
        with (
            capture_lock,
            inside_a_capture(),
            resting_collector(),
            unchanged_process_state(states),
            no_autocast_cache(),
            torch.cuda.device(device),
        ):
            torch._C._set_grad_enabled(False)
            if warmups:
                with on_side_stream(device):
                    warm_up(name, fn, static_inputs, warmups)
                states.restore()
            before = _pool_use(device)
            model = _Model(name, fn, static_inputs, device)
            function = self._record(model, warmups)
            return TreesReplay(
                model, function, _pool_use(device).since(before), mark_steps=self._mark_steps
            )

    def _record(self, model: "_Model", warmups: int) -> TreeFunction:
        if self._mark_steps:
            self._check_inputs(model)
            begin_step()
        try:
            # torch.cuda.graph leaves its stream current where a capture cannot be ended.
            with torch.cuda.stream(torch.cuda.current_stream(model.device)):
                function = TreeFunction(
                    model,
                    model.inputs.tensors,
                    device=model.device,
                    stack_traces=model.stack_traces,
                )
        except CaptureError as error:
            about(model.name, error)
            raise
        except Exception as error:
            # The end of a capture that was spoilt raises too, over what spoilt it.
            first, model.failure = model.failure or error, None
            raise capture_error(model.name, first, warmups=warmups) from error
        if not model.was_captured:
            raise CaptureError(
                f"cudagraph trees ran {model.name} without recording it; look for a setting under "
                "torch._inductor.config.triton that keeps them from it, or use engine='cuda'"
            )
        return function

    def _check_inputs(self, model: "_Model") -> None:
        """Raise CaptureError for an input that the new generation would take away."""
        pool = tree_pool(model.device)
        segments = [] if pool is None else pool_segments(pool, model.device)
        for position, tensor in enumerate(model.inputs.tensors):
            if block_state(segments, tensor.untyped_storage().data_ptr()) is not None:
                raise CaptureError(
                    f"static input {position} of {model.name} is an output of another recording, "
                    "which ends with the step that this capture begins; capture both as one, use "
                    "TreesEngine(mark_steps=False), or use engine='cuda'"
                )


class _Model:
    """The captured function as trees call it: with one list, which it empties, and only once."""

    def __init__(
        self, name: str, fn: Captured, static_inputs: Sequence[Tensor], device: int
    ) -> None:
        self.name = name
        self.__name__ = name  # trees show it in their log
        self.device = device
        self.inputs = FixedInputs(static_inputs)
        self.stack_traces: list[str | None] = []
        self.kept: dict[int, Any] = {}
        self.num_outputs = 0
        self.was_captured = False
        self.failure: Exception | None = None
        self._fn: Captured | None = fn
        self._was_called = False

    def __call__(self, inputs: list[Any]) -> list[Any]:
        if self._fn is None or self._was_called:
            raise ReplayError(
                f"cudagraph trees would run {self.name} again instead of replaying it: what was "
                "alive at its capture (outputs of the recordings before it in the step) is not so "
                "now; begin each step with begin_step() and replay in the order of the captures"
            )
        self._was_called = True
        self.was_captured = torch.cuda.is_current_stream_capturing()
        tensors = list(inputs)
        inputs.clear()
        try:
            outputs = check_outputs(self.name, self._fn(*tensors), tensors)
        except Exception as error:
            self.failure = error
            raise
        self.num_outputs = len(outputs)
        self.stack_traces[:] = [
            f"output {position} of {self.name}" for position in range(len(outputs))
        ]
        self.kept = self._kept_out_of_trees(outputs)
        return [None if at in self.kept else value for at, value in enumerate(outputs)]

    def _kept_out_of_trees(self, outputs: list[Any]) -> dict[int, Any]:
        """Numbers, and tensors made elsewhere: trees would take the memory of those for theirs."""
        pool = tree_pool(self.device)
        segments = [] if pool is None else pool_segments(pool, self.device)
        return {
            position: value
            for position, value in enumerate(outputs)
            if not isinstance(value, Tensor)
            or any(value is each for each in self.inputs.tensors)
            or block_state(segments, value.untyped_storage().data_ptr()) is None
        }

    def with_kept(self, outputs: Sequence[Any]) -> list[Any]:
        """The outputs of trees with what was kept out of them back in its place."""
        return [self.kept.get(position, value) for position, value in enumerate(outputs)]

    def forget(self) -> None:
        self._fn = None
        self.kept = {}
        self.inputs = FixedInputs([])


class TreesReplay(Replay):
    """One recording of the trees. ``outputs`` are those of the last call: earlier ones may raise
    when they are read, with a message that names this recording."""

    def __init__(
        self, model: _Model, function: TreeFunction, use: PoolUse, *, mark_steps: bool
    ) -> None:
        self._model = model
        self._function: TreeFunction | None = function
        self._outputs = model.with_kept(function.first_outputs)
        function.first_outputs = []
        self._use = use
        self._mark_steps = mark_steps
        self._thread = threading.current_thread()

    def __call__(self, inputs: Sequence[Tensor] | None = None) -> list[Any]:
        """Replay on the current stream. Raises ReplayError on another thread than the capture's."""
        function = self._alive()
        if threading.current_thread() is not self._thread:
            raise ReplayError(
                f"{self._model.name} was captured on thread {self._thread.name!r} and is replayed "
                f"on {threading.current_thread().name!r}, where cudagraph trees do not know it; "
                "replay on the capturing thread, or use engine='cuda', which replays on any"
            )
        if inputs is not None:
            self._model.inputs.check(inputs)
        if self._mark_steps:
            begin_step()
        given = self._model.inputs.tensors if inputs is None else inputs
        self._outputs = self._model.with_kept(function(given))
        return list(self._outputs)

    def _alive(self) -> TreeFunction:
        if self._function is None:
            raise ReplayError(
                f"the recording of {self._model.name} was reset; capture the function again"
            )
        if not self._function.is_alive:
            raise ReplayError(
                f"the recording of {self._model.name} is gone: torch.compiler.reset() has shut "
                "cudagraph trees down; capture the function again"
            )
        return self._function

    @property
    def outputs(self) -> list[Any]:
        self._alive()
        return list(self._outputs)

    @property
    def externals(self) -> list[Tensor]:
        """Empty: a graph holds addresses, and does not say which tensors they were. Whoever may
        replace a tensor passes it as a static input."""
        return []

    @property
    def pool_bytes(self) -> int:
        """By how many bytes this capture made the pool of the trees grow, which is not the pool of
        the ``cuda`` engine."""
        return self._use.reserved_bytes

    @property
    def num_entries(self) -> int:
        """One: the launch of the graph."""
        return 1

    def reset(self) -> None:
        """Let the trees forget the recording; its memory is their pool's again when the next
        recording or step begins."""
        if self._function is not None:
            self._function.forget()
        self._function = None
        self._outputs = []
        self._model.forget()
        self._use = PoolUse(0, 0, 0)

    def describe(self) -> str:
        if self._function is None:
            return "a recording that was reset"
        return (
            f"# trees engine: {self._model.name} as one graph of "
            f"{len(self._model.inputs.tensors)} static inputs and {self._model.num_outputs} "
            f"outputs; the pool of the trees grew by {self.pool_bytes} bytes"
        )


def _pool_use(device: int) -> PoolUse:
    pool = tree_pool(device)
    return PoolUse(0, 0, 0) if pool is None else PoolUse.of(pool_segments(pool, device))
