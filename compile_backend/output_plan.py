"""What a call returns: eager's shapes, strides and dtypes, whatever size the graph ran at.

Each output of a traced graph has symbolic sizes and strides. Evaluated at the live sizes they say
what eager would return; where the graph ran padded, the live rows are the first rows of each
dimension that differs (that is what the padding proof shows).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx

from compile_backend.passes.aten_trace import AtenTrace, storage_of

__all__ = ["BoundOutputs", "OutputPlan", "copy_values", "plan_outputs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Output:
    """One output of the traced graph: an input as it is, a tensor, or something else."""

    input_index: int | None = None
    is_view_of_input: bool = False  # it lies in memory that is the caller's already
    fake: Tensor | None = None
    number: Any = None  # symbolic number
    storage: int | None = None
    same_as: int | None = None  # position of an earlier output that is this very tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Geometry:
    """Where one tensor output lies in the memory eager would have given it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    is_contiguous: bool

    @property
    def end(self) -> int:
        """One past the last element, from the start of the storage."""
        if 0 in self.shape:
            return self.offset
        steps = zip(self.shape, self.stride, strict=True)
        return self.offset + 1 + sum((size - 1) * stride for size, stride in steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPlan:
    """The outputs of one graph, with symbolic geometry."""

    outputs: tuple[_Output, ...]

    @property
    def returns_inputs(self) -> bool:
        """Whether an output is an input, or a view of one."""
        return any(o.input_index is not None or o.is_view_of_input for o in self.outputs)

    def bind(self, sizes: Mapping[sympy.Symbol, int]) -> BoundOutputs:
        """The plan at concrete live sizes. What depends on values is left as the graph made it."""
        geometry: list[_Geometry | None] = []
        numbers: dict[int, Any] = {}
        groups: dict[int, list[int]] = {}
        for position, output in enumerate(self.outputs):
            geometry.append(None)
            if output.number is not None and _is_known(output.number, sizes):
                numbers[position] = _evaluate(output.number, sizes)
            if output.fake is None or output.is_view_of_input:
                continue
            if not all(_is_known(size, sizes) for size in output.fake.shape):
                continue
            geometry[position] = _geometry(output.fake, sizes)
            if output.storage is not None:
                groups.setdefault(output.storage, []).append(position)
        return BoundOutputs(
            plan=self,
            geometry=tuple(geometry),
            numbers=numbers,
            shared=tuple(tuple(group) for group in groups.values() if len(group) > 1),
            returns_inputs=any(output.input_index is not None for output in self.outputs),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundOutputs:
    """An :class:`OutputPlan` at one set of live sizes."""

    plan: OutputPlan
    geometry: tuple[_Geometry | None, ...]
    numbers: Mapping[int, Any]
    shared: tuple[tuple[int, ...], ...]  # outputs that are views of one storage
    returns_inputs: bool  # whether an output is an input as it is

    def finish(self, results: Sequence[Any], args: Sequence[Any], *, copy: bool) -> tuple[Any, ...]:
        """The outputs of a call, from what the graph produced and the caller's arguments.

        With ``copy`` each tensor is the caller's to keep, with eager's strides; outputs that share
        a storage share the copy's. Without it, tensors are the graph's own, narrowed.
        """
        if not copy and not self.returns_inputs and not self.numbers and not self._trims(results):
            return tuple(results)
        finished = list(results)
        copied: dict[int, Tensor] = {}
        if copy:
            for group in self.shared:
                copied.update(self._copy_group(group, results))
        for position, output in enumerate(self.plan.outputs):
            if output.same_as is not None:
                finished[position] = finished[output.same_as]
            elif output.input_index is not None:
                finished[position] = args[output.input_index]
            elif position in self.numbers:
                finished[position] = self.numbers[position]
            elif (geometry := self.geometry[position]) is not None:
                if position in copied:
                    finished[position] = copied[position]
                    continue
                live = _narrowed(results[position], geometry.shape)
                finished[position] = _kept(live, geometry) if copy else live
        return tuple(finished)

    def _trims(self, results: Sequence[Any]) -> bool:
        """Whether the graph ran at other sizes than the live ones."""
        return any(
            place is not None and place.shape != result.shape
            for place, result in zip(self.geometry, results, strict=True)
        )

    def _copy_group(self, group: Sequence[int], results: Sequence[Any]) -> dict[int, Tensor]:
        """Copies of outputs that are views of one storage, as views of one new storage.

        The views may have several dtypes, so places are counted in bytes.
        """
        places = {position: self._geometry_of(position) for position in group}
        size = {position: results[position].element_size() for position in group}
        unit = max(size.values())
        start = min(place.offset * size[p] for p, place in places.items()) // unit * unit
        end = max(place.end * size[p] for p, place in places.items())
        storage = torch.empty(
            -(-(end - start) // unit) * unit, dtype=torch.uint8, device=results[group[0]].device
        )
        made: dict[int, Tensor] = {}
        for position, place in places.items():
            source = _narrowed(results[position], place.shape)
            offset = place.offset - start // size[position]
            base = storage.view(source.dtype)
            made[position] = base.as_strided(place.shape, place.stride, offset)
            copy_values(made[position], source)
        return made

    def _geometry_of(self, position: int) -> _Geometry:
        geometry = self.geometry[position]
        assert geometry is not None
        return geometry


def plan_outputs(trace: AtenTrace, input_index: Mapping[fx.Node, int]) -> OutputPlan:
    """The outputs of a traced Dynamo graph. ``input_index`` numbers its placeholders."""
    (output_node,) = trace.gm.graph.find_nodes(op="output")
    inputs = {id(trace.values[node]): index for node, index in input_index.items()}
    input_storages = frozenset().union(*(trace.storages[node] for node in input_index))
    seen: dict[int, int] = {}
    outputs: list[_Output] = []
    for node in output_node.args[0]:
        value = trace.values[node] if isinstance(node, fx.Node) else node
        if isinstance(value, Tensor) and id(value) in inputs:
            outputs.append(_Output(input_index=inputs[id(value)]))
        elif isinstance(value, Tensor) and storage_of(value) in input_storages:
            outputs.append(_Output(fake=value, is_view_of_input=True))
        elif isinstance(value, Tensor) and id(value) in seen:
            outputs.append(_Output(fake=value, same_as=seen[id(value)]))
        elif isinstance(value, Tensor):
            seen[id(value)] = len(outputs)
            outputs.append(_Output(fake=value, storage=storage_of(value)))
        elif isinstance(value, (SymInt, SymFloat, SymBool)):
            outputs.append(_Output(number=value))
        else:
            outputs.append(_Output())
    return OutputPlan(outputs=tuple(outputs))


def _is_known(value: Any, sizes: Mapping[sympy.Symbol, int]) -> bool:
    """Whether the live sizes determine a number (a shape may also depend on values)."""
    if not isinstance(value, (SymInt, SymFloat, SymBool)):
        return True
    return bool(value.node.expr.free_symbols <= sizes.keys())


def _evaluate(value: Any, sizes: Mapping[sympy.Symbol, int]) -> Any:
    if not isinstance(value, (SymInt, SymFloat, SymBool)):
        return value
    result = value.node.expr.xreplace(dict(sizes))
    if isinstance(value, SymInt):
        return int(result)
    return bool(result) if isinstance(value, SymBool) else float(result)


def _narrowed(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    for dim, size in enumerate(shape):
        if tensor.shape[dim] != size:
            tensor = tensor.narrow(dim, 0, size)
    return tensor


def _geometry(fake: Tensor, sizes: Mapping[sympy.Symbol, int]) -> _Geometry:
    shape = tuple(int(_evaluate(size, sizes)) for size in fake.shape)
    stride = tuple(int(_evaluate(step, sizes)) for step in fake.stride())
    contiguous = torch._prims_common.make_contiguous_strides_for(shape)
    return _Geometry(
        shape=shape,
        stride=stride,
        offset=int(_evaluate(fake.storage_offset(), sizes)),
        is_contiguous=stride == tuple(contiguous),
    )


def _kept(live: Tensor, geometry: _Geometry) -> Tensor:
    if geometry.is_contiguous and live.is_contiguous():
        return live.clone(memory_format=torch.contiguous_format)
    copy = torch.empty_strided(
        geometry.shape, geometry.stride, dtype=live.dtype, device=live.device
    )
    copy_values(copy, live)
    return copy


def copy_values(target: Tensor, source: Tensor) -> None:
    """Copy values; an expanded dimension holds one value, which is written once."""
    for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if stride == 0 and size > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)
