"""Functions that end a segment: marked with :func:`no_graph`, they run as written at every replay.

::

    segment 1 ──> attend(q, k, v, out) ──> segment 2 ──> ...      one Engine.capture_breakable

While an engine records such a capture it is the *breaker* of its thread. A marked function that is
called then asks the breaker to end the segment, to run the function outside of it, and to begin the
next segment. Everywhere else a marked function is a plain one.

What passes between the segments is memory: a marked function writes into tensors that it is given,
and an earlier segment made. What it returns is not passed on, since a replay does not run the
Python that would receive it.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, overload

import torch
from torch import Tensor

from compile_backend.engines.tape import tensors_in
from compile_backend.errors import CaptureError, FallbackReason, ReplayError

__all__ = [
    "Breaker",
    "MarkedCall",
    "breaking_at",
    "call_marked",
    "failure_of",
    "is_in_segment",
    "no_graph",
]

Function = TypeVar("Function", bound=Callable[..., Any])


class Breaker(Protocol):
    """What a breakable capture offers to the marked functions of its thread."""

    def is_in_segment(self) -> bool:
        """Whether a segment is being recorded right now, not something that is kept whole."""

    def call_between_segments(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        stub: Callable[..., Any] | None,
    ) -> Any:
        """End the segment, call ``fn`` (``stub`` in its place, if there is one), begin the next.

        Replays call ``fn`` with the same arguments, tensors being those of the replay. Raises
        CaptureError for a result that :class:`MarkedCall` refuses.
        """


class _Current(threading.local):
    breaker: Breaker | None = None


_current = _Current()


@contextmanager
def breaking_at(breaker: Breaker) -> Iterator[None]:
    """Make ``breaker`` the one of this thread."""
    previous, _current.breaker = _current.breaker, breaker
    try:
        yield
    finally:
        _current.breaker = previous


def is_in_segment() -> bool:
    """Whether this thread is recording a segment of a breakable capture.

    False inside a marked function and inside whatever a recording keeps whole.
    """
    breaker = _current.breaker
    return breaker is not None and breaker.is_in_segment()


@overload
def no_graph(fn: Function, /) -> Function: ...


@overload
def no_graph(
    fn: None = None,
    /,
    *,
    enable: bool | Callable[[], bool] = True,
    capture_stub: Callable[..., Any] | None = None,
) -> Callable[[Function], Function]: ...


def no_graph(
    fn: Any = None,
    /,
    *,
    enable: bool | Callable[[], bool] = True,
    capture_stub: Callable[..., Any] | None = None,
) -> Any:
    """Mark a function that no graph may hold: ``@no_graph`` or ``@no_graph(enable=...)``.

    A call of it ends the current segment of a breakable capture. The function then runs as written,
    at the capture and at every replay: host reads, collectives and state of its own are fine. It
    writes its results into tensors that it is given::

        @no_graph()
        def attend(q, k, v, out): ...

        out = torch.empty_like(q)
        attend(q, k, v, out)

    It returns None, or arguments of its own. Anything else is a CaptureError: a new tensor, or what
    holds one, would be the capture's at every replay, and so would a number. Tensors reach it as
    arguments, in lists, tuples and dicts too; other arguments are the capture's at every replay.
    Tensors of its own that later segments read stay where they are: written in place, not replaced.

    ``enable`` False, or a function that returns False, leaves the call in the segment; it is asked
    at the capture. ``capture_stub`` is called in place of the function while capturing, with the
    same arguments, and returns what it would: for what must not run then.

    Outside of a breakable capture, inside another marked function and under ``torch.compile`` the
    function just runs.
    """

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            breaker = _current.breaker
            if breaker is None or not breaker.is_in_segment():
                return function(*args, **kwargs)
            if not (enable() if callable(enable) else enable):
                return function(*args, **kwargs)
            return breaker.call_between_segments(function, args, kwargs, capture_stub)

        return marked

    return mark if fn is None else mark(fn)


def call_marked(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    stub: Callable[..., Any] | None,
) -> "tuple[Any, MarkedCall]":
    """Call ``fn``, or ``stub`` in its place, while capturing: the result, and what replays call.

    Raises what the function raises; CaptureError for what later segments would not see.
    """
    tensors = list(tensors_in((args, kwargs)))
    places = _places(tensors)
    result = (fn if stub is None else stub)(*args, **kwargs)
    call = MarkedCall(fn, result, (args, kwargs))
    if _places(tensors) != places:
        raise CaptureError(
            f"{call.name}, which is marked no_graph, gave an argument of its own other memory, "
            "shape or strides, which later segments would not see; write into it as it is"
        )
    return result, call


def _places(tensors: Sequence[Tensor]) -> list[Any]:
    return [
        (each.data_ptr(), each.shape, each.stride())
        for each in tensors
        if each.layout is torch.strided
    ]


def failure_of(fn: Callable[..., Any], error: Exception) -> CaptureError:
    """What a capture remembers of the ``error`` of a marked function, which may be swallowed."""
    if isinstance(error, CaptureError):
        return error
    return CaptureError(f"{name_of(fn)}, which is marked no_graph, raised {error!r}")


class MarkedCall:
    """A marked function as replays call it, and which of its arguments it may return."""

    def __init__(self, fn: Callable[..., Any], result: Any, arguments: Any) -> None:
        """``result`` is what the call with ``arguments`` returned while capturing.

        Raises CaptureError unless it is None or made of tensors among the arguments.
        """
        self.name = name_of(fn)
        self._fn = fn
        self._returns = self._positions(result, list(tensors_in(arguments)))

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        result = self._fn(*args, **kwargs)
        if result is None and self._returns is None:
            return
        try:
            returns = self._positions(result, list(tensors_in((args, kwargs))))
        except CaptureError as error:
            raise ReplayError(f"at a replay {error}") from error
        if returns != self._returns:
            raise ReplayError(
                f"at a replay {self.name} returned other arguments of its own than at the capture "
                f"(its capture_stub, if it has one); let it return None, or always the same"
            )

    def _positions(self, result: Any, arguments: Sequence[Tensor]) -> Any:
        """``result`` with the position of the argument in place of each tensor."""
        if result is None:
            return None
        if isinstance(result, Tensor):
            for position, argument in enumerate(arguments):
                if argument is result:
                    return position
            raise self._refused(
                f"a tensor of shape {list(result.shape)}, which later segments would go on "
                "reading as it was at the capture; make it before the call (torch.empty), pass it "
                "as an argument `out`, and write into it"
            )
        if type(result) in (list, tuple):
            return type(result)(self._positions(each, arguments) for each in result)
        if isinstance(result, bool | int | float | complex):
            raise self._refused(
                f"the number {result!r}, which every replay would use as it was at the capture; "
                "return None, and write it into a tensor that is passed in",
                FallbackReason.HOST_READ,
            )
        raise self._refused(
            f"{type(result).__name__}, which would be the capture's at every replay; return None, "
            "and write tensors into arguments (`out`) made before the call"
        )

    def _refused(self, what: str, reason: FallbackReason | None = None) -> CaptureError:
        return CaptureError(f"{self.name}, which is marked no_graph, returned {what}", reason)


def name_of(fn: Callable[..., Any]) -> str:
    """How messages and programs call a marked function."""
    return getattr(fn, "__name__", type(fn).__name__)
