"""One captured bucket: a graph at fixed sizes and numbers, recorded on an engine and replayed.

A program owns the recording of one graph for one key. In FULL mode the whole outer graph is one
segment; in PIECEWISE mode the operators between segments run as written at every replay, and what
they return is brought to where the next segment was captured to read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from compile_backend.engines import Engine, Replay
from compile_backend.errors import CaptureError, FallbackReason, ReplayError
from compile_backend.output_plan import copy_values
from compile_backend.passes.partition import module_attribute
from compile_backend.passes.segment import Segmented

__all__ = ["AddressChangedError", "CapturedProgram", "CapturedSegment"]


class AddressChangedError(ReplayError):
    """An input that was captured at a fixed address came from another one. ``index`` says which."""

    def __init__(self, index: int) -> None:
        super().__init__(f"input {index} moved since the graph was captured")
        self.index = index


@dataclass(slots=True)
class CapturedProgram:
    """A graph captured for one key.

    ``template`` is the argument list of ``gm`` with numbers filled in; tensors go to
    ``positions``. On an engine that bakes addresses, an input whose position is in ``staged`` is
    copied to where it was captured; every other one must not have moved.
    """

    engine: Engine
    template: tuple[Any, ...]
    positions: tuple[int, ...]
    staged: frozenset[int]  # indices into ``positions``
    hits: int = 0
    capture_seconds: float = 0.0
    num_rows: int = 0
    num_padded_rows: int = 0
    num_moves: int = 0  # re-captures because an input that cannot be staged moved
    is_checked: bool = False  # with a tail, by check_padding
    refused_whole: str | None = None  # why it was captured in smaller segments than asked for
    label: str | None = None  # what messages call it
    warmups: int = 0  # unrecorded runs before each capture, where that writes nothing that matters
    _replay: Replay | None = None
    _segments: list[CapturedSegment] = field(default_factory=list)
    _stepwise: Callable[..., Any] | None = None
    _statics: list[Tensor] = field(default_factory=list)
    _addresses: list[int] = field(default_factory=list)

    @property
    def is_captured(self) -> bool:
        return self._replay is not None or self._stepwise is not None

    @property
    def num_segments(self) -> int:
        return 1 if self._replay is not None else len(self._segments)

    @property
    def pool_bytes(self) -> int:
        """Bytes that the recordings of this program keep."""
        replays = [self._replay, *(segment.replay for segment in self._segments)]
        return sum(replay.pool_bytes for replay in replays if replay is not None)

    @property
    def staged_bytes(self) -> int:
        """Bytes of the copies that staged inputs are brought to."""
        return sum(self._statics[index].nbytes for index in self.staged if self._statics)

    def capture_full(self, gm: fx.GraphModule, tensors: Sequence[Tensor]) -> Sequence[Any]:
        """Record the whole graph as one segment; returns the results of this call."""
        statics = self._static_inputs(tensors)

        def run(*inputs: Tensor) -> Sequence[Any]:
            outputs: Sequence[Any] = gm.forward(*self.arguments(inputs))
            return outputs

        replay = self.engine.capture(
            run, static_inputs=statics, warmups=self.warmups, label=self.label
        )
        self._publish(statics, tensors)
        if self.engine.late_binding:
            replay.forget_inputs()
        self._replay = replay
        return replay.outputs

    def capture_segments(self, graph: Segmented, tensors: Sequence[Tensor]) -> Sequence[Any]:
        """Record each segment of a cut graph; returns the results of this call."""
        if not graph.segments:
            raise CaptureError(
                "no compiled piece lies between the operators that are left out, so there is "
                "nothing to capture",
                FallbackReason.NOTHING_TO_CAPTURE,
            )
        statics = self._static_inputs(tensors)
        fixed = {_storage(tensor) for tensor in statics}
        segments = {
            name: CapturedSegment(
                self.engine,
                _submodule(graph.gm, name),
                graph.mutated_inputs[name],
                fixed,
                warmups=self.warmups,
                label=self.label and f"{self.label} (segment {number})",
            )
            for number, name in enumerate(graph.segments, 1)
        }
        root: dict[str, Any] = dict(segments)
        for node in graph.gm.graph.nodes:
            if node.op in ("get_attr", "call_module") and str(node.target) not in root:
                root[str(node.target)] = module_attribute(graph.gm, str(node.target))
        stepwise = fx.GraphModule(root, graph.gm.graph)
        outputs: Sequence[Any] = stepwise.forward(*self.arguments(statics))
        self._publish(statics, tensors)
        self._segments = list(segments.values())
        self._stepwise = stepwise.forward
        return outputs

    def replay(self, tensors: Sequence[Tensor]) -> Sequence[Any]:
        """Run the recording on these inputs.

        Raises AddressChangedError, before anything is written, where a captured address is stale.
        """
        inputs: Sequence[Tensor] = tensors
        if not self.engine.late_binding:
            self._check_addresses(tensors)
            for index in self.staged:
                static, tensor = self._statics[index], tensors[index]
                if static.data_ptr() != tensor.data_ptr():
                    copy_values(static, tensor)
            inputs = self._statics
        if self._replay is not None:
            return self._replay(inputs) if self.engine.late_binding else self._replay()
        assert self._stepwise is not None, "replayed before it was captured"
        outputs: Sequence[Any] = self._stepwise(*self.arguments(inputs))
        return outputs

    def reset(self) -> None:
        """Drop the recordings; the program can be captured again."""
        for replay in [self._replay, *(segment.replay for segment in self._segments)]:
            if replay is not None:
                replay.reset()
        self._replay, self._stepwise = None, None
        self._segments, self._statics, self._addresses = [], [], []

    def arguments(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The argument list of the graph, with these tensors in it."""
        arguments = list(self.template)
        for position, tensor in zip(self.positions, tensors, strict=True):
            arguments[position] = tensor
        return arguments

    def _static_inputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if self.engine.late_binding:
            return list(tensors)
        return [
            _static_copy(tensor) if index in self.staged else tensor
            for index, tensor in enumerate(tensors)
        ]

    def _publish(self, statics: list[Tensor], tensors: Sequence[Tensor]) -> None:
        if not self.engine.late_binding:
            self._statics = statics
            self._addresses = [tensor.data_ptr() for tensor in tensors]

    def _check_addresses(self, tensors: Sequence[Tensor]) -> None:
        for index, (address, tensor) in enumerate(zip(self._addresses, tensors, strict=True)):
            if index not in self.staged and tensor.data_ptr() != address:
                raise AddressChangedError(index)


