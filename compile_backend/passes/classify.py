"""What each placeholder of a Dynamo graph is, read from its ``Source`` object.

First step of the backend. A wrapper module changes printed names, two arguments may end in the
same name, and a cache hung on a batch looks like a field of it, so names are never parsed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from compile_backend import compat
from compile_backend.errors import SlotMismatchError
from compile_backend.registry.fit import holds_losslessly

__all__ = [
    "GraphInput",
    "InputKind",
    "check_slot_fits",
    "classify_inputs",
    "read_field",
    "slot_axes",
]


class InputKind(Enum):
    """What an input of a traced graph is to the backend."""

    WEIGHT = "weight"  # parameter or buffer: fixed address, read late on the host
    BATCH_FIELD = "batch field"  # tensor field of a declared batch, with a slot
    TENSOR = "tensor"  # any other tensor argument
    SIZE = "size"  # a size symbol of some tensor
    SIZE_FIELD = "size field"  # number field of a declared batch that holds the size of an axis
    NUMBER = "number"  # any other number; part of the graph key


class Declaration(Protocol):
    """The part of a batch declaration that classification reads."""

    @property
    def slots(self) -> Mapping[str, Any]: ...
    @property
    def size_fields(self) -> Mapping[str, str]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphInput:
    """One placeholder. ``value`` is its fake tensor, SymInt or number."""

    index: int
    node: fx.Node
    kind: InputKind
    source: str  # for messages
    value: Any
    field: str | None = None  # of the declared batch
    also: tuple[str, ...] = ()  # other declared fields that hold this very tensor
    declaration: Declaration | None = None

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def is_wrapped_number(self) -> bool:
        """A Python float that Dynamo passes as a 0-d tensor."""
        return self.kind is InputKind.NUMBER and isinstance(self.value, Tensor)

    @property
    def declared_dims(self) -> list[int]:
        """Dimensions that follow an axis, of a batch field with a slot."""
        if self.declaration is None or self.field is None or self.kind is not InputKind.BATCH_FIELD:
            return []
        axes = slot_axes(self.declaration.slots[self.field], self.value.dim())
        return [dim for dim, axis in enumerate(axes) if axis is not None]


def classify_inputs(
    gm: fx.GraphModule,
    *,
    examples: Sequence[Any],
    scope: Mapping[str, Any],
    declaration_of: Callable[[type], Declaration | None],
) -> list[GraphInput]:
    """The inputs of a Dynamo graph, in order.

    ``examples`` are the real inputs, ``scope`` the local variables of the traced frame;
    ``declaration_of`` finds the declaration of a batch type. Dynamo passes a tensor that it meets
    twice as one input under its first source, so declared fields are also found by identity.
    Raises AssertionError for a graph that Dynamo did not make.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    found = [
        _classify(index, node, scope, declaration_of) for index, node in enumerate(placeholders)
    ]
    holders = _declared_holders(placeholders, scope, declaration_of)
    return [_with_fields(graph_input, examples, holders) for graph_input in found]


def _declared_holders(
    placeholders: Sequence[fx.Node],
    scope: Mapping[str, Any],
    declaration_of: Callable[[type], Declaration | None],
) -> dict[int, list[tuple[Declaration, str]]]:
    """By id of the tensor: the slotted fields of the declared batches in sight that hold it."""
    owners = {id(value): value for value in scope.values()}
    for node in placeholders:
        attribute = compat.attribute_of(node.meta["grapharg"].source)
        if attribute is not None:
            owner = compat.resolve_source(attribute[0], scope)
            owners[id(owner)] = owner
    holders: dict[int, list[tuple[Declaration, str]]] = {}
    for owner in owners.values():
        declaration = declaration_of(type(owner))
        for name in () if declaration is None else declaration.slots:
            value = read_field(owner, name)
            if declaration is not None and isinstance(value, Tensor):
                holders.setdefault(id(value), []).append((declaration, name))
    return holders


def read_field(batch: Any, name: str) -> Any:
    """The value behind a slot's name: a field, or for ``a.b`` item or attribute ``b`` of ``a``."""
    first, dot, rest = name.partition(".")
    value = getattr(batch, first, None)
    if not dot or value is None:
        return value
    try:
        return value[rest]
    except (KeyError, TypeError):
        return getattr(value, rest, None)


