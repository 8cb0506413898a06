"""Declared batches: which fields of a user's batch type live in slots.

A declared batch is a class whose tensor fields have a :class:`GraphSlot` each, so its owner says
how every field is padded. The backend finds the fields of such an object among the inputs of a
traced graph; everything else on the object passes through untouched.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compile_backend.errors import SlotDefinitionError
from compile_backend.registry.slot import GraphSlot

__all__ = ["BatchDeclaration", "declaration_of", "declare_batch"]

_AXES = ("bs", "tokens")
_declarations: dict[type, BatchDeclaration] = {}
_lock = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDeclaration:
    """The slots of one batch type, and which of its numbers are sizes."""

    batch_type: type
    slots: Mapping[str, GraphSlot]
    size_fields: Mapping[str, str]  # number field -> axis: the graph sees the padded size


def declare_batch(
    batch_type: type,
    slots: Sequence[GraphSlot],
    *,
    size_fields: Mapping[str, str] | None = None,
) -> BatchDeclaration:
    """Declare that the fields of ``batch_type`` named by ``slots`` live in static slots.

    Each slot is named after a field and is on axis ``"bs"`` or ``"tokens"`` (padded) or
    ``"none"`` (copied whole). ``size_fields`` names number fields that hold the size of an axis
    (``{"batch_size": "bs"}``); a captured graph sees the padded size there. Fields without a slot
    pass through at their own address. Subclasses inherit the declaration; declaring a type again
    replaces it for graphs compiled later.

    By declaring, the owner promises that a padded row, filled as its slot's policy says, changes
    no live row through the custom operators that stay outside the compiled pieces: those that
    write their arguments, and those named in ``splitting_ops``. They mask by lengths, and write
    padded rows to a scratch row. Other custom operators are vouched for in ``rowwise_ops``; what
    PyTorch's own operators do is proven. ``shape_fn`` is given the largest capture sizes.

    Raises SlotDefinitionError for a name that the type does not have, two slots of one name, an
    unknown axis, a computed slot, or dotted names.
    """
    if not isinstance(batch_type, type):
        raise SlotDefinitionError(
            f"declare_batch() got {batch_type!r}; pass the batch's class, not a name or an instance"
        )
    if isinstance(slots, GraphSlot) or not all(isinstance(slot, GraphSlot) for slot in slots):
        raise SlotDefinitionError("declare_batch() takes a list of GraphSlot")
    known = _field_names(batch_type)
    by_name: dict[str, GraphSlot] = {}
    for slot in slots:
        if slot.name in by_name:
            raise SlotDefinitionError(f"two slots are named {slot.name!r}; give each field one")
        if known is not None and slot.name not in known:
            raise SlotDefinitionError(
                f"{batch_type.__name__} has no field {slot.name!r}; its fields are "
                f"{', '.join(sorted(known))}"
            )
        for axis in slot.axis if isinstance(slot.axis, tuple) else (slot.axis,):
            if axis not in (*_AXES, "none", None):
                raise SlotDefinitionError(
                    f"slot {slot.name!r} is on axis {axis!r}; a declared field follows "
                    f"{', '.join(_AXES)} or none"
                )
        if slot.source_fn is not None or slot.post_fill is not None or slot.is_computed:
            raise SlotDefinitionError(
                f"slot {slot.name!r} is computed (source_fn, post_fill or copy_from_fb=False); a "
                "call that is not padded uses no slots, so compute the field in the batch"
            )
        if slot.is_dotted:
            raise SlotDefinitionError(
                f"slot {slot.name!r} has a dot in its name; a declared slot is named after a field"
            )
        by_name[slot.name] = slot
    sizes = dict(size_fields or {})
    for name, axis in sizes.items():
        if axis not in _AXES:
            raise SlotDefinitionError(
                f"size field {name!r} is on axis {axis!r}; use one of {', '.join(_AXES)}"
            )
        if known is not None and name not in known:
            raise SlotDefinitionError(f"{batch_type.__name__} has no size field {name!r}")
    declaration = BatchDeclaration(batch_type=batch_type, slots=by_name, size_fields=sizes)
    with _lock:
        _declarations[batch_type] = declaration
    return declaration


def declaration_of(batch_type: type) -> BatchDeclaration | None:
    """The declaration of a type or of its nearest declared base, or None."""
    for base in batch_type.__mro__:
        if base in _declarations:
            return _declarations[base]
    return None


def _field_names(batch_type: type) -> set[str] | None:
    """The field names of a dataclass or annotated class; None where they cannot be known."""
    if dataclasses.is_dataclass(batch_type):
        return {f.name for f in dataclasses.fields(batch_type)}
    annotated = {n for base in batch_type.__mro__ for n in getattr(base, "__annotations__", {})}
    return annotated or None
