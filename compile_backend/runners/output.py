"""What a forward pass returns, with the size it ran at: whoever trims or counts reads it here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.utils import _pytree as pytree

from compile_backend.errors import FallbackReason

__all__ = ["ForwardOutput", "Path", "copied_from"]

Path = Literal["decode", "prefill", "eager", "idle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    """The result of :meth:`ModelRunner.forward`.

    Without ``copy_outputs`` the tensors may be views of graph memory, which the next forward of
    this runner overwrites.
    """

    logits: Tensor | None  # [rows, vocab]: see ``ModelRunner.forward``; None without an lm_head
    hidden_states: Any  # [num_tokens, hidden], or whatever the model returns
    path: Path  # which runner ran it
    reason: FallbackReason | None  # why no graph did, where one was wanted
    bucket: int | None  # captured size: requests for decode, tokens for prefill
    batch_size: int  # live
    num_tokens: int  # live


def copied_from(buffers: Iterable[Tensor], result: Any) -> Any:
    """``result`` with copies of the tensors that lie in the memory of ``buffers``."""
    storages = {buffer.untyped_storage().data_ptr() for buffer in buffers}

    def copy(value: Any) -> Any:
        if isinstance(value, Tensor) and value.untyped_storage().data_ptr() in storages:
            return value.clone()
        return value

    return pytree.tree_map(copy, result)
