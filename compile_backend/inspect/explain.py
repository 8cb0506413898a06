"""``explain(compiled)``: what runs from captured graphs, what does not, and why.

Names are the ones people know from serving engines (``num_cudagraph_captured``, ...).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from compile_backend.errors import FallbackReason, GraphbufError
from compile_backend.inspect.report import GraphReport, TrainingReport, recompile_warning
from compile_backend.owners import backends_of, is_served

__all__ = ["BucketUse", "Explanation", "explain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketUse:
    """One captured program: its sizes, how often it was replayed, and what padding cost."""

    graph: str
    label: str
    hits: int
    num_rows: int  # live rows of all calls, summed over the padded axes
    num_padded_rows: int  # rows that ran
    num_segments: int
    capture_seconds: float
    pool_bytes: int
    refused_whole: str | None  # why it was captured in smaller segments than asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A snapshot of everything a compiled function has done. ``str()`` is a readable table."""

    reports: tuple[GraphReport | TrainingReport, ...]
    buckets: tuple[BucketUse, ...]
    calls: int
    uncaptured: int
    recaptures: int  # a captured address changed, so the program was recorded again
    fallbacks: dict[FallbackReason, int]
    messages: dict[FallbackReason, str]
    compile_seconds: float
    capture_seconds: float
    slot_bytes: int

    @property
    def num_graphs(self) -> int:
        """Graphs that Dynamo traced, those that need gradients included."""
        return len(self.reports)

    @property
    def num_pieces(self) -> int:
        return sum(len(r.built.pieces) for r in self.reports if isinstance(r, GraphReport))

    @property
    def num_compiled_pieces(self) -> int:
        """Pieces that were compiled: equal ones share the code of the first."""
        return sum(r.built.num_compiled for r in self.reports if isinstance(r, GraphReport))

    @property
    def num_cudagraph_captured(self) -> int:
        """Captured programs: one per bucket (or exact size) and set of numbers."""
        return len(self.buckets)

    @property
    def hits(self) -> int:
        """Calls that replayed a recording. The call that records is none."""
        return sum(bucket.hits for bucket in self.buckets)

    @property
    def padding_waste(self) -> float:
        """Padded rows that were nobody's, as a fraction of all rows that ran in buckets."""
        ran = sum(bucket.num_padded_rows for bucket in self.buckets)
        live = sum(bucket.num_rows for bucket in self.buckets)
        return (ran - live) / ran if ran else 0.0

    @property
    def pool_bytes(self) -> int:
        """Bytes that recordings keep, slots not counted."""
        return sum(bucket.pool_bytes for bucket in self.buckets)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def explain(compiled: Any) -> Explanation:
    """What has become of the calls of ``compiled`` so far.

    ``compiled`` is what ``torch.compile(..., backend="graphbuf")`` returned, or a
    backend instance. Before the first call the explanation is empty. Raises GraphbufError
    for an object that this backend does not serve.
    """
    backends = backends_of(compiled)
    if not backends and not is_served(compiled):
        raise GraphbufError(
            f"{type(compiled).__name__!r} was not compiled by this backend; pass the result of "
            'torch.compile(model, backend="graphbuf"), or a model after model.compile(...)'
        )
    reports = tuple(report for backend in backends for report in backend.reports)
    return _explain(reports)


def _explain(reports: Sequence[GraphReport | TrainingReport]) -> Explanation:
    fallbacks: Counter[FallbackReason] = Counter()
    messages: dict[FallbackReason, str] = {}
    buckets: list[BucketUse] = []
    slot_bytes: dict[int, int] = {}
    calls = uncaptured = recaptures = 0
    compile_seconds = capture_seconds = 0.0
    for report in reports:
        if isinstance(report, TrainingReport):
            fallbacks[FallbackReason.GRAD_ENABLED] += report.calls
            messages.setdefault(FallbackReason.GRAD_ENABLED, report.advice)
            calls += report.calls
            uncaptured += report.calls
            continue
        counts = report.served.counts
        calls += counts.calls
        uncaptured += counts.uncaptured
        recaptures += counts.recaptures
        fallbacks.update(counts.fallbacks)
        for reason, message in counts.messages.items():
            messages.setdefault(reason, message)
        compile_seconds += report.built.compile_seconds
        capture_seconds += report.served.capture_seconds
        buckets += _buckets_of(report)
        slots = report.served.facts.slots
        for fact in slots.facts if slots is not None else ():
            slot_bytes[fact.address] = fact.num_bytes
    return Explanation(
        reports=tuple(reports),
        buckets=tuple(buckets),
        calls=calls,
        uncaptured=uncaptured,
        recaptures=recaptures,
        fallbacks={reason: count for reason, count in fallbacks.items() if count},
        messages=messages,
        compile_seconds=compile_seconds,
        capture_seconds=capture_seconds,
        slot_bytes=sum(slot_bytes.values())
        + sum(p.staged_bytes for r in reports if isinstance(r, GraphReport)
              for p in r.served.programs.values()),
    )  # fmt: skip


