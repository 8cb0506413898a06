"""Does graphbuf serve a batch that changes every step faster than eager and torch.compile?

    python benchmarks/decode_traffic.py            # some minutes; --quick for a smoke run

The model is the example's small Llama. A seeded trace of requests is served several times, and at
every step the same batch goes through eager, ``torch.compile(dynamic=True)``, the string backend, a
hand-written graph runner of the kind that small engines carry, and ``ModelRunner``, in an order
that rotates, so that all meet the same noise and the same caches. Eager chooses the tokens; the
logits of the others must agree with its own. Every path has served the whole trace once before
anything is timed, so compiling and capturing are reported apart. One process per thread count,
because thread pools are sized once.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from compile_backend import (  # noqa: E402
    ForwardBatch,
    ForwardMode,
    ModelRunner,
    RunnerConfig,
    explain,
)
from compile_backend.attention import KVCache, RequestTable, TorchNativeBackend  # noqa: E402
from compile_backend.engines import HostEngine, Replay  # noqa: E402
from examples.llama.batch import LlamaBatch  # noqa: E402
from examples.llama.demo import MAX_TOKENS, OPTIONS  # noqa: E402
from examples.llama.generate import Forward, Generation, generate  # noqa: E402
from examples.llama.model import Llama, ServedLlama, load_model  # noqa: E402
from examples.llama.traffic import SlowReaders, seeded_requests  # noqa: E402

EAGER, DYNAMIC, GRAPHBUF = "eager", "torch.compile(dynamic=True)", 'backend="graphbuf"'
HAND_WRITTEN, RUNNER = "hand-written runner", "`ModelRunner`"
SIZES: list[int] = OPTIONS["cudagraph_capture_sizes"]
LOGIT_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What is served, and how often it is timed."""

    num_requests: int
    new_tokens: tuple[int, int]
    gap: tuple[int, int]
    rounds: int
    seed: int


