"""What the proof knows about a tensor, and how a rule says that it cannot go on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import sympy
import torch
from torch import Tensor

from compile_backend.errors import FallbackReason
from compile_backend.passes.aten_trace import AtenCall
from compile_backend.passes.padding.layout import Dim, Dims, Sizes, is_clean

__all__ = [
    "Case",
    "NotShown",
    "Range",
    "Value",
    "aten",
    "mixes_rows",
    "moves_rows",
    "range_of_tensor",
    "uses_size",
]


class Range(IntEnum):
    """What is known of the numbers in *every* row, padded ones included. Later implies earlier.

    Only causal attention asks: a masked row is multiplied by zero, and zero times infinity is not
    zero. Overflow of the number format is left out of account.
    """

    ANY = 0
    FINITE = 1
    NONNEGATIVE = 2
    POSITIVE = 3

    @classmethod
    def of_number(cls, number: object) -> "Range":
        """Of a Python number. A symbolic one is finite."""
        if isinstance(number, bool):
            return cls.NONNEGATIVE
        if isinstance(number, int | float):
            if not math.isfinite(number):
                return cls.ANY
            return cls.POSITIVE if number > 0 else cls.NONNEGATIVE if number == 0 else cls.FINITE
        return cls.FINITE

    @property
    def unsigned(self) -> "Range":
        """Without what is known of the sign."""
        return min(self, Range.FINITE)

    @property
    def rounded(self) -> "Range":
        """After an operation that can round a small number to zero."""
        return min(self, Range.NONNEGATIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor in the proof.

    The invariant: an element whose coordinates along the padded axes are all live depends on live
    elements of the inputs only, and not on how long the axes are. ``iota`` names the axis along
    which every element equals its own coordinate.
    """

    dims: Dims
    range: Range = Range.ANY
    iota: str | None = None
    made_by: AtenCall | None = None

    @property
    def is_clean(self) -> bool:
        return all(is_clean(dim) for dim in self.dims)

    def with_dims(self, dims: Sequence[Dim]) -> "Value":
        return replace(self, dims=tuple(dims))


class NotShown(Exception):  # noqa: N818 - an outcome of the proof, not an error
    """An operator was met that is not shown to keep padded rows away from live ones."""

    def __init__(self, why: str, advice: str, reason: FallbackReason) -> None:
        super().__init__(why)
        self.why = why
        self.advice = advice
        self.reason = reason
        self.call: AtenCall | None = None  # where it was met, if not where it is raised


def aten(names: str) -> list[str]:
    """Full names of ATen operators, given apart by spaces."""
    return [f"aten.{name}" for name in names.split()]


def mixes_rows(what: str, axis: Dim) -> NotShown:
    """Live rows would see padded ones."""
    return NotShown(
        f"{what} mixes the rows of padded axis {_axis_names(axis)}",
        "return the rows and combine the live ones outside the compiled function, or pass the "
        "data at a fixed length with a mask made from its lengths",
        FallbackReason.PADDING_UNSAFE,
    )


def moves_rows(what: str, axis: Dim) -> NotShown:
    """Live rows would end up where nobody looks for them."""
    return NotShown(
        f"{what} moves the rows of padded axis {_axis_names(axis)} away from its start",
        "return the rows in place and reorder the live ones outside the compiled function",
        FallbackReason.OUTPUT_NOT_PREFIX,
    )


def uses_size(axes: frozenset[str]) -> NotShown:
    """A size would be computed with, and the padded size is not the live one."""
    return NotShown(
        f"the size of padded axis {', '.join(map(repr, sorted(axes)))} is used as a value",
        "pass the live size as a tensor argument",
        FallbackReason.PADDING_UNSAFE,
    )


def _axis_names(dim: Dim) -> str:
    return ", ".join(sorted({repr(atom) for atom in dim if isinstance(atom, str)}))


@dataclass(frozen=True, slots=True)
class Case:
    """One call as a rule sees it: arguments by schema name, tensors as :class:`Value`."""

    call: AtenCall
    values: dict[int, Value]  # by id of the tensor
    sizes: Sizes
    min_rows: dict[str, int]  # per axis, what a constant index needs; rules raise it

    def arg(self, name: str, default: Any = None) -> Any:
        return self.call.argument(name, default)

    def value(self, name: str) -> Value:
        found = self.optional(name)
        assert found is not None, f"{self.call.name} has no tensor {name!r}"
        return found

    def optional(self, name: str) -> Value | None:
        return self.of(self.arg(name))

    def of(self, tensor: Any) -> Value | None:
        return self.values[id(tensor)] if isinstance(tensor, Tensor) else None

    def dim(self, value: Value, name: str = "dim", default: int = -1) -> int:
        """The dimension argument ``name`` as an index from the front."""
        index = self.arg(name, default)
        return int(index) % max(len(value.dims), 1)

    def dims(self, value: Value, name: str = "dim") -> list[int]:
        """A dimension argument that may be a number, a list, or absent for all."""
        given = self.arg(name)
        if not value.dims:
            return []
        if given is None or (isinstance(given, list | tuple) and not given):
            return list(range(len(value.dims)))
        given = list(given) if isinstance(given, list | tuple) else [given]
        return [int(d) % len(value.dims) for d in given]

    def result_sizes(self, index: int | None = None) -> list[sympy.Expr]:
        """Sizes of the result, or of its ``index``-th tensor."""
        result = self.call.result if index is None else self.call.result[index]
        return [self.sizes.expr(size) for size in result.shape]

    @property
    def is_floating(self) -> bool:
        """Whether the (first) result can hold infinities at all."""
        result = self.call.result
        first = result if isinstance(result, Tensor) else next(iter(result), None)
        return isinstance(first, Tensor) and (
            first.dtype.is_floating_point or first.dtype.is_complex
        )

    def clean(self, value: Value, dim: int, what: str | None = None) -> None:
        """Raise unless no padded axis runs along dimension ``dim`` of ``value``."""
        if not is_clean(value.dims[dim]):
            raise mixes_rows(what or f"{self.call.name} over dimension {dim}", value.dims[dim])

    def unsupported(self, why: str) -> NotShown:
        return NotShown(
            f"{self.call.name}: {why}",
            "run it outside the compiled function, or leave this graph to exact sizes",
            FallbackReason.PADDING_UNSAFE,
        )


def range_of_tensor(tensor: Tensor) -> Range:
    """Of a tensor that is real and small enough to look at; others are taken to be finite."""
    if not tensor.dtype.is_floating_point or tensor.numel() > 1024 or tensor.is_meta:
        return Range.FINITE
    return Range.FINITE if bool(torch.isfinite(tensor).all()) else Range.ANY
