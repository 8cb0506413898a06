"""What decode and prefill have in common: find the captured bucket of a batch, fill, plan, replay.

A subclass says which sizes it captures and which bucket a batch belongs to. All the rest is one
path: :meth:`GraphRunner.find` decides, from host numbers alone and without writing anything, and
capture, look-up and replay use the key that it builds.
"""

from __future__ import annotations

import copy
import logging
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from enum import Enum
from functools import partial
from itertools import product
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from compile_backend.attention import ForwardContext, forward_context
from compile_backend.engines import NoEngine
from compile_backend.errors import FallbackReason, GraphbufError, PassError, SlotNotFoundError
from compile_backend.forward_batch import ForwardBatch, ForwardMode
from compile_backend.passes.axes import Refusal
from compile_backend.passes.classify import read_field
from compile_backend.registry.registry import CudaGraphBufferRegistry
from compile_backend.runners.base import BaseRunner, ServedModel
from compile_backend.runners.bucket_graphs import BucketGraphs, GraphKey
from compile_backend.runners.contracts import Bucket, GraphSource, GraphStore, Match, ServedGraph
from compile_backend.runners.host_only import traceable_view, variant_of
from compile_backend.runners.known_graphs import KnownGraphs

__all__ = ["GraphRunner", "Template"]

log = logging.getLogger(__name__)


Template = Callable[[int, int], ForwardBatch]  # (batch size, tokens) -> a batch of one kind


