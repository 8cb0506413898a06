"""What does a decode step cost on a GPU, and how near is it to the bare replay of its own graph?

    python -m benchmarks.gpu_decode               # needs a CUDA device; about four minutes
    python -m benchmarks.gpu_decode --dry-run     # the same code on the CPU, tiny

A stack of Llama blocks with random weights decodes one token per request over a full KV cache: run
eagerly, by ``torch.compile``, from hand-written CUDA graphs, and by ``ModelRunner`` on both of its
CUDA engines. First at fixed batch sizes, where the bare ``graph.replay()`` of the runners' own
graphs runs as well; then with another size at every step, counting what is compiled or recorded
again. All paths take turns step by step in one process, over one cache, and their outputs must
agree with eager's. A path that fails is reported and left out; the others go on.

Times: *step* from an idle device until its work is done, by CUDA events; *queued* the same per step
when many are queued without waiting, where host work hides behind the device's; *host* what the
call itself takes. Launches are calls of the runtime outside of graphs. Set-up of later paths finds
in Inductor's cache what earlier ones compiled, and the trees engine shares a pool with
``reduce-overhead``; both show in the order of the paths.
"""

from __future__ import annotations

import argparse
import functools
import math
import operator
import random
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from benchmarks._decode_paths import (  # noqa: E402
    DRY_RUN,
    EAGER,
    Maker,
    RunnerPath,
    Step,
    Workload,
    World,
    bare_name,
    path_makers,
    runner_name,
)
from benchmarks._decode_report import (  # noqa: E402
    TARGET,
    Changes,
    PathReport,
    Report,
    Spread,
    Steps,
    new_report,
    table,
)
from benchmarks._timing import describe_setup  # noqa: E402
from compile_backend import ForwardBatch  # noqa: E402
from compile_backend.engines import HostEngine, StrictHostEngine  # noqa: E402

LEAST_ROUNDS, LEAST_CHANGES = 5, 12  # whatever the time
LAUNCHES = {
    "kernels": ("cudaLaunchKernel", "cuLaunchKernel"),
    "copies": ("cudaMemcpy", "cuMemcpy", "cudaMemset", "cuMemset"),
    "graphs": ("cudaGraphLaunch", "cuGraphLaunch"),
}


class WrongOutputError(Exception):
    """A path's hidden states are not eager's."""