FULL = Trace(num_requests=48, new_tokens=(24, 72), gap=(0, 5), rounds=7, seed=0)
QUICK = Trace(num_requests=8, new_tokens=(6, 12), gap=(0, 3), rounds=2, seed=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PathResult:
    """One path over the whole trace: the seconds in ``forward``, summed over steps, per round."""

    name: str
    round_seconds: list[float]
    setup_seconds: float  # before the first step, and what the first round took longer
    largest_logit_error: float


class EveryPath:
    """A forward that sends each batch through all paths, times each, and returns eager's logits.

    All paths write the same KV slots with the same values, up to rounding, so none disturbs the
    next one's step.
    """

    def __init__(self, paths: dict[str, Forward]) -> None:
        self._paths = paths
        self._num_calls = 0
        self.seconds = dict.fromkeys(paths, 0.0)
        self.logit_error = dict.fromkeys(paths, 0.0)

    def __call__(self, batch: LlamaBatch) -> Tensor:
        names = list(self._paths)
        first = self._num_calls % len(names)
        self._num_calls += 1
        logits: dict[str, Tensor] = {}
        for name in names[first:] + names[:first]:
            path = self._paths[name]
            if isinstance(path, RunnerPath):
                path.follow_scheduler()
            began = time.perf_counter()
            logits[name] = path(batch)
            self.seconds[name] += time.perf_counter() - began
        for name in names:
            error = float((logits[name] - logits[EAGER]).abs().max())
            error = math.inf if math.isnan(error) else error
            self.logit_error[name] = max(self.logit_error[name], error)
        return logits[EAGER]


class HandWrittenPath:
    """Static tensors, a recording of the model per bucket, ``[:n]`` copies, tails reset by hand."""

    def __init__(self, model: Llama) -> None:
        self._model = model
        largest = SIZES[-1]
        self._tails = {"positions": 0, "out_cache_loc": 0, "req_pool_indices": 0, "seq_lens": 1}
        self._buffers = {
            name: torch.full((largest,), self._tails.get(name, 0))
            for name in ("input_ids", *self._tails)
        }
        self._graphs = {size: self._capture(size) for size in reversed(SIZES)}

    def __call__(self, batch: LlamaBatch) -> Tensor:
        n = len(batch.input_ids)
        size = next(size for size in SIZES if size >= n)
        for name, buffer in self._buffers.items():
            buffer[:n] = getattr(batch, name)
            if name in self._tails:
                buffer[n:size] = self._tails[name]
        (logits,) = self._graphs[size]()
        return logits[:n]

    def _capture(self, size: int) -> Replay:
        batch = LlamaBatch(**{name: buffer[:size] for name, buffer in self._buffers.items()})
        return HostEngine().capture(
            lambda *_: [self._model(batch)], static_inputs=list(vars(batch).values())
        )


class RunnerPath:
    """``ModelRunner``, with a cache of its own. Each token row is a request that decodes, which is
    what it is to attention: it reads the first ``seq_lens`` tokens of its row of the table."""

    def __init__(self, model: Llama) -> None:
        config, cache = model.config, model.cache
        num_slots = cache.num_pages * cache.page_size
        self._pages = cache.page_table
        self._slots_of_page = torch.arange(num_slots, dtype=torch.int32).view(-1, cache.page_size)
        kv_cache = KVCache(
            num_slots,
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            torch.float32,
            "cpu",
        )
        self._table = RequestTable(cache.max_requests, config.max_seq_len, "cpu")
        self.runner = ModelRunner(
            ServedLlama(model),
            TorchNativeBackend(kv_cache, self._table),
            RunnerConfig(
                max_running_requests=MAX_TOKENS,
                cudagraph_capture_sizes=tuple(SIZES),
                enable_prefill_graph=False,
                show_progress=False,
            ),
        )
        self.runner.warmup()

    def follow_scheduler(self) -> None:
        """Copy the scheduler's page table, which a scheduler for this runner would write itself."""
        slots = self._slots_of_page[self._pages].flatten(1)
        self._table.req_to_token.copy_(slots[:, : self._table.max_context_len])

    def __call__(self, batch: LlamaBatch) -> Tensor:
        logits = self.runner.forward(
            ForwardBatch(
                forward_mode=ForwardMode.DECODE,
                batch_size=len(batch.input_ids),
                input_ids=batch.input_ids,
                positions=batch.positions,
                out_cache_loc=batch.out_cache_loc,
                req_pool_indices=batch.req_pool_indices,
                seq_lens=batch.seq_lens,
                seq_lens_cpu=batch.seq_lens,
            )
        ).logits
        assert logits is not None
        return logits


def compile_paths(model: Llama) -> tuple[dict[str, Forward], dict[str, float]]:
    """The paths by name, and the seconds that setting each up took before its first step."""
    makers: dict[str, Callable[[], Forward]] = {
        EAGER: lambda: model,
        DYNAMIC: lambda: torch.compile(model, dynamic=True),
        GRAPHBUF: lambda: torch.compile(model, backend="graphbuf", options=OPTIONS),
        HAND_WRITTEN: lambda: HandWrittenPath(model),
        RUNNER: lambda: RunnerPath(model),
    }
    paths, seconds = {}, {}
    with torch.inference_mode():
        for name, make in makers.items():
            began = time.perf_counter()
            paths[name] = make()
            seconds[name] = time.perf_counter() - began
    return paths, seconds


def measure(trace: Trace, num_threads: int) -> dict[str, Any]:
    """Serve ``trace`` through every path in this process; returns what ``print_result`` prints."""
    torch.set_num_threads(num_threads)
    model = load_model()
    cache = model.allocate_cache(num_pages=385, max_requests=48)
    requests = seeded_requests(
        trace.num_requests, trace.seed, new_tokens=trace.new_tokens, gap=trace.gap
    )
    paths, setup_seconds = compile_paths(model)

    def serve() -> tuple[EveryPath, Generation]:
        every_path = EveryPath(paths)
        thin = SlowReaders(trace.seed)
        return every_path, generate(every_path, cache, requests, max_tokens=MAX_TOKENS, thin=thin)

    warmup, generation = serve()
    rounds = [serve()[0] for _ in range(trace.rounds)]

    results = [
        PathResult(
            name=name,
            round_seconds=[r.seconds[name] for r in rounds],
            setup_seconds=setup_seconds[name]
            + max(0.0, warmup.seconds[name] - statistics.median(r.seconds[name] for r in rounds)),
            largest_logit_error=max(r.logit_error[name] for r in (warmup, *rounds)),
        )
        for name in paths
    ]
    rows = [step.num_rows for step in generation.steps]
    return {
        "num_threads": num_threads,
        "num_steps": len(rows),
        "num_rows": sum(rows),
        "rows_range": (min(rows), max(rows)),
        "num_sizes": len(set(rows)),
        "num_size_changes": generation.num_size_changes,
        "num_new_tokens": generation.num_new_tokens,
        "paths": [asdict(result) for result in results],
        "explain": str(explain(paths[GRAPHBUF])),
        "explain_runner": str(paths[RUNNER].runner.explain()),
        "runner_hits": paths[RUNNER].runner.explain().hits,
        "num_forwards": len(rows) * (trace.rounds + 1),
    }


def measure_in_subprocess(num_threads: int, *, quick: bool) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(num_threads)]
    done = subprocess.run(
        [*command, *(["--quick"] if quick else [])],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def print_setup(trace: Trace, result: dict[str, Any]) -> None:
    low, high = result["rows_range"]
    print(
        f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} CPUs; "
        f"{trace.num_requests} requests, {result['num_new_tokens']} new tokens; "
        f"{result['num_steps']} steps of {low} to {high} token rows "
        f"(mean {result['num_rows'] / result['num_steps']:.1f}, {result['num_sizes']} sizes, "
        f"changed {result['num_size_changes']} times); {trace.rounds} rounds, paths interleaved "
        f"step by step; captured sizes {OPTIONS['cudagraph_capture_sizes']}\n"
    )


