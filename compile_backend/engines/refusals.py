"""What a capture refuses, in one place, and the errors that say so."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from compile_backend.engines.host_reads import READING_FUNCTIONS, reason_to_refuse
from compile_backend.engines.schemas import changes_layout, leaves
from compile_backend.engines.tape import Tape, storage_of
from compile_backend.errors import CaptureError, FallbackReason

__all__ = ["Refusals"]

_FAILED = FallbackReason.CAPTURE_FAILED
_ADVICE = {
    FallbackReason.HOST_READ: (
        "the number would be baked into the recording; keep the value in a tensor, or read it "
        "inside a break op"
    ),
    FallbackReason.DATA_DEPENDENT_SHAPE: (
        "the recording has one shape; use a form with a fixed size (a mask, torch.where with two "
        "branches, nonzero_static), or move it into a break op"
    ),
    _FAILED: "keep to operators on tensors, or move it into a break op",
}
_STORAGE_TYPES = (torch.UntypedStorage, torch.TypedStorage)
_REALLOCATING = frozenset({"aten::resize_", "aten::resize_as_", "aten::set_"})


class Refusals:
    """Judges what a capture meets. Remembers its first error: a function may swallow it."""

    def __init__(self, tape: Tape, *, as_device: bool) -> None:
        self.first: CaptureError | None = None
        self._tape = tape
        self._as_device = as_device

    def error(self, reason: FallbackReason, what: str) -> CaptureError:
        """The error to raise, with advice that suits its reason."""
        return self.remember(CaptureError(f"{what}; {_ADVICE[reason]}", reason))

    def remember(self, error: CaptureError) -> CaptureError:
        """``error``, which now counts as raised even where the function swallows it."""
        if self.first is None:
            self.first = error
        return error

    def check_operator(
        self, op: OpOverload[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Raise if a replay could not repeat this call."""
        reason = reason_to_refuse(op, args, kwargs, as_device=self._as_device)
        if reason is not None:
            raise self.error(reason, f"{op} was called: {reason.value}")
        if any(isinstance(leaf, _STORAGE_TYPES) for leaf in leaves((args, kwargs))):
            raise self.error(_FAILED, f"{op} was given a storage, which has no register")
        if changes_layout(op) and self._tape.is_from_outside(args[0]):
            raise self.error(
                _FAILED, f"{op} changes the shape or strides of an input or external in place"
            )
        if op.namespace == "c10d":
            raise self.error(
                _FAILED,
                f"{op} was called: a collective whose end is waited for on the host; call the "
                "functional one (torch.distributed._functional_collectives)",
            )
        if self._as_device and op._schema.name in _REALLOCATING:
            raise self.error(_FAILED, f"{op} gives a tensor other memory")

    def check_function(self, function: Callable[..., Any]) -> None:
        """Raise if a Python function of torch does what no operator would show."""
        if function in READING_FUNCTIONS:
            raise self.error(
                FallbackReason.HOST_READ,
                f"Tensor.{READING_FUNCTIONS[function]} reads a tensor's values on the host",
            )
        if function == Tensor.data.__set__:  # type: ignore[attr-defined]
            raise self.error(_FAILED, "Tensor.data was assigned, which no operator shows")

    def check_tensor(self, tensor: Tensor) -> None:
        """Raise for a tensor no operator returned, on memory that an operator here allocated."""
        if self._tape.find(tensor) is None and self._tape.made_storage(storage_of(tensor)):
            raise self.error(
                _FAILED,
                f"a tensor of shape {list(tensor.shape)} shares memory with an intermediate, but "
                "was made without an operator (nn.Parameter(t), a storage)",
            )

    def check_results(self, result: Any, name: str, *, numbers: bool) -> None:
        """Raise unless an opaque call returned tensors, None and, if allowed, ``numbers``."""
        for leaf in leaves(result):
            if leaf is None or isinstance(leaf, Tensor):
                continue
            if not isinstance(leaf, int | float | complex):
                raise self.error(
                    _FAILED,
                    f"{name} returned {type(leaf).__name__}; a recorded call returns tensors",
                )
            if not numbers:
                raise self.error(
                    FallbackReason.HOST_READ, f"{name} returned the number {leaf!r} to Python"
                )

    def check_outputs(self, outputs: Any) -> None:
        """Raise unless the function returned a flat list of tensors, None and numbers."""
        if not isinstance(outputs, list | tuple):
            raise self.error(
                _FAILED, f"the function returned {type(outputs).__name__}, not a list or tuple"
            )
        for position, value in enumerate(outputs):
            if isinstance(value, Tensor):
                self.check_tensor(value)
            elif value is not None and type(value) not in (bool, int, float, complex):
                raise self.error(
                    _FAILED,
                    f"output {position} is {type(value).__name__}, not a tensor, None or a number",
                )
