"""What both CUDA engines ask of a call before, while and after it is captured.

Place in the flow: below ``cuda`` and ``trees``, beside ``capturing``, which does the same for the
engines that write tapes.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from compile_backend.engines.base import Captured
from compile_backend.engines.opaque import current_recorder
from compile_backend.errors import CaptureError, ConfigError, FallbackReason, ReplayError

__all__ = [
    "FixedInputs",
    "capture_error",
    "check_call",
    "check_outputs",
    "device_of",
    "inside_a_capture",
    "require_cuda",
    "warm_up",
]


def require_cuda(engine: str) -> None:
    """Raise ConfigError, which says what is missing and what to use instead, without a device."""
    if torch.cuda.is_available():
        return
    if torch.version.cuda is None and torch.version.hip is None:
        missing = f"torch {torch.__version__} is built without CUDA; install a CUDA build of torch"
    else:
        missing = (
            f"torch {torch.__version__} sees no CUDA device; check the driver (nvidia-smi) and "
            "CUDA_VISIBLE_DEVICES"
        )
    raise ConfigError(
        f"engine {engine!r} captures on a CUDA device, and {missing}, or use engine 'host' on a "
        "CPU, 'host_strict' to emulate a device there, or 'auto' to pick by device"
    )


class _Thread(threading.local):
    captures = False


_thread = _Thread()


@contextmanager
def inside_a_capture() -> Iterator[None]:
    """Mark this thread as capturing, so that a capture inside it is refused."""
    _thread.captures = True
    try:
        yield
    finally:
        _thread.captures = False


def check_call(name: str, static_inputs: Sequence[Tensor]) -> None:
    """Raise CaptureError for what can be refused before anything runs."""
    if _thread.captures or current_recorder() is not None or _stream_is_capturing():
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


def _stream_is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def device_of(name: str, static_inputs: Sequence[Tensor]) -> int:
    """The index of the device of the static inputs; the current one where none is on a device."""
    positions: dict[int, int] = {}
    for position, tensor in enumerate(static_inputs):
        if tensor.is_cuda:
            positions.setdefault(tensor.get_device(), position)
    if len(positions) > 1:
        where = ", ".join(f"input {at} on cuda:{device}" for device, at in positions.items())
        raise CaptureError(
            f"the static inputs of {name} lie on several devices ({where}), and a graph runs on "
            "one; capture one function per device",
            FallbackReason.OTHER_DEVICE,
        )
    return next(iter(positions)) if positions else torch.cuda.current_device()


def warm_up(
    name: str,
    fn: Captured,
    static_inputs: Sequence[Tensor],
    warmups: int,
    *,
    around_last: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Run ``fn`` on the current stream, its last run inside ``around_last()``.

    Raises CaptureError that says which run failed.
    """
    for run in range(warmups):
        try:
            with around_last() if run == warmups - 1 else nullcontext():
                fn(*static_inputs)
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(
                f"{name} raised {type(error).__name__} in warm-up run {run + 1} of {warmups}: "
                f"{error}"
            ) from error


# What torch and the driver say, and what it means to whoever wrote the captured function.
_HOST_READS = (
    "not permitted when stream is capturing",
    "not permitted when the stream is capturing",
    "previous error during capture",
)
_UNREGISTERED_GENERATOR = "generator not in capture mode"


def capture_error(name: str, error: Exception, *, warmups: int) -> CaptureError:
    """The error for a function that raised ``error`` while it was captured; chain it to that.

    A CaptureError is returned as it is.
    """
    if isinstance(error, CaptureError):
        return error
    what = f"{name} raised {type(error).__name__} while it was recorded: {error}"
    text = str(error)
    if isinstance(error, torch.cuda.OutOfMemoryError):
        advice = "capture the largest size first, or leave more memory outside of caches"
        return CaptureError(f"{what}; {advice}")
    if any(each in text for each in _HOST_READS):
        settle = "" if warmups else ", and settle lazy state (autotuning, handles) with warmups=1"
        return CaptureError(
            f"{what}; most often this is a host read (.item(), .cpu(), bool()) or a copy from "
            "pageable host memory: keep the value on the device, or move it into a break op "
            f"(a function marked no_graph){settle}",
            FallbackReason.HOST_READ,
        )
    if _UNREGISTERED_GENERATOR in text:
        return CaptureError(
            f"{what}; a generator other than the device's default one is used: name it in "
            "CudaEngine.capture(generators=[...])"
        )
    return CaptureError(what)


def check_outputs(name: str, outputs: Any, static_inputs: Sequence[Tensor]) -> list[Any]:
    """``outputs`` as a list; raises CaptureError for what a replay could not give again."""
    if not isinstance(outputs, list | tuple):
        raise CaptureError(
            f"the function {name} returned {type(outputs).__name__}, not a list or tuple; keep to "
            "a flat list of tensors, None and numbers"
        )
    for position, value in enumerate(outputs):
        if isinstance(value, Tensor):
            if not value.is_cuda and not any(value is each for each in static_inputs):
                raise CaptureError(
                    f"output {position} of {name} is on {value.device}, where a replay does not "
                    "write; return device tensors, or compute it outside of the capture",
                    FallbackReason.OTHER_DEVICE,
                )
        elif value is not None and type(value) not in (bool, int, float, complex):
            raise CaptureError(
                f"output {position} is {type(value).__name__}, not a tensor, None or a number; "
                f"{name} was not captured"
            )
    return list(outputs)


class FixedInputs:
    """The captured inputs of a recording that baked their addresses. Keeps them alive."""

    __slots__ = ("_layouts", "tensors")

    def __init__(self, static_inputs: Sequence[Tensor]) -> None:
        self.tensors = list(static_inputs)
        self._layouts = [_layout(tensor) for tensor in static_inputs]

    def check(self, inputs: Sequence[Tensor]) -> None:
        """Raise ReplayError unless ``inputs`` are the captured memory, in the captured layout."""
        if len(inputs) != len(self._layouts):
            raise ReplayError(
                f"{len(inputs)} inputs were given to a recording of {len(self._layouts)}"
            )
        for position, (tensor, captured) in enumerate(zip(inputs, self._layouts, strict=True)):
            given = _layout(tensor)
            if given != captured:
                raise ReplayError(
                    f"input {position} is at {given[0]:#x} with shape {list(given[1])} and strides "
                    f"{list(given[2])}; the recording reads {captured[0]:#x} with "
                    f"{list(captured[1])} and {list(captured[2])}; copy the values into the "
                    "captured tensor"
                )


def _layout(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()
