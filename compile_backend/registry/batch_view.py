"""A batch of views: a copy of the template whose fields are slot views."""

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from torch import Tensor

__all__ = ["BatchViews", "view_batch"]

Batch = TypeVar("Batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchViews:
    """The views of one pair of padded sizes, by how each gets into the batch."""

    copied: tuple[tuple[str, Tensor], ...]  # set where the template's field is not None
    sourced: tuple[tuple[str, Tensor], ...]  # set where the last fill found a source
    computed: dict[str, Tensor]  # set always
    sizes: tuple[tuple[str, int], ...]  # set where the template has such an integer field
    names: frozenset[str]  # of copied, sourced and computed


def view_batch(template: Batch, views: BatchViews, skipped: frozenset[str]) -> Batch:
    """A shallow copy of ``template`` with the views in place. The template is not changed.

    Raises AttributeError where the template lacks a copied field.
    """
    kind: type = type(template)
    if not _keeps_fields_in_dict(kind):
        return _view_any_batch(template, views, skipped)
    # Writing the instance dict costs a tenth of copy.copy and setattr, and runs at every step.
    batch: Batch = object.__new__(kind)
    fields = batch.__dict__
    fields.update(template.__dict__)
    if not fields.keys() >= views.names:
        return _view_any_batch(template, views, skipped)
    for name, view in views.copied:
        if fields[name] is not None:
            fields[name] = view
    for name, view in views.sourced:
        if name not in skipped:
            fields[name] = view
    fields.update(views.computed)
    for name, size in views.sizes:
        if isinstance(fields.get(name), int):
            fields[name] = size
    return batch


def _view_any_batch(template: Batch, views: BatchViews, skipped: frozenset[str]) -> Batch:
    """The same for classes with ``__slots__``, properties or attributes of their own making."""
    batch = copy.copy(template)
    changes: dict[str, Any] = {
        name: view for name, view in views.copied if getattr(template, name) is not None
    }
    changes |= {name: view for name, view in views.sourced if name not in skipped}
    changes |= views.computed
    for name, size in views.sizes:
        is_derived = isinstance(getattr(type(template), name, None), property)
        if not is_derived and isinstance(getattr(template, name, None), int):
            changes[name] = size
    for name, value in changes.items():
        object.__setattr__(batch, name, value)  # a frozen dataclass is only a copy here
    return batch


@cache
def _keeps_fields_in_dict(kind: type) -> bool:
    """Whether the instance dict of class ``kind`` is all there is to its fields and to copying."""
    has_dict = kind.__dictoffset__ != 0
    ordinary = ("__new__", "__getattribute__", "__getstate__", "__reduce_ex__")
    is_ordinary = all(getattr(kind, name) == getattr(object, name) for name in ordinary)
    has_slots = any("__slots__" in vars(base) for base in kind.__mro__[:-1])
    return has_dict and is_ordinary and not has_slots and not hasattr(kind, "__copy__")
