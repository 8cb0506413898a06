"""The serving loop: plan a step, run it, pick the next tokens, until every request is done.

``forward`` is any callable from a batch to logits, so the eager model and a compiled one are served
by the same code. Plans depend on lengths alone, never on token values, so two runs over the same
requests see the same batches in the same order.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from examples.llama.attention import PagedKVCache
from examples.llama.batch import LlamaBatch
from examples.llama.scheduler import Chunk, Request, Scheduler, build_batch

Forward = Callable[[LlamaBatch], Tensor]


@dataclass(frozen=True, slots=True)
class Step:
    """What one step ran, and the seconds that ``forward`` took for it."""

    num_rows: int
    num_sequences: int
    forward_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The outcome of serving some requests; lists are in the order of the requests."""

    outputs: list[list[int]]  # the new tokens of each request
    logits: list[Tensor]  # [new tokens, vocab] each; empty unless they were asked for
    steps: list[Step]
    seconds: float

    @property
    def num_new_tokens(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def tokens_per_s(self) -> float:
        return self.num_new_tokens / self.seconds

    @property
    def num_size_changes(self) -> int:
        """How many steps had another number of rows than the step before."""
        rows = [step.num_rows for step in self.steps]
        return sum(a != b for a, b in itertools.pairwise(rows))


@torch.inference_mode()
def generate(
    forward: Forward,
    cache: PagedKVCache,
    requests: list[Request],
    *,
    max_tokens: int = 64,
    prefill_chunk: int = 32,
    thin: Callable[[list[Chunk]], list[Chunk]] | None = None,
    forced: list[list[int]] | None = None,
    keep_logits: bool = False,
) -> Generation:
    """Serve ``requests`` greedily through ``forward``, which reads and writes ``cache``.

    With ``forced`` the next tokens are taken from there and the model's own choice is ignored, so
    that the logits of two runs can be compared position by position.
    """
    scheduler = Scheduler(cache, max_tokens=max_tokens, prefill_chunk=prefill_chunk, thin=thin)
    for request in requests:
        scheduler.add(request)

    kept: list[list[Tensor]] = [[] for _ in requests]
    steps: list[Step] = []
    began = time.perf_counter()
    while scheduler.has_work:
        chunks = scheduler.plan()
        batch = build_batch(chunks, cache.page_size)
        forward_began = time.perf_counter()
        logits = forward(batch)
        seconds = time.perf_counter() - forward_began
        steps.append(Step(len(batch.input_ids), len(chunks), seconds))

        sampled = logits[_sampling_rows(chunks)]
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        next_tokens = sampled.argmax(-1).tolist()
        if forced is not None:
            next_tokens = [forced[s.index][len(s.output)] for s in sampling]
        if keep_logits:
            for sequence, row in zip(sampling, sampled, strict=True):
                kept[sequence.index].append(row)
        scheduler.commit(chunks, next_tokens)

    finished = sorted(scheduler.finished, key=lambda s: s.index)
    return Generation(
        outputs=[s.output for s in finished],
        logits=[torch.stack(rows) for rows in kept] if keep_logits else [],
        steps=steps,
        seconds=time.perf_counter() - began,
    )


def _sampling_rows(chunks: list[Chunk]) -> list[int]:
    """Return the row of each chunk's last token, for the chunks that sample."""
    rows, stop = [], 0
    for chunk in chunks:
        stop += chunk.num_rows
        if chunk.samples:
            rows.append(stop - 1)
    return rows
