"""Which backend serves which ``torch.compile`` call.

A string backend is a plain function for Dynamo; this module remembers, per object that
``torch.compile`` made, the backend that was set up for it, for as long as that object lives.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

from compile_backend import compat

__all__ = ["BACKEND_NAME", "Reporting", "backend_for", "backends_of", "is_served"]


@runtime_checkable
class Reporting(Protocol):
    """A backend, as far as whoever explains it is concerned."""

    @property
    def reports(self) -> tuple[Any, ...]: ...


BACKEND_NAME = "graphbuf"

Backend = TypeVar("Backend", bound=Reporting)

_known: list[tuple[weakref.ref[Any], Any]] = []
_lock = threading.RLock()


def backend_for(owner: Any | None, make: Callable[[], Backend]) -> Backend:
    """The backend of this owner, made at the first call; a new one where there is no owner."""
    if owner is None:
        return make()
    with _lock:
        found: Backend | None = _find(owner)
        if found is None:
            found = make()
            _known.append((weakref.ref(owner), found))
        return found


def backends_of(compiled: Any) -> list[Reporting]:
    """The backends that serve what ``torch.compile`` returned; empty before its first call."""
    in_place = getattr(compiled, "_compiled_call_impl", None)  # nn.Module.compile()
    if in_place is not None and not hasattr(compiled, "dynamo_ctx"):
        compiled = in_place
    owner = compat.owner_of_compiled(compiled)
    for candidate in (compiled, owner, getattr(owner, "compiler_fn", None)):
        if isinstance(candidate, Reporting):
            return [candidate]
    if owner is None:
        return []
    with _lock:
        found = _find(owner)
        if found is not None:
            return [found]
        # Dynamo may serve a model with what it compiled for one with equal options.
        return [backend for ref, backend in _known if ref() == owner]


def is_served(compiled: Any) -> bool:
    """Whether this is a backend, or what ``torch.compile`` made with this backend."""
    if isinstance(compiled, Reporting) or backends_of(compiled):
        return True
    in_place = getattr(compiled, "_compiled_call_impl", None)
    owners = [compat.owner_of_compiled(each) for each in (compiled, in_place) if each is not None]
    return any(getattr(owner, "compiler_name", None) == BACKEND_NAME for owner in owners)


def _find(owner: Any) -> Any | None:
    _known[:] = [(ref, backend) for ref, backend in _known if ref() is not None]
    return next((backend for ref, backend in _known if ref() is owner), None)
