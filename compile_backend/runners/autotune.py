"""FlashInfer's kernel tuning: on the buffers of a runner, at the sizes that are captured.

One dummy forward runs inside FlashInfer's own context, which measures every kernel that it meets at
each size. What rank 0 measured is used by all ranks, so that all of them pick the same kernels.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from compile_backend.errors import ConfigError, MissingExtraError
from compile_backend.extras import import_extra
from compile_backend.forward_batch import ForwardMode
from compile_backend.registry.capacity import (
    decode_capture_sizes,
    max_num_token,
    prefill_capture_sizes,
)
from compile_backend.runner_config import RunnerConfig
from compile_backend.runners.base import BaseRunner, captured_mode, captured_widths

__all__ = ["autotune_flashinfer", "share_file", "tuned_sizes", "tuning_buckets", "why_not_tuned"]


def why_not_tuned(config: RunnerConfig, device: torch.device) -> str | None:
    """Why nothing is tuned for a model on ``device``; None where it can be."""
    if not config.enable_flashinfer_autotune:
        return "enable_flashinfer_autotune is False"
    if device.type != "cuda":
        return f"the model is on {str(device)!r}; FlashInfer measures on CUDA devices"
    try:
        _tuner()
    except MissingExtraError as error:
        return str(error)
    return None


def autotune_flashinfer(runner: BaseRunner) -> None:
    """Run the largest dummy batch of ``runner`` in FlashInfer's tuning context.

    Where torch.distributed is initialised every rank of its default group must call this: the
    forward enters the model's collectives, and rank 0's measurements are broadcast. Writes slots
    and scratch rows. Raises ConfigError for a runner without buffers, MissingExtraError without
    FlashInfer.
    """
    tuner, config = _tuner(), runner.config
    found = runner._autotune_buffers()
    if found is None:
        raise ConfigError(
            f"the {runner.name} runner has no buffers to tune kernels on: its _autotune_buffers() "
            f"returned None; return (buffers, batch size), such as "
            f"(self._alloc_dummy_decode_buffers(size), size), or tune on the eager runner"
        )
    buffers, batch_size = found
    mode = ForwardMode.EXTEND if config.role == "prefill" else captured_mode(config)
    rank, num_ranks = _rank()
    with _measurements_file(config.flashinfer_autotune_cache, rank, num_ranks) as path:
        if path is not None:
            share_file(path)  # all ranks begin with the same, so that all measure the same
        with tuner.autotune(True, cache=path, tuning_buckets=tuning_buckets(config)):
            runner._dummy_run(batch_size, buffers, mode)
        if path is not None and share_file(path) and rank > 0:
            cache = tuner.AutoTuner.get()
            cache.clear_cache()  # its own measurements would come first
            cache.load_configs(path)


def tuned_sizes(config: RunnerConfig) -> AbstractContextManager[None]:
    """Kernels are picked by what was measured at the captured sizes; nothing is measured.

    Outside of it FlashInfer looks a size up under the power of two below it. For captures, once
    :func:`autotune_flashinfer` ran.
    """
    context: AbstractContextManager[None] = _tuner().autotune(
        False, tuning_buckets=tuning_buckets(config)
    )
    return context


def tuning_buckets(config: RunnerConfig) -> tuple[int, ...]:
    """Token counts that are measured: those of the captured batches, within the capacity."""
    sizes: set[int] = set()
    if config.role != "prefill":
        widths = captured_widths(config)
        sizes.update(bs * width for bs in decode_capture_sizes(config) for width in widths)
    if config.role != "decode":
        sizes.update(prefill_capture_sizes(config))
    return tuple(sorted({min(size, max_num_token(config)) for size in sizes}))


def share_file(path: str) -> bool:
    """Replace the file at ``path``, on every rank but 0, by rank 0's; whether rank 0 has one.

    ``path`` may differ from rank to rank. Without other ranks nothing is done.
    """
    rank, num_ranks = _rank()
    content = [Path(path).read_bytes() if rank == 0 and os.path.exists(path) else None]
    if num_ranks > 1:
        dist.broadcast_object_list(content, src=0)
    if rank > 0 and content[0] is not None:
        Path(path).write_bytes(content[0])
    return content[0] is not None


def _tuner() -> Any:
    return import_extra("flashinfer.autotuner", extra="cuda", needed_for="kernel tuning")


def _rank() -> tuple[int, int]:
    """This process's rank in the default group, and its size; (0, 1) without one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


@contextmanager
def _measurements_file(configured: str | None, rank: int, num_ranks: int) -> Iterator[str | None]:
    """Where this rank keeps what it measures: the configured file is rank 0's alone."""
    if rank == 0 and (configured is not None or num_ranks == 1):
        yield configured
        return
    with tempfile.TemporaryDirectory(prefix="graphbuf-") as folder:
        yield os.path.join(folder, "flashinfer.json")