def markdown_rows(result: dict[str, Any]) -> list[str]:
    """Return one table row per path: median over rounds, range, and speed against eager."""
    paths = {path["name"]: path for path in result["paths"]}
    baseline = paths[EAGER]["round_seconds"]
    lines = []
    for name, path in paths.items():
        seconds = path["round_seconds"]
        per_step = [1e3 * s / result["num_steps"] for s in seconds]
        speedups = [b / s for b, s in zip(baseline, seconds, strict=True)]
        lines.append(
            f"| {result['num_threads']} | {name} | {statistics.median(per_step):.2f} "
            f"({min(per_step):.2f} to {max(per_step):.2f}) "
            f"| {result['num_new_tokens'] / statistics.median(seconds):,.0f} "
            f"| {statistics.median(speedups):.2f}x ({min(speedups):.2f} to {max(speedups):.2f}) "
            f"| {path['setup_seconds']:.1f} | {path['largest_logit_error']:.0e} |"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a short trace, to see that it runs")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    trace = QUICK if args.quick else FULL
    if args.worker is not None:
        print(json.dumps(measure(trace, args.worker)))
        return 0

    results = [measure_in_subprocess(threads, quick=args.quick) for threads in args.threads]
    print_setup(trace, results[0])
    print("| threads | path | ms per step | tokens/s | against eager | set-up s | logit error |")
    print("|--:|---|--:|--:|--:|--:|--:|")
    for result in results:
        print("\n".join(markdown_rows(result)))
    for result in results:
        print(f"\ngraphbuf at {result['num_threads']} threads:\n{result['explain']}")
        print(
            f"\nModelRunner, {result['runner_hits']} of {result['num_forwards']} forwards replayed"
        )
        print(result["explain_runner"])

    disagreeing = [
        f"{path['name']} at {result['num_threads']} threads: {path['largest_logit_error']:.1e}"
        for result in results
        for path in result["paths"]
        if path["largest_logit_error"] > LOGIT_TOLERANCE
    ]
    if disagreeing:
        print(f"\nFAILED: logits differ by more than {LOGIT_TOLERANCE:.0e}: {disagreeing}")
    return 1 if disagreeing else 0


if __name__ == "__main__":
    sys.exit(main())