class GraphRunner(BaseRunner):
    """Serves batches by replaying captured buckets. ``traced`` may be shared between runners."""

    unit: ClassVar[Literal["bs", "tokens"]]  # what a bucket is named after

    def __init__(
        self,
        served: ServedModel,
        registry: CudaGraphBufferRegistry,
        traced: GraphSource,
        *,
        mode: Literal["FULL", "PIECEWISE"],
        modes: Sequence[ForwardMode],
    ) -> None:
        super().__init__(served, registry)
        self.traced = traced
        self.modes = tuple(modes)  # the forward modes it serves; captured in the first
        self.graphs = self._make_graphs(mode)
        self.refusals: dict[GraphKey, Refusal] = {}  # buckets that could not be captured
        self.is_warm = False
        self._examples: list[ForwardBatch] = []
        self._known = KnownGraphs()
        self._metadata: dict[GraphKey, Any] = {}
        self._addresses: list[int] = []

    def _make_graphs(self, mode: Literal["FULL", "PIECEWISE"]) -> GraphStore:
        config = self.config
        return BucketGraphs(
            self.registry,
            runner=self.name,
            engine=self.served.decode_engine if mode == "FULL" else self.served.engine,
            mode=mode,
            config=config.graphbuf_config(splitting_ops=("graphbuf::attention",)),
            copy_outputs=config.copy_outputs,
        )

    # -- what a subclass says --------------------------------------------------------------------

    @property
    @abstractmethod
    def buckets(self) -> Sequence[Bucket]:
        """Every captured size, the smallest first."""

    @abstractmethod
    def bucket_for(self, batch: ForwardBatch) -> Bucket | Refusal:
        """The bucket that a batch of a mode in ``modes`` runs in, or why there is none."""

    def bucket_of(self, graph: ServedGraph, bucket: Bucket) -> Bucket:
        """The bucket as this graph needs it."""
        return bucket

    @abstractmethod
    def attention_keys(self, bucket: Bucket) -> Sequence[tuple[int, ...]]:
        """Every key that the attention backend can ask for at this bucket."""

    @abstractmethod
    def attention_key(self, batch: ForwardBatch) -> tuple[int, ...]:
        """The key that it asks for now."""

    # -- look-up ---------------------------------------------------------------------------------

    def refuse(self, batch: ForwardBatch) -> Refusal | None:
        found = self.find(batch)
        return found if isinstance(found, Refusal) else None

    def find(self, batch: ForwardBatch) -> Match | Refusal:
        """The captured graph for ``batch``, or why there is none. Writes nothing."""
        batch = self.prepare(batch)
        if refusal := self._refuse_kind(batch):
            return refusal
        bucket = self.bucket_for(batch)
        if isinstance(bucket, Refusal):
            return bucket
        attention, stream = self.attention_key(batch), batch.stream_index or 0
        unserved = self.refusals.get(self.key(None, bucket, attention, batch.has_lora, stream))
        graph = self._graph_for(batch, bucket)
        if isinstance(graph, Refusal):
            return unserved or graph
        bucket = self.bucket_of(graph, bucket)
        key = self.key(graph, bucket, attention, batch.has_lora, stream)
        if key not in self.graphs:
            not_captured = Refusal(
                FallbackReason.NOT_CAPTURED, f"no graph is captured for {key}; call capture()"
            )
            return self.refusals.get(key) or unserved or not_captured
        if refusal := self._refuse_now(graph, batch, key):
            return refusal
        return Match(graph, key, batch.batch_size, batch.num_tokens)

    def key(
        self,
        graph: ServedGraph | None,
        bucket: Bucket,
        attention: tuple[int, ...],
        lora: bool,
        stream: int,
    ) -> GraphKey:
        """The one place where a key is built. Without a graph: what a refusal is kept under."""
        stream = stream if self.num_streams > 1 else 0
        name = "" if graph is None else graph.name
        return GraphKey(name, bucket.bs, bucket.tokens, attention, lora, stream)

    def prepare(self, batch: ForwardBatch) -> ForwardBatch:
        """The batch as the graphs run it; ``batch`` itself is not changed."""
        return batch

    @property
    def num_streams(self) -> int:
        """Streams that have graphs of their own."""
        return 1

    def _refuse_kind(self, batch: ForwardBatch) -> Refusal | None:
        """Why no graph serves a batch of this kind, whatever its size."""
        if self.served.engine.name == NoEngine.name:
            if self.config.engine == "none":
                return Refusal(FallbackReason.DISABLED, "engine is 'none'")
            return Refusal(FallbackReason.NO_ENGINE, f"no engine captures on {self.served.device}")
        if batch.forward_mode not in self.modes:
            return Refusal(
                FallbackReason.MODE_NOT_CAPTURED,
                f"{batch.forward_mode.name} is not served by the {self.name} graphs, which serve "
                f"{', '.join(mode.name for mode in self.modes)}",
            )
        captured = self.config.capture_hidden_mode
        if batch.capture_hidden_mode > captured:
            return Refusal(
                FallbackReason.HIDDEN_STATES,
                f"the batch wants {batch.capture_hidden_mode.name} hidden states and graphs were "
                f"captured for {captured.name}; raise capture_hidden_mode in the config",
            )
        if batch.has_lora and not self.config.enable_lora:
            return Refusal(
                FallbackReason.VARIANT_NOT_TRACED,
                "the batch uses adapters and graphs were captured without; set enable_lora=True",
            )
        if (batch.stream_index or 0) >= self.num_streams > 1:
            return Refusal(
                FallbackReason.STREAM_NOT_CAPTURED,
                f"stream_index is {batch.stream_index} and graphs were captured for "
                f"{self.num_streams} streams; raise num_streams",
            )
        return None

    def _graph_for(
        self, batch: ForwardBatch, bucket: Bucket, *, is_capture: bool = False
    ) -> ServedGraph | Refusal:
        """The traced graph whose guards hold for this kind of batch at this size."""
        kind = variant_of(batch)
        graph = self._known.get(kind, bucket)
        if graph is None:
            if not self.is_warm:
                return Refusal(FallbackReason.NOT_CAPTURED, "warmup() has not been called")
            # Asks Dynamo's guards, on views that nothing reads; compiles nothing.
            graph = self.traced.find(self._traceable(self._view(batch, bucket)))
            mode = None if is_capture else batch.forward_mode
            self._known.remember(kind, bucket, graph, mode)
        if not isinstance(graph, str):
            return graph
        if missing := self._missing_field(batch):
            raise SlotNotFoundError(
                f"a {batch.forward_mode.name} batch has {missing} = None, which the model reads; "
                f"set it"
            )
        if is_capture or self._known.is_served_at_some_size(kind):
            return Refusal(
                FallbackReason.GUARD_FAILED,
                f"the traced graphs do not serve {batch.forward_mode.name} at {bucket}: {graph}",
            )
        return Refusal(
            FallbackReason.VARIANT_NOT_TRACED,
            f"no traced graph serves a {batch.forward_mode.name} batch with these optional fields "
            f"and flags ({graph}); warm up with such a batch: warmup(examples=[...])",
        )

    def _missing_field(self, batch: ForwardBatch) -> str | None:
        """A field that every captured graph reads and the batch does not have."""
        captured = {key.graph for key in self.graphs.keys}
        read = [set(g.slots.values()) for g in self.traced.graphs if g.name in captured]
        for name in sorted(set.intersection(*read)) if read else ():
            if not self.registry.get_slot(name).is_computed and read_field(batch, name) is None:
                return name
        return None

    def _refuse_now(self, graph: ServedGraph, batch: ForwardBatch, key: GraphKey) -> Refusal | None:
        """Why a captured bucket does not serve a batch of these very sizes."""
        if source := graph.torn_weight():
            return Refusal(
                FallbackReason.WEIGHTS_UNTIED,
                f"{source} was shared by several modules when the model was traced and is not now; "
                f"make a new runner, or tie the weights again",
            )
        raw = {"bs": batch.batch_size, "tokens": batch.num_tokens}
        if failing := graph.failing_guard(raw):
            return Refusal(
                FallbackReason.GUARD_FAILED,
                f"the graph was traced under a guard that does not hold for this batch: {failing}",
            )
        if raw == {"bs": key.bs or raw["bs"], "tokens": key.tokens}:
            return None
        if graph.unpadded is not None:
            return graph.unpadded
        for axis, least in graph.min_rows.items():
            if raw[axis] < least:
                return Refusal(
                    FallbackReason.PADDING_UNSAFE,
                    f"the model reads row {least - 1} of {axis}, which would be a padded row at "
                    f"{raw[axis]} live rows",
                )
        return None

    # -- running ---------------------------------------------------------------------------------

    def load_batch(self, batch: ForwardBatch) -> ForwardBatch:
        match = self.find(batch)
        if isinstance(match, Refusal):
            raise match.error(f"the {self.name} runner")
        return self._load(self.prepare(batch), Bucket(match.key.bs, match.key.tokens))

    def execute(self, batch: ForwardBatch) -> Any:
        match = self.find(batch)
        if isinstance(match, Refusal):
            raise match.error(f"the {self.name} runner")
        return self.run(batch, match)

    def run(self, batch: ForwardBatch, match: Match) -> Any:
        """Fill, plan, replay, trim."""
        key, backend = match.key, self.served.attn_backend
        batch = self.prepare(batch)
        view = self._load(batch, Bucket(key.bs, key.tokens))
        metadata = backend.init_forward_metadata(view, graph_key=self._planned_key(key))
        if key in self._metadata:
            metadata = backend.upgrade_metadata(self._metadata[key], metadata)
        raw = {"bs": match.raw_bs, "tokens": match.raw_tokens}
        with forward_context(ForwardContext(backend, view, metadata)):
            return self.graphs.replay(match.graph, key, raw)

    def _load(self, batch: ForwardBatch, bucket: Bucket) -> ForwardBatch:
        self.registry.fill_from(
            batch,
            raw_bs=batch.batch_size,
            padded_bs=bucket.bs or batch.batch_size,
            raw_num_tokens=batch.num_tokens,
            padded_num_tokens=bucket.tokens,
            pp_proxy_tensors=batch.pp_proxy_tensors,
        )
        return self._view(batch, bucket)

    def _view(self, batch: ForwardBatch, bucket: Bucket) -> ForwardBatch:
        bs = bucket.bs or batch.batch_size
        if self.graphs.mode != "FULL" and batch.forward_mode.is_extend():
            # Attention runs as written, on the requests that there are.
            bs = batch.batch_size
        view = self._extract(batch, bs, bucket.tokens)
        view.capture_hidden_mode = self.config.capture_hidden_mode
        return view

    def _traceable(self, view: ForwardBatch) -> ForwardBatch:
        return traceable_view(view, {*self.registry.slot_names, "batch_size"})

    def _planned_key(self, key: GraphKey) -> tuple[int, ...] | None:
        """What attention bakes: nothing where it runs as written between the segments."""
        return key.attention if self.graphs.mode == "FULL" else None

    # -- warming up ------------------------------------------------------------------------------

    def trace(self, sizes: Sequence[tuple[int, int]], examples: Collection[ForwardBatch]) -> None:
        """Trace every kind of batch that is served: each mode, with and without optional fields."""
        self._examples += [each for each in examples if each.forward_mode in self.modes]
        self._known.forget()
        for template in self._templates():
            *alternatives, last = self._trace_sizes(sizes)
            for choice in alternatives:
                try:
                    self._trace_kind(template, choice)
                    break
                except PassError as error:
                    log.debug("%s cannot be traced at %s: %s", self.traced.name, choice, error)
            else:
                self._trace_kind(template, last)
        self.is_warm = True

    def _trace_sizes(self, sizes: Sequence[tuple[int, int]]) -> list[Sequence[tuple[int, int]]]:
        """Sizes to trace at, and what to try where the model cannot be traced at them."""
        return [sizes]

    def _trace_kind(self, template: Template, sizes: Sequence[tuple[int, int]]) -> None:
        self.traced.trace(
            [
                self._traceable(self._view(template(bs, tokens), Bucket(bs, tokens)))
                for bs, tokens in sizes
            ]
        )

    def _may_lack(self) -> dict[str, bool]:
        """What a batch of this model may have or not, by name in :func:`dummy_batch`."""
        config = self.config
        return {
            "mrope_positions": config.is_multimodal,
            "mamba_track": config.enable_mamba_track,
            "lora": config.enable_lora,
        }

    def _kinds(self) -> Iterator[tuple[ForwardMode, tuple[str, ...]]]:
        """Every mode, with and without each thing that a batch of this model may lack."""
        names = [name for name, may in self._may_lack().items() if may]
        present = [
            dict(zip(names, c, strict=True)) for c in product((False, True), repeat=len(names))
        ]
        for mode, optional in product(self.modes, present):
            yield mode, tuple(name for name, is_present in optional.items() if is_present)

    def _templates(self) -> list[Template]:
        """Every kind of batch that is captured, as what makes a batch of given sizes."""

        def of_kind(mode: ForwardMode, optional: tuple[str, ...]) -> Template:
            return lambda bs, tokens: self._dummy_batch(mode, bs, tokens, optional=optional)

        return [
            *(of_kind(mode, optional) for mode, optional in self._kinds()),
            *(partial(self._like, example) for example in self._examples),
        ]

    def _like(self, example: ForwardBatch, batch_size: int, num_tokens: int) -> ForwardBatch:
        """A dummy batch with the fields and flags of ``example``."""
        dummy = self._dummy_batch(example.forward_mode, batch_size, num_tokens)
        batch = copy.copy(example)
        for name, value in vars(example).items():
            if value is None or isinstance(value, (bool, str, Enum)):
                continue
            if (own := getattr(dummy, name, None)) is not None:
                setattr(batch, name, own)
            elif isinstance(value, Tensor) and self.registry.has_slot(name):
                sizes = {"bs": batch_size, "tokens": num_tokens}
                setattr(batch, name, torch.zeros_like(self.registry.view(name, sizes)))
        return batch

    def captures(self) -> Iterator[tuple[Bucket, Callable[[], None]]]:
        """What is to be captured, the largest bucket first: each with the call that does it."""
        templates, streams = self._templates(), range(self.num_streams)
        seen: set[GraphKey] = set()  # kinds of batches may share a graph
        for bucket in sorted(self.buckets, key=lambda b: (b.tokens, b.bs), reverse=True):
            spans = reversed(self.attention_keys(bucket))
            for attention, template, stream in product(spans, templates, streams):
                key = self._capture_key(template, bucket, attention, stream)
                if key not in seen and key not in self.graphs:
                    seen.add(key)
                    yield bucket, partial(self._capture, template, bucket, attention, stream)

    def _capture_key(
        self, template: Template, bucket: Bucket, attention: tuple[int, ...], stream: int
    ) -> GraphKey:
        batch = template(bucket.bs or 1, bucket.tokens)
        graph = self._graph_for(batch, bucket, is_capture=True)
        if isinstance(graph, Refusal):
            return self.key(None, bucket, attention, batch.has_lora, stream)
        bucket = self.bucket_of(graph, bucket)
        return self.key(graph, bucket, attention, batch.has_lora, stream)

    def _capture(
        self, template: Template, bucket: Bucket, attention: tuple[int, ...], stream: int
    ) -> None:
        """Capture one bucket, unless it is captured already."""
        backend = self.served.attn_backend
        batch = template(bucket.bs or 1, bucket.tokens)
        graph = self._graph_for(batch, bucket, is_capture=True)
        if isinstance(graph, Refusal):
            self.refusals[self.key(None, bucket, attention, batch.has_lora, stream)] = graph
            return
        bucket = self.bucket_of(graph, bucket)
        key = self.key(graph, bucket, attention, batch.has_lora, stream)
        if key in self.graphs:
            return
        try:
            view = self._load(batch, bucket)
            metadata = backend.init_forward_metadata(view, graph_key=self._planned_key(key))
        except GraphbufError as error:  # a size that no live batch can have either
            refusal: Refusal | None = Refusal(FallbackReason.CAPTURE_FAILED, str(error))
        else:
            with forward_context(ForwardContext(backend, view, metadata)):
                refusal = self.graphs.capture(graph, key)
        if refusal is not None:
            self.refusals[key] = refusal
            log.warning("graphbuf: %s not captured, %s: %s", key, refusal.reason.name,
                        refusal.message)  # fmt: skip
            return
        self.refusals.pop(key, None)
        self._metadata[key] = metadata
        self._addresses = self._external_addresses()
        self._known.note_captured(batch.forward_mode, graph)

    # -- taking it back --------------------------------------------------------------------------

    def _external_addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self.served.attn_backend.captured_tensors()]

    def refresh(self) -> None:
        """Capture again what has baked an address of the attention backend that is stale now."""
        if self.served.engine.late_binding or not len(self.graphs):
            return
        if self._external_addresses() == self._addresses:
            return
        self.reset()
        for _, capture in self.captures():
            capture()
        self.served.attn_backend.reset_scratch()
        self.graphs.num_recaptures += len(self.graphs)

    def reset(self) -> None:
        """Drop every recording; the traced graphs stay."""
        self.graphs.reset()
        self.refusals.clear()
        self._metadata.clear()