def _with_fields(
    graph_input: GraphInput,
    examples: Sequence[Any],
    holders: Mapping[int, list[tuple[Declaration, str]]],
) -> GraphInput:
    if graph_input.kind not in (InputKind.TENSOR, InputKind.BATCH_FIELD):
        return graph_input
    fields = [
        (declaration, name)
        for declaration, name in holders.get(id(examples[graph_input.index]), [])
        if _has_slot(declaration, name)
    ]
    if not fields:
        return graph_input
    declaration, name = fields[0]
    return dataclasses.replace(
        graph_input,
        kind=InputKind.BATCH_FIELD,
        declaration=declaration,
        field=name,
        also=tuple(other for _, other in fields[1:]),
    )


def _classify(
    index: int,
    node: fx.Node,
    scope: Mapping[str, Any],
    declaration_of: Callable[[type], Declaration | None],
) -> GraphInput:
    graph_arg = node.meta.get("grapharg")
    assert graph_arg is not None, f"placeholder {node.name!r} has no Dynamo source"
    source = graph_arg.source
    value = node.meta.get("example_value", node.meta.get("val"))
    declared = _declared_field(source, scope, declaration_of)

    def found(
        kind: InputKind, field: str | None = None, declaration: Declaration | None = None
    ) -> GraphInput:
        return GraphInput(
            index=index,
            node=node,
            kind=kind,
            source=compat.source_name(source),
            value=value,
            field=field,
            declaration=declaration,
        )

    if not isinstance(value, Tensor):
        if compat.is_tensor_property(source):
            return found(InputKind.SIZE)
        if declared is not None and declared[1] in declared[0].size_fields:
            return found(InputKind.SIZE_FIELD, declared[1], declared[0])
        return found(InputKind.NUMBER)
    if not graph_arg.is_tensor:
        return found(InputKind.NUMBER)
    if declared is not None and _has_slot(*declared):
        return found(InputKind.BATCH_FIELD, declared[1], declared[0])
    if isinstance(value, torch.nn.Parameter) or compat.is_module_state(source, graph_arg, value):
        return found(InputKind.WEIGHT)
    return found(InputKind.TENSOR)


def slot_axes(slot: Any, rank: int) -> list[str | None]:
    """The axis per dimension that a slot declares, read off its shape at two maximum sizes."""
    if isinstance(slot.axis, tuple):
        return [*slot.axis, *[None] * (rank - len(slot.axis))][:rank]
    if slot.axis == "none":
        return [None] * rank
    small, large = slot.shape_fn(8, 8), slot.shape_fn(16, 16)
    if len(small) != rank:
        return [None] * rank
    return [slot.axis if a != b else None for a, b in zip(small, large, strict=True)]


def check_slot_fits(slot: Any, field: GraphInput) -> None:
    """Raise SlotMismatchError where a slot could never hold the field that it is declared for."""
    shape, rank = tuple(slot.shape_fn(8, 8)), field.value.dim()
    if len(shape) != rank:
        raise SlotMismatchError(
            f"slot {slot.name!r} has {len(shape)} dimension(s) (shape_fn(8, 8) is {shape}) but "
            f"{field.source} has {rank}; make shape_fn return the shape of the whole field"
        )
    if not holds_losslessly(slot.dtype, field.value.dtype):
        raise SlotMismatchError(
            f"slot {slot.name!r} is {slot.dtype} but {field.source} is {field.value.dtype}, which "
            "it cannot hold; declare the slot with the dtype of the field"
        )
    if isinstance(slot.axis, str) and slot.axis != "none" and not any(slot_axes(slot, rank)):
        raise SlotMismatchError(
            f"slot {slot.name!r} follows axis {slot.axis!r} but its shape_fn gives {shape} for any "
            "maximum; make the shape follow max_bs or max_num_tokens, or use axis='none'"
        )


def _has_slot(declaration: Declaration, field: str) -> bool:
    slot = declaration.slots.get(field)
    return slot is not None and bool(slot.enabled)


def _declared_field(
    source: Any, scope: Mapping[str, Any], declaration_of: Callable[[type], Declaration | None]
) -> tuple[Declaration, str] | None:
    attribute = compat.attribute_of(source)
    if attribute is None:
        return None
    base, field = attribute
    owner = compat.resolve_source(base, scope)
    if owner is compat.UNRESOLVED:
        return None
    declaration = declaration_of(type(owner))
    return None if declaration is None else (declaration, field)
