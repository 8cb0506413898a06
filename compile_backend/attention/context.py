"""What an attention call knows of the forward pass it is in.

A custom operator cannot take a batch, so whoever runs a model (eagerly, at capture, at replay) sets
a :class:`ForwardContext` around it, and :func:`~compile_backend.attention.attention` reads it.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compile_backend.errors import ContextError
from compile_backend.forward_batch import ForwardBatch

if TYPE_CHECKING:
    from compile_backend.attention.base import AttentionBackend

__all__ = ["ForwardContext", "forward_context", "get_forward_context"]


@dataclass(slots=True)
class ForwardContext:
    """The backend, the batch and what the backend planned for it."""

    attn_backend: "AttentionBackend"
    forward_batch: ForwardBatch
    metadata: Any  # what attn_backend.init_forward_metadata(forward_batch) returned


class _Current(threading.local):
    context: ForwardContext | None = None


_current = _Current()


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[ForwardContext]:
    """Make ``context`` the one that attention calls of this thread read. Nests."""
    previous, _current.context = _current.context, context
    try:
        yield context
    finally:
        _current.context = previous


def get_forward_context() -> ForwardContext:
    """The innermost context of this thread. Raises ContextError outside of any."""
    context = _current.context
    if context is None:
        raise ContextError(
            "attention was called outside a forward pass on thread "
            f"{threading.current_thread().name!r}; run the model inside "
            "`with forward_context(ForwardContext(attn_backend, forward_batch, metadata)):`"
        )
    return context
