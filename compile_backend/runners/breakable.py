"""Prefill from graphs that no compiler made: segments between the functions marked ``no_graph``.

The model is recorded as written, once per token count. Attention ends a segment, as does every
function that is marked; each runs as written at every replay.

Without a trace nothing proves that padded rows stay away from live ones: **the model's owner
vouches for it**. Every bucket that a smaller batch may run in is replayed twice while warming up,
with different values in the padded rows, and is refused where a live row differs. That finds rows
that are mixed by a sum or a maximum; it finds no use of the number of rows, such as ``x.mean(0)``
with the padding masked, or ``x / x.shape[0]``.

All else is baked as the model's Python made it: branches, numbers, attributes, modules. Reading
the batch's host fields, or the ForwardContext, inside a segment is refused. A parameter or buffer
that was replaced is noticed before a replay, and its bucket captured anew on scratch rows; another
tensor that the model reaches must stay, and be written in place.

Warming up calls the model and its marked functions on scratch rows, several times for each bucket,
and takes back what they write to the model's parameters and buffers. Decode graphs are traced from
the same model, through marked functions: what Dynamo cannot trace in one is a custom operator, or
decode runs without graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compile_backend.attention import ForwardContext, forward_context
from compile_backend.engines.process_state import GeneratorStates
from compile_backend.errors import CaptureError, FallbackReason
from compile_backend.forward_batch import ForwardBatch
from compile_backend.passes.axes import Refusal
from compile_backend.runners.base import ServedModel
from compile_backend.runners.breakable_graphs import BreakableGraphs, slot_views
from compile_backend.runners.breakable_model import (
    Probe,
    RecordedGraph,
    RecordedModel,
    facts_of,
    show_batch,
)
from compile_backend.runners.bucket_graphs import GraphKey
from compile_backend.runners.contracts import Bucket, Match
from compile_backend.runners.graph_runner import Template
from compile_backend.runners.prefill import PrefillCudaGraphRunner
from compile_backend.runners.state import unchanged_state

__all__ = ["BreakableCudaGraphRunner"]

log = logging.getLogger(__name__)

# A slot whose padded rows say where to write: they keep pointing at scratch.
_KEPT_TAIL = "out_cache_loc"


class BreakableCudaGraphRunner(PrefillCudaGraphRunner):
    """One breakable recording per token count, and per kind of batch that the model tells apart.

    Takes the batches that the piecewise runner takes, for the same reasons it declines others.
    """

    traced: RecordedModel
    graphs: BreakableGraphs

    def __init__(self, served: ServedModel, roots: Sequence[nn.Module]) -> None:
        """``roots`` are the modules whose parameters and buffers the model reads."""
        self._roots = tuple(roots)
        self._written: dict[int, Tensor] = {}  # parameters and buffers that the model writes
        super().__init__(served, RecordedModel(self._probe))

    def _make_graphs(self, mode: Any) -> BreakableGraphs:
        served = self.served
        return BreakableGraphs(
            self.registry,
            engine=served.engine,
            model=served.model,
            roots=self._roots,
            copy_outputs=served.config.copy_outputs,
        )

    # -- running ---------------------------------------------------------------------------------

    def run(self, batch: ForwardBatch, match: Match) -> Any:
        if self.graphs.has_moved(match.key):
            self._capture_again(match.key)
        return super().run(batch, match)

    def _capture_again(self, key: GraphKey) -> None:
        """On scratch rows. Raises CaptureError where that fails; the bucket is refused then."""
        template = partial(self._like, self._recorded(key).template)
        self.graphs.drop(key)
        self._capture(template, Bucket(0, key.tokens), key.attention, key.stream)
        if key not in self.graphs:
            refusal = self.refusals.get(key)
            raise CaptureError(
                f"a weight was replaced, and {key} cannot be captured again: "
                f"{refusal.message if refusal else 'the model reads other fields now'}",
                refusal.reason if refusal else None,
            )
        self.served.attn_backend.reset_scratch()
        self.graphs.num_recaptures += 1

    def _recorded(self, key: GraphKey) -> RecordedGraph:
        return next(graph for graph in self.traced.graphs if graph.name == key.graph)

    # -- warming up ------------------------------------------------------------------------------

    def _trace_kind(self, template: Template, sizes: Sequence[tuple[int, int]]) -> None:
        """Run the model to see what it reads and returns, unless a graph serves this kind."""
        batches = [template(bs, tokens) for bs, tokens in sizes]
        view = self._view(batches[0], Bucket(*sizes[0]))
        if isinstance(self.traced.find(self._traceable(view)), str):
            at_buckets = [template(1, bucket.tokens) for bucket in self.buckets]
            self.traced.trace(batches, at_buckets)

    def _probe(self, batch: ForwardBatch) -> Probe:
        sizes = {"bs": batch.batch_size, "tokens": batch.num_tokens}
        view = self._load(batch, Bucket(sizes["bs"], sizes["tokens"]))
        slots = slot_views(self.registry, view, sizes)
        read: set[str] = set()
        shown = show_batch(view, slots, read)
        backend = self.served.attn_backend
        metadata = backend.init_forward_metadata(view)
        with unchanged_state(self._roots), forward_context(ForwardContext(backend, view, metadata)):
            before = [(tensor, tensor._version) for tensor in self._tensors()]
            result = self.served.model(shown)
            self._written |= {id(t): t for t, version in before if t._version != version}
        axes = {name: frozenset(self.registry.get_slot(name).layout.axes) for name in slots}
        return Probe(batch, result, facts_of(shown, read), axes)

    def _tensors(self) -> list[Tensor]:
        tensors = [t for root in self._roots for t in (*root.parameters(), *root.buffers())]
        return [tensor for tensor in tensors if not tensor.is_inference()]

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Take back what is written to tensors that the model was seen to write."""
        kept = [(tensor, tensor.clone()) for tensor in self._written.values()]
        try:
            yield
        finally:
            for tensor, value in kept:
                tensor.copy_(value)

    def _capture(
        self, template: Template, bucket: Bucket, attention: tuple[int, ...], stream: int
    ) -> None:
        known, num_facts = set(self.graphs.keys), self._num_facts()
        with self._unchanged():
            super()._capture(template, bucket, attention, stream)
            for key in set(self.graphs.keys) - known:
                if refusal := self._check_padding(template, key):
                    self.graphs.drop(key)
                    self.refusals[key] = refusal
        if self._num_facts() != num_facts:  # what was found by fewer facts is looked up again
            self._known.forget()

    def _num_facts(self) -> int:
        return sum(len(graph.facts) for graph in self.traced.graphs)

    def _check_padding(self, template: Template, key: GraphKey) -> Refusal | None:
        """Why the bucket must not be padded; None where nothing is known against it.

        Replays with ones and then with zeros in the padded rows of the smallest batch that would
        run in the bucket, and compares the live rows bit by bit. Where a repetition differs too
        (state of a marked function), nothing was learnt.
        """
        graph, num_live = self._recorded(key), self._least_tokens(key.tokens)
        if num_live == key.tokens or graph.unpadded is not None:
            return None
        batch = template(1, num_live)
        raw = {"bs": batch.batch_size, "tokens": num_live}
        try:
            ones, zeros = (self._run_with_tails(batch, graph, key, raw, tail) for tail in (1, 0))
            position = _first_difference(ones, zeros)
            if position is None:
                return None
            again = self._run_with_tails(batch, graph, key, raw, 0)
        except Exception as error:  # noqa: BLE001 - whatever a marked function may raise
            return Refusal(
                FallbackReason.CAPTURE_FAILED,
                f"a first replay, of {num_live} tokens, raised {type(error).__name__}: {error}",
            )
        if _first_difference(zeros, again) is not None:
            log.warning(
                "graphbuf: %s: replays of one batch differ, so its padding was not checked", key
            )
            return None
        return Refusal(
            FallbackReason.PADDING_UNSAFE,
            f"tensor {position} that the model returns (shape {list(zeros[position].shape)}) "
            f"changes in its live rows with the values in the padded ones ({num_live} tokens in "
            f"the bucket of {key.tokens}); compute each row from that row alone, mix rows in a "
            "function marked no_graph, or capture the sizes that arrive",
        )

    def _least_tokens(self, bucket: int) -> int:
        """The fewest tokens of a batch that runs in the bucket of that size."""
        below = max((b.tokens for b in self.buckets if b.tokens < bucket), default=0)
        return next(
            n for n in range(below + 1, bucket + 1) if bucket <= n * self.config.max_padding_waste
        )

    def _run_with_tails(
        self,
        batch: ForwardBatch,
        graph: RecordedGraph,
        key: GraphKey,
        raw: Mapping[str, int],
        value: int,
    ) -> list[Tensor]:
        """The tensors of a result with ``value`` in the padded rows, the generators put back."""
        generators = GeneratorStates()
        view = self._load(batch, Bucket(key.bs, key.tokens))
        padded = {"bs": key.bs or raw["bs"], "tokens": key.tokens}
        for name, slot in slot_views(self.registry, view, padded).items():
            if name == _KEPT_TAIL or "tokens" not in graph.slot_axes[name]:
                continue
            for dim, num_live in enumerate(self.registry.view(name, raw).shape):
                if num_live != slot.shape[dim]:
                    slot.narrow(dim, num_live, slot.shape[dim] - num_live).fill_(value)
        backend = self.served.attn_backend
        metadata = backend.init_forward_metadata(view)
        # What the model writes is taken back, so that the runs begin alike.
        with self._unchanged(), forward_context(ForwardContext(backend, view, metadata)):
            result = self.graphs.run(graph, key, raw)
            found = [t.clone() for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        generators.restore()
        return found


def _first_difference(some: Sequence[Tensor], others: Sequence[Tensor]) -> int | None:
    pairs = enumerate(zip(some, others, strict=True))
    return next((i for i, (a, b) in pairs if not torch.equal(_bits(a), _bits(b))), None)


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, in which NaN equals itself."""
    return tensor.contiguous().flatten().view(torch.uint8)
