"""One capture, from the caller's function to a finished recording, or to nothing at all."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from compile_backend.engines.autocast import no_autocast_cache
from compile_backend.engines.base import Captured, about, name_of
from compile_backend.engines.opaque import current_recorder
from compile_backend.engines.process_state import GeneratorStates, unchanged_process_state
from compile_backend.engines.recorder import TapeRecorder
from compile_backend.engines.tape import Tape
from compile_backend.errors import CaptureError

__all__ = ["record"]

Built = TypeVar("Built")


def record(
    fn: Captured,
    static_inputs: Sequence[Tensor],
    *,
    warmups: int,
    label: str | None,
    as_device: bool,
    breakable: bool,
    build: Callable[[Tape, list[Any]], Built],
) -> Built:
    """Run ``fn`` as :meth:`Engine.capture` says; ``build`` makes the result from tape and outputs.

    ``breakable`` as in :meth:`Engine.capture_breakable`: segments and marked functions go on one
    tape, so that what crosses a break is a register like any other. The tape's tensors live until
    ``build`` is done with them.
    """
    name = name_of(fn, label)
    _check(name, static_inputs)
    generators = GeneratorStates()
    with unchanged_process_state(generators), no_autocast_cache():
        torch._C._set_grad_enabled(False)
        _warm_up(name, fn, static_inputs, warmups)
        if warmups:
            generators.restore()
        recorder = TapeRecorder(as_device=as_device, breakable=breakable, generators=generators)
        outputs = _run(recorder, name, fn, static_inputs)
        return build(recorder.tape, outputs)


def _check(name: str, static_inputs: Sequence[Tensor]) -> None:
    if current_recorder() is not None:
        raise CaptureError(
            f"cannot capture {name} inside another capture of this thread; capture it before, "
            "and call it there as a compiled piece"
        )
    for position, each in enumerate(static_inputs):
        if not isinstance(each, Tensor):
            raise CaptureError(
                f"static input {position} of {name} is {type(each).__name__}, not a tensor; "
                "bind numbers to the function before it is captured"
            )


def _warm_up(name: str, fn: Captured, static_inputs: Sequence[Tensor], warmups: int) -> None:
    for run in range(warmups):
        try:
            fn(*static_inputs)
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(
                f"{name} raised {type(error).__name__} in warm-up run {run + 1} of {warmups}: "
                f"{error}"
            ) from error


def _run(
    recorder: TapeRecorder, name: str, fn: Captured, static_inputs: Sequence[Tensor]
) -> list[Any]:
    # No local variable may hold an error that is raised here: its traceback holds this frame, and
    # the cycle would keep the whole tape until the collector runs.
    try:
        outputs = recorder.run(fn, static_inputs)
    except Exception as error:
        if isinstance(error, CaptureError) and recorder.refusals.first in (error, None):
            recorder.refusals.first = None
            about(_where(recorder, name), error)
            raise
        raise _capture_error(recorder, name, error) from error
    if (
        recorder.refusals.first is not None
    ):  # swallowed: what the function did next is not what eager does
        raise _capture_error(recorder, name, recorder.refusals.first)
    return outputs


def _capture_error(recorder: TapeRecorder, name: str, error: Exception) -> CaptureError:
    """The error for a function that raised ``error``; a refusal before that is what counts."""
    refusal, recorder.refusals.first = recorder.refusals.first, None
    if refusal is not None:
        return about(name, CaptureError(str(refusal), refusal.reason))
    entries = recorder.tape.entries
    after = f"after {entries[-1].name!r}" if entries else "before its first operator"
    return CaptureError(
        f"{_where(recorder, name)} raised {type(error).__name__} while it was recorded, {after} "
        f"({len(entries)} calls were): {error}"
    )


def _where(recorder: TapeRecorder, name: str) -> str:
    return f"{name} (segment {recorder.tape.segment_under_way})" if recorder.breakable else name
