"""What every runner is built on, and the contract that :class:`ModelRunner` dispatches by."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from compile_backend.attention import AttentionBackend
from compile_backend.engines import Engine
from compile_backend.errors import FallbackReason
from compile_backend.forward_batch import ForwardBatch, ForwardMode
from compile_backend.passes.axes import Refusal
from compile_backend.registry.registry import CudaGraphBufferRegistry
from compile_backend.runner_config import RunnerConfig
from compile_backend.runners.dummy import dummy_batch

__all__ = ["BaseRunner", "ServedModel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the runners of one model share. All of it is settled."""

    model: Callable[[ForwardBatch], Any]
    attn_backend: AttentionBackend
    config: RunnerConfig
    engine: Engine
    device: torch.device
    max_bs: int  # of every registry: the capacity, and at least what tracing needs
    max_num_token: int
    tokens_per_bs: int  # of a batch that the decode graphs serve


class BaseRunner(ABC):
    """Serves some forward modes on one registry. Not thread-safe: ModelRunner holds the lock."""

    name: str

    def __init__(self, served: ServedModel, registry: CudaGraphBufferRegistry) -> None:
        self.served = served
        self.registry = registry

    @property
    def config(self) -> RunnerConfig:
        return self.served.config

    def decline(self, batch: ForwardBatch) -> FallbackReason | None:
        """Why this runner does not take ``batch``, or None. Writes nothing."""
        refusal = self.refuse(batch)
        return None if refusal is None else refusal.reason

    def can_run_graph(self, batch: ForwardBatch) -> bool:
        """Whether :meth:`decline` has no reason."""
        return self.refuse(batch) is None

    @abstractmethod
    def refuse(self, batch: ForwardBatch) -> Refusal | None:
        """As :meth:`decline`, with a message that says which value and what to do."""

    @abstractmethod
    def load_batch(self, batch: ForwardBatch) -> ForwardBatch:
        """Copy ``batch`` into the slots; returns a new view of it. ``batch`` is not changed.

        The view's tensors are the slots', at the sizes that the runner runs at. Whatever does not
        fit raises before the first byte is written.
        """

    @abstractmethod
    def execute(self, batch: ForwardBatch) -> Any:
        """Load ``batch`` and run it: what the model returns, for the live rows."""

    def _dummy_run(
        self,
        batch_size: int,
        buffers: ForwardBatch | None = None,
        forward_mode: ForwardMode | None = None,
    ) -> Any:
        """Run the model once on scratch rows, as autotuning and warm-up do.

        ``buffers`` is a batch of at least that size to run on, by default a new dummy one.
        """
        mode = ForwardMode.DECODE if forward_mode is None else forward_mode
        return self.execute(self._dummy_batch(mode, batch_size) if buffers is None else buffers)

    def _dummy_batch(
        self, mode: ForwardMode, batch_size: int, num_tokens: int | None = None, **options: Any
    ) -> ForwardBatch:
        served = self.served
        return dummy_batch(
            mode,
            batch_size=batch_size,
            num_tokens=batch_size * served.tokens_per_bs if num_tokens is None else num_tokens,
            seq_len=max(1, served.attn_backend.seq_len_fill_value),
            device=served.device,
            cache_loc_dtype=self.config.cache_loc_dtype,
            **options,
        )
