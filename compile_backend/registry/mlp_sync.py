"""What the scheduler does to a batch whose ranks meet in the MLP's collectives."""

import dataclasses
from collections.abc import Sequence

import torch

from compile_backend.errors import ConfigError, SlotMismatchError
from compile_backend.forward_batch import ForwardBatch
from compile_backend.registry.capacity import mlp_sync_padded_tokens
from compile_backend.runner_config import RunnerConfig

__all__ = ["agreed_num_tokens", "prepare_mlp_sync_batch"]


def prepare_mlp_sync_batch(
    batch: ForwardBatch,
    config: RunnerConfig,
    global_num_tokens: Sequence[int],
    *,
    same_size: bool = True,
) -> ForwardBatch:
    """``batch`` with the sizes that every rank runs at, from the live tokens of each.

    The result shares every tensor with ``batch`` and sets three fields: ``global_num_tokens_cpu``
    and ``global_num_tokens_gpu`` (int64, on the device of ``input_ids``; one copy to it) to
    :func:`~compile_backend.registry.capacity.mlp_sync_padded_tokens`, and
    ``num_token_non_padded_cpu`` to this rank's live tokens. Tokens are not padded here: a runner
    fills its slots to the size, by each slot's policy. Without MLP sync ``batch`` is returned.

    Raises SlotMismatchError where this rank's count is not the batch's, and what
    ``mlp_sync_padded_tokens`` raises.
    """
    if not config.enable_mlp_sync:
        return batch
    padded = mlp_sync_padded_tokens(config, global_num_tokens, same_size=same_size)
    own = global_num_tokens[config.dp_rank if config.require_mlp_tp_gather else 0]
    if own != batch.num_tokens:
        raise SlotMismatchError(
            f"global_num_tokens is {list(global_num_tokens)}, {own} for this rank (dp_rank "
            f"{config.dp_rank}), but the batch has {batch.num_tokens} tokens; "
            "count tokens after the batch is complete"
        )
    device = None if batch.input_ids is None else batch.input_ids.device
    return dataclasses.replace(
        batch,
        global_num_tokens_cpu=padded,
        global_num_tokens_gpu=torch.tensor(padded, dtype=torch.int64, device=device),
        num_token_non_padded_cpu=own,
    )


def agreed_num_tokens(batch: ForwardBatch) -> list[int]:
    """The tokens that each rank runs. Raises ConfigError for a batch on which no rank agreed."""
    counts = batch.global_num_tokens_cpu
    if counts is None:
        raise ConfigError(
            f"enable_mlp_sync is set but a {batch.forward_mode.name} batch of {batch.num_tokens} "
            "tokens has no global_num_tokens_cpu, so the ranks would run different sizes and wait "
            "for each other; pass it through prepare_mlp_sync_batch"
        )
    return counts
