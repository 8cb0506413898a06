"""Serve prompts that arrive over time: the model as written, then graphbuf's runners, compared.

    python -m examples.llama.serve                        # 24 prompts of a seeded trace, both ways
    python -m examples.llama.serve --temperature 0.8      # sampled; the seeds make it repeatable
    fortune | python -m examples.llama.serve --stdin      # one prompt per line, until the end

The tokens of both must be equal, or differ only where the model itself is undecided (see demo.py).
The table says how the steps ran: out of which graph, or eagerly and why. Ctrl-C prints what is
finished, frees everything and exits with code 130.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from compile_backend import ModelRunner, RunnerConfig
from compile_backend.attention import TorchNativeBackend
from compile_backend.config import CompilerName, EngineName
from compile_backend.registry.capacity import max_prefill_buffer_tokens
from compile_backend.runners import RunnerExplanation
from examples.llama.arrivals import Lines, Trace
from examples.llama.demo import find_departures, print_continuations, print_table, speed
from examples.llama.generate import Generation
from examples.llama.model import Llama, ServedLlama, load_model
from examples.llama.sampling import SamplingParams
from examples.llama.server import PlainModel, Runner, Server, StepRecord, serve
from examples.llama.token_scheduler import (
    Finish,
    RequestRefusedError,
    Sequence,
    ServedRequest,
    ServingMemory,
)
from examples.llama.tokenizer import decode
from examples.llama.traffic import seeded_requests

NUM_PROMPTS = 24
MAX_RUNNING = 16
MAX_STEP_TOKENS = 64
KV_LEN_BUCKETS = range(32, 257, 32)  # close, for the same reason as the capture sizes
NUM_SLOTS = 2049  # the scratch slot, and fewer than 16 requests can fill, so that some wait


def runner_config(engine: EngineName = "auto", compiler: CompilerName = "inductor") -> RunnerConfig:
    """Return the limits that the scheduler keeps, told to the runners."""
    return RunnerConfig(
        max_running_requests=MAX_RUNNING,
        chunked_prefill_size=MAX_STEP_TOKENS,
        max_prefill_tokens=MAX_STEP_TOKENS,
        max_total_num_tokens=NUM_SLOTS,
        # On a CPU a padded row costs what a live one does, so the sizes are close to each other.
        cudagraph_capture_sizes=(1, 2, 3, 4, *range(6, MAX_RUNNING + 1, 2)),
        prefill_capture_sizes=tuple(range(8, MAX_STEP_TOKENS + 1, 8)),
        engine=engine,
        compiler=compiler,
        show_progress=sys.stderr.isatty(),
    )


def max_step_tokens() -> int:
    """The most tokens of a step: what the runner's slots are made for, from the same function."""
    return max_prefill_buffer_tokens(runner_config())


def build_runner(model: Llama, config: RunnerConfig) -> tuple[ModelRunner, ServingMemory]:
    """Return graphbuf's runner for ``model``, not warmed up, and the memory that it serves from."""
    memory = allocate_memory(model)
    backend = TorchNativeBackend(memory.cache, memory.table, kv_len_buckets=KV_LEN_BUCKETS)
    return ModelRunner(ServedLlama(model), backend, config), memory


def allocate_memory(model: Llama) -> ServingMemory:
    return ServingMemory.allocate(model.config, num_slots=NUM_SLOTS, max_requests=MAX_RUNNING)


def warm_up(runner: ModelRunner) -> float:
    """Compile and capture; returns the seconds that took."""
    began = time.perf_counter()
    with torch.inference_mode():
        runner.warmup()
    return time.perf_counter() - began


def trace_requests(count: int, seed: int, temperature: float) -> list[ServedRequest]:
    return [
        ServedRequest(
            prompt=request.prompt,
            max_new_tokens=request.max_new_tokens,
            arrival_step=request.arrival_step,
            sampling=SamplingParams(temperature=temperature, seed=seed + i),
        )
        for i, request in enumerate(seeded_requests(count, seed))
    ]


def describe(sequence: Sequence) -> str:
    """One line: the prompt, what was added to it and, where it was cut short, that it was."""
    text = f"{sequence.request.prompt} |{decode(sequence.output)}".replace("\n", " / ")
    if sequence.finish is Finish.CANCELLED:
        text += f" [cancelled after {len(sequence.output)} new tokens]"
    return text


def describe_interrupt(server: Server) -> str:
    """What became of the requests, and of the memory that they held."""
    num_cancelled = sum(s.finish is Finish.CANCELLED for s in server.finished)
    slots = server.memory.slots
    return (
        f"interrupted: {len(server.finished) - num_cancelled} requests finished, {num_cancelled} "
        f"cancelled; {slots.num_free} of {server.memory.max_tokens} token slots are free"
    )


def run_trace(
    runner: Runner,
    memory: ServingMemory,
    requests: list[ServedRequest],
    *,
    mixed: bool = False,
    forced: list[list[int]] | None = None,
) -> tuple[Generation, list[StepRecord]]:
    """Serve ``requests`` from the first to the last; prints what there is when interrupted."""
    server = Server(
        runner,
        memory,
        max_step_tokens=max_step_tokens(),
        mixed=mixed,
        keep_scores=True,
        forced=forced,
    )
    began = time.perf_counter()
    try:
        serve(server, Trace(requests))
    except KeyboardInterrupt:
        for sequence in server.finished:
            print(f"  {describe(sequence)}")
        print(describe_interrupt(server), file=sys.stderr)
        raise
    return server.generation(time.perf_counter() - began), server.steps


