"""What a model may see of a batch while it is traced, and what it must not.

A graph is captured once and replayed for other batches, so a number or a list that the model reads
from the batch would be baked into it, and a tensor without a slot would be read at an old address.
Such fields are replaced by a :class:`HostOnly`, whose use ends the trace with an error that names
the field.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection
from enum import Enum
from functools import cache
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from compile_backend.errors import PassError
from compile_backend.forward_batch import PPProxyTensors

__all__ = ["HostOnly", "read_of_forbidden_field", "traceable_view", "variant_of"]

Batch = TypeVar("Batch")

_PLAIN = (bool, str, Enum, type(None))  # part of the variant, so a graph may branch on them

# For the runner alone, so that no graph depends on them. What is captured decides about hidden
# states: a graph is always shown the mode that it is captured for.
_TYPE_PREFIX = "HostOnly_"
_NOT_SEEN = ("return_logprob", "can_run_dp_cuda_graph", "stream_index")


class HostOnly:
    """Stands for a batch field that a traced model must not read. It may ask ``is None``."""

    def __init__(self, field: str) -> None:
        self.field = field

    def __getattr__(self, name: str) -> NoReturn:
        if name == "field" or name.startswith("__"):
            raise AttributeError(name)
        raise _refused(self.field)


def forbidden(field: str) -> HostOnly:
    """A stand-in whose type is named after the field, since errors of a tracer name types."""
    return _type_for(field)(field)


@cache
def _type_for(field: str) -> type[HostOnly]:
    """One type for each field: it is part of the guards of a graph that asks ``is None``."""
    return type(f"{_TYPE_PREFIX}{field.replace('.', '__')}", (HostOnly,), {})


def read_of_forbidden_field(error: BaseException) -> PassError | None:
    """The error that says which forbidden field was read, if reading one is what failed."""
    found = re.search(rf"{_TYPE_PREFIX}(\w+)|the batch field '([\w.]+)'", str(error))
    if found is None:
        return None
    return _refused(found[2] or found[1].replace("__", "."))


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
    """A shallow copy of a batch in which only ``visible`` slots and plain flags can be read.

    ``visible`` are slot names; ``pp_proxy_tensors.hidden_states`` is an item of that field.
    """
    seen = copy.copy(view)
    for name, value in vars(view).items():
        if isinstance(value, Tensor) and name in visible:
            setattr(seen, name, _stand_in(value))
        elif isinstance(value, PPProxyTensors):
            items = {
                key: _stand_in(item) if f"{name}.{key}" in visible else forbidden(f"{name}.{key}")
                for key, item in value.items()
            }
            setattr(seen, name, PPProxyTensors(items))  # type: ignore[arg-type]  # HostOnly
        elif name in _NOT_SEEN or (name not in visible and not isinstance(value, _PLAIN)):
            setattr(seen, name, forbidden(name))
    return seen


def _stand_in(tensor: Tensor) -> Tensor:
    """A tensor of the same layout, at the start of its storage. Tracing reads no values, and would
    make the place of a slot in its buffer an input of the graph."""
    with torch.inference_mode(False):  # the kind of tensor is part of the guards
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )


def variant_of(batch: Any) -> tuple[Any, ...]:
    """What a traced model may branch on: which fields are present, and the plain flags."""
    return (
        type(batch),
        *[
            v if isinstance(v, _PLAIN) else True
            for name, v in vars(batch).items()
            if name not in _NOT_SEEN and name != "capture_hidden_mode"
        ],
    )
