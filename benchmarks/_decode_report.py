"""What ``gpu_decode`` reports: facts per path, as JSON and as one table."""

from __future__ import annotations

import json
import platform
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks._decode_paths import (
    HAND_WRITTEN,
    HAND_WRITTEN_COMPILED,
    Workload,
    bare_name,
    runner_name,
)
from benchmarks._timing import Timing

__all__ = ["TARGET", "Changes", "PathReport", "Report", "Spread", "Steps", "new_report", "table"]

TARGET = 1.03  # of the bare replay
CHANGING = "changing"  # in place of a batch size


@dataclass(slots=True, kw_only=True)
class Spread:
    """Microseconds per step."""

    median: float
    iqr: float
    best: float
    num_samples: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        timing = Timing("", tuple(seconds), 1)
        return cls(
            median=timing.median * 1e6,
            iqr=timing.interquartile_range * 1e6,
            best=timing.best * 1e6,
            num_samples=len(seconds),
        )


@dataclass(slots=True, kw_only=True)
class Steps:
    """One path at one batch size, or with changing ones."""

    step: Spread
    host: Spread
    queued: Spread | None = None  # for fixed sizes
    launches: dict[str, float] | None = None  # per step, by kind; None where none can be seen


@dataclass(slots=True, kw_only=True)
class Changes:
    """What was made anew while the batch size changed: a number for each pass over the sequence,
    the first of which meets each size for the first time."""

    num_steps: int
    compilations: list[int]
    recordings: list[int]


@dataclass(slots=True, kw_only=True)
class PathReport:
    status: str = "ok"  # or "failed"
    error: str | None = None
    traceback: str | None = None
    setup_seconds: float | None = None
    capture_seconds: float | None = None  # part of set-up, where it can be told apart
    setup_compilations: int | None = None  # graphs that Dynamo gave to a compiler
    setup_recordings: int | None = None
    pool_bytes: int | None = None  # by which graph pools grew during set-up
    changing_pool_bytes: int | None = None  # and while sizes changed
    largest_error: float = 0.0  # of a row, relative to eager's
    fixed: dict[str, Steps] = field(default_factory=dict)
    changing: Steps | None = None
    changes: Changes | None = None


@dataclass(slots=True, kw_only=True)
class Report:
    """Everything that is written as JSON."""

    setup: dict[str, Any]
    workload: dict[str, Any]
    paths: dict[str, PathReport] = field(default_factory=dict)
    bare: dict[str, dict[str, Steps]] = field(default_factory=dict)  # by batch size and engine
    floor: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    seconds: float = 0.0
    stopped: str | None = None  # why it ended early

    @property
    def failed(self) -> list[str]:
        return [name for name, path in self.paths.items() if path.status == "failed"]

    def fail(self, name: str, error: BaseException) -> None:
        path = self.paths.setdefault(name, PathReport())
        path.status = "failed"
        path.error = f"{type(error).__name__}: {error}"
        path.traceback = "".join(traceback.format_exception(error))
        print(f"FAILED {name}:\n{path.traceback}", file=sys.stderr, flush=True)

    def compare_with_floor(self) -> None:
        """Part 3: the runners against the bare replay of their own graph, and by hand."""
        for size, bare in self.bare.items():
            for engine in self.workload["engines"]:
                ours = self.paths[runner_name(engine)].fixed.get(size)
                floor = bare.get(bare_name(engine))
                if ours is None or floor is None:
                    continue
                assert ours.queued is not None
                assert floor.queued is not None
                ratios = {
                    "step": ours.step.median / floor.step.median,
                    "queued": ours.queued.median / floor.queued.median,
                }
                by_hand = {
                    name: ours.step.median / self.paths[name].fixed[size].step.median
                    for name in (HAND_WRITTEN, HAND_WRITTEN_COMPILED)
                    if name in self.paths and size in self.paths[name].fixed
                }
                self.floor.setdefault(size, {})[engine] = {
                    "to_bare_replay": ratios,
                    "is_within_target": {kind: ratios[kind] <= TARGET for kind in ratios},
                    "to_hand_written": by_hand,
                }

    def write(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(self), indent=1, default=str) + "\n")


