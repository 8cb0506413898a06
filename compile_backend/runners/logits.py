"""From hidden states to logits: the wanted rows go through ``lm_head``, in graphs of their own.

Apart from the model's graph, so that the logits of a prefill do not depend on its token count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compile_backend.declared import BatchDeclaration
from compile_backend.errors import ConfigError, FallbackReason
from compile_backend.forward_batch import ForwardBatch
from compile_backend.passes.axes import Refusal
from compile_backend.registry.buckets import pad_to
from compile_backend.registry.capacity import decode_capture_sizes
from compile_backend.registry.registry import CudaGraphBufferRegistry
from compile_backend.registry.slot import GraphSlot, PaddingPolicy
from compile_backend.runners.base import ServedModel
from compile_backend.runners.bucket_graphs import BucketGraphs, GraphKey
from compile_backend.runners.host_only import traceable_view
from compile_backend.runners.traced import TracedCallable, TracedGraph

__all__ = ["LogitsRunner", "gather_rows"]


@dataclass
class HiddenRows:
    """What the traced ``lm_head`` is given."""

    hidden_states: Tensor  # [rows, hidden]


class LogitsRunner:
    """``lm_head`` over up to as many rows as requests may run; more rows run uncaptured."""

    name = "logits"

    def __init__(
        self, served: ServedModel, lm_head: Callable[[Tensor], Tensor], roots: list[nn.Module]
    ) -> None:
        self.served = served
        self.lm_head = lm_head
        self.graphs: BucketGraphs | None = None
        self.refusal: Refusal | None = None
        self.traced: TracedCallable | None = None
        self._roots = roots
        self._graph: TracedGraph | None = None
        self._sizes = decode_capture_sizes(served.config)

    def forward(self, rows: Tensor) -> tuple[Tensor, Refusal | None]:
        """The logits [n, vocab] of ``rows`` [n, hidden], and why no graph ran where none did."""
        num_rows = rows.shape[0]
        if num_rows == 0:
            return self.lm_head(rows), None
        refusal = self._refuse(num_rows)
        if refusal is not None:
            return self.lm_head(rows), refusal
        assert self.graphs is not None
        assert self._graph is not None
        key = self._key(self._bucket(num_rows))
        raw, padded = _sizes(num_rows), _sizes(key.bs)
        self.graphs.registry.fill_tensors({"hidden_states": rows}, raw=raw, padded=padded)
        logits: Tensor = self.graphs.replay(self._graph, key, raw)
        return logits, None

    def trace(self, hidden_states: Tensor, sizes: list[tuple[int, int]]) -> None:
        """Trace ``lm_head`` for rows like ``hidden_states`` [any, hidden]."""
        served = self.served
        hidden, dtype = hidden_states.shape[-1], hidden_states.dtype
        slot = GraphSlot(
            "hidden_states",
            lambda max_bs, max_num_tokens: (max_bs, hidden),
            dtype,
            axis="bs",
            padding_policy=PaddingPolicy.ZERO,
        )
        registry = CudaGraphBufferRegistry(
            device=hidden_states.device, max_bs=served.max_bs, max_num_tokens=0
        )
        registry.register_slot(slot)
        declaration = BatchDeclaration(
            batch_type=HiddenRows, slots={slot.name: slot}, size_fields={}
        )
        config = served.config.graphbuf_config(splitting_ops=())
        self.traced = TracedCallable(
            lambda rows: self.lm_head(rows.hidden_states),
            name="lm_head",
            roots=self._roots,
            config=config,
            engine=served.engine,
            declaration_of=lambda kind: declaration if kind is HiddenRows else None,
        )
        batches = [HiddenRows(registry.view("hidden_states", {"bs": bs})) for bs, _ in sizes]
        visible = registry.slot_names
        self._graph = self.traced.trace([traceable_view(batch, visible) for batch in batches])
        self.graphs = BucketGraphs(
            registry,
            engine=served.engine,
            mode="FULL",
            config=config,
            copy_outputs=served.config.copy_outputs,
        )

    def captures(self) -> Iterator[tuple[int, Callable[[], None]]]:
        """Bucket and the call that captures it, the largest first."""
        for size in reversed(self._sizes):

            def capture(size: int = size) -> None:
                assert self.graphs is not None
                assert self._graph is not None
                self.refusal = self.graphs.capture(self._graph, self._key(size)) or self.refusal

            yield size, capture

    def reset(self) -> None:
        if self.graphs is not None:
            self.graphs.reset()

    def _refuse(self, num_rows: int) -> Refusal | None:
        if self.graphs is None or self._graph is None:
            return Refusal(FallbackReason.NOT_CAPTURED, "warmup() has not been called")
        bucket = pad_to(num_rows, self._sizes)
        if bucket is None:
            return Refusal(
                FallbackReason.ABOVE_LARGEST_BUCKET,
                f"logits of {num_rows} rows are wanted and the largest captured size is "
                f"{self._sizes[-1]}; ask for fewer, or raise max_running_requests",
            )
        if bucket != num_rows and self._graph.unpadded is not None:
            return self._graph.unpadded
        if self._key(bucket) not in self.graphs:
            return self.refusal or Refusal(
                FallbackReason.NOT_CAPTURED, f"lm_head was not captured for {bucket} rows"
            )
        return None

    def _bucket(self, num_rows: int) -> int:
        bucket = pad_to(num_rows, self._sizes)
        assert bucket is not None
        return bucket

    def _key(self, size: int) -> GraphKey:
        assert self._graph is not None
        return GraphKey(self._graph.name, size, size)


def _sizes(num_rows: int) -> dict[str, int]:
    return {"bs": num_rows, "tokens": num_rows}


def gather_rows(hidden_states: Tensor, batch: ForwardBatch) -> Tensor:
    """The rows whose logits are wanted, of ``hidden_states`` [num_tokens, hidden].

    All of them where ``return_logprob`` is set and in the modes that want each token's; otherwise
    one per request, its last. Raises ConfigError for a request without a token, whose last row
    would be somebody else's.
    """
    if not batch.forward_mode.is_extend() or batch.return_logprob:
        return hidden_states
    if not batch.forward_mode.wants_last_tokens():
        return hidden_states
    lengths = batch.extend_seq_lens_cpu
    if lengths is None:
        raise ConfigError(
            f"a {batch.forward_mode.name} batch needs extend_seq_lens_cpu, the new tokens of each "
            f"request, to find the rows of their last tokens"
        )
    if 0 in lengths:
        raise ConfigError(
            f"request {lengths.index(0)} of the batch extends by no token (extend_seq_lens_cpu = "
            f"{lengths}); leave it out of the batch"
        )
    if batch.extend_seq_lens is not None:  # on the device: no copy from the host
        return hidden_states.index_select(0, batch.extend_seq_lens.cumsum(0) - 1)
    ends = torch.tensor(lengths, device=hidden_states.device).cumsum(0)
    return hidden_states.index_select(0, ends - 1)
