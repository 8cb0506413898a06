"""One traced graph at run time: choose a program, fill the slots, replay or run, trim.

This is the callable that Dynamo gets back. Everything it does per call is in
:meth:`ServedGraph.run` and the methods it names; what is expensive is done once per
combination of sizes and numbers, in :class:`CallPlan`, or at capture.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from compile_backend.call_plan import CallPlan, Decider, Decision, ProgramKey
from compile_backend.config import GraphbufConfig
from compile_backend.engines import Engine
from compile_backend.errors import (
    CaptureError,
    FallbackReason,
    GraphbufError,
    PaddingError,
)
from compile_backend.output_plan import OutputPlan
from compile_backend.padding_check import check_padding, restore, saved
from compile_backend.passes.axes import Refusal
from compile_backend.passes.classify import GraphInput, InputKind
from compile_backend.passes.segment import Segmented, segment
from compile_backend.program import AddressChangedError, CapturedProgram
from compile_backend.slots import GraphSlots
from compile_backend.step import step

__all__ = ["GraphFacts", "ServedGraph"]

log = logging.getLogger(__name__)

MAX_CALL_PLANS = 4096
MAX_REFUSED_KEYS = 8  # after so many that cannot be recorded, no more are tried


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphFacts:
    """What is known about a traced graph once it is compiled. All of it is settled."""

    name: str
    inputs: tuple[GraphInput, ...]
    outer: fx.GraphModule  # exact sizes; called with the graph's own arguments
    lifted: fx.GraphModule | None  # padded sizes; slots instead of the padded arguments
    segment_cuts: tuple[frozenset[str], ...]  # what to leave out of the segments, tried in order
    slots: GraphSlots | None
    outputs: OutputPlan
    mutated: frozenset[int]  # indices of inputs that the graph writes
    aliased: frozenset[int]  # indices of inputs of which an output is a view
    written: fx.GraphModule  # the graph as it was traced, one operator after the other
    separate: tuple[tuple[int, int], ...]  # a written input and another, of two storages
    overlapping: tuple[tuple[int, int, int], ...]  # the same of one storage: bytes between them
    decider: Decider


@dataclass(slots=True)
class CallCounts:
    """What the calls of one graph did."""

    calls: int = 0
    uncaptured: int = 0
    recaptures: int = 0
    fallbacks: Counter[FallbackReason] = field(default_factory=Counter)
    messages: dict[FallbackReason, str] = field(default_factory=dict)


class ServedGraph:
    """The compiled form of one Dynamo graph; :meth:`run` takes the graph's flat arguments."""

    def __init__(self, facts: GraphFacts, config: GraphbufConfig, engine: Engine) -> None:
        self.facts = facts
        self.config = config
        self.engine = engine
        self.counts = CallCounts()
        self.programs: dict[ProgramKey, CapturedProgram] = {}
        self.capture_seconds = 0.0
        self._plans: dict[tuple[Any, ...], CallPlan] = {}
        self._given_up: dict[ProgramKey, Refusal] = {}
        self._scalars = tuple(
            (i.index, i.is_wrapped_number)
            for i in facts.inputs
            if not isinstance(i.value, Tensor) or i.is_wrapped_number
        )
        self._segmented: dict[tuple[fx.GraphModule, frozenset[str]], Segmented] = {}
        self._warm: set[ProgramKey] = set()  # keys that have run, where the engine needs that
        self._refused: Refusal | None = None  # once several keys could not be recorded
        self._moving: set[int] = set()  # tensor inputs that were seen at two addresses
        padded = facts.slots.input_indices if facts.slots is not None else frozenset()
        tensors = [i.index for i in facts.inputs if isinstance(i.value, Tensor)]
        self._exact_positions = tuple(tensors)
        self._unpadded = tuple(index for index in tensors if index not in padded)
        self._lifted_arguments = tuple(i.index for i in facts.inputs if i.index not in padded)
        self._lifted_positions = tuple(
            position
            for position, index in enumerate(self._lifted_arguments)
            if index in set(self._unpadded)
        )

    def run(self, *args: Any) -> tuple[Any, ...]:
        """One call: the outputs of the graph, as eager would return them."""
        scalars = self._read_scalars(args)
        with step:
            self.counts.calls += 1
            plan = self._plan_for(scalars)
            if refusal := self._refuse_now(args):
                plan = _without_program(plan, refusal)
            if plan.reason is not None:
                self._count_fallback(plan)
            key = plan.decision.key
            if key is not None and self._is_warm(key):
                program = self.programs.get(key)
                if program is None:
                    program = self.programs[key] = self._new_program(plan, key)
                if key.padded:
                    self._fill(plan, args)
                return self._run(plan, key, program, args)
            self.counts.uncaptured += 1
            if key is not None and key.padded:
                return self._run_uncaptured_in_bucket(plan, key, args)
        graph = self.facts.outer
        if plan.reason is FallbackReason.ALIASED_INPUTS:
            graph = self.facts.written
        results: Sequence[Any] = graph.forward(*args)
        return plan.outputs.finish(results, args, copy=False)

    def _is_warm(self, key: ProgramKey) -> bool:
        """Whether ``key`` may be captured or replayed; the first call at it runs uncaptured, at the
        sizes of the key, where the engine needs that, and is counted as such."""
        if not self.engine.needs_warmup or key in self._warm:
            return True
        self._warm.add(key)
        return False

    def _run_uncaptured_in_bucket(
        self, plan: CallPlan, key: ProgramKey, args: Sequence[Any]
    ) -> tuple[Any, ...]:
        graph, slots = self.facts.lifted, self.facts.slots
        assert graph is not None
        assert slots is not None
        self._fill(plan, args)
        tensors = [args[index] for index in self._unpadded]
        results = graph.forward(*self._new_program(plan, key).arguments(tensors))
        outputs = plan.outputs.finish(results, args, copy=self.config.copy_outputs)
        slots.after_copy_out()
        return outputs

    def _refuse_now(self, args: Sequence[Any]) -> Refusal | None:
        """Why this very call is not replayed, whatever its sizes."""
        if step.depth > 1:
            return Refusal(
                FallbackReason.NESTED_CALL,
                "an operator of a running step called a compiled function; call it between steps",
            )
        if self._refused is not None:
            return self._refused
        for written, other, distance in self.facts.overlapping:
            if args[written].data_ptr() - args[other].data_ptr() != distance:
                return Refusal(
                    FallbackReason.ALIASED_INPUTS,
                    f"{self.facts.inputs[written].source} is written and lies at another distance "
                    f"from {self.facts.inputs[other].source} than when it was traced; pass copies",
                )
        for written, other in self.facts.separate:
            if _shares_memory(args[written], args[other]):
                return Refusal(
                    FallbackReason.ALIASED_INPUTS,
                    f"{self.facts.inputs[written].source} is written and shares memory with "
                    f"{self.facts.inputs[other].source}, which it did not when it was traced; "
                    "pass a copy",
                )
        return None

    def _read_scalars(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The numbers of a call: sizes, numbers, and floats that Dynamo passes as 0-d tensors."""
        return tuple(
            [
                _distinct(args[index].item()) if wrapped else args[index]
                for index, wrapped in self._scalars
            ]
        )

    # -- planning --------------------------------------------------------------------------------

    def _plan_for(self, scalars: tuple[Any, ...]) -> CallPlan:
        plan = self._plans.get(scalars)
        if plan is None:
            if len(self._plans) >= MAX_CALL_PLANS:
                self._plans.clear()
            plan = self._plans[scalars] = self._make_plan(scalars)
        return plan

    def _make_plan(self, scalars: tuple[Any, ...]) -> CallPlan:
        decider = self.facts.decider
        decision = decider.decide(scalars, self.programs)
        given_up = None if decision.key is None else self._given_up.get(decision.key)
        if given_up is not None:
            decision = Decision(key=None, raw=decision.raw, padded=decision.raw, refusal=given_up)
        by_index: dict[int, Any] = {
            index: value
            for (index, wrapped), value in zip(self._scalars, scalars, strict=True)
            if not wrapped
        }
        if decision.key is not None and decision.key.padded:
            for axis in decider.axes:
                by_index.update(dict.fromkeys(axis.size_inputs, decision.padded[axis.name]))
            order: Sequence[int] = self._lifted_arguments
        else:
            order = [graph_input.index for graph_input in self.facts.inputs]
        return CallPlan(
            decision=decision,
            outputs=self.facts.outputs.bind(decider.symbols(scalars)),
            template=tuple(by_index.get(index) for index in order),
        )

    def _count_fallback(self, plan: CallPlan) -> None:
        refusal = plan.decision.refusal
        assert refusal is not None
        if self.config.strict:
            raise refusal.error(f"graph {self.facts.name}")
        if refusal.reason not in self.counts.messages:
            self.counts.messages[refusal.reason] = refusal.message
            level = logging.DEBUG if refusal.reason is FallbackReason.DISABLED else logging.WARNING
            log.log(level, "graphbuf: graph %s: %s: %s", self.facts.name, refusal.reason.name,
                    refusal.message)  # fmt: skip
        self.counts.fallbacks[refusal.reason] += 1

    # -- running ---------------------------------------------------------------------------------

    def _new_program(self, plan: CallPlan, key: ProgramKey) -> CapturedProgram:
        positions = self._lifted_positions if key.padded else self._exact_positions
        return CapturedProgram(
            engine=self.engine,
            template=plan.template,
            positions=positions,
            staged=self._staged(key),
            label=self._label(plan),
        )

    def _label(self, plan: CallPlan) -> str:
        """What messages call the program of a call."""
        sizes = ", ".join(f"{name}={size}" for name, size in plan.decision.padded.items())
        return f"graph {self.facts.name}" + (f" at {sizes}" if sizes else "")

    def _staged(self, key: ProgramKey) -> frozenset[int]:
        indices = self._unpadded if key.padded else self._exact_positions
        return frozenset(
            place for place, index in enumerate(indices) if self._is_staged(index, key)
        )

    def _is_staged(self, index: int, key: ProgramKey) -> bool:
        """Whether an input is copied to a fixed place, where the engine bakes addresses.

        Parameters, buffers and what the graph writes stay where they are. Another argument is
        taken to stay too until it is seen to move, so that a large constant one is never copied.
        """
        graph_input = self.facts.inputs[index]
        if self.engine.late_binding or index in self.facts.mutated | self.facts.aliased:
            return False
        if graph_input.kind is InputKind.WEIGHT:
            return False
        if graph_input.is_wrapped_number or index in self._moving:
            return True
        slots = self.facts.slots
        return not key.padded and slots is not None and index in slots.input_indices

    def _fill(self, plan: CallPlan, args: Sequence[Any]) -> None:
        assert self.facts.slots is not None
        self.facts.slots.fill(args, raw=plan.decision.raw, padded=plan.decision.padded)

    def _run(
        self, plan: CallPlan, key: ProgramKey, program: CapturedProgram, args: Sequence[Any]
    ) -> tuple[Any, ...]:
        indices = self._unpadded if key.padded else self._exact_positions
        tensors = [args[index] for index in indices]
        if not program.is_captured:
            results = self._capture(plan, key, program, args, tensors)
        else:
            try:
                results = program.replay(tensors)
            except AddressChangedError as moved:
                results = self._recapture(plan, key, indices[moved.index], args)
            else:
                program.hits += 1
        if self.config.check_padding and key in self.programs:
            self._check_padding(plan, key, args, tensors)
        if key not in self.programs:  # capturing failed and the call ran uncaptured
            return plan.outputs.finish(results, args, copy=False)
        program = self.programs[key]
        program.num_rows += sum(plan.decision.raw.values())
        program.num_padded_rows += sum(plan.decision.padded.values())
        keeps = key.padded or not self.engine.fresh_outputs
        outputs = plan.outputs.finish(results, args, copy=keeps and self.config.copy_outputs)
        if key.padded and self.facts.slots is not None:
            self.facts.slots.after_copy_out()
        return outputs

    # -- capturing -------------------------------------------------------------------------------

    def _capture(
        self,
        plan: CallPlan,
        key: ProgramKey,
        program: CapturedProgram,
        args: Sequence[Any],
        tensors: Sequence[Tensor],
    ) -> Sequence[Any]:
        graph = self.facts.lifted if key.padded else self.facts.outer
        assert graph is not None
        started = time.perf_counter()
        state = self._saved_state(args)
        try:
            results = self._capture_in_segments(program, graph, tensors, state)
        except CaptureError as error:
            return self._give_up(plan, key, error, state, args)
        program.capture_seconds = time.perf_counter() - started
        self.capture_seconds += program.capture_seconds
        if key.padded and self.facts.slots is not None:
            self.facts.slots.mark_captured()
        log.info("captured graph %s at %s in %.3f s", self.facts.name, plan.decision.padded,
                 program.capture_seconds)  # fmt: skip
        return results

    def _check_padding(
        self,
        plan: CallPlan,
        key: ProgramKey,
        args: Sequence[Any],
        tensors: Sequence[Tensor],
    ) -> None:
        """At the first call of a bucket that leaves it a tail, once.

        Comes after the call, which must find lazy state of the model as it is at any call. On an
        engine whose outputs are overwritten this writes none of them: the runs are uncaptured.
        """
        program, graph = self.programs[key], self.facts.lifted
        if program.is_checked or not key.padded or plan.decision.raw == plan.decision.padded:
            return
        assert self.facts.slots is not None
        assert graph is not None
        arguments = program.arguments(tensors)
        try:
            check_padding(
                lambda: plan.outputs.finish(graph.forward(*arguments), args, copy=True),
                self.facts.slots,
                args,
                raw=plan.decision.raw,
                padded=plan.decision.padded,
                written=[args[index] for index in sorted(self.facts.mutated)],
                where=f"graph {self.facts.name}",
            )
        except PaddingError:
            self.programs.pop(key).reset()  # the next call captures, and is checked, again
            raise
        program.is_checked = True

    def _capture_in_segments(
        self,
        program: CapturedProgram,
        graph: fx.GraphModule,
        tensors: Sequence[Tensor],
        state: Sequence[tuple[Tensor, Tensor]],
    ) -> Sequence[Any]:
        """Record in the largest segments that the engine takes; never run twice over a write."""
        *coarser, finest = self.facts.segment_cuts
        for cuts in coarser:
            try:
                return self._capture_at(cuts, program, graph, tensors)
            except CaptureError as error:
                if not self._restorable(state):
                    raise
                log.info("graph %s: %s; capturing smaller segments", self.facts.name, error)
                restore(state)
                program.reset()
                program.refused_whole = str(error)
        return self._capture_at(finest, program, graph, tensors)

    def _capture_at(
        self,
        cuts: frozenset[str],
        program: CapturedProgram,
        graph: fx.GraphModule,
        tensors: Sequence[Tensor],
    ) -> Sequence[Any]:
        if not cuts:
            return program.capture_full(graph, tensors)
        cut = self._segmented.get((graph, cuts))
        if cut is None:
            cut = self._segmented[graph, cuts] = segment(graph, cuts)
        return program.capture_segments(cut, tensors)

    def _saved_state(self, args: Sequence[Any]) -> list[tuple[Tensor, Tensor]]:
        """Copies of what the graph writes, so that a refused capture can be taken back.

        Only where a capture may be refused halfway: an engine that binds late records any call.
        """
        if self.engine.late_binding or not self.engine.runs_while_recording:
            return []
        return saved([args[index] for index in sorted(self.facts.mutated)])

    def _restorable(self, state: Sequence[tuple[Tensor, Tensor]]) -> bool:
        nothing_ran = not self.engine.runs_while_recording
        return nothing_ran or bool(state) or not self.facts.mutated

    def _give_up(
        self,
        plan: CallPlan,
        key: ProgramKey,
        error: CaptureError,
        state: Sequence[tuple[Tensor, Tensor]],
        args: Sequence[Any],
    ) -> Sequence[Any]:
        """A graph that cannot be recorded runs as written from now on, unless it already wrote."""
        self.programs.pop(key, None)
        cause = error.__cause__
        nothing_ran = error.reason is FallbackReason.NOTHING_TO_CAPTURE
        if not nothing_ran and not self._restorable(state):
            if cause is not None and not isinstance(cause, GraphbufError):
                raise cause  # the caller's own error, as plain eager would have raised it
            raise error
        restore(state)
        results: Sequence[Any] = self.facts.outer.forward(*args)  # raises the caller's own error
        refusal = Refusal(error.reason, str(error))
        self._given_up[key] = refusal
        if len(self._given_up) >= MAX_REFUSED_KEYS:
            self._refused = refusal
        self._plans.clear()
        self.counts.uncaptured += 1
        if plan.reason is not None:
            self.counts.fallbacks[plan.reason] -= 1  # counted for this call; the later one counts
        self._count_fallback(_without_program(plan, refusal))
        return results

    def _recapture(
        self, plan: CallPlan, key: ProgramKey, moved: int, args: Sequence[Any]
    ) -> Sequence[Any]:
        """An address changed: record again, and stage an argument that is seen to move."""
        graph_input = self.facts.inputs[moved]
        may_be_staged = moved not in self.facts.mutated | self.facts.aliased
        if graph_input.kind is not InputKind.WEIGHT and may_be_staged:
            self._moving.add(moved)  # staged from now on, so it cannot come here again
        else:
            self.programs[key].num_moves += 1
        program = self.programs[key]
        program.reset()
        self.counts.recaptures += 1
        if program.num_moves > self.config.max_recaptures:
            refusal = Refusal(
                FallbackReason.ADDRESS_CHANGED,
                f"inputs such as {graph_input.source} came from new addresses {program.num_moves} "
                "times; keep it in one tensor and update it in place, or raise max_recaptures",
            )
            self._given_up[key] = refusal
            self._plans.clear()
            del self.programs[key]
            uncaptured = self._plan_for(self._read_scalars(args))
            self._count_fallback(uncaptured)
            self.counts.uncaptured += 1
            results: Sequence[Any] = self.facts.outer.forward(*args)
            return results
        indices = self._unpadded if key.padded else self._exact_positions
        program.staged = self._staged(key)
        tensors = [args[index] for index in indices]
        return self._capture(plan, key, program, args, tensors)

    # -- taking it back --------------------------------------------------------------------------

    def invalidate(self) -> None:
        """Drop every captured program; the next call of each size captures again."""
        with step.lock:
            for program in self.programs.values():
                program.reset()
            self.programs.clear()
            self._given_up.clear()
            self._refused = None
            self._plans.clear()


def _without_program(plan: CallPlan, refusal: Refusal) -> CallPlan:
    """The plan of the same call run uncaptured."""
    raw = plan.decision.raw
    return CallPlan(
        decision=Decision(key=None, raw=raw, padded=raw, refusal=refusal),
        outputs=plan.outputs,
        template=plan.template,
    )


def _shares_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and a.numel() > 0


def _distinct(number: float) -> float | str:
    """A float as part of a key: 0.0 and -0.0 are equal and NaN is not, but graphs see the bits."""
    return number if number == number and number != 0 else repr(number)
