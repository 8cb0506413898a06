"""Calls that a recording keeps whole: compiled pieces and break ops.

A function being captured is seen operator by operator. What must not be seen that way says so at
the call: :class:`CompiledPiece` for a compiled subgraph, :func:`record_opaque` for a break op. Both
ask the recorder of their own thread, so a call outside any capture just runs.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

__all__ = ["CompiledPiece", "Recorder", "current_recorder", "record_opaque", "recording_to"]


class Recorder(Protocol):
    """What an active capture offers to the calls below, and to the modes that watch it."""

    def call_operator(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator call and record it."""

    def call_function(self, function: Callable[..., Any]) -> None:
        """Raise CaptureError if a Python function of torch does what no operator would show."""

    def call_piece(self, piece: "CompiledPiece", args: tuple[Any, ...]) -> Any:
        """Run ``piece`` as one entry. Numbers among its results are baked (they are sizes)."""

    def call_break_op(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run ``fn`` as one entry, or enter it where the engine behaves as a device graph."""


class _Current(threading.local):
    recorder: Recorder | None = None


_current = _Current()


def current_recorder() -> Recorder | None:
    """The recorder of the capture that this thread is in, or None."""
    return _current.recorder


@contextmanager
def recording_to(recorder: Recorder | None) -> Iterator[None]:
    """Make ``recorder`` the current one of this thread; ``None`` hides an active one."""
    previous, _current.recorder = _current.recorder, recorder
    try:
        yield
    finally:
        _current.recorder = previous


class CompiledPiece:
    """A compiled subgraph: one entry of a recording, whatever happens inside it.

    ``boxed`` says that ``fn`` takes one list and may consume it; it is given a fresh one each time.
    The results are ``fn``'s own: a tensor, or a list or tuple of tensors, None and sizes.
    """

    __slots__ = ("boxed", "fn", "name")

    def __init__(self, fn: Callable[..., Any], name: str, boxed: bool = False) -> None:
        self.fn = fn
        self.name = name
        self.boxed = boxed

    def __call__(self, *args: Any) -> Any:
        recorder = _current.recorder
        if recorder is not None:
            return recorder.call_piece(self, args)
        return self.fn(list(args)) if self.boxed else self.fn(*args)

    def __repr__(self) -> str:
        return f"CompiledPiece({self.name!r}, boxed={self.boxed})"


def record_opaque(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``fn``, a break op; an active capture keeps the call as one entry, run anew by each
    replay with whatever it reads on the host. An engine that behaves as a device graph enters it
    instead, so that a host read inside it is refused there."""
    recorder = _current.recorder
    if recorder is not None:
        return recorder.call_break_op(fn, args, kwargs)
    return fn(*args, **kwargs)
