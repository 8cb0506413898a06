"""Which sizes of a traced graph are padded, and which dimension of which input follows them.

One symbol is never proof of one axis (a 3x3 input ties batch and feature, and by default each
argument gets a batch symbol of its own), so this pass only proposes: leading symbols with equal
hints are padded together, the proof in :mod:`passes.padding_safety` decides, and a call whose
live sizes differ runs at its exact sizes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
from torch import SymInt, Tensor

from compile_backend.errors import FallbackError, FallbackReason
from compile_backend.passes.classify import (
    GraphInput,
    InputKind,
    check_slot_fits,
    slot_axes,
)

__all__ = ["Axis", "AxisPlan", "PaddedInput", "Refusal", "num_choices", "plan_axes", "symbol_of"]

MAX_PADDED_AXES = 2


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a call is not padded, or not captured."""

    reason: FallbackReason
    message: str

    def error(self, what: str) -> FallbackError:
        """The error for whoever insists on a graph; ``what`` would not replay one."""
        return FallbackError(
            f"{what} would not replay a captured bucket ({self.reason.name}): {self.message}",
            self.reason,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A size that is padded: its symbols, all of which take one value, and its inputs."""

    name: str
    symbols: frozenset[sympy.Symbol]
    size_inputs: tuple[int, ...]  # indices of the number inputs that carry it

    declared_as: frozenset[str] = frozenset()  # "bs" and "tokens", where a declared batch names it


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedInput:
    """A tensor input that lives in a slot. ``axes`` has an axis name or None per dimension."""

    input: GraphInput
    axes: tuple[str | None, ...]

    @property
    def dims(self) -> dict[int, str]:
        return {dim: axis for dim, axis in enumerate(self.axes) if axis is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisPlan:
    """The padded axes of one graph; empty where nothing can be padded, with ``refusal``."""

    axes: tuple[Axis, ...] = ()
    inputs: tuple[PaddedInput, ...] = ()
    refusal: Refusal | None = None
    is_declared: bool = False
    symbols_by_axis: Mapping[str, frozenset[sympy.Symbol]] = field(default_factory=dict)


def symbol_of(value: Any) -> sympy.Symbol | None:
    """The plain symbol that a size is, or None for an integer or a compound expression."""
    if isinstance(value, SymInt):
        expr = value.node.expr
        return expr if isinstance(expr, sympy.Symbol) else None
    return None


def plan_axes(
    inputs: Sequence[GraphInput],
    *,
    mutated: Collection[str] = (),
    aliased: Collection[str] = (),
    max_axes: int = MAX_PADDED_AXES,
    choice: int = 0,
) -> AxisPlan:
    """Propose the padded axes, at most ``max_axes``.

    ``choice`` picks among leading sizes that as many arguments agree on (``num_choices``).
    ``mutated`` and ``aliased`` name the placeholders that the graph writes, and whose storage an
    output shares; such an input is never copied into a slot.
    """
    groups = _declared_groups(inputs) + _undeclared_groups(inputs, choice)
    groups = _merged(groups)[:max_axes]
    is_declared = any(group.declared_as for group in groups)
    if not groups:
        return AxisPlan()
    axes = tuple(
        Axis(
            name=group.name,
            symbols=frozenset(group.symbols),
            size_inputs=tuple(i.index for i in inputs if _carried_symbol(i) in group.symbols),
            declared_as=frozenset(group.declared_as),
        )
        for group in groups
    )
    if twice := _declared_twice(inputs):
        return AxisPlan(refusal=twice, is_declared=True)
    axis_of = {symbol: axis.name for axis in axes for symbol in axis.symbols}
    padded: list[PaddedInput] = []
    for graph_input in inputs:
        if not isinstance(graph_input.value, Tensor) or graph_input.is_wrapped_number:
            continue
        sizes = list(graph_input.value.shape)
        followed = tuple(axis_of.get(symbol_of(size)) for size in sizes)
        refusal = _refuse(graph_input, sizes, followed, set(axis_of), mutated, aliased)
        if refusal is not None:
            return AxisPlan(refusal=refusal, is_declared=is_declared)
        if any(followed) or graph_input.kind is InputKind.BATCH_FIELD:
            padded.append(PaddedInput(input=graph_input, axes=followed))
    return AxisPlan(
        axes=axes,
        inputs=tuple(padded),
        is_declared=is_declared,
        symbols_by_axis={axis.name: axis.symbols for axis in axes},
    )


def _declared_twice(inputs: Sequence[GraphInput]) -> Refusal | None:
    """Two batches that bring one field cannot both be in the slot of its name."""
    fields: dict[str, GraphInput] = {}
    for graph_input in inputs:
        if graph_input.kind is InputKind.BATCH_FIELD and graph_input.field is not None:
            if graph_input.also:
                return Refusal(
                    FallbackReason.PADDING_UNSAFE,
                    f"the declared fields {', '.join((graph_input.field, *graph_input.also))} hold "
                    "one tensor, which cannot be padded in two ways; pass copies",
                )
            first = fields.setdefault(graph_input.field, graph_input)
            if first is not graph_input:
                return Refusal(
                    FallbackReason.PADDING_UNSAFE,
                    f"{first.source} and {graph_input.source} are both declared as "
                    f"{graph_input.field!r}; pass one declared batch to a compiled function",
                )
    return None


def _refuse(
    graph_input: GraphInput,
    sizes: Sequence[Any],
    followed: Sequence[str | None],
    symbols: set[sympy.Symbol],
    mutated: Collection[str],
    aliased: Collection[str],
) -> Refusal | None:
    """Why this input cannot live in a slot, or None."""
    named = f"input {graph_input.source}"
    for size in sizes:
        if isinstance(size, SymInt) and symbol_of(size) is None:
            overlap = size.node.expr.free_symbols & symbols
            if overlap:
                return Refusal(
                    FallbackReason.PADDING_UNSAFE,
                    f"{named} has size {size}, which is no plain multiple of a padded size; "
                    "give it a size of its own or pass it at a fixed size",
                )
    if not any(followed) and graph_input.kind is not InputKind.BATCH_FIELD:
        return None
    if any(_varies(s) and axis is None for s, axis in zip(sizes, followed, strict=True)):
        return Refusal(
            FallbackReason.LIVE_SIZES_DIFFER,
            f"{named} has shape {list(sizes)}, of which a size varies that is not "
            "padded; fix it, or pad it by hand",
        )
    if graph_input.name in mutated and not _is_computed(graph_input):
        return Refusal(
            FallbackReason.MUTATED_INPUT,
            f"{named} is written by the graph, so it is passed through and cannot be padded; "
            "write to a buffer of fixed size, or return the new value",
        )
    if graph_input.name in aliased:
        return Refusal(
            FallbackReason.ALIASED_OUTPUT,
            f"an output is a view of {named}; return a copy to have it padded",
        )
    if not graph_input.value.is_contiguous():
        return Refusal(
            FallbackReason.LAYOUT,
            f"{named} is not contiguous (stride {tuple(graph_input.value.stride())}); "
            "pass x.contiguous()",
        )
    return None


def _varies(size: Any) -> bool:
    return isinstance(size, SymInt) and bool(size.node.expr.free_symbols)


@dataclass(slots=True)
class _SymbolGroup:
    name: str
    symbols: set[sympy.Symbol]
    declared_as: set[str] = field(default_factory=set)


def _declared_groups(inputs: Sequence[GraphInput]) -> list[_SymbolGroup]:
    """The axes that declared batches name, ``bs`` before ``tokens``, whatever is read first."""
    groups: dict[str, _SymbolGroup] = {}
    for graph_input in inputs:
        declaration = graph_input.declaration
        if declaration is None or graph_input.field is None:
            continue
        found: list[tuple[str, Any]] = []
        if graph_input.kind is InputKind.BATCH_FIELD:
            slot = declaration.slots[graph_input.field]
            check_slot_fits(slot, graph_input)
            found = [
                (axis, size)
                for axis, size in zip(
                    slot_axes(slot, graph_input.value.dim()), graph_input.value.shape, strict=True
                )
                if axis is not None
            ]
        elif graph_input.kind is InputKind.SIZE_FIELD:
            found = [(declaration.size_fields[graph_input.field], graph_input.value)]
        for axis, size in found:
            symbol = symbol_of(size)
            if symbol is not None:
                group = groups.setdefault(axis, _SymbolGroup(axis, set(), {axis}))
                group.symbols.add(symbol)
    return [groups[axis] for axis in sorted(groups)]


def num_choices(inputs: Sequence[GraphInput]) -> int:
    """How many leading sizes could be the batch size of the plain arguments, at least 1."""
    return max(1, len(_most_common(_symbols_by_hint(inputs)[0])))


def _undeclared_groups(inputs: Sequence[GraphInput], choice: int) -> list[_SymbolGroup]:
    """The leading symbols of plain arguments that agree on most of them, and the inner ones.

    Symbols of other groups are not padded: a call is told apart by their values.
    """
    leading, inner = _symbols_by_hint(inputs)
    groups = [_SymbolGroup("batch", set(group)) for group in _most_common(leading)[choice:][:1]]
    return groups + [_SymbolGroup("seq", set(group)) for group in _most_common(inner)[:1]]


def _most_common(by_hint: Mapping[int, list[sympy.Symbol]]) -> list[list[sympy.Symbol]]:
    most = max(map(len, by_hint.values()), default=0)
    return [symbols for symbols in by_hint.values() if len(symbols) == most]


def _symbols_by_hint(
    inputs: Sequence[GraphInput],
) -> tuple[dict[int, list[sympy.Symbol]], dict[int, list[sympy.Symbol]]]:
    """Symbols of plain arguments under the size they were traced at, one per dimension that has
    it: those of leading dimensions, and those of inner ones."""
    leading: dict[int, list[sympy.Symbol]] = {}
    inner: dict[int, list[sympy.Symbol]] = {}
    for graph_input in inputs:
        if graph_input.kind is not InputKind.TENSOR:
            continue
        for dim, size in enumerate(graph_input.value.shape):
            symbol = symbol_of(size)
            if symbol is not None and size.node.hint is not None:
                where = leading if dim == 0 else inner
                where.setdefault(int(size.node.hint), []).append(symbol)
    return leading, inner


def _merged(groups: Sequence[_SymbolGroup]) -> list[_SymbolGroup]:
    """Groups with a symbol in common are one; the first name wins."""
    merged: list[_SymbolGroup] = []
    for group in groups:
        home = next((known for known in merged if known.symbols & group.symbols), None)
        if home is None:
            merged.append(group)
        else:
            home.symbols |= group.symbols
            home.declared_as |= group.declared_as
    return merged


def _carried_symbol(graph_input: GraphInput) -> sympy.Symbol | None:
    if graph_input.kind in (InputKind.SIZE, InputKind.SIZE_FIELD):
        return symbol_of(graph_input.value)
    return None


def _is_computed(graph_input: GraphInput) -> bool:
    """Whether a field's slot is written inside the graph, so that nothing is copied into it."""
    if graph_input.declaration is None or graph_input.field is None:
        return False
    return bool(graph_input.declaration.slots[graph_input.field].is_computed)
