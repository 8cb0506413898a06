"""Every size, in one place: how many requests and tokens the largest batch of a worker has.

The scheduler, the registries, autotuning and warm-up call these functions, so what is allocated is
what arrives. Each takes the frozen config alone and allocates nothing. Sizes are rows: requests on
the bs axis (``max_bs``), tokens on the tokens axis (``max_num_token``).
"""

import math
from collections.abc import Iterator, Sequence

from torch import Tensor

from compile_backend.errors import SlotMismatchError, SlotOverflowError
from compile_backend.forward_batch import ForwardBatch, ForwardMode
from compile_backend.registry.buckets import default_capture_sizes
from compile_backend.runner_config import RunnerConfig

__all__ = [
    "check_capacity",
    "cp_padding_size",
    "decode_capture_sizes",
    "max_bs",
    "max_decode_tokens",
    "max_num_token",
    "max_prefill_buffer_tokens",
    "mlp_sync_align",
    "mlp_sync_alignment",
    "mlp_sync_padded_tokens",
    "num_tokens_per_bs",
    "prefill_capture_sizes",
]

_TOKEN_FIELDS = {  # field: its token dimension
    "input_ids": 0,
    "positions": 0,
    "out_cache_loc": 0,
    "mrope_positions": 1,
    "input_embeds": 0,
}
_BS_FIELDS = (
    "req_pool_indices",
    "seq_lens",
    "seq_lens_cpu",
    "encoder_lens",
    "rids_int",
    "bootstrap_room_ids_int",
    "extend_seq_lens",
    "extend_prefix_lens",
    "extend_start_loc",
    "mamba_track_indices",
    "mamba_track_mask",
    "mamba_track_seqlens",
)


