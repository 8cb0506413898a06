"""The host engine: the CPU's fast path.

Every operator, break op and compiled piece is called again with the replay's own inputs, without
the Python that led to the calls, without Dynamo's guards, and without a dispatcher in front of
Python kernels. Outputs are fresh tensors.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compile_backend.engines.autocast import autocast_off
from compile_backend.engines.base import Captured, Engine, Replay, captured_outputs
from compile_backend.engines.capturing import record
from compile_backend.engines.late_bound import late_bound_program
from compile_backend.engines.program import Program
from compile_backend.engines.tape import Origin, Tape
from compile_backend.errors import ReplayError

__all__ = ["HostEngine", "HostReplay"]


class HostEngine(Engine):
    """Late-bound inputs, fresh outputs.

    ``check_inputs=False`` leaves out the comparison of each replay's inputs with the captured
    layouts, for a caller whose key already holds shapes, strides and dtypes.
    """

    name = "host"
    late_binding = True
    fresh_outputs = True

    def __init__(self, *, check_inputs: bool = True) -> None:
        self._check_inputs = check_inputs

    def capture(
        self,
        fn: Captured,
        *,
        static_inputs: Sequence[Tensor],
        warmups: int = 0,
        label: str | None = None,
    ) -> "HostReplay":
        return self._record(fn, static_inputs, warmups, label, breakable=False)

    def capture_breakable(
        self,
        fn: Captured,
        *,
        static_inputs: Sequence[Tensor],
        warmups: int = 0,
        label: str | None = None,
    ) -> "HostReplay":
        return self._record(fn, static_inputs, warmups, label, breakable=True)

    def _record(
        self,
        fn: Captured,
        static_inputs: Sequence[Tensor],
        warmups: int,
        label: str | None,
        *,
        breakable: bool,
    ) -> "HostReplay":
        return record(
            fn,
            static_inputs,
            warmups=warmups,
            label=label,
            as_device=False,
            breakable=breakable,
            build=lambda tape, outputs: HostReplay(
                tape, static_inputs, outputs, check_inputs=self._check_inputs
            ),
        )


class _Layout(NamedTuple):
    """What an input must share with the captured one."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def strides_that_matter(self) -> list[int]:
        """Strides of dimensions that have a second element; none in an empty tensor."""
        if 0 in self.shape:
            return []
        return [stride for size, stride in zip(self.shape, self.stride, strict=True) if size > 1]

    @classmethod
    def of(cls, tensor: Tensor) -> "_Layout":
        return cls(tensor.dtype, tensor.shape, tensor.stride())


class HostReplay(Replay):
    """A late-bound program with the captured inputs as its defaults."""

    def __init__(
        self, tape: Tape, static_inputs: Sequence[Tensor], outputs: list[Any], *, check_inputs: bool
    ) -> None:
        self._static_inputs: list[Tensor] | None = list(static_inputs)
        self._captured = [weakref.ref(tensor) for tensor in static_inputs]
        self._outputs: list[Any] | None = list(outputs)
        self._program: Program | None = late_bound_program(tape)
        self._run = self._program.run
        self._layouts = [_Layout.of(tensor) for tensor in static_inputs] if check_inputs else None
        self._repeats = [
            (position, tape.inputs.index(register))
            for position, register in enumerate(tape.inputs)
            if register in tape.inputs[:position]
        ]
        self._num_entries = self._program.num_calls
        self._num_segments = tape.num_segments
        self._externals = [tape.tensor(each) for each in tape.of_origin(Origin.EXTERNAL)]
        self._pool_bytes = sum(each.nbytes for each in tape.pristine.values())

    def __call__(self, inputs: Sequence[Tensor] | None = None) -> list[Any]:
        if inputs is not None:
            self._check(inputs)
        elif self._static_inputs is not None:
            inputs = self._static_inputs
        else:
            raise ReplayError("this recording keeps no inputs (forget_inputs); give it some")
        self._outputs = None
        if torch._C._is_any_autocast_enabled():
            with autocast_off(), torch.no_grad():
                return self._run(*inputs)
        if not torch.is_grad_enabled():
            return self._run(*inputs)
        torch._C._set_grad_enabled(False)
        try:
            return self._run(*inputs)
        finally:
            torch._C._set_grad_enabled(True)

    def _check(self, inputs: Sequence[Tensor]) -> None:
        if len(inputs) != len(self._captured):
            if self._program is None:
                _raise_reset()
            raise ReplayError(
                f"{len(inputs)} inputs were given to a recording of {len(self._captured)}"
            )
        if self._layouts is not None:
            # Most inputs are the captured tensors themselves: weights, and views of slots.
            for tensor, captured, (dtype, shape, stride) in zip(
                inputs, self._captured, self._layouts, strict=True
            ):
                if tensor is not captured() and (
                    tensor.shape != shape or tensor.stride() != stride or tensor.dtype is not dtype
                ):
                    self._compare_layouts(inputs)
                    break
        for position, first in self._repeats:
            if inputs[position] is not inputs[first]:
                raise ReplayError(
                    f"inputs {first} and {position} were one tensor at the capture and are two "
                    "now; capture again with two"
                )

    def _compare_layouts(self, inputs: Sequence[Tensor]) -> None:
        for position, (tensor, captured) in enumerate(
            zip(inputs, self._layouts or (), strict=True)
        ):
            given = _Layout.of(tensor)
            if (given.dtype, given.shape, given.strides_that_matter) != (
                captured.dtype,
                captured.shape,
                captured.strides_that_matter,
            ):
                raise ReplayError(
                    f"input {position} is {given.dtype} {list(given.shape)} with strides "
                    f"{list(given.stride)}; the recording has {captured.dtype} "
                    f"{list(captured.shape)} with strides {list(captured.stride)}; capture that "
                    "layout on its own"
                )

    @property
    def outputs(self) -> list[Any]:
        return captured_outputs(self._outputs)

    @property
    def externals(self) -> list[Tensor]:
        return list(self._externals)

    @property
    def pool_bytes(self) -> int:
        return self._pool_bytes

    @property
    def num_entries(self) -> int:
        return self._num_entries

    @property
    def num_segments(self) -> int:
        return self._num_segments

    def forget_inputs(self) -> None:
        self._static_inputs = None

    def reset(self) -> None:
        self._program = self._outputs = self._layouts = None
        self._run = _raise_reset
        self._static_inputs, self._captured = [], []
        self._externals, self._pool_bytes = [], 0

    def describe(self) -> str:
        if self._program is None:
            return "a recording that was reset"
        header = (
            f"# host engine: {self._num_entries} entries, {len(self._externals)} externals, "
            f"{self._pool_bytes} bytes of constants"
        )
        return f"{header}\n{self._program.source}"


def _raise_reset(*_: Tensor) -> list[Any]:
    raise ReplayError("this recording was reset; capture the function again")
