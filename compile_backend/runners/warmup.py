"""Warm-up: everything slow or stateful happens here, once, before the first batch is served.

In order: a dry run (workspaces, lazy state), FlashInfer's and DeepGEMM's kernels, trace and
compile, capture; so nothing is tuned or compiled while a graph is recorded. What it wrote is taken
back: slots are as they were made, and the scratch row of the cache is finite.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compile_backend.engines import NoEngine
from compile_backend.forward_batch import ForwardBatch, ForwardMode
from compile_backend.runners.autotune import autotune_flashinfer, why_not_tuned
from compile_backend.runners.base import captured_mode
from compile_backend.runners.deep_gemm import pp_parallel_deep_gemm_warmup, why_not_swept
from compile_backend.runners.logits import gather_rows
from compile_backend.runners.state import unchanged_state

if TYPE_CHECKING:
    from compile_backend.runners.model_runner import ModelRunner

__all__ = ["WarmupFacts", "take_back", "warm_up"]

log = logging.getLogger(__name__)

FLASHINFER, DEEP_GEMM = "flashinfer_autotune", "deep_gemm_warmup"  # keys of WarmupFacts.skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupFacts:
    """What warm-up took. Settled."""

    num_captured: int
    num_refused: int  # buckets that could not be captured; explain() says why
    skipped: Mapping[str, str]  # steps that were not made, and why
    tune_seconds: float  # FlashInfer's and DeepGEMM's kernels
    trace_seconds: float  # tracing and compiling
    capture_seconds: float
    total_seconds: float
    pool_bytes: int


def warm_up(runner: ModelRunner, examples: Collection[ForwardBatch]) -> WarmupFacts:
    """What :meth:`ModelRunner.warmup` does, inside its step."""
    began = time.perf_counter()
    served = runner.served
    served.attn_backend.init_graph_state(max_bs=served.max_bs, max_num_tokens=served.max_num_token)
    with unchanged_state(runner.roots):
        hidden = _dry_run(runner)
        tuned_at = time.perf_counter()
        skipped = _tune_kernels(runner)
    traced_at = time.perf_counter()
    captures = served.engine.name != NoEngine.name
    if captures:
        for graph_runner in runner.graph_runners:
            graph_runner.trace(runner.trace_sizes, examples)
        if runner.logits is not None and hidden is not None and runner.graph_runners:
            runner.logits.trace(hidden, runner.trace_sizes)
    capture_at = time.perf_counter()
    if captures:
        runner.is_tuned = FLASHINFER not in skipped
        with runner.tuned():
            _capture_all(runner)
    done = time.perf_counter()
    take_back(runner)
    graphs = [r.graphs for r in runner.graph_runners]
    if runner.logits is not None and runner.logits.graphs is not None:
        graphs.append(runner.logits.graphs)
    facts = WarmupFacts(
        num_captured=sum(map(len, graphs)),
        num_refused=sum(len(r.refusals) for r in runner.graph_runners),
        skipped=skipped,
        tune_seconds=traced_at - tuned_at,
        trace_seconds=capture_at - traced_at,
        capture_seconds=done - capture_at,
        total_seconds=time.perf_counter() - began,
        pool_bytes=sum(g.pool_bytes for g in graphs),
    )
    log.info(
        "graphbuf: captured %d graphs in %.2f s (%d bytes), traced and compiled in %.2f s",
        facts.num_captured, facts.capture_seconds, facts.pool_bytes, facts.trace_seconds,
    )  # fmt: skip
    return facts


def _dry_run(runner: ModelRunner) -> Tensor | None:
    """Run once eagerly per way to run, on scratch rows; the hidden states, if there are any."""
    from compile_backend.runners.model_runner import hidden_states_of

    hidden = None
    for mode in (captured_mode(runner.config), ForwardMode.EXTEND):
        batch = runner.eager._dummy_batch(mode, 1)
        hidden = hidden_states_of(runner.eager.execute(batch))
        if hidden is not None and runner.logits is not None:
            runner.logits.lm_head(gather_rows(hidden, batch))
    return hidden


def _tune_kernels(runner: ModelRunner) -> Mapping[str, str]:
    """Have the kernels measured and compiled for which it can be done; what was not, and why."""
    config, device = runner.config, runner.served.device
    skipped: dict[str, str] = {}
    if reason := why_not_tuned(config, device):
        skipped[FLASHINFER] = reason
    else:
        autotune_flashinfer(runner.decode or runner.eager)
    if reason := why_not_swept(config, device):
        skipped[DEEP_GEMM] = reason
    else:
        pp_parallel_deep_gemm_warmup(runner.eager)
    for step, reason in skipped.items():
        log.debug("graphbuf: %s skipped: %s", step, reason)
    return skipped


def _capture_all(runner: ModelRunner) -> None:
    captures = list(runner.captures())
    gc.collect()  # so that collecting does not fall into a capture
    for label, capture in _progress(captures, runner):
        del label
        capture()


def _progress(
    captures: Iterable[tuple[str, Callable[[], None]]], runner: ModelRunner
) -> Iterator[tuple[str, Callable[[], None]]]:
    """The captures, behind a bar on rank 0 that shows what is captured and the free memory."""
    captures = list(captures)
    bar = _bar(len(captures)) if _shows_progress(runner) else None
    try:
        for label, capture in captures:
            if bar is not None:
                free = _available_bytes(runner.served.device) / 2**30
                bar.set_description(f"Capturing batches ({label} avail_mem={free:.2f} GB)")
            yield label, capture
            if bar is not None:
                bar.update()
    finally:
        if bar is not None:
            bar.close()


def _shows_progress(runner: ModelRunner) -> bool:
    config = runner.config
    return config.show_progress and not (config.attn_tp_rank or config.pp_rank or config.dp_rank)


def _bar(total: int) -> Any:
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return None  # the closing log line says the same
    return tqdm(total=total, leave=True)


def _available_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def take_back(runner: ModelRunner) -> None:
    """Slots as they were made, those of the eager registry last: it made the shared ones."""
    for registry in reversed(runner.registries):
        registry.reset_slots()
    runner.served.attn_backend.reset_scratch()
