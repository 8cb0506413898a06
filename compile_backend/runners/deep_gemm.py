"""DeepGEMM compiles a kernel for each kind of size that it first meets: so it meets them here.

The sizes lie where its choice of kernel changes, which depends on how many multiprocessors a batch
fills. Every pipeline stage sweeps at once, on proxy tensors of its own, so that a deep pipeline
does not compile one stage after the other.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from compile_backend.errors import MissingExtraError
from compile_backend.extras import import_extra
from compile_backend.forward_batch import ForwardMode
from compile_backend.registry.capacity import max_bs, max_prefill_buffer_tokens, mlp_sync_align
from compile_backend.runner_config import RunnerConfig
from compile_backend.runners.base import BaseRunner, captured_mode

__all__ = ["pp_parallel_deep_gemm_warmup", "sweep", "why_not_swept"]

BLOCK_ROWS = 64  # rows of the smallest tile, which one multiprocessor works on


def why_not_swept(config: RunnerConfig, device: torch.device) -> str | None:
    """Why no sweep is made for a model on ``device``; None where it is."""
    if config.deep_gemm_warmup == "never":
        return "deep_gemm_warmup is 'never'"
    if config.deep_gemm_warmup == "always":
        return None
    if device.type != "cuda":
        return f"the model is on {str(device)!r}; DeepGEMM's kernels run on CUDA devices"
    try:
        import_extra("deep_gemm", extra="deepgemm", needed_for="the DeepGEMM warm-up")
    except MissingExtraError as error:
        return str(error)
    return None


def pp_parallel_deep_gemm_warmup(runner: BaseRunner, *, num_sms: int | None = None) -> None:
    """Run the model at every size of :func:`sweep`, on one set of the runner's buffers.

    Nothing is sent to or received from other pipeline stages; collectives inside the model are
    entered, so all ranks of a stage must call this. ``num_sms`` are the multiprocessors of the
    device, by default as many as it has; a device without counts as one. Writes slots and scratch
    rows.
    """
    runs = sweep(runner.config, _num_sms(runner.served.device) if num_sms is None else num_sms)
    buffers = runner._alloc_dummy_decode_buffers(max(size for _, size in runs))
    for mode, size in runs:
        if mode is ForwardMode.EXTEND:
            requests = min(size, buffers.batch_size)
            runner._dummy_run(requests, buffers, mode, num_tokens=size)
        else:
            runner._dummy_run(size, buffers, mode)


def sweep(config: RunnerConfig, num_sms: int) -> tuple[tuple[ForwardMode, int], ...]:
    """Modes and sizes to run, of the batches that this worker's role gets: requests where each has
    a fixed number of tokens, else tokens. Aligned for MLP sync and within the capacity."""
    waves = (2, max(num_sms // 8, 2), max(num_sms // 4, 4), num_sms)
    sizes = (1, *(wave * BLOCK_ROWS for wave in waves))
    runs: list[tuple[ForwardMode, int]] = []
    if config.role != "prefill":
        mode = captured_mode(config)
        runs += [(mode, size) for size in _fitted(config, sizes, max_bs(config))]
    if config.role != "decode":
        largest = mlp_sync_align(config, max_prefill_buffer_tokens(config))
        runs += [(ForwardMode.EXTEND, size) for size in _fitted(config, sizes, largest)]
    return tuple(runs)


def _fitted(config: RunnerConfig, sizes: Iterable[int], largest: int) -> list[int]:
    """``sizes`` aligned, at most ``largest``, each once, in increasing order."""
    return sorted({min(mlp_sync_align(config, size), largest) for size in sizes})


def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
