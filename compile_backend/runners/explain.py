"""``ModelRunner.explain()``: what is captured, what fell back and why, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compile_backend.errors import FallbackReason
from compile_backend.passes.split import Cut
from compile_backend.registry.registry import SlotFact
from compile_backend.runners.bucket_graphs import BucketUse, GraphKey

if TYPE_CHECKING:
    from compile_backend.runners.model_runner import ModelRunner
    from compile_backend.runners.traced import TracedCallable
    from compile_backend.runners.warmup import WarmupFacts

__all__ = ["RunnerExplanation", "RunnerUse", "TraceFact", "explain_runner"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFact:
    """One traced graph."""

    name: str
    num_pieces: int
    num_compiled_pieces: int  # equal pieces are compiled once
    cuts: tuple[Cut, ...]
    compile_seconds: float
    not_padded: str | None  # why padded rows are not shown to stay away from live ones


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUse:
    """One runner: its buckets and what became of them."""

    name: str
    unit: str  # what a bucket is named after: "bs" or "tokens"
    engine: str
    mode: str  # FULL or PIECEWISE
    buckets: tuple[BucketUse, ...]
    refused: tuple[tuple[str, str], ...]  # bucket, and why it was not captured
    recaptures: int

    @property
    def hits(self) -> int:
        return sum(bucket.hits for bucket in self.buckets)

    @property
    def num_rows(self) -> int:
        return sum(bucket.num_rows for bucket in self.buckets)

    @property
    def num_padded_rows(self) -> int:
        return sum(bucket.num_padded_rows for bucket in self.buckets)

    @property
    def padding_waste(self) -> float:
        """Padded rows that were nobody's, as a fraction of all that ran."""
        ran = self.num_padded_rows
        return (ran - self.num_rows) / ran if ran else 0.0

    @property
    def pool_bytes(self) -> int:
        return sum(bucket.pool_bytes for bucket in self.buckets)

    @property
    def capture_seconds(self) -> float:
        return sum(bucket.capture_seconds for bucket in self.buckets)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerExplanation:
    """A snapshot of a ModelRunner. ``str()`` is a readable table."""

    traces: tuple[TraceFact, ...]
    runners: tuple[RunnerUse, ...]
    slots: Mapping[str, tuple[SlotFact, ...]]  # by registry; a shared buffer appears in several
    paths: Mapping[str, int]  # forwards by the path that ran them
    fallbacks: Mapping[FallbackReason, int]
    logits_fallbacks: Mapping[FallbackReason, int]
    messages: Mapping[tuple[str, FallbackReason], str]  # by forward mode (or "logits") and reason
    warmup: WarmupFacts | None

    @property
    def hits(self) -> int:
        """Forwards that replayed the model's graph; logits are counted in their own runner."""
        return sum(runner.hits for runner in self.runners if runner.name != "logits")

    @property
    def num_cudagraph_captured(self) -> int:
        return sum(len(runner.buckets) for runner in self.runners)

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots; a buffer that several registries share counts once."""
        facts = [fact for facts in self.slots.values() for fact in facts]
        return sum({fact.address: fact.num_bytes for fact in facts}.values())

    @property
    def pool_bytes(self) -> int:
        return sum(runner.pool_bytes for runner in self.runners)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def explain_runner(runner: ModelRunner) -> RunnerExplanation:
    """The snapshot that :meth:`ModelRunner.explain` returns."""
    counts = runner.counts
    uses = [
        RunnerUse(
            name=each.name,
            unit=each.unit,
            engine=each.graphs.engine_name,
            mode=each.graphs.mode,
            buckets=each.graphs.uses,
            refused=tuple(
                (_label(each.unit, key), f"{why.reason.name}: {why.message}")
                for key, why in each.refusals.items()
            ),
            recaptures=each.graphs.num_recaptures,
        )
        for each in runner.graph_runners
    ]
    traces = _traces(runner.traced)
    slots = {r.name: r.registry.slot_facts() for r in (runner.eager, *runner.graph_runners)}
    logits = runner.logits
    if logits is not None and logits.graphs is not None:
        refusal = logits.refusal
        uses.append(
            RunnerUse(
                name="logits",
                unit="bs",
                engine=runner.served.engine.name,
                mode="FULL",
                buckets=logits.graphs.uses,
                refused=(("", f"{refusal.reason.name}: {refusal.message}"),) if refusal else (),
                recaptures=logits.graphs.num_recaptures,
            )
        )
        assert logits.traced is not None
        traces += _traces(logits.traced)
        slots["logits"] = logits.graphs.registry.slot_facts()
    return RunnerExplanation(
        traces=tuple(traces),
        runners=tuple(uses),
        slots=slots,
        paths={str(path): count for path, count in counts.paths.items()},
        fallbacks=dict(counts.fallbacks),
        logits_fallbacks=dict(counts.logits_fallbacks),
        messages=dict(counts.messages),
        warmup=runner.warmup_facts,
    )


def _traces(traced: TracedCallable) -> list[TraceFact]:
    return [
        TraceFact(
            name=graph.name,
            num_pieces=len(graph.compiled.pieces),
            num_compiled_pieces=graph.compiled.num_compiled,
            cuts=tuple(graph.compiled.plan.cuts.values()),
            compile_seconds=graph.compiled.compile_seconds,
            not_padded=None if graph.unpadded is None else graph.unpadded.message,
        )
        for graph in traced.graphs
    ]


def _lines(e: RunnerExplanation) -> list[str]:
    paths = "  ".join(f"{path} {count}" for path, count in sorted(e.paths.items())) or "none"
    lines = [
        f"forwards: {paths}  hits {e.hits}  captured {e.num_cudagraph_captured}  "
        f"slots {e.slot_bytes} B  pool {e.pool_bytes} B"
    ]
    if e.warmup is None:
        lines.append("warmup() has not been called")
    else:
        lines.append(
            f"warm-up {e.warmup.total_seconds:.2f} s: trace and compile "
            f"{e.warmup.trace_seconds:.2f} s, capture {e.warmup.capture_seconds:.2f} s"
        )
        lines += [f"  {name} skipped: {why}" for name, why in e.warmup.skipped.items()]
    for trace in e.traces:
        lines.append(
            f"graph {trace.name}: {trace.num_pieces} piece(s) ({trace.num_compiled_pieces} "
            f"compiled), {trace.compile_seconds:.2f} s"
        )
        lines += [f"  break op {cut.op} ({cut.source}): {cut.why}" for cut in trace.cuts]
        if trace.not_padded is not None:
            lines.append(f"  not padded: {trace.not_padded}")
    for runner in e.runners:
        lines.append(
            f"{runner.name}: engine {runner.engine}, {runner.mode}, {runner.hits} hits, padding "
            f"waste {runner.padding_waste:.1%}, captured in {runner.capture_seconds:.2f} s, "
            f"pool {runner.pool_bytes} B, recaptures {runner.recaptures}"
        )
        lines += [f"  {_bucket_line(runner.unit, bucket)}" for bucket in runner.buckets]
        lines += [f"  {size} not captured, {why}" for size, why in runner.refused]
    for name, facts in e.slots.items():
        lines.append(f"slots of {name}:")
        lines += [
            f"  {fact.name} {list(fact.shape)} {fact.dtype} axis {fact.axis} {fact.policy.name} "
            f"{fact.num_bytes} B ({fact.owner})"
            for fact in facts
        ]
    lines += _fallback_lines("fallbacks", e.fallbacks, e.messages)
    if e.logits_fallbacks:
        lines += _fallback_lines("logits without a graph", e.logits_fallbacks, e.messages, "logits")
    return lines


def _label(unit: str, key: GraphKey) -> str:
    parts = [f"{unit}={getattr(key, unit)}"]
    parts += [f"attention {list(key.attention)}"] if key.attention else []
    parts += ["lora"] if key.lora else []
    parts += [f"stream {key.stream}"] if key.stream else []
    return " ".join(parts)


def _bucket_line(unit: str, bucket: BucketUse) -> str:
    whole = f"; not in one graph: {bucket.refused_whole}" if bucket.refused_whole else ""
    return (
        f"{_label(unit, bucket.key)} of {bucket.key.graph}: {bucket.hits} hits, rows "
        f"{bucket.num_rows}/{bucket.num_padded_rows}, {bucket.num_segments} segment(s), "
        f"{bucket.capture_seconds * 1e3:.1f} ms, {bucket.pool_bytes} B{whole}"
    )


def _fallback_lines(
    title: str,
    counts: Mapping[FallbackReason, int],
    messages: Mapping[tuple[str, FallbackReason], str],
    only: str | None = None,
) -> list[str]:
    if not counts:
        return [f"{title}: none"]
    lines = [f"{title}:"]
    for reason, count in sorted(counts.items(), key=lambda item: -item[1]):
        lines.append(f"  {reason.name} x{count}: {reason.value}")
        lines += [
            f"    {what}: {message}"
            for (what, why), message in messages.items()
            if why is reason and (what == "logits") == (only == "logits")
        ]
    return lines