class Stopwatch:
    """Seconds per call: of the device from idle until it is idle again, and of the host. Without a
    device both are the host's."""

    def __init__(self, workload: Workload) -> None:
        self._events = (
            [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            if workload.is_on_device
            else None
        )

    def __call__(self, run: Callable[[], Any], calls: int = 1) -> tuple[float, float]:
        if self._events is None:
            began = time.perf_counter()
            for _ in range(calls):
                run()
            seconds = (time.perf_counter() - began) / calls
            return seconds, seconds
        start, end = self._events
        torch.cuda.synchronize()
        start.record()
        began = time.perf_counter()
        for _ in range(calls):
            run()
        host = (time.perf_counter() - began) / calls
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / calls, host


class Anew:
    """Counts what the process compiles and records, whoever does."""

    def __init__(self) -> None:
        self.num_recordings = 0

    def read(self) -> tuple[int, int]:
        """Dynamo's compilations so far, and graphs recorded so far."""
        return torch._dynamo.utils.counters["stats"]["unique_graphs"], self.num_recordings

    def since(self, before: tuple[int, int]) -> tuple[int, int]:
        compilations, recordings = map(operator.sub, self.read(), before)
        return compilations, recordings

    @contextmanager
    def counting(self) -> Iterator[Anew]:
        places: list[tuple[Any, str]] = [
            (torch.cuda.CUDAGraph, "capture_begin"),
            (HostEngine, "capture"),
            (StrictHostEngine, "capture"),
        ]
        methods = [getattr(owner, name) for owner, name in places]
        for (owner, name), method in zip(places, methods, strict=True):
            setattr(owner, name, self._counted(method))
        try:
            yield self
        finally:
            for (owner, name), method in zip(places, methods, strict=True):
                setattr(owner, name, method)

    def _counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.num_recordings += 1
            return method(*args, **kwargs)

        return counted


class Benchmark:
    """One run. ``paths`` are those that have not failed."""

    def __init__(
        self, workload: Workload, report: Report, *, seconds: float, save: Callable[[], None]
    ) -> None:
        self.workload = workload
        self.report = report
        self.paths: dict[str, Step] = {}
        self._began = time.perf_counter()
        self._seconds = seconds
        self._save = save
        self._watch = Stopwatch(workload)
        self._anew = Anew()
        self._known_pool_bytes = 0

    @torch.no_grad()
    def run(self, makers: Mapping[str, Maker]) -> None:
        """Measure every path; the report is saved after each part."""
        with self._anew.counting():
            say("model and cache")
            world = World(self.workload)
            for name, make in makers.items():
                self._set_up(world, name, make)
            fixed = {
                size: [world.batch(size) for _ in range(4)] for size in world.workload.batch_sizes
            }
            seconds = self._left(0.45) / len(fixed)
            for size, batches in fixed.items():
                self._fixed_size(size, batches, seconds)
            self.report.compare_with_floor()
            self._changing_sizes(world, self._left(0.75))
            for size, batches in fixed.items():
                self._count_launches(size, batches[0])
            self.checkpoint()

    def checkpoint(self) -> None:
        self.report.seconds = time.perf_counter() - self._began
        self._save()

    # -- parts -----------------------------------------------------------------------------------

    def _set_up(self, world: World, name: str, make: Maker) -> None:
        say(f"set-up: {name}")
        path = self.report.paths[name] = PathReport()
        pool_bytes, anew = self._pool_bytes(), self._anew.read()
        began = time.perf_counter()

        def set_up() -> None:
            step = make(world)
            for size in self.workload.batch_sizes:
                batch = world.batch(size)
                for _ in range(3):  # run, record, replay
                    step(batch)
            self._synchronize()
            self.paths[name] = step

        self._attempt(name, set_up)
        path.setup_seconds = time.perf_counter() - began
        path.setup_compilations, path.setup_recordings = self._anew.since(anew)
        step = self.paths.get(name)
        path.capture_seconds = getattr(step, "capture_seconds", None)
        path.pool_bytes = self._pool_bytes() - pool_bytes
        if not self.workload.is_on_device:
            path.pool_bytes = getattr(step, "host_pool_bytes", 0)
        self.checkpoint()

    def _fixed_size(self, size: int, batches: Sequence[ForwardBatch], seconds: float) -> None:
        """Part 1, and the bare replays of part 3, in turns."""
        say(f"batch size {size}")
        for batch in batches:
            self._compare_outputs(batch)
        bare = {}
        for engine in self.workload.engines:
            path = self.paths.get(runner_name(engine))
            if isinstance(path, RunnerPath):
                replay = self._attempt(bare_name(engine), path.bare_replay, batches[0])
                if replay is not None:
                    bare[bare_name(engine)] = replay
        steps = self._take_turns(batches, bare, seconds=0.6 * seconds)
        queued = self._take_turns(
            batches, bare, seconds=0.4 * seconds, calls=self.workload.num_queued
        )
        for name, samples in steps.items():
            if not samples or not queued.get(name):
                continue
            facts = Steps(
                step=Spread.of([step for step, _ in samples]),
                host=Spread.of([host for _, host in samples]),
                queued=Spread.of([step for step, _ in queued[name]]),
            )
            if name in bare:
                self.report.bare.setdefault(str(size), {})[name] = facts
            else:
                self.report.paths[name].fixed[str(size)] = facts
        self.checkpoint()

    def _take_turns(
        self,
        batches: Sequence[ForwardBatch],
        bare: Mapping[str, Callable[[], Any]],
        *,
        seconds: float,
        calls: int = 1,
    ) -> dict[str, list[tuple[float, float]]]:
        """Samples of every path and bare replay: a round of all, the next from another one on."""
        samples: dict[str, list[tuple[float, float]]] = defaultdict(list)
        stop = time.perf_counter() + seconds
        for index in range(self.workload.most_rounds):
            batch = batches[index % len(batches)]
            for name in rotated([*self.paths, *bare], index):
                run = bare.get(name)
                if run is None:
                    run = functools.partial(self.paths[name], batch)
                if (sample := self._attempt(name, self._watch, run, calls)) is not None:
                    samples[name].append(sample)
            if index + 1 >= LEAST_ROUNDS and time.perf_counter() > stop:
                break
        return samples

    def _changing_sizes(self, world: World, seconds: float) -> None:
        """Part 2: another size at every step. The first pass checks outputs and the second settles
        (reduce-overhead records a size when it comes again); the others are timed."""
        say("changing batch sizes")
        began = time.perf_counter()
        sizes = changing_sizes(self.workload.num_changes, world.largest)
        batches = {size: world.batch(size) for size in set(sizes)}
        passes: dict[str, list[list[int]]] = {name: [] for name in self.paths}
        grown = dict.fromkeys(self.paths, 0)
        self._pool_bytes()
        samples: dict[str, list[tuple[float, float]]] = defaultdict(list)
        num_passes = 0
        while num_passes < 3 or (
            time.perf_counter() - began < seconds
            and (num_passes - 2) * len(sizes) < self.workload.most_rounds
        ):
            for made in passes.values():
                made.append([0, 0])
            for index, size in enumerate(sizes):
                batch, expected = batches[size], None
                if num_passes == 0:
                    expected = self._attempt(EAGER, self._kept, EAGER, batch)
                for name in rotated(list(self.paths), index):
                    before, pool_bytes = self._anew.read(), self._known_pool_bytes
                    if expected is not None:
                        self._attempt(name, self._check, name, batch, expected)
                    else:
                        run = functools.partial(self.paths[name], batch)
                        sample = self._attempt(name, self._watch, run)
                        if num_passes >= 2 and sample is not None:
                            samples[name].append(sample)
                    compiled, recorded = self._anew.since(before)
                    passes[name][-1][0] += compiled
                    passes[name][-1][1] += recorded
                    if recorded:
                        grown[name] += self._pool_bytes() - pool_bytes
                too_slow = time.perf_counter() - began > 0.4 * seconds
                if num_passes == 0 and too_slow and index + 1 >= LEAST_CHANGES:
                    sizes = sizes[: index + 1]
                    break
            num_passes += 1
        for name in self.paths:
            path = self.report.paths[name]
            path.changing = Steps(
                step=Spread.of([step for step, _ in samples[name]]),
                host=Spread.of([host for _, host in samples[name]]),
            )
            path.changes = Changes(
                num_steps=len(sizes),
                compilations=[compiled for compiled, _ in passes[name]],
                recordings=[recorded for _, recorded in passes[name]],
            )
            path.changing_pool_bytes = grown[name]
        self.checkpoint()

    def _count_launches(self, size: int, batch: ForwardBatch, num_steps: int = 4) -> None:
        """What each path launches outside of graphs. Last: a profiler slows what follows."""
        say(f"launches at batch size {size}")
        counts: dict[str, dict[str, float]] = {}
        for name in list(self.paths):
            found = self._attempt(name, self._profile, self.paths[name], batch, num_steps)
            if found is not None:
                counts[name] = found
        if not any(sum(found.values()) for found in counts.values()):
            return  # a CPU, or a profiler that may not see the device
        for name, found in counts.items():
            if str(size) in self.report.paths[name].fixed:
                self.report.paths[name].fixed[str(size)].launches = found

    def _profile(self, step: Step, batch: ForwardBatch, num_steps: int) -> dict[str, float]:
        activities = [ProfilerActivity.CPU]
        if self.workload.is_on_device:
            activities.append(ProfilerActivity.CUDA)
        step(batch)
        self._synchronize()
        with profile(activities=activities, acc_events=True) as recorded:
            for _ in range(num_steps):
                step(batch)
            self._synchronize()
        names = [event.name() for event in recorded.profiler.kineto_results.events()]
        return {
            kind: sum(name.startswith(prefixes) for name in names) / num_steps
            for kind, prefixes in LAUNCHES.items()
        }

    # -- outputs ---------------------------------------------------------------------------------

    def _kept(self, name: str, batch: ForwardBatch) -> Tensor:
        return self.paths[name](batch).clone()

    def _compare_outputs(self, batch: ForwardBatch) -> None:
        expected = self._attempt(EAGER, self._kept, EAGER, batch)
        if expected is None:
            return
        for name in list(self.paths):
            self._attempt(name, self._check, name, batch, expected)

    def _check(self, name: str, batch: ForwardBatch, expected: Tensor) -> None:
        got = self._kept(name, batch)
        if got.shape != expected.shape or got.dtype is not expected.dtype:
            raise WrongOutputError(
                f"batch of {batch.batch_size}: {list(got.shape)} {got.dtype}, eager gives "
                f"{list(expected.shape)} {expected.dtype}"
            )
        difference = (got.float() - expected.float()).norm(dim=1)
        error = float((difference / expected.float().norm(dim=1)).max())
        if math.isnan(error) or error > self.workload.tolerance:
            raise WrongOutputError(
                f"batch of {batch.batch_size}: a row is off by {error:.3g} of its norm from "
                f"eager's; {self.workload.tolerance} is allowed"
            )
        path = self.report.paths[name]
        path.largest_error = max(path.largest_error, error)

    # -- inside ----------------------------------------------------------------------------------

    def _attempt(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        """What ``call`` returns; None where it raises, which takes the path out."""
        if name in self.report.failed:
            return None
        try:
            return call(*args)
        except Exception as error:  # noqa: BLE001 - whatever a path raises is its result
            self.report.fail(name, error)
            self.paths.pop(name, None)
            return None

    def _left(self, share: float) -> float:
        """Seconds for a part that may take this share of what is left; few when nothing is."""
        left = self._seconds - (time.perf_counter() - self._began)
        return max(1.0, share * left)

    def _synchronize(self) -> None:
        if self.workload.is_on_device:
            torch.cuda.synchronize()

    def _pool_bytes(self) -> int:
        """Bytes of every memory pool that is a graph's, whoever made it."""
        if self.workload.is_on_device:
            snapshot = torch.cuda.memory_snapshot(include_traces=False)
            self._known_pool_bytes = sum(
                each["total_size"] for each in snapshot if tuple(each["segment_pool_id"]) != (0, 0)
            )
        return self._known_pool_bytes


def changing_sizes(num_steps: int, largest: int, seed: int = 0) -> list[int]:
    """Batch sizes from 1 to ``largest``, no two in a row equal; the extremes are among them."""
    generator = random.Random(seed)
    sizes = [largest, 1]
    while len(sizes) < num_steps:
        size = generator.randint(1, largest)
        if size != sizes[-1]:
            sizes.append(size)
    return sizes


def rotated(names: list[str], by: int) -> list[str]:
    first = by % len(names) if names else 0
    return names[first:] + names[:first]


def say(what: str) -> None:
    print(f"... {what}", file=sys.stderr, flush=True)


# --- the command ----------------------------------------------------------------------------------


class StoppedError(BaseException):
    """Somebody asked the process to end: no path's error."""


def measure(
    workload: Workload,
    *,
    seconds: float,
    file: Path,
    makers: Mapping[str, Maker] | None = None,
) -> Report:
    """Run the benchmark and write its JSON to ``file``, also where it is stopped half-way."""
    report = new_report(workload, seconds)
    benchmark = Benchmark(
        workload, report, seconds=seconds, save=functools.partial(report.write, file)
    )
    try:
        benchmark.run(path_makers(workload) if makers is None else makers)
    except (StoppedError, KeyboardInterrupt) as stop:
        report.stopped = str(stop) or "interrupted"
        benchmark.checkpoint()
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, help="time budget (default 240; dry run 10)")
    parser.add_argument("--out", type=Path, help="directory of the JSON (benchmarks/results)")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, tiny")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --dry-run runs the same code on the CPU")
    workload = DRY_RUN if options.dry_run else Workload()
    out = options.out
    if out is None:
        out = Path(tempfile.mkdtemp()) if options.dry_run else ROOT / "benchmarks" / "results"
    if options.dry_run:
        torch.set_num_threads(1)

    def stop(number: int, _: object) -> None:
        raise StoppedError(f"stopped by {signal.Signals(number).name}")

    signal.signal(signal.SIGTERM, stop)
    file = out / f"gpu_decode-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    report = measure(
        workload, seconds=options.seconds or (10.0 if options.dry_run else 240.0), file=file
    )
    print(describe_setup())
    print(table(report))
    for size, engines in report.floor.items():
        for engine, floor in engines.items():
            reached = floor["is_within_target"]
            within = ", ".join(f"{kind} {'yes' if reached[kind] else 'NO'}" for kind in reached)
            print(f"batch {size}, engine {engine}: within {TARGET} x the bare replay: {within}")
    for name in report.failed:
        print(f"FAILED {name}: {report.paths[name].error}")
    if report.stopped:
        print(f"INCOMPLETE: {report.stopped}")
    print(f"{report.seconds:.0f} s; {file}")
    return 1 if report.failed or report.stopped else 0


if __name__ == "__main__":
    sys.exit(main())
