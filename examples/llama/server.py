"""The server: plan a step, run the model, pick the next tokens, record what happened.

``runner`` is anything with ``forward(ForwardBatch) -> ForwardOutput``: graphbuf's ``ModelRunner``,
or ``PlainModel``, which runs the model as it is written. Both are served by the same code.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

from compile_backend import FallbackReason, ForwardBatch, ForwardMode
from compile_backend.attention import AttentionBackend, ForwardContext, forward_context
from compile_backend.runners import ForwardOutput
from examples.llama.arrivals import Arrivals
from examples.llama.generate import Generation
from examples.llama.model import ServedLlama
from examples.llama.token_scheduler import (
    Plan,
    RequestRefusedError,
    Sequence,
    ServedRequest,
    ServingMemory,
    TokenScheduler,
    build_forward_batch,
)


class Runner(Protocol):
    """What serves a batch."""

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Return the logits of one row per request, in the order of the batch."""


class PlainModel:
    """The model as it is written: no slot, no compiler, no graph. What everything is judged by."""

    def __init__(self, model: ServedLlama, attn_backend: AttentionBackend) -> None:
        self.model = model
        self.attn_backend = attn_backend

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        metadata = self.attn_backend.init_forward_metadata(batch)
        with forward_context(ForwardContext(self.attn_backend, batch, metadata)):
            hidden = self.model(batch)
        rows = hidden
        if batch.extend_seq_lens is not None:  # the last token of each request
            rows = hidden[batch.extend_seq_lens.cumsum(0) - 1]
        return ForwardOutput(
            logits=self.model.lm_head(rows),
            hidden_states=hidden,
            path="eager",
            reason=None,
            bucket=None,
            batch_size=batch.batch_size,
            num_tokens=batch.num_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one step was: its batch, how it was run and why not otherwise, and how long it took."""

    mode: ForwardMode
    batch_size: int
    num_tokens: int
    path: str  # "decode", "prefill" or "eager"
    reason: FallbackReason | None  # why no graph took it
    bucket: int | None
    seconds: float  # forward and sampling

    @property
    def rows(self) -> int:
        """Live rows: requests of a decode batch, tokens of any other."""
        return self.batch_size if self.mode.is_decode() else self.num_tokens

    @property
    def padded_rows(self) -> int:
        return self.rows if self.bucket is None else self.bucket


class Server:
    """Serves requests through ``runner``, whose attention backend reads ``memory``.

    ``steps`` has a record per step and ``finished`` the requests that have ended, in the order in
    which they did. With ``keep_scores`` the scores behind each new token are kept, per request.
    With ``forced`` the next tokens of request i are taken from ``forced[i]``. Not thread-safe.
    """

    def __init__(
        self,
        runner: Runner,
        memory: ServingMemory,
        *,
        max_step_tokens: int,
        mixed: bool = False,
        keep_scores: bool = False,
        forced: list[list[int]] | None = None,
    ) -> None:
        self.runner = runner
        self.memory = memory
        self.scheduler = TokenScheduler(memory, max_step_tokens=max_step_tokens, mixed=mixed)
        self.steps: list[StepRecord] = []
        self._forced = forced
        self._scores: dict[int, list[Tensor]] | None = {} if keep_scores else None

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def finished(self) -> list[Sequence]:
        return self.scheduler.finished

    def submit(self, request: ServedRequest) -> int:
        """Queue ``request``; its index. Raises RequestRefusedError for one that can never run."""
        return self.scheduler.submit(request)

    def cancel(self, index: int) -> bool:
        """End request ``index`` now and free what it holds. False where it is not live."""
        return self.scheduler.cancel(index)

    def close(self) -> None:
        """End every request. The server can be used again."""
        self.scheduler.cancel_all()

    @torch.inference_mode()
    def step(self) -> StepRecord:
        """Run one step. Where the runner raises, nothing is committed and a retry works."""
        began = time.perf_counter()
        plan = self.scheduler.plan()
        out = self.runner.forward(build_forward_batch(plan, self.memory.cache.k.device))
        self.scheduler.commit(plan, self._pick_tokens(plan, out.logits))
        record = StepRecord(
            mode=plan.mode,
            batch_size=len(plan.chunks),
            num_tokens=plan.num_tokens,
            path=out.path,
            reason=out.reason,
            bucket=out.bucket,
            seconds=time.perf_counter() - began,
        )
        self.steps.append(record)
        return record

    def _pick_tokens(self, plan: Plan, logits: Tensor | None) -> list[int]:
        sampling = [i for i, chunk in enumerate(plan.chunks) if chunk.samples]
        if not sampling:
            return []
        assert logits is not None, "a runner with an lm_head returns logits"
        # Indexing copies, so what follows is not overwritten by the next forward.
        scores = logits[torch.tensor(sampling, device=logits.device)].float()
        sequences = [plan.chunks[i].sequence for i in sampling]
        for sequence, row in zip(sequences, scores, strict=True):
            sequence.sampler.score_(row)
            if self._scores is not None:
                self._scores.setdefault(sequence.index, []).append(row)
        if self._forced is not None:
            return [self._forced[s.index][len(s.output)] for s in sequences]
        return scores.argmax(-1).tolist()

    def generation(self, seconds: float) -> Generation:
        """What was generated in ``seconds``, in the order of the requests, to compare runs by."""
        finished = sorted(self.finished, key=lambda s: s.index)
        kept = self._scores
        return Generation(
            outputs=[s.output for s in finished],
            logits=[] if kept is None else [torch.stack(kept[s.index]) for s in finished],
            steps=[],
            seconds=seconds,
        )


def _raise(error: RequestRefusedError) -> None:
    raise error


def serve(
    server: Server,
    arrivals: Arrivals,
    *,
    on_finish: Callable[[Sequence], None] = lambda sequence: None,
    on_refuse: Callable[[RequestRefusedError], None] = _raise,
) -> None:
    """Serve until nothing waits, runs or will come; whatever happens, no request is left live.

    A refused request is told to ``on_refuse``; where that returns, the others are served. Ctrl-C
    ends the serving after the step that runs: the live requests are cancelled and told to
    ``on_finish`` as every one that ends, and KeyboardInterrupt is raised. A second Ctrl-C does not
    wait for the step.
    """
    num_told = len(server.finished)
    try:
        with Interrupt() as interrupt:
            while not interrupt.is_requested:
                is_idle = not server.has_work
                for request in arrivals.take(len(server.steps), is_idle=is_idle):
                    try:
                        server.submit(request)
                    except RequestRefusedError as error:
                        on_refuse(error)
                if server.has_work:
                    server.step()
                elif arrivals.is_exhausted:
                    break
                for sequence in server.finished[num_told:]:
                    num_told += 1
                    on_finish(sequence)
    finally:
        server.close()
        for sequence in server.finished[num_told:]:
            on_finish(sequence)
    if interrupt.is_requested:
        raise KeyboardInterrupt


class Interrupt:
    """Ctrl-C as a question asked between steps. Asked a second time, it raises at once.

    In a thread other than the main one, where Python delivers no signal, it is never requested.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._previous: Any = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.is_requested:
            raise KeyboardInterrupt
        self.is_requested = True