def _buckets_of(report: GraphReport) -> list[BucketUse]:
    axes = [axis.name for axis in report.served.facts.decider.axes]
    uses = []
    for key, program in report.served.programs.items():
        if key.padded:
            label = ", ".join(f"{n}={s}" for n, s in zip(axes, key.sizes, strict=True))
        else:
            label = "exact " + (", ".join(map(str, key.sizes)) or "(fixed sizes)")
        if key.others:
            label += f" numbers {list(key.others)}"
        uses.append(
            BucketUse(
                graph=report.name,
                label=label,
                hits=program.hits,
                num_rows=program.num_rows,
                num_padded_rows=program.num_padded_rows,
                num_segments=program.num_segments,
                capture_seconds=program.capture_seconds,
                pool_bytes=program.pool_bytes,
                refused_whole=program.refused_whole,
            )
        )
    return uses


def _lines(e: Explanation) -> list[str]:
    lines = [
        f"graphs {e.num_graphs}  pieces {e.num_pieces} ({e.num_compiled_pieces} compiled)  "
        f"captured {e.num_cudagraph_captured}  "
        f"calls {e.calls}  hits {e.hits}  uncaptured {e.uncaptured}  "
        f"recaptures {e.recaptures}",
        f"padding waste {e.padding_waste:.1%}  compile {e.compile_seconds:.2f} s  "
        f"capture {e.capture_seconds:.2f} s  slots {e.slot_bytes} B  pool {e.pool_bytes} B",
    ]
    for report in e.reports:
        lines += _report_lines(report)
    if e.buckets:
        lines.append("captured:")
        lines += [
            f"  {b.graph}  {b.label}: {b.hits} hits, rows {b.num_rows}/{b.num_padded_rows}, "
            f"{b.num_segments} segment(s), {b.capture_seconds * 1e3:.1f} ms, {b.pool_bytes} B"
            + (f"; not in one graph: {b.refused_whole}" if b.refused_whole else "")
            for b in e.buckets
        ]
    if warning := recompile_warning(e.reports):
        lines.append(f"warning: {warning}")
    lines.append("fallbacks:" if e.fallbacks else "fallbacks: none")
    for reason, count in sorted(e.fallbacks.items(), key=lambda item: -item[1]):
        lines.append(f"  {reason.name} x{count}: {e.messages.get(reason, reason.value)}")
    return lines


def _report_lines(report: GraphReport | TrainingReport) -> list[str]:
    if isinstance(report, TrainingReport):
        return [f"graph {report.name}: needs gradients, ordinary compile, {report.calls} calls"]
    served = report.served
    padded = f"pads {', '.join(a.name for a in served.facts.decider.axes)}"
    if served.facts.slots is None:
        padded = "exact sizes"
    pieces = f"{len(report.built.pieces)} piece(s) ({report.built.num_compiled} compiled)"
    seconds = f"compiled in {report.built.compile_seconds:.2f} s"
    lines = [f"graph {report.name}: {pieces}, engine {served.engine.name}, {padded}, {seconds}"]
    if report.built.graph_break is not None:
        reason, where = report.built.graph_break
        lines.append(f"  ended by a graph break at {where}: {reason}")
    lines += [f"  break op {cut.op} ({cut.source}): {cut.why}" for cut in report.built.cuts]
    if served.facts.slots is not None:
        lines += [
            f"  slot {fact.name} {list(fact.shape)} {fact.dtype} axis {fact.axis} "
            f"{fact.policy.name} {fact.num_bytes} B ({fact.owner})"
            for fact in served.facts.slots.facts
        ]
    refusal = served.facts.decider.no_padding
    if refusal is not None:
        lines.append(f"  not padded, {refusal.reason.name}: {refusal.message}")
    return lines