def max_prefill_buffer_tokens(config: RunnerConfig) -> int:
    """Most live tokens of a prefill batch: the chunk, or the token pool where prompts stay whole.

    Under dynamic chunking over pipeline stages a chunk grows to ``max_prefill_tokens``, and the
    profiler that fits the latency model probes at 1.25 times the chunk, rounded up.
    """
    chunk = _chunk(config)
    if chunk == 0:
        assert config.max_total_num_tokens is not None  # RunnerConfig sees to it
        return config.max_total_num_tokens
    if not (config.enable_dynamic_chunking and config.pp_size > 1):
        return chunk
    probe = -(-5 * chunk // 4)
    return max(chunk, config.max_prefill_tokens, probe)


def num_tokens_per_bs(config: RunnerConfig) -> int:
    """Most tokens that one row of the bs axis brings outside prefill.

    A target verifies all draft tokens of a request at once (DFLASH: its block). A draft worker
    steps with one token per branch, then takes in what was accepted: all draft tokens, or two per
    step where each EAGLE step has a layer of its own. A diffusion model denoises a block.
    """
    if config.dllm_block_size is not None:
        return config.dllm_block_size
    if config.speculative_role == "none":
        return 1
    draft_tokens = config.speculative_adaptive_max_draft_tokens
    if draft_tokens is None:
        draft_tokens = config.speculative_num_draft_tokens
    if config.speculative_role == "target":
        return draft_tokens
    layer_tokens = 2 * config.speculative_num_steps if config.speculative_multi_layer_eagle else 0
    return max(config.speculative_eagle_topk, draft_tokens, layer_tokens)


def max_bs(config: RunnerConfig) -> int:
    """Most rows on the bs axis, padded for MLP sync.

    One per running request; a frozen-KV MTP draft worker lays out each branch as a row.
    """
    return mlp_sync_align(config, config.max_running_requests * _rows_per_request(config))


def max_decode_tokens(config: RunnerConfig) -> int:
    """Most tokens of a batch outside prefill, padded for MLP sync as ``max_bs`` is."""
    return max_bs(config) * num_tokens_per_bs(config)


def max_num_token(config: RunnerConfig) -> int:
    """Most rows on the tokens axis, of prefill or not, padded for MLP sync."""
    largest = max(max_prefill_buffer_tokens(config), max_decode_tokens(config))
    return mlp_sync_align(config, largest)


def cp_padding_size(config: RunnerConfig) -> int:
    """What context parallelism makes token counts a multiple of; 1 without it.

    Twice the ranks: zig-zag context parallelism splits each rank's share in two, so that every
    rank attends to an early and a late part of the sequence.
    """
    return 2 * config.attn_cp_size if config.attn_cp_size > 1 else 1


def mlp_sync_alignment(config: RunnerConfig) -> int:
    """What sizes are a multiple of under MLP sync; 1 without it.

    The least common multiple: aligning to attention-TP and then to context parallelism could undo
    the first.
    """
    if not config.enable_mlp_sync:
        return 1
    return math.lcm(config.attn_tp_size, cp_padding_size(config))


def mlp_sync_align(config: RunnerConfig, size: int) -> int:
    """``size`` rows rounded up to the alignment; unchanged without MLP sync."""
    alignment = mlp_sync_alignment(config)
    return -(-size // alignment) * alignment


def mlp_sync_padded_tokens(
    config: RunnerConfig, global_num_tokens: Sequence[int], *, same_size: bool
) -> list[int]:
    """The tokens that each rank runs, from the live tokens of each; the order is kept.

    ``global_num_tokens`` has a count per data-parallel rank where the MLP gathers over them
    (``require_mlp_tp_gather``), else this rank's count alone. ``same_size`` is for a gather of
    equal shares (every graph): each rank runs the largest rank's aligned size, an idle one too.
    Otherwise each rank runs its own aligned size, and an idle one stays at 0. All ranks must pass
    the same ``same_size``. Without MLP sync nothing is aligned.

    Raises SlotMismatchError for another number of counts or a negative one, SlotOverflowError for
    more tokens than ``max_num_token``.
    """
    num_ranks = config.dp_size if config.require_mlp_tp_gather else 1
    if len(global_num_tokens) != num_ranks:
        raise SlotMismatchError(
            f"global_num_tokens is {list(global_num_tokens)}, of {len(global_num_tokens)} ranks, "
            f"but the ranks that gather are {num_ranks} (require_mlp_tp_gather is "
            f"{config.require_mlp_tp_gather}, dp_size {config.dp_size}); pass one count for each"
        )
    limit = max_num_token(config)
    for rank, num_tokens in enumerate(global_num_tokens):
        if num_tokens < 0:
            raise SlotMismatchError(
                f"global_num_tokens is {list(global_num_tokens)}: rank {rank} counts {num_tokens} "
                "tokens; pass 0 for an idle rank"
            )
        if num_tokens > limit:
            raise SlotOverflowError(
                f"global_num_tokens is {list(global_num_tokens)}: rank {rank} brings {num_tokens} "
                f"tokens but buffers hold {limit}; give every rank the same settings, and "
                f"{_advice_for_prefill(config, num_tokens)}"
            )
    aligned = [mlp_sync_align(config, num_tokens) for num_tokens in global_num_tokens]
    return [max(aligned)] * num_ranks if same_size else aligned


def decode_capture_sizes(config: RunnerConfig) -> tuple[int, ...]:
    """Batch sizes of the decode graphs: aligned, increasing, at most ``max_bs``.

    From ``cudagraph_capture_sizes``, of which those above ``max_bs`` become ``max_bs``; by default
    up to and including ``max_bs``, whether or not that lies on the stride.
    """
    return _capture_sizes(config, config.cudagraph_capture_sizes, max_bs(config))


def prefill_capture_sizes(config: RunnerConfig) -> tuple[int, ...]:
    """Token counts of the prefill graphs: aligned, increasing, at most the aligned prefill ceiling.

    From ``prefill_capture_sizes``, or by default, as :func:`decode_capture_sizes`.
    """
    largest = mlp_sync_align(config, max_prefill_buffer_tokens(config))
    return _capture_sizes(config, config.prefill_capture_sizes, largest)


def check_capacity(batch: ForwardBatch, config: RunnerConfig) -> None:
    """Raise SlotOverflowError where ``batch`` is larger than what is allocated, before any write.

    The message names the field, both sizes and the setting to raise. Reads shapes only.
    """
    limit = max_bs(config)
    for field, rows in _bs_sizes(batch):
        if rows > limit:
            requests = -(-rows // _rows_per_request(config))
            raise SlotOverflowError(
                f"{field} brings {rows} rows but buffers hold {limit} on the bs axis; "
                f"raise max_running_requests to at least {requests} or split the batch"
            )
    limit = max_num_token(config)
    for field, num_tokens in _token_sizes(batch):
        if num_tokens > limit:
            raise SlotOverflowError(
                f"{field} brings {num_tokens} tokens but buffers hold {limit} in a batch of mode "
                f"{batch.forward_mode.name}; {_advice(config, batch, num_tokens)} "
                "or split the batch"
            )


def _chunk(config: RunnerConfig) -> int:
    return max(config.chunked_prefill_size or 0, 0)


def _rows_per_request(config: RunnerConfig) -> int:
    is_frozen_draft = (
        config.speculative_algorithm == "FROZEN_KV_MTP" and config.speculative_role == "draft"
    )
    return config.speculative_eagle_topk if is_frozen_draft else 1


def _capture_sizes(
    config: RunnerConfig, listed: tuple[int, ...] | None, largest: int
) -> tuple[int, ...]:
    sizes = default_capture_sizes(largest) if listed is None else listed
    return tuple(sorted({min(mlp_sync_align(config, size), largest) for size in sizes}))


def _bs_sizes(batch: ForwardBatch) -> Iterator[tuple[str, int]]:
    yield "batch_size", batch.batch_size
    for field in _BS_FIELDS:
        tensor = _tensor(batch, field)
        if tensor is not None:
            yield field, tensor.shape[0] if tensor.dim() else 0


def _tensor(batch: ForwardBatch, field: str) -> Tensor | None:
    value = getattr(batch, field)
    if value is None or isinstance(value, Tensor):
        return value
    raise SlotMismatchError(
        f"batch field {field!r} is a {type(value).__name__} ({value!r:.60}); pass a tensor"
    )


def _token_sizes(batch: ForwardBatch) -> Iterator[tuple[str, int]]:
    for field, dim in _TOKEN_FIELDS.items():
        tensor = _tensor(batch, field)
        if tensor is not None:
            yield field, tensor.shape[dim] if tensor.dim() > dim else 0
    if batch.extend_num_tokens is not None:
        yield "extend_num_tokens", batch.extend_num_tokens
    for rank, num_tokens in enumerate(batch.global_num_tokens_cpu or ()):
        yield f"global_num_tokens_cpu[{rank}]", num_tokens


def _advice(config: RunnerConfig, batch: ForwardBatch, num_tokens: int) -> str:
    """Which setting makes room for ``num_tokens``, by what bounds a batch of this mode."""
    if batch.forward_mode in (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.IDLE):
        return _advice_for_prefill(config, num_tokens)
    per_request = -(-num_tokens // max(batch.batch_size, 1))
    if config.dllm_block_size is not None:
        return f"raise dllm_block_size to at least {per_request}"
    if config.speculative_adaptive_max_draft_tokens is not None:
        return f"raise speculative_adaptive_max_draft_tokens to at least {per_request}"
    if config.speculative_algorithm is not None:
        return f"raise speculative_num_draft_tokens to at least {per_request}"
    return f"raise max_running_requests to at least {num_tokens}"


def _advice_for_prefill(config: RunnerConfig, num_tokens: int) -> str:
    setting = "chunked_prefill_size" if _chunk(config) else "max_total_num_tokens"
    return f"raise {setting} to at least {num_tokens}"