def new_report(workload: Workload, seconds: float) -> Report:
    device = torch.cuda.get_device_name() if workload.is_on_device else "cpu"
    try:
        import triton

        triton_version = triton.__version__
    except ModuleNotFoundError:
        triton_version = None
    return Report(
        setup={
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": device,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": triton_version,
            "python": platform.python_version(),
            "dry_run": not workload.is_on_device,
            "seconds": seconds,
        },
        workload=asdict(workload),
    )


# --- the table ------------------------------------------------------------------------------------

HEADER = (
    *("batch", "path", "step us", "IQR", "queued us", "host us", "launches", "step/bare"),
    *("queued/bare", "step/hand", "compiled", "recorded", "set-up s", "pool MiB", "error"),
)


def table(report: Report) -> str:
    """A row for each path at each batch size. ``/bare``: to the bare replay of the same graph;
    ``/hand``: to the hand-written graph of the same compiled code. Compiled and recorded: in each
    pass over the changing sizes."""
    rows = [list(HEADER)]
    sizes = [str(size) for size in report.workload["batch_sizes"]]
    for size in sizes:
        for name, path in report.paths.items():
            rows.append(_row(size, name, path, path.fixed.get(size), report))
        for name, facts in report.bare.get(size, {}).items():
            rows.append([size, name, *_times(facts)])
    for name, path in report.paths.items():
        rows.append(_row(CHANGING, name, path, path.changing, report))
    measured = [row for row in rows if len(row) > 3]  # the others end with a message
    widths = [max(len(row[at]) for row in measured if at < len(row)) for at in range(len(HEADER))]
    widths[1] = max(len(row[1]) for row in rows)
    lines = []
    for at, row in enumerate(rows):
        if at and row[0] != rows[at - 1][0]:
            lines.append("")
        padded = zip(row, widths, strict=False)
        names = [f"{cell:{width}}" for cell, width in islice(padded, 2)]
        lines.append("  ".join([*names, *(f"{cell:>{width}}" for cell, width in padded)]).rstrip())
    return "\n".join(lines)


def _row(batch: str, name: str, path: PathReport, facts: Steps | None, report: Report) -> list[str]:
    if facts is None:
        why = (path.error or "not measured").splitlines()[0]
        return [batch, name, f"{path.status.upper()}: {why}"]
    to_bare = ["", ""]
    to_hand = compiled = recorded = ""
    for engine, floor in report.floor.get(batch, {}).items():
        if name == runner_name(engine):
            to_bare = [f"{floor['to_bare_replay'][kind]:.3f}" for kind in ("step", "queued")]
    by_hand = report.paths.get(HAND_WRITTEN_COMPILED)
    reference = by_hand and (by_hand.changing if batch == CHANGING else by_hand.fixed.get(batch))
    if reference:
        to_hand = f"{facts.step.median / reference.step.median:.3f}"
    if batch == CHANGING and path.changes is not None:
        compiled = "/".join(map(str, path.changes.compilations))
        recorded = "/".join(map(str, path.changes.recordings))
    return [
        batch,
        name,
        *_times(facts),
        *to_bare,
        to_hand,
        compiled,
        recorded,
        _number(path.setup_seconds),
        _number(None if path.pool_bytes is None else path.pool_bytes / 2**20),
        f"{path.largest_error:.1e}" + (" FAILED later" if path.status == "failed" else ""),
    ]


def _times(facts: Steps) -> list[str]:
    launches = ""
    if facts.launches is not None:
        launches = _number(facts.launches["kernels"] + facts.launches["copies"])
    return [
        _number(facts.step.median),
        _number(facts.step.iqr),
        _number(facts.queued.median if facts.queued else None),
        _number(facts.host.median),
        launches,
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
