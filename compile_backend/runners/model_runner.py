"""What an inference engine calls: one model, three runners, one set of slots.

Runners are built in the order eager, decode, prefill, so that the eager buffers are the ones that
all share. The model is traced and compiled once; decode captures it whole, prefill in segments.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compile_backend.attention import AttentionBackend
from compile_backend.compiled_graph import pick_engine
from compile_backend.declared import BatchDeclaration
from compile_backend.engines import engine_by_name
from compile_backend.engines.autocast import autocast_off
from compile_backend.errors import ConfigError, FallbackReason
from compile_backend.forward_batch import CaptureHiddenMode, ForwardBatch, PPProxyTensors
from compile_backend.passes.axes import Refusal
from compile_backend.registry.capacity import (
    check_capacity,
    max_bs,
    max_num_token,
)
from compile_backend.registry.mlp_sync import agreed_num_tokens
from compile_backend.registry.registry import CudaGraphBufferRegistry
from compile_backend.registry.slot import GraphSlot
from compile_backend.runner_config import RunnerConfig
from compile_backend.runners.autotune import tuned_sizes
from compile_backend.runners.base import ServedModel, captured_mode, captured_widths
from compile_backend.runners.breakable import BreakableCudaGraphRunner
from compile_backend.runners.contracts import Match
from compile_backend.runners.decode import DecodeCudaGraphRunner
from compile_backend.runners.dummy import trace_sizes
from compile_backend.runners.eager import EagerRunner, SplitPrefill
from compile_backend.runners.explain import RunnerExplanation, explain_runner
from compile_backend.runners.graph_runner import GraphRunner
from compile_backend.runners.logits import LogitsRunner, gather_rows, num_logit_rows
from compile_backend.runners.output import ForwardOutput, Path
from compile_backend.runners.prefill import PrefillCudaGraphRunner
from compile_backend.runners.state import ModuleTree, modules_of
from compile_backend.runners.traced import TracedCallable
from compile_backend.runners.warmup import WarmupFacts, take_back, warm_up
from compile_backend.step import step

__all__ = ["ModelRunner", "hidden_states_of"]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RunnerCounts:
    """What the forwards of one ModelRunner did."""

    paths: Counter[Path] = field(default_factory=Counter)
    fallbacks: Counter[FallbackReason] = field(default_factory=Counter)
    logits_fallbacks: Counter[FallbackReason] = field(default_factory=Counter)
    messages: dict[tuple[str, FallbackReason], str] = field(default_factory=dict)


class ModelRunner:
    """Runs forward batches from captured graphs where it can, eagerly on the same slots otherwise.

    ``model(forward_batch)`` returns hidden states [num_tokens, hidden], or a tuple that begins with
    them, or a dict that has them as ``"hidden_states"``; its attention layers call
    :func:`compile_backend.attention.attention`. ``lm_head`` maps hidden rows [n, hidden] to logits
    [n, vocab]; by default it is the model's attribute of that name. Attributes of the model that
    are no tensors are fixed when it is traced; a replaced module or ``train()`` has it run eagerly.
    ``pp_proxy_example`` has what the previous pipeline stage sends, with any number of rows; on the
    first stage there is none.

    May be called from several threads: fill, replay and copy-out of one forward are one unit, also
    against every other user of shared slots in the process. The exception is the engine ``trees``,
    which ``auto`` means for decode on a CUDA device: it replays on the thread that captured. A host
    with several threads takes ``engine="cuda"``.
    """

    def __init__(
        self,
        model: Callable[[ForwardBatch], Any],
        attn_backend: AttentionBackend,
        config: RunnerConfig | None = None,
        lm_head: Callable[[Tensor], Tensor] | None = None,
        *,
        pp_proxy_example: PPProxyTensors | None = None,
    ) -> None:
        self.config = config = RunnerConfig() if config is None else config
        self.counts = RunnerCounts()
        self.warmup_facts: WarmupFacts | None = None
        self._tree: ModuleTree | None = None  # once warm
        self.is_tuned = False  # by FlashInfer, in warm-up
        head = getattr(model, "lm_head", None) if lm_head is None else lm_head
        self.roots = roots = list(dict.fromkeys([*modules_of(model), *modules_of(head)]))
        tensors = [t for root in roots for t in (*root.parameters(), *root.buffers())]
        device = tensors[0].device if tensors else torch.device("cpu")
        self.trace_sizes = trace_sizes(size for t in tensors for size in t.shape)
        compile_config = config.graphbuf_config(splitting_ops=("graphbuf::attention",))
        engine = pick_engine(compile_config, device)
        uses_trees = config.engine == "auto" and device.type == "cuda"
        self.served = ServedModel(
            model=model,
            attn_backend=attn_backend,
            config=config,
            engine=engine,
            decode_engine=engine_by_name("trees") if uses_trees else engine,
            device=device,
            max_bs=max(max_bs(config), *[bs for bs, _ in self.trace_sizes]),
            max_num_token=max(max_num_token(config), *[n for _, n in self.trace_sizes]),
            tokens_per_bs=captured_widths(config)[-1],
            pp_proxy_rows={
                key: (tuple(tensor.shape[1:]), tensor.dtype)
                for key, tensor in (pp_proxy_example or PPProxyTensors()).items()
            },
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
        self.prefill = self._prefill_runner() if config.enable_prefill_graph else None
        self.logits = None if head is None else LogitsRunner(self.served, head, roots)

    @property
    def graph_runners(self) -> tuple[GraphRunner, ...]:
        """The runners with graphs, in the order in which they are captured."""
        return tuple(runner for runner in (self.decode, self.prefill) if runner is not None)

    @property
    def registries(self) -> tuple[CudaGraphBufferRegistry, ...]:
        return tuple(runner.registry for runner in (self.eager, *self.graph_runners))

    def warmup(self, *, examples: Collection[ForwardBatch] = ()) -> WarmupFacts:
        """Settle lazy state, trace and compile the model, capture every bucket.

        After it nothing compiles; called again it returns at once. ``examples`` are batches of
        kinds that the config does not tell of: with other optional fields or flags, or of a
        subclass of ForwardBatch; only which fields they have matters. They may come later too.
        Raises PassError where the model cannot be traced as one graph.
        """
        with step, torch.no_grad():
            if self.warmup_facts is None or examples:
                with autocast_off():
                    self.warmup_facts = warm_up(self, examples)
                self._tree = ModuleTree(self.roots)
            return self.warmup_facts

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """One forward pass. ``batch`` is not changed.

        Logit rows: one per request, of its last token; in modes that want every token's, and with
        ``return_logprob``, one per token. Raises SlotOverflowError for a batch above the capacity
        that the config states, SlotMismatchError and SlotNotFoundError for fields that do not fit;
        both before anything is written. Under ``strict`` raises FallbackError where no graph runs.
        """
        self._check(batch)
        with step, torch.no_grad(), self.tuned():
            found = self._choose(batch)
            if isinstance(found, Refusal):
                return self._run_eagerly(batch, found)
            if found is None:
                return self._output(batch, self.eager.execute(batch), "idle", None, None)
            runner, match = found
            has_logits = self._captured_logits(batch)
            result = runner.run(batch, match)
            path: Path = "decode" if runner is self.decode else "prefill"
            bucket = getattr(match.key, runner.unit)
            return self._output(batch, result, path, None, bucket, captured_logits=has_logits)

    def split_prefill(self, batch: ForwardBatch) -> SplitPrefill:
        """Begin a prefill whose layers run in several calls of :meth:`continue_prefill`, with other
        forwards in between. Nothing of it is captured."""
        self._check(batch)
        with step, torch.no_grad():
            return self.eager.split_prefill(batch)

    def continue_prefill(self, split: SplitPrefill, num_layers: int) -> ForwardOutput | None:
        """Run the next layers; the output with the last of them, None before."""
        with step, torch.no_grad(), self.tuned():
            if not split.run(num_layers):
                return None
            return self._output(split.batch, split.result, "eager", None, None)

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
        with step, torch.no_grad(), autocast_off(), self.tuned():
            for _, capture in self.captures():
                capture()
            take_back(self)

    def captures(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """What there is to capture, in order: a label and the call that does it."""
        for runner in self.graph_runners:
            for bucket, capture in runner.captures():
                yield f"{runner.unit}={getattr(bucket, runner.unit)}", capture
        if self.logits is not None and self.logits.graphs is not None:
            for size, capture in self.logits.captures():
                yield f"logits={size}", capture

    def tuned(self) -> AbstractContextManager[Any]:
        """The sizes that kernels were tuned at; elsewhere FlashInfer looks a size up by its own."""
        return tuned_sizes(self.config) if self.is_tuned else nullcontext()

    # -- inside ----------------------------------------------------------------------------------

    def _prefill_runner(self) -> PrefillCudaGraphRunner:
        if self.config.prefill_backend == "breakable":
            return BreakableCudaGraphRunner(self.served, self.roots)
        return PrefillCudaGraphRunner(self.served, self.traced)

    def _check(self, batch: ForwardBatch) -> None:
        """Raise for a batch that cannot be served, before anything is written."""
        check_capacity(batch, self.config)
        if self.logits is not None:
            num_logit_rows(batch)
        if self.config.enable_mlp_sync:
            agreed_num_tokens(batch)

    def _choose(self, batch: ForwardBatch) -> tuple[GraphRunner, Match] | Refusal | None:
        """The graph that runs ``batch``, why none does, or None where none is wanted."""
        if step.depth > 1:
            return Refusal(
                FallbackReason.NESTED_CALL,
                "forward() was called inside another step, whose slots are in use",
            )
        if refusal := self._refuse_state():
            return refusal
        for runner in self.graph_runners:
            runner.refresh()
        mode, decode = batch.forward_mode, self.decode
        if mode.is_idle() or batch.batch_size == 0:
            found = None if decode is None else decode.find(batch)
            if decode is not None and isinstance(found, Match):
                return decode, found
            is_wanted = self.config.enable_mlp_sync and batch.can_run_dp_cuda_graph
            # Where it is, the other ranks count on a replay.
            return found if is_wanted and isinstance(found, Refusal) else None
        for runner in self.graph_runners:
            if mode in runner.modes:
                found = runner.find(batch)
                return (runner, found) if isinstance(found, Match) else found
        disabled = {
            "enable_decode_graph": self.config.enable_decode_graph
            or mode is not captured_mode(self.config),
            "enable_prefill_graph": self.config.enable_prefill_graph
            or not mode.wants_last_tokens(),
        }
        for option, enabled in disabled.items():
            if not enabled:
                return Refusal(FallbackReason.DISABLED, f"{option} is False")
        return Refusal(
            FallbackReason.MODE_NOT_CAPTURED, f"no runner captures {mode.name} with this config"
        )

    def _refuse_state(self) -> Refusal | None:
        """Why no batch is served from a graph as things are around the call, or None."""
        if self._tree is None:
            return None
        if torch._C._is_any_autocast_enabled():
            return Refusal(
                FallbackReason.AUTOCAST,
                "autocast is on around forward(); put it inside the model, or convert the weights",
            )
        if change := self._tree.change():
            return Refusal(
                FallbackReason.MODEL_CHANGED,
                f"{change} after warm-up; make a new ModelRunner",
            )
        return None

    def _run_eagerly(self, batch: ForwardBatch, refusal: Refusal) -> ForwardOutput:
        self._count(refusal, self.counts.fallbacks, batch.forward_mode.name.lower())
        if refusal.reason is FallbackReason.NESTED_CALL:
            result = self.eager.execute_on_own_tensors(batch)
        else:
            result = self.eager.execute(batch)
        return self._output(batch, result, "eager", refusal.reason, None)

    def _captured_logits(self, batch: ForwardBatch) -> bool:
        """Whether a graph makes the logits of ``batch``; if not, it is counted why."""
        if self.logits is None:
            return False
        refusal = self.logits.refuse(num_logit_rows(batch))
        if refusal is not None:
            self._count(refusal, self.counts.logits_fallbacks, self.logits.name)
        return refusal is None

    def _count(self, refusal: Refusal, counter: Counter[FallbackReason], what: str) -> None:
        """Count a fall-back of ``what`` (a forward mode, or the logits) and log its first."""
        reason = refusal.reason
        if self.config.strict and reason is not FallbackReason.DISABLED:
            raise refusal.error(f"the runner ({what})")
        if (what, reason) not in self.counts.messages:
            self.counts.messages[what, reason] = refusal.message
            level = logging.DEBUG if reason is FallbackReason.DISABLED else logging.WARNING
            log.log(level, "graphbuf: %s: %s: %s", what, reason.name, refusal.message)
        counter[reason] += 1

    def _output(
        self,
        batch: ForwardBatch,
        result: Any,
        path: Path,
        reason: FallbackReason | None,
        bucket: int | None,
        *,
        captured_logits: bool = False,
    ) -> ForwardOutput:
        self.counts.paths[path] += 1
        logits = None
        hidden_states = hidden_states_of(result)
        if self.logits is not None and hidden_states is not None:
            logits = self.logits.forward(
                gather_rows(hidden_states, batch),
                captured=captured_logits,
                stream=batch.stream_index or 0,
            )
        self.eager.registry.after_copy_out()
        return ForwardOutput(
            logits=logits,
            hidden_states=_wanted(result, hidden_states, batch),
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


def _wanted(result: Any, hidden_states: Tensor | None, batch: ForwardBatch) -> Any:
    """Of what the model returned, what the batch asks for."""
    mode = batch.capture_hidden_mode
    if mode is CaptureHiddenMode.FULL or hidden_states is None:
        return result
    return gather_rows(hidden_states, batch) if mode is CaptureHiddenMode.LAST else None


def _by_dimension(slot: GraphSlot) -> GraphSlot:
    """The slot with its axis said per dimension: a standard slot has the shape of its buffer,
    which does not tell which dimension follows the axis."""
    if isinstance(slot.axis, tuple) or slot.axis == "none":
        return slot
    return dataclasses.replace(slot, axis=(slot.axis,))


def hidden_states_of(result: Any) -> Tensor | None:
    """The hidden states in what a model returned; None for what a pipeline stage hands on.

    Raises ConfigError for a result in which they cannot be told.
    """
    if isinstance(result, PPProxyTensors):
        return None
    found = result
    if isinstance(result, (tuple, list)) and result:
        found = result[0]
    elif isinstance(result, dict):
        found = result.get("hidden_states")
    if isinstance(found, Tensor):
        return found
    raise ConfigError(
        f"the model returned a {type(result).__name__} in which there are no hidden states; return "
        f"a tensor, a tuple that begins with it, a dict with 'hidden_states', or PPProxyTensors"
    )