def path_rows(steps: list[StepRecord]) -> list[tuple[str, ...]]:
    """One row per path and reason: steps, live rows, graph hits, padding, seconds."""
    groups: dict[str, list[StepRecord]] = defaultdict(list)
    for step in steps:
        why = f": {step.reason.value}" if step.reason else ""
        groups[f"{step.path} graph" if step.path != "eager" else f"eager{why}"].append(step)
    rows = [("path", "steps", "rows", "hits", "padding", "seconds")]
    for name, group in sorted(groups.items()):
        live, padded = sum(s.rows for s in group), sum(s.padded_rows for s in group)
        hits = sum(s.path != "eager" for s in group)
        seconds = sum(s.seconds for s in group)
        waste = f"{1 - live / padded:.1%}"
        rows.append((name, f"{len(group)}", f"{live}", f"{hits}", waste, f"{seconds:.2f}"))
    return rows


def print_columns(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)]
        print("  " + "  ".join([f"{first:<{widths[0]}}", *cells]))


def compare(args: argparse.Namespace) -> int:
    """Serve the trace both ways, print what happened, and return 1 where a token is wrong."""
    model = load_model()
    requests = trace_requests(args.prompts, args.seed, args.temperature)
    memory = allocate_memory(model)
    plain = PlainModel(ServedLlama(model), TorchNativeBackend(memory.cache, memory.table))
    runner, runner_memory = build_runner(model, runner_config(args.engine, args.compiler))

    def run_plain() -> Generation:
        return run_trace(plain, memory, requests, mixed=args.mixed)[0]

    def run_runner(forced: list[list[int]] | None = None) -> tuple[Generation, list[StepRecord]]:
        return run_trace(runner, runner_memory, requests, mixed=args.mixed, forced=forced)

    eager = run_plain()
    print(f"{len(requests)} prompts, continued by the model as it is written:\n")
    print_continuations(list(requests), eager)
    warmup_seconds = warm_up(runner)
    other, steps = run_runner()

    eager_runs, runner_runs = [], []
    for _ in range(args.runs):  # interleaved: both see the same noise of the machine
        eager_runs.append(run_plain())
        generation, steps = run_runner()
        runner_runs.append(generation)

    print("\nHow the steps of one run through the runners were served:\n")
    print_columns(path_rows(steps))
    report = runner.explain()
    print()
    print_table(
        [
            ("new tokens", f"{other.num_new_tokens}"),
            ("tokens/s, eager", speed(eager_runs)),
            ("tokens/s, runners", speed(runner_runs)),
            ("warm-up seconds", f"{warmup_seconds:.2f}"),
            ("  of which compiling", f"{sum(t.compile_seconds for t in report.traces):.2f}"),
            ("  of which capturing", f"{sum(r.capture_seconds for r in report.runners):.2f}"),
            ("graphs traced", f"{len(report.traces)} (the model, and its output projection)"),
            ("pieces", pieces(report)),
            ("graphs captured", f"{report.num_cudagraph_captured}"),
            ("hits", f"{report.hits}"),
            ("slot bytes", f"{report.slot_bytes:,}"),
            ("pool bytes", f"{report.pool_bytes:,}"),
        ]
    )
    for run in (other, *runner_runs):
        departures = find_departures(list(requests), eager, run, lambda led: run_runner(led)[0])
        for departure in departures:
            print(f"\n{departure}")
        if departures:
            return 0 if all(d.is_within_tolerance for d in departures) else 1
    print("\nEvery token of every run equals the eager model's.")
    return 0


def serve_stdin(args: argparse.Namespace) -> int:
    """Serve the lines of standard input as they come; results go to stdout, the rest to stderr."""
    runner, memory = build_runner(load_model(), runner_config(args.engine, args.compiler))
    print(f"warmed up in {warm_up(runner):.2f} s; one prompt per line", file=sys.stderr, flush=True)
    server = Server(runner, memory, max_step_tokens=max_step_tokens(), mixed=args.mixed)
    seeds = itertools.count(args.seed)

    def to_request(text: str) -> ServedRequest:
        sampling = SamplingParams(temperature=args.temperature, seed=next(seeds))
        return ServedRequest(prompt=text, max_new_tokens=args.max_new_tokens, sampling=sampling)

    def refuse(error: RequestRefusedError) -> None:
        print(f"refused: {error}", file=sys.stderr, flush=True)

    try:
        serve(
            server,
            Lines(sys.stdin.fileno(), to_request),
            on_finish=lambda sequence: print(describe(sequence), flush=True),
            on_refuse=refuse,
        )
    except KeyboardInterrupt:
        print(describe_interrupt(server), file=sys.stderr)
        raise
    return 0


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stdin", action="store_true", help="serve the lines of standard input")
    parser.add_argument("--seed", type=int, default=1, help="of the traffic and of the sampling")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument(
        "--engine", default="auto", help="auto, host, host_strict, cuda, trees or none"
    )
    parser.add_argument("--compiler", default="inductor", help="inductor, aot_eager or eager")
    parser.add_argument(
        "--mixed", action="store_true", help="let running requests share steps with prompts"
    )
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS, help="of the trace")
    parser.add_argument("--runs", type=int, default=3, help="timed runs of each path")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="of a line with --stdin")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    args = parser.parse_args(argv)
    try:
        SamplingParams(temperature=args.temperature)
        runner_config(args.engine, args.compiler)
    except ValueError as error:
        parser.error(str(error))
    if min(args.prompts, args.runs, args.threads) < 1:
        parser.error("--prompts, --runs and --threads are at least 1")
    return args


def pieces(report: RunnerExplanation) -> str:
    """Return how many compiled pieces the model has, and how many of them are different."""
    total = sum(trace.num_pieces for trace in report.traces)
    compiled = sum(trace.num_compiled_pieces for trace in report.traces)
    return f"{total}, of which {compiled} were compiled: the layers share them"


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    torch.set_num_threads(args.threads)
    try:
        return serve_stdin(args) if args.stdin else compare(args)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
