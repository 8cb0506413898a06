"""Continue 16 prompts, first through the eager model, then through a ``torch.compile`` backend.

    python examples/llama/demo.py                       # from the root of the repository
    python -m examples.llama.demo --backend inductor    # any other backend, to compare

Requests arrive over time and fall behind at times, so the batch has another size at every step.
The tokens of both runs must be equal. Greedy decoding turns the smallest difference in a logit into
another token where two are nearly as likely. So at a difference the compiled model is led along
eager's tokens, and the run fails unless the logits agree there and the two tokens were that close.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from compile_backend import explain
from examples.llama.generate import Forward, Generation, generate
from examples.llama.model import Llama, load_model
from examples.llama.scheduler import Request
from examples.llama.tokenizer import decode
from examples.llama.traffic import SlowReaders, seeded_requests

NUM_PROMPTS = 16
MAX_TOKENS = 64  # rows of a step, so also the largest capture size
OPTIONS: dict[str, Any] = {
    # On a CPU a padded row costs what a live one does, so the sizes are close to each other.
    "cudagraph_capture_sizes": [1, 2, 3, 4, *range(6, 33, 2), *range(36, MAX_TOKENS + 1, 4)],
    "splitting_ops": ["graphbuf_llama::paged_attention"],
}
# Two runs whose batches are padded differently may pick other GEMM kernels, so logits of a size
# near 10 agree to float32 rounding over six layers, not bit by bit.
LOGIT_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """The first token of one request on which two runs disagree, judged on eager's tokens."""

    prompt: str
    position: int
    eager_token: int
    other_token: int
    top2_gap: float  # between the two likeliest tokens of the eager model at this position
    logit_error: float  # the largest over the whole request, when led along eager's tokens

    @property
    def is_within_tolerance(self) -> bool:
        # An error of e in each of two logits can turn a gap of up to 2 e.
        return self.top2_gap <= 2 * LOGIT_TOLERANCE and self.logit_error <= LOGIT_TOLERANCE

    def __str__(self) -> str:
        verdict = "within tolerance" if self.is_within_tolerance else "FAILED"
        return (
            f"{verdict}: {self.prompt!r}, new token {self.position}: eager chose "
            f"{decode([self.eager_token])!r} and the compiled model "
            f"{decode([self.other_token])!r}; eager's top-2 logit gap there is "
            f"{self.top2_gap:.2e}, and led along eager's tokens the compiled logits differ by at "
            f"most {self.logit_error:.2e} (tolerance {LOGIT_TOLERANCE:.0e})"
        )


def compile_model(model: Llama, backend: str) -> Forward:
    """Return ``model`` as ``backend`` compiles it."""
    if backend == "eager":
        return model
    if backend == "graphbuf":
        return torch.compile(model, backend="graphbuf", options=OPTIONS)
    return torch.compile(model, backend=backend, dynamic=True)


def find_departures(
    requests: list[Request],
    eager: Generation,
    other: Generation,
    rerun_led_by: Callable[[list[list[int]]], Generation],
) -> list[Departure]:
    """Return where ``other`` departs from ``eager``: at most one place per request."""
    if other.outputs == eager.outputs:
        return []
    led = rerun_led_by(eager.outputs)
    departures = []
    for i, (ours, theirs) in enumerate(zip(eager.outputs, other.outputs, strict=True)):
        position = next((p for p in range(len(ours)) if ours[p] != theirs[p]), None)
        if position is None:
            continue
        top2 = eager.logits[i][position].topk(2).values
        departures.append(
            Departure(
                prompt=requests[i].prompt,
                position=position,
                eager_token=ours[position],
                other_token=theirs[position],
                top2_gap=float(top2[0] - top2[1]),
                logit_error=float((eager.logits[i] - led.logits[i]).abs().max()),
            )
        )
    return departures


def print_continuations(requests: list[Request], generation: Generation) -> None:
    for request, output in zip(requests, generation.outputs, strict=True):
        print(f"  {request.prompt} |{decode(output)}".replace("\n", " / "))


def print_table(rows: Iterable[tuple[str, str]]) -> None:
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")


def speed(runs: list[Generation]) -> str:
    """Return the median and the range of the tokens per second of ``runs``."""
    rates = [run.tokens_per_s for run in runs]
    return f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"


def graphbuf_rows(compiled: Forward) -> list[tuple[str, str]]:
    """Return what ``explain`` says about a model compiled with graphbuf."""
    report = explain(compiled)
    fallbacks = [f"{count} x {reason.value}" for reason, count in report.fallbacks.items()]
    return [
        ("graphs traced", f"{report.num_graphs}"),
        ("graphs captured", f"{report.num_cudagraph_captured}"),
        ("hits", f"{report.hits}"),
        ("padding waste", f"{report.padding_waste:.1%} of the rows that ran"),
        ("fallbacks", "; ".join(fallbacks) or "none"),
        ("compile seconds", f"{report.compile_seconds:.2f}"),
        ("capture seconds", f"{report.capture_seconds:.2f}"),
        ("slot bytes", f"{report.slot_bytes:,}"),
        ("pool bytes", f"{report.pool_bytes:,}"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--backend", default="graphbuf", help="graphbuf, inductor, aot_eager or eager"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the traffic")
    parser.add_argument("--runs", type=int, default=3, help="timed runs of each path")
    parser.add_argument(
        "--threads", type=int, default=1, help="of torch; such small steps gain little from more"
    )
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    model = load_model()
    cache = model.allocate_cache(num_pages=257)
    requests = seeded_requests(NUM_PROMPTS, args.seed)

    def serve(forward: Forward, forced: list[list[int]] | None = None) -> Generation:
        return generate(
            forward,
            cache,
            requests,
            max_tokens=MAX_TOKENS,
            thin=SlowReaders(args.seed),
            forced=forced,
            keep_logits=True,
        )

    eager = serve(model)
    print(f"{NUM_PROMPTS} prompts, continued by the eager model:\n")
    print_continuations(requests, eager)

    compiled = compile_model(model, args.backend)
    began = time.perf_counter()
    other = serve(compiled)
    first_run_seconds = time.perf_counter() - began

    eager_runs, compiled_runs = [], []
    for _ in range(args.runs):  # interleaved: both see the same noise of the machine
        eager_runs.append(serve(model))
        compiled_runs.append(serve(compiled))

    rows = [step.num_rows for step in eager.steps]
    print(f"\nThe same requests through backend={args.backend!r}:\n")
    print_table(
        [
            ("steps", f"{len(rows)}, of {min(rows)} to {max(rows)} token rows"),
            ("batch size changed", f"at {eager.num_size_changes} of {len(rows) - 1} steps"),
            ("new tokens", f"{eager.num_new_tokens}"),
            ("tokens/s, eager", speed(eager_runs)),
            (f"tokens/s, {args.backend}", speed(compiled_runs)),
            ("first run", f"{first_run_seconds:.2f} s, compiling and capturing included"),
            *(graphbuf_rows(compiled) if args.backend == "graphbuf" else []),
        ]
    )

    for run in (other, *compiled_runs):
        departures = find_departures(requests, eager, run, lambda led: serve(compiled, led))
        for departure in departures:
            print(f"\n{departure}")
        if departures:
            return 0 if all(d.is_within_tolerance for d in departures) else 1
    print("\nEvery token of every run equals the eager model's.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
