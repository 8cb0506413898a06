"""From hidden states to logits: the wanted rows go through ``lm_head``, in graphs of their own.

Apart from the model's graph, so that the logits of a prefill do not depend on its token count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

from compile_backend.declared import BatchDeclaration
from compile_backend.errors import ConfigError, FallbackReason, SlotMismatchError
from compile_backend.forward_batch import ForwardBatch, ForwardMode
from compile_backend.passes.axes import Refusal
from compile_backend.registry.buckets import pad_to
from compile_backend.registry.capacity import decode_capture_sizes, max_bs
from compile_backend.registry.registry import CudaGraphBufferRegistry
from compile_backend.registry.slot import GraphSlot, PaddingPolicy
from compile_backend.runners.base import ServedModel, captured_widths
from compile_backend.runners.bucket_graphs import BucketGraphs, GraphKey
from compile_backend.runners.host_only import traceable_view
from compile_backend.runners.traced import TracedCallable, TracedGraph

__all__ = ["LogitsRunner", "gather_rows", "num_logit_rows"]


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
        self._sizes = _row_counts(served)

    def forward(self, rows: Tensor, *, captured: bool, stream: int = 0) -> Tensor:
        """The logits [n, vocab] of ``rows`` [n, hidden]; ``captured`` where :meth:`refuse` found
        nothing against it. Each ``stream`` has graphs of its own."""
        num_rows = rows.shape[0]
        if num_rows == 0 or not captured:
            return self.lm_head(rows)
        assert self.graphs is not None
        assert self._graph is not None
        key = self._key(self._bucket(num_rows), stream)
        raw, padded = _sizes(num_rows), _sizes(key.bs)
        self.graphs.registry.fill_tensors({"hidden_states": rows}, raw=raw, padded=padded)
        logits: Tensor = self.graphs.replay(self._graph, key, raw)
        return logits

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
            device=hidden_states.device,
            max_bs=max(served.max_bs, self._sizes[-1]),
            max_num_tokens=0,
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
        views = [traceable_view(batch, visible) for batch in batches]
        self.traced.trace(views)
        found = self.traced.find(views[0])
        if isinstance(found, str):
            self.refusal = Refusal(FallbackReason.GUARD_FAILED, found)
            return
        self._graph = found
        self.graphs = BucketGraphs(
            registry,
            runner=self.name,
            engine=served.engine,
            mode="FULL",
            config=config,
            copy_outputs=served.config.copy_outputs,
        )

    def captures(self) -> Iterator[tuple[int, Callable[[], None]]]:
        """Bucket and the call that captures it, the largest first."""
        if self._graph is None:
            return
        streams = range(self.served.config.num_streams)
        for size, stream in product(reversed(self._sizes), streams):

            def capture(size: int = size, stream: int = stream) -> None:
                assert self.graphs is not None
                assert self._graph is not None
                key = self._key(size, stream)
                if key not in self.graphs:
                    self.refusal = self.graphs.capture(self._graph, key) or self.refusal

            yield size, capture

    def reset(self) -> None:
        if self.graphs is not None:
            self.graphs.reset()

    def refuse(self, num_rows: int) -> Refusal | None:
        """Why no graph makes logits for so many rows, or None. Writes nothing."""
        if num_rows == 0:
            return None
        if self.graphs is None or self._graph is None:
            return self.refusal or Refusal(
                FallbackReason.NOT_CAPTURED, "warmup() has not been called"
            )
        bucket = pad_to(num_rows, self._sizes)
        if bucket is None:
            return Refusal(
                FallbackReason.ABOVE_LARGEST_BUCKET,
                f"logits of {num_rows} rows are wanted and the largest captured size is "
                f"{self._sizes[-1]}; {self._advice(num_rows)}",
            )
        if source := self._graph.torn_weight():
            return Refusal(
                FallbackReason.WEIGHTS_UNTIED,
                f"{source} was shared by several modules when lm_head was traced and is not now",
            )
        if failing := self._graph.failing_guard(_sizes(num_rows)):
            return Refusal(FallbackReason.GUARD_FAILED, failing)
        if bucket != num_rows and self._graph.unpadded is not None:
            return self._graph.unpadded
        if self._key(bucket, 0) not in self.graphs:
            return self.refusal or Refusal(
                FallbackReason.NOT_CAPTURED, f"lm_head was not captured for {bucket} rows"
            )
        return None

    def _advice(self, num_rows: int) -> str:
        if num_rows <= max_bs(self.served.config):
            return f"give cudagraph_capture_sizes with a size of {num_rows} or more"
        return (
            f"ask for fewer, or raise max_running_requests (and the largest of "
            f"cudagraph_capture_sizes, if given) to {num_rows}"
        )

    def _bucket(self, num_rows: int) -> int:
        bucket = pad_to(num_rows, self._sizes)
        assert bucket is not None
        return bucket

    def _key(self, size: int, stream: int) -> GraphKey:
        assert self._graph is not None
        stream = stream if stream < self.served.config.num_streams else 0
        return GraphKey(self._graph.name, size, size, stream=stream)


def _row_counts(served: ServedModel) -> tuple[int, ...]:
    """How many rows of logits graphs are captured for: one per request, and where the captured mode
    wants each token's, as many as a request brings."""
    sizes = decode_capture_sizes(served.config)
    if served.captured_mode is ForwardMode.DECODE and served.tokens_per_bs == 1:
        return sizes
    widths = (1, *captured_widths(served.config))
    return tuple(sorted({size * width for size in sizes for width in widths}))


def _sizes(num_rows: int) -> dict[str, int]:
    return {"bs": num_rows, "tokens": num_rows}


def num_logit_rows(batch: ForwardBatch) -> int:
    """How many rows :func:`gather_rows` gives. Raises ConfigError for a batch that it refuses."""
    if batch.return_logprob or not batch.forward_mode.wants_last_tokens():
        return batch.num_tokens
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
    on_device = batch.extend_seq_lens
    if len(lengths) != batch.batch_size or sum(lengths) != batch.num_tokens:
        raise SlotMismatchError(
            f"extend_seq_lens_cpu {lengths} does not say where the {batch.num_tokens} tokens of "
            f"{batch.batch_size} requests end; give the new tokens of each request"
        )
    if on_device is not None and (
        on_device.shape != (batch.batch_size,)
        or on_device.is_floating_point()
        or (on_device.device.type == "cpu" and on_device.tolist() != lengths)
    ):
        raise SlotMismatchError(
            f"extend_seq_lens (shape {list(on_device.shape)}, {on_device.dtype}) is not the same "
            f"as extend_seq_lens_cpu {lengths}; give both the new tokens of each request"
        )
    return len(lengths)


def gather_rows(hidden_states: Tensor, batch: ForwardBatch) -> Tensor:
    """The rows whose logits are wanted, of ``hidden_states`` [num_tokens, hidden].

    All of them where ``return_logprob`` is set and in the modes that want each token's; otherwise
    one per request, its last. Raises ConfigError for a request without a token, whose last row
    would be somebody else's.
    """
    num_rows = num_logit_rows(batch)
    if batch.return_logprob or not batch.forward_mode.wants_last_tokens():
        return hidden_states
    if batch.extend_seq_lens is not None:  # on the device: no copy from the host
        return hidden_states.index_select(0, batch.extend_seq_lens.cumsum(0) - 1)
    assert batch.extend_seq_lens_cpu is not None
    ends = torch.tensor(batch.extend_seq_lens_cpu, device=hidden_states.device).cumsum(0)
    assert len(ends) == num_rows
    return hidden_states.index_select(0, ends - 1)
