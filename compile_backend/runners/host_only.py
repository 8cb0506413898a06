"""What a model may see of a batch while it is traced, and what it must not.

A graph is captured once and replayed for other batches, so a number or a list that the model reads
from the batch would be baked into it, and a tensor without a slot would be read at an old address.
Such fields are replaced by a :class:`HostOnly`, whose use ends the trace with an error that names
the field.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from enum import Enum
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from compile_backend.errors import PassError

__all__ = ["HostOnly", "traceable_view", "variant_of"]

Batch = TypeVar("Batch")

_PLAIN = (bool, str, Enum, type(None))  # part of the variant, so a graph may branch on them


class HostOnly:
    """Stands for a batch field that a traced model must not read. It may ask ``is None``."""

    def __init__(self, field: str) -> None:
        self.field = field

    def __getattr__(self, name: str) -> NoReturn:
        if name == "field" or name.startswith("__"):
            raise AttributeError(name)
        raise _refused(self.field)


def _refused(field: str) -> PassError:
    return PassError(
        f"the model reads the batch field {field!r}, which has no slot: a captured graph would "
        f"keep the value it was captured with; read it in the attention backend, or give the model "
        f"a tensor that has a slot"
    )


def _refuse(name: str) -> Callable[..., NoReturn]:
    def method(self: HostOnly, *_: object) -> NoReturn:
        raise _refused(self.field)

    method.__name__ = name
    return method


_OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow neg abs "
    "eq ne lt le gt ge bool int float index len iter next getitem setitem contains call"
)
for _name in _OPERATORS.split(" "):
    setattr(HostOnly, f"__{_name}__", _refuse(f"__{_name}__"))
HostOnly.__hash__ = object.__hash__  # type: ignore[method-assign]  # __eq__ above removed it


def traceable_view(view: Batch, visible: Collection[str]) -> Batch:
    """A shallow copy of a batch in which only ``visible`` fields and plain flags can be read."""
    seen = copy.copy(view)
    for name, value in vars(view).items():
        if isinstance(value, Tensor) and name in visible:
            setattr(seen, name, _stand_in(value))
        elif name not in visible and not isinstance(value, _PLAIN):
            setattr(seen, name, HostOnly(name))
    return seen


def _stand_in(tensor: Tensor) -> Tensor:
    """A tensor of the same layout, at the start of its storage. Tracing reads no values, and would
    make the place of a slot in its buffer an input of the graph."""
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


def variant_of(batch: Any) -> tuple[Any, ...]:
    """What a traced model may branch on: which fields are present, and the plain flags."""
    return (
        type(batch),
        *[v if isinstance(v, _PLAIN) else True for v in vars(batch).values()],
    )
