"""The contract of an attention backend: plan a batch on the host, then attend layer by layer.

::

    init_forward_metadata(batch) ──> metadata ──> forward(q, k, v, layer_id=...) per layer

Planning runs outside graphs, before every forward pass and every replay. What ``forward`` does may
be captured in the modes of ``full_graph_modes``: there it reads nothing on the host, and every
tensor of the metadata keeps its address for one (padded size, graph key).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from compile_backend.attention.context import ForwardContext
from compile_backend.forward_batch import ForwardBatch, ForwardMode

__all__ = ["AttentionBackend"]


class AttentionBackend(ABC):
    """How attention is computed, and over which KV cache. Not thread-safe."""

    name: ClassVar[str]
    full_graph_modes: ClassVar[frozenset[ForwardMode]]
    """Forward modes whose kernels a FULL graph may hold: they read nothing on the host."""

    @property
    @abstractmethod
    def seq_len_fill_value(self) -> int:
        """The length of a padded request."""

    @property
    def max_seq_len(self) -> int | None:
        """The longest request that can be planned, or None where there is no limit."""
        return None

    @abstractmethod
    def init_graph_state(self, *, max_bs: int, max_num_tokens: int) -> None:
        """Make the metadata buffers that graphs read; before the first capture.

        Again with sizes that fit does nothing. Raises ConfigError for sizes that do not fit once
        a plan in the buffers was handed out, since a graph may have captured their addresses.
        """

    def graph_key(self, forward_batch: ForwardBatch) -> tuple[int, ...]:
        """The bucketed host numbers that a graph for this batch bakes, such as the KV length."""
        return ()

    def capture_keys(self, forward_mode: ForwardMode, batch_size: int) -> Sequence[tuple[int, ...]]:
        """Every key that ``graph_key`` can return for such a batch, the smallest first."""
        return [()]

    @abstractmethod
    def init_forward_metadata(
        self, forward_batch: ForwardBatch, *, graph_key: tuple[int, ...] | None = None
    ) -> Any:
        """Plan the batch; the result goes into the ForwardContext.

        Without ``graph_key`` the plan is the caller's own. With it (a captured graph's, on the
        static view) the plan's tensors are the same memory for the same padded size and key, and
        the next call overwrites them. Host fields of the batch are live; padded rows follow the
        slots' policies. Raises ContextError for a batch that lacks a field or does not fit the
        key, before anything is written.
        """

    def upgrade_metadata(self, captured: Any, fresh: Any) -> Any:
        """The metadata for a replay, from that of the capture and that of this batch."""
        return fresh

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        layer_id: int,
        scale: float | None,
        context: ForwardContext,
    ) -> Tensor:
        """Write k and v to the cache and attend: a new contiguous tensor, shaped like q.

        q is [tokens, num_heads, head_dim], k and v [tokens, num_kv_heads, head_dim]; ``scale`` None
        means ``head_dim ** -0.5``. No tokens: an empty tensor, and nothing is read or written.
        """
        if q.shape[0] == 0:
            return q.new_empty(q.shape)
        by_mode = (
            self.forward_decode
            if context.forward_batch.forward_mode.is_decode_or_idle()
            else self.forward_extend
        )
        return by_mode(q, k, v, layer_id=layer_id, scale=scale, context=context)

    @abstractmethod
    def forward_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        layer_id: int,
        scale: float | None,
        context: ForwardContext,
    ) -> Tensor:
        """One token per request. As :meth:`forward`; at least one token."""

    @abstractmethod
    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        layer_id: int,
        scale: float | None,
        context: ForwardContext,
    ) -> Tensor:
        """Any number of tokens per request. As :meth:`forward`; at least one token.

        Rows past the batch's live tokens are padding: they write nothing and come out as zeros.
        """

    def captured_tensors(self) -> Sequence[Tensor]:
        """Tensors of the backend's own that a FULL graph reads or writes where they are, such as
        the cache. Their addresses are compared before each replay; a move is captured again."""
        return ()

    @abstractmethod
    def reset_scratch(self) -> None:
        """Make what padded rows wrote finite again: zero the scratch row, after warm-up."""
