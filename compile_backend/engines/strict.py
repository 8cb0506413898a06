"""The strict host engine: an emulator of a device graph.

Numbers, branches and addresses are baked. A replay repeats the recorded calls on the captured
memory and copies every fresh result over the captured one, so that intermediates and outputs keep
their address and are overwritten. Kernels of Python custom operators are recorded operator by
operator, and a host read anywhere but inside a compiled piece is refused.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compile_backend.engines.autocast import autocast_off
from compile_backend.engines.base import Captured, Engine, Replay
from compile_backend.engines.capturing import record
from compile_backend.engines.fixed import fixed_program
from compile_backend.engines.program import Program
from compile_backend.engines.tape import Origin, Tape, storage_of
from compile_backend.errors import ReplayError

__all__ = ["StrictHostEngine", "StrictHostReplay"]


class StrictHostEngine(Engine):
    """Baked inputs, outputs that the next replay overwrites."""

    name = "host_strict"
    late_binding = False
    fresh_outputs = False

    def capture(
        self,
        fn: Captured,
        *,
        static_inputs: Sequence[Tensor],
        warmups: int = 0,
        label: str | None = None,
    ) -> "StrictHostReplay":
        return self._record(fn, static_inputs, warmups, label, breakable=False)

    def capture_breakable(
        self,
        fn: Captured,
        *,
        static_inputs: Sequence[Tensor],
        warmups: int = 0,
        label: str | None = None,
    ) -> "StrictHostReplay":
        return self._record(fn, static_inputs, warmups, label, breakable=True)

    def _record(
        self,
        fn: Captured,
        static_inputs: Sequence[Tensor],
        warmups: int,
        label: str | None,
        *,
        breakable: bool,
    ) -> "StrictHostReplay":
        return record(
            fn,
            static_inputs,
            warmups=warmups,
            label=label,
            as_device=True,
            breakable=breakable,
            build=lambda tape, outputs: StrictHostReplay(tape, static_inputs, outputs),
        )


class StrictHostReplay(Replay):
    """A program on fixed memory, which it keeps as a device graph keeps its pool."""

    def __init__(self, tape: Tape, static_inputs: Sequence[Tensor], outputs: list[Any]) -> None:
        self._program: Program | None = fixed_program(tape)
        self._outputs = list(outputs)
        self._addresses = [_address(tensor) for tensor in static_inputs]
        self._num_entries = self._program.num_calls
        self._num_segments = tape.num_segments
        self._externals = [tape.tensor(each) for each in tape.of_origin(Origin.EXTERNAL)]
        made = {
            storage_of(tensor): tensor
            for tensor in tape.tensors
            if tape.made_storage(storage_of(tensor))
        }
        self._pool_bytes = sum(tensor.untyped_storage().nbytes() for tensor in made.values())

    def __call__(self, inputs: Sequence[Tensor] | None = None) -> list[Any]:
        if self._program is None:
            raise ReplayError("this recording was reset; capture the function again")
        if inputs is not None:
            self._check(inputs)
        # Memory of tensors made under inference mode may be written only under it.
        with torch.inference_mode(), torch.no_grad(), autocast_off():
            return self._program.run()

    def _check(self, inputs: Sequence[Tensor]) -> None:
        if len(inputs) != len(self._addresses):
            raise ReplayError(
                f"{len(inputs)} inputs were given to a recording of {len(self._addresses)}"
            )
        for position, (tensor, captured) in enumerate(zip(inputs, self._addresses, strict=True)):
            if _address(tensor) != captured:
                given = _address(tensor)
                raise ReplayError(
                    f"input {position} is at {given[0]:#x} with shape {list(given[1])} and strides "
                    f"{list(given[2])}; the recording reads {captured[0]:#x} with "
                    f"{list(captured[1])} and {list(captured[2])}; copy the values into the "
                    "captured tensor"
                )

    @property
    def outputs(self) -> list[Any]:
        if self._program is None:
            raise ReplayError("this recording was reset; capture the function again")
        return list(self._outputs)

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

    def reset(self) -> None:
        self._program = None
        self._outputs, self._externals, self._pool_bytes = [], [], 0

    def describe(self) -> str:
        if self._program is None:
            return "a recording that was reset"
        header = (
            f"# strict host engine: {self._num_entries} entries, {len(self._externals)} externals, "
            f"a pool of {self._pool_bytes} bytes"
        )
        return f"{header}\n{self._program.source}"


def _address(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()