class CapturedSegment(torch.nn.Module):
    """One segment: captured at the first call, replayed at every later one.

    What an operator between segments returns is its own: new at each step, or memory it keeps. On
    an engine that bakes addresses it is copied to a place of this segment's, and copied back where
    the segment wrote to it. ``fixed`` holds the storages that stay where they are for the life of
    the program (its inputs, what earlier segments return); this segment adds its outputs.
    """

    def __init__(
        self,
        engine: Engine,
        gm: fx.GraphModule,
        mutated: frozenset[int],
        fixed: set[int],
        *,
        warmups: int,
        label: str | None,
    ) -> None:
        super().__init__()
        self._label = label
        self._warmups = warmups
        self._engine = engine
        self._run = gm.forward
        self._mutated = mutated
        self._fixed = fixed
        self._numbers: dict[int, Any] = {}
        self._positions: list[int] = []
        self._statics: list[Tensor] = []
        self.replay: Replay | None = None

    def forward(self, *inputs: Any) -> Sequence[Any]:
        if self.replay is None:
            return self._capture(inputs)
        for position, number in self._numbers.items():
            if inputs[position] != number:
                raise ReplayError(
                    f"a segment was captured with the number {number!r} at input {position} and "
                    f"now gets {inputs[position]!r}; capture with cudagraph_mode='NONE'"
                )
        tensors = [inputs[position] for position in self._positions]
        if self._engine.late_binding:
            return self.replay(tensors)
        for static, tensor in self._moved(tensors):
            copy_values(static, tensor)
        outputs = self.replay()
        self._write_back(tensors)
        return outputs

    def _capture(self, inputs: Sequence[Any]) -> Sequence[Any]:
        self._positions = [i for i, value in enumerate(inputs) if isinstance(value, Tensor)]
        self._numbers = {i: v for i, v in enumerate(inputs) if not isinstance(v, Tensor)}

        def run(*tensors: Tensor) -> Sequence[Any]:
            arguments = list(inputs)
            for position, tensor in zip(self._positions, tensors, strict=True):
                arguments[position] = tensor
            outputs: Sequence[Any] = self._run(*arguments)
            return outputs

        tensors = [inputs[position] for position in self._positions]
        statics = tensors
        if not self._engine.late_binding:
            statics = [t if _storage(t) in self._fixed else _static_copy(t) for t in tensors]
        replay = self._engine.capture(
            run, static_inputs=statics, warmups=self._warmups, label=self._label
        )
        if not self._engine.late_binding:
            self._statics = statics
            self._write_back(tensors)
            self._fixed |= {_storage(t) for t in replay.outputs if isinstance(t, Tensor)}
        else:
            replay.forget_inputs()
        self.replay = replay
        return replay.outputs

    def _moved(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        pairs = zip(self._statics, tensors, strict=True)
        return [pair for pair in pairs if pair[0].data_ptr() != pair[1].data_ptr()]

    def _write_back(self, tensors: Sequence[Tensor]) -> None:
        for index in self._mutated:
            place = self._positions.index(index)
            static, tensor = self._statics[place], tensors[place]
            if static.data_ptr() != tensor.data_ptr():
                copy_values(tensor, static)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _static_copy(tensor: Tensor) -> Tensor:
    with torch.inference_mode(mode=False):
        static = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        copy_values(static, tensor)
    return static


def _submodule(gm: fx.GraphModule, name: str) -> fx.GraphModule:
    submodule = gm.get_submodule(name)
    assert isinstance(submodule, fx.GraphModule)
    return submodule
