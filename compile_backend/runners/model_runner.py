"""What an inference engine calls: one model, three runners, one set of slots.

Runners are built in the order eager, decode, prefill, so that the eager buffers are the ones that
all share. The model is traced and compiled once; decode captures it whole, prefill in segments.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from compile_backend.attention import AttentionBackend
from compile_backend.compiled_graph import pick_engine
from compile_backend.declared import BatchDeclaration
from compile_backend.errors import FallbackReason
from compile_backend.forward_batch import ForwardBatch
from compile_backend.passes.axes import Refusal
from compile_backend.registry.capacity import (
    check_capacity,
    max_bs,
    max_num_token,
    num_tokens_per_bs,
)
from compile_backend.registry.registry import CudaGraphBufferRegistry
from compile_backend.registry.slot import GraphSlot
from compile_backend.runner_config import RunnerConfig
from compile_backend.runners.base import ServedModel
from compile_backend.runners.decode import DecodeCudaGraphRunner
from compile_backend.runners.dummy import trace_sizes
from compile_backend.runners.eager import EagerRunner
from compile_backend.runners.explain import RunnerExplanation, explain_runner
from compile_backend.runners.graph_runner import GraphRunner, Match
from compile_backend.runners.logits import LogitsRunner, gather_rows
from compile_backend.runners.output import ForwardOutput, Path
from compile_backend.runners.prefill import PrefillCudaGraphRunner
from compile_backend.runners.traced import TracedCallable
from compile_backend.runners.warmup import WarmupFacts, warm_up
from compile_backend.step import step

__all__ = ["ModelRunner", "hidden_states_of"]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RunnerCounts:
    """What the forwards of one ModelRunner did."""

    paths: Counter[Path] = field(default_factory=Counter)
    fallbacks: Counter[FallbackReason] = field(default_factory=Counter)
    logits_fallbacks: Counter[FallbackReason] = field(default_factory=Counter)
    messages: dict[FallbackReason, str] = field(default_factory=dict)


class ModelRunner:
    """Runs forward batches from captured graphs where it can, eagerly on the same slots otherwise.

    ``model(forward_batch)`` returns hidden states [num_tokens, hidden] (or a tuple or dict that
    begins with them, or has them as ``"hidden_states"``); its attention layers call
    :func:`compile_backend.attention.attention`. ``lm_head`` maps hidden rows [n, hidden] to logits
    [n, vocab]; by default it is the model's attribute of that name. Attributes of the model that
    are no tensors are fixed when it is traced.

    May be called from several threads: fill, replay and copy-out of one forward are one unit, also
    against every other user of shared slots in the process.
    """

    def __init__(
        self,
        model: Callable[[ForwardBatch], Any],
        attn_backend: AttentionBackend,
        config: RunnerConfig | None = None,
        lm_head: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.config = config = RunnerConfig() if config is None else config
        self.counts = RunnerCounts()
        self.warmup_facts: WarmupFacts | None = None
        head = getattr(model, "lm_head", None) if lm_head is None else lm_head
        owners = [model, head, getattr(head, "__self__", None)]
        roots = list(dict.fromkeys(owner for owner in owners if isinstance(owner, nn.Module)))
        tensors = [t for root in roots for t in (*root.parameters(), *root.buffers())]
        device = tensors[0].device if tensors else torch.device("cpu")
        self.trace_sizes = trace_sizes(size for t in tensors for size in t.shape)
        compile_config = config.graphbuf_config(splitting_ops=("graphbuf::attention",))
        self.served = ServedModel(
            model=model,
            attn_backend=attn_backend,
            config=config,
            engine=pick_engine(compile_config, device),
            device=device,
            max_bs=max(max_bs(config), *[bs for bs, _ in self.trace_sizes]),
            max_num_token=max(max_num_token(config), *[n for _, n in self.trace_sizes]),
            tokens_per_bs=num_tokens_per_bs(config),
        )
        self.eager = EagerRunner(self.served)
        self.traced = TracedCallable(
            model,
            name="model",
            roots=roots,
            config=compile_config,
            engine=self.served.engine,
            declaration_of=self._declaration_of,
        )
        self.decode = (
            DecodeCudaGraphRunner(self.served, self.traced) if config.enable_decode_graph else None
        )
        self.prefill = (
            PrefillCudaGraphRunner(self.served, self.traced)
            if config.enable_prefill_graph
            else None
        )
        self.logits = None if head is None else LogitsRunner(self.served, head, roots)

    @property
    def graph_runners(self) -> tuple[GraphRunner, ...]:
        """The runners with graphs, in the order in which they are captured."""
        return tuple(runner for runner in (self.decode, self.prefill) if runner is not None)

    @property
    def registries(self) -> tuple[CudaGraphBufferRegistry, ...]:
        return tuple(runner.registry for runner in (self.eager, *self.graph_runners))

    def warmup(self, *, examples: Collection[ForwardBatch] = ()) -> WarmupFacts:
        """Settle lazy state, trace and compile the model, capture every bucket. Once; then returns.

        After it nothing compiles. ``examples`` are batches of kinds that the config does not tell
        of: with other optional fields or flags that the model branches on; only which fields they
        have matters. Raises PassError where the model cannot be traced as one graph.
        """
        if self.warmup_facts is None:
            with step, torch.no_grad():
                self.warmup_facts = warm_up(self, examples)
        return self.warmup_facts

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """One forward pass. ``batch`` is not changed.

        Logit rows: one per request, of its last token; in modes that want every token's, and with
        ``return_logprob``, one per token. Raises SlotOverflowError for a batch above the capacity
        that the config states, SlotMismatchError and SlotNotFoundError for fields that do not fit;
        both before anything is written. Under ``strict`` raises FallbackError where no graph runs.
        """
        check_capacity(batch, self.config)
        with step, torch.no_grad():
            found = self._choose(batch)
            if isinstance(found, Refusal):
                return self._run_eagerly(batch, found)
            if found is None:
                return self._output(batch, self.eager.execute(batch), "idle", None, None)
            runner, match = found
            result = runner.run(batch, match)
            path: Path = "decode" if runner is self.decode else "prefill"
            return self._output(batch, result, path, None, getattr(match.key, runner.unit))

    def explain(self) -> RunnerExplanation:
        """What is captured, what fell back and why, how many bytes. Print it, or read it."""
        return explain_runner(self)

    def invalidate(self) -> None:
        """Drop every captured graph. Forwards run eagerly until :meth:`capture`."""
        with step:
            for runner in self.graph_runners:
                runner.reset()
            if self.logits is not None:
                self.logits.reset()

    def capture(self) -> None:
        """Capture every bucket again, after :meth:`invalidate`. Compiles nothing."""
        with step, torch.no_grad():
            for _, capture in self.captures():
                capture()

    def captures(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """What there is to capture, in order: a label and the call that does it."""
        for runner in self.graph_runners:
            for bucket, capture in runner.captures():
                yield f"{runner.unit}={getattr(bucket, runner.unit)}", capture
        if self.logits is not None and self.logits.graphs is not None:
            for size, capture in self.logits.captures():
                yield f"logits={size}", capture

    # -- inside ----------------------------------------------------------------------------------

    def _choose(self, batch: ForwardBatch) -> tuple[GraphRunner, Match] | Refusal | None:
        """The graph that runs ``batch``, why none does, or None where none is wanted."""
        if step.depth > 1:
            return Refusal(
                FallbackReason.NESTED_CALL,
                "forward() was called inside another step, whose slots are in use",
            )
        mode = batch.forward_mode
        if mode.is_idle() or batch.batch_size == 0:
            return None
        refusal: Refusal | None = None
        for runner, enabled, option in (
            (self.decode, self.config.enable_decode_graph, "enable_decode_graph"),
            (self.prefill, self.config.enable_prefill_graph, "enable_prefill_graph"),
        ):
            if mode.is_decode() != (option == "enable_decode_graph"):
                continue
            if runner is None:
                return Refusal(FallbackReason.DISABLED, f"{option} is {enabled}")
            found = runner.find(batch)
            if isinstance(found, Match):
                return runner, found
            refusal = found
        assert refusal is not None
        return refusal

    def _run_eagerly(self, batch: ForwardBatch, refusal: Refusal) -> ForwardOutput:
        self._count(refusal, self.counts.fallbacks)
        if refusal.reason is FallbackReason.NESTED_CALL:
            result = self.eager.execute_on_own_tensors(batch)
        else:
            result = self.eager.execute(batch)
        return self._output(batch, result, "eager", refusal.reason, None)

    def _count(self, refusal: Refusal, counter: Counter[FallbackReason]) -> None:
        reason = refusal.reason
        if self.config.strict and reason is not FallbackReason.DISABLED:
            raise refusal.error("the runner")
        if reason not in self.counts.messages:
            self.counts.messages[reason] = refusal.message
            level = logging.DEBUG if reason is FallbackReason.DISABLED else logging.WARNING
            log.log(level, "graphbuf: runner: %s: %s", reason.name, refusal.message)
        counter[reason] += 1

    def _output(
        self,
        batch: ForwardBatch,
        result: Any,
        path: Path,
        reason: FallbackReason | None,
        bucket: int | None,
    ) -> ForwardOutput:
        self.counts.paths[path] += 1
        logits = None
        hidden_states = hidden_states_of(result)
        if self.logits is not None and hidden_states is not None:
            rows = gather_rows(hidden_states, batch)
            if path == "decode" or path == "prefill":
                logits, refusal = self.logits.forward(rows)
                if refusal is not None:
                    self._count(refusal, self.counts.logits_fallbacks)
            else:
                logits = self.logits.lm_head(rows)
        return ForwardOutput(
            logits=logits,
            hidden_states=result,
            path=path,
            reason=reason,
            bucket=bucket,
            batch_size=batch.batch_size,
            num_tokens=batch.num_tokens,
        )

    def _declaration_of(self, kind: type) -> BatchDeclaration | None:
        """The slots of the batch type, of all runners together: one trace serves them all."""
        if not issubclass(kind, ForwardBatch):
            return None
        slots: dict[str, GraphSlot] = {}
        for registry in self.registries:
            for name in registry.slot_names:
                slots.setdefault(name, _by_dimension(registry.get_slot(name)))
        return BatchDeclaration(batch_type=kind, slots=slots, size_fields={"batch_size": "bs"})


def _by_dimension(slot: GraphSlot) -> GraphSlot:
    """The slot with its axis said per dimension: a standard slot has the shape of its buffer,
    which does not tell which dimension follows the axis."""
    if isinstance(slot.axis, tuple) or slot.axis == "none":
        return slot
    return dataclasses.replace(slot, axis=(slot.axis,))


def hidden_states_of(result: Any) -> Tensor | None:
    """The hidden states in what a model returned; None where it returns something else."""
    if isinstance(result, (tuple, list)) and result:
        result = result[0]
    elif isinstance(result, dict):
        result = result.get("hidden_states")
    return result if isinstance(result, Tensor) else None
