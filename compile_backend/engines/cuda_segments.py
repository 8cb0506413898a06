"""One capture on a CUDA device: graphs and, between them, the functions marked ``no_graph``.

::

    capture:  begin graph 0 ─ end, replay ─> attend() ─> begin graph 1 ─ end, replay ─> ...
    replay:             graph 0 ────────────> attend() ────────> graph 1 ─────────────> ...

Nothing runs while a graph is captured, so each one is replayed when it ends: what comes next, a
marked function or the next graph, finds its values. A capture that nothing interrupts is one graph.

What a marked function is given lies where the graphs before it write. A recording holds those
addresses, not the memory: it is free again as soon as the captured function lets go of it, so that
one layer's values take the place of the layer's before. They are valid while nothing else runs in
the pool, which the pool is told.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from compile_backend.engines.autocast import (
    autocast_off,
    in_present_autocast,
    in_present_inference_mode,
)
from compile_backend.engines.base import Captured, about
from compile_backend.engines.breakable import breaking_at, call_marked, failure_of
from compile_backend.engines.device_calls import capture_error, check_outputs
from compile_backend.engines.graph_pool import (
    CapturedWork,
    CaptureErrorMode,
    GraphPool,
    non_owning,
)
from compile_backend.engines.tape import map_tensors, tensors_in
from compile_backend.errors import CaptureError

__all__ = ["GraphStep", "MarkedStep", "SegmentRecorder"]


class GraphStep:
    """The launch of one graph on the current stream."""

    __slots__ = ("_graph",)

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def __call__(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        self._graph.reset()

    def __str__(self) -> str:
        return "graph"


class MarkedStep:
    """The call of a marked function, in the autocast and inference mode of its capture."""

    __slots__ = ("_arguments", "_call", "_name", "_pool")

    def __init__(
        self, name: str, call: Callable[..., None], arguments: tuple[Any, Any], pool: GraphPool
    ) -> None:
        self._name = name
        self._call = in_present_autocast(in_present_inference_mode(call))
        self._arguments = arguments
        self._pool = pool

    def __call__(self) -> None:
        args, kwargs = _copied(self._arguments)
        with autocast_off(), torch.cuda.device(self._pool.device):
            self._call(*args, **kwargs)
        self._pool.order()  # where it has left another stream current

    def reset(self) -> None:
        self._arguments = ((), {})

    def __str__(self) -> str:
        return f"call {self._name}"


class SegmentRecorder:
    """Records one function of one thread as ``steps``. Used once, inside the capture lock.

    The breaker of its thread where ``breakable``; a marked function just runs otherwise.
    """

    def __init__(
        self,
        pool: GraphPool,
        name: str,
        *,
        breakable: bool,
        error_mode: CaptureErrorMode,
        generators: Sequence[torch.Generator],
        warmups: int,
    ) -> None:
        self.steps: list[GraphStep | MarkedStep] = []
        self._pool = pool
        self._name = name
        self._breakable = breakable
        self._error_mode: CaptureErrorMode = error_mode
        self._generators = generators
        self._warmups = warmups
        self._capture: AbstractContextManager[CapturedWork] | None = None  # that is under way
        self._graph = torch.cuda.CUDAGraph()
        self._work = CapturedWork()
        self._number = 1
        self._failure: CaptureError | None = None  # of a break, which the function may swallow

    def run(self, fn: Captured, static_inputs: Sequence[Tensor]) -> list[Any]:
        """Call ``fn`` on the inputs, record it, return its outputs: those of a real call.

        Raises CaptureError, chained to what ``fn`` raised; no graph is kept then.
        """
        breaking = breaking_at(self) if self._breakable else nullcontext()
        outputs: list[Any] = []
        try:
            with self._caller_as_found(), breaking:
                self._begin()
                results = fn(*static_inputs)
                if self._failure is None:
                    outputs = check_outputs(self._where, results, static_inputs)
                    self._end()
        except Exception as error:
            self._drop()
            if self._failure is None and isinstance(error, CaptureError):
                about(self._where, error)
                raise
            raise self._take_failure(error) from error
        except BaseException:
            self._drop()
            raise
        if self._failure is not None:  # swallowed: what came after it is not what a replay does
            self._drop()
            raise self._take_failure(self._failure)
        return outputs

    def is_in_segment(self) -> bool:
        return self._capture is not None

    def call_between_segments(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        stub: Callable[..., Any] | None,
    ) -> Any:
        try:
            self._end()
            arguments = _copied((args, kwargs))
            result = self._call(fn, args, kwargs, stub, arguments)
            self._begin()
        except Exception as error:
            if self._failure is None:
                self._failure = capture_error(self._where, error, warmups=self._warmups)
            raise
        return result

    # -- inside ----------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._graph = graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        self._number = 1 + sum(isinstance(step, GraphStep) for step in self.steps)
        capture = self._pool.capturing(
            graph, error_mode=self._error_mode, generators=self._generators
        )
        self._work = capture.__enter__()
        self._capture = capture

    def _end(self) -> None:
        """End the graph and run it; one without a launch is dropped."""
        # Not an ExitStack, whose frame would hold an error of this, and that its frame.
        capture, self._capture = self._capture, None
        assert capture is not None
        capture.__exit__(None, None, None)
        if self._work.is_empty:
            self._graph.reset()
            return
        self.steps.append(GraphStep(self._graph))
        self._pool.order()
        self._graph.replay()

    def _call(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        stub: Callable[..., Any] | None,
        arguments: tuple[Any, Any],
    ) -> Any:
        try:
            result, call = call_marked(fn, args, kwargs, stub)
        except Exception as error:
            self._failure = self._failure_at_break(fn, error)
            raise
        tensors = list(tensors_in(arguments))
        addresses = non_owning(tensors, self._pool.segments())
        not_owning = {id(old): new for old, new in zip(tensors, addresses, strict=True)}
        kept = map_tensors(lambda tensor: not_owning[id(tensor)], arguments)
        self.steps.append(MarkedStep(call.name, call, kept, self._pool))
        return result

    @contextmanager
    def _caller_as_found(self) -> Iterator[None]:
        """Give up what is under way where the block fails, and put the current stream back."""
        kept = self._pool.kept_for(self._name) if self._breakable else nullcontext()
        with torch.cuda.stream(torch.cuda.current_stream(self._pool.device)), kept:
            try:
                yield
            except BaseException as error:
                capture, self._capture = self._capture, None
                if capture is not None:
                    capture.__exit__(type(error), error, error.__traceback__)
                raise

    @property
    def _where(self) -> str:
        return f"{self._name} (segment {self._number})" if self._breakable else self._name

    def _failure_at_break(self, fn: Callable[..., Any], error: Exception) -> CaptureError:
        """Not the error itself: its traceback holds this recorder, and so the memory."""
        failure = failure_of(fn, error)
        return CaptureError(f"{self._where}: {failure}", failure.reason)

    def _take_failure(self, error: Exception) -> CaptureError:
        failure, self._failure = self._failure, None
        return failure or capture_error(self._where, error, warmups=self._warmups)

    def _drop(self) -> None:
        for step in self.steps:
            step.reset()
        self.steps.clear()


def _copied(arguments: tuple[Any, Any]) -> tuple[Any, Any]:
    """The same tensors in lists, tuples and dicts of their own, which a function may change."""
    copied: tuple[Any, Any] = map_tensors(lambda tensor: tensor, arguments)
    return copied
