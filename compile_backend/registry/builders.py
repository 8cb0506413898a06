"""The standard slots of serving: registries for decode, for prefill and for eager forwards.

Each builder declares the slots of one forward mode and how each is padded. With ``source`` the
slots adopt the tensors of an existing object (same storage) instead of allocating.
``contiguous_views`` makes every view contiguous, ``mrope_positions`` [3, tokens] included, as
compiled pieces want it; ``pp_proxy_rows`` adds slots for what the previous pipeline stage sends.
"""

from collections.abc import Mapping
from typing import Any

import torch

from compile_backend.registry.registry import CudaGraphBufferRegistry
from compile_backend.registry.slot import PaddingPolicy
from compile_backend.registry.standard_slots import StandardSlots

__all__ = ["ProxyRows", "build_decode_registry", "build_eager_registry", "build_prefill_registry"]

ProxyRows = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Tensors from the previous pipeline stage, by key: the shape of one token's row, and the dtype."""

FOREACH_COPY, ZERO = PaddingPolicy.FOREACH_COPY, PaddingPolicy.ZERO


def build_decode_registry(
    *,
    device: torch.device | str,
    max_bs: int,
    max_num_token: int,
    seq_len_fill_value: int,
    cache_loc_dtype: torch.dtype,
    enable_mamba_track: bool = False,
    is_encoder_decoder: bool = False,
    encoder_len_fill_value: int = 0,
    encoder_lens_dtype: torch.dtype = torch.int32,
    enable_num_token_non_padded: bool = False,
    require_gathered_buffer: bool = False,
    require_mlp_tp_gather: bool = False,
    attn_tp_size: int = 1,
    attn_tp_rank: int = 0,
    dp_size: int = 1,
    register_global_num_tokens: bool = True,
    share_pool: bool = True,
    source: Any = None,
    contiguous_views: bool = False,
    pp_proxy_rows: ProxyRows | None = None,
) -> CudaGraphBufferRegistry:
    """The slots of a decode graph, up to ``max_bs`` requests and ``max_num_token`` tokens.

    ``seq_len_fill_value`` is the length of a padded request, which is the attention backend's to
    say. ``require_gathered_buffer`` says that ranks gather their tokens at the padded size:
    ``num_token_non_padded`` is then this rank's share of the live tokens within the bucket, and the
    global token counts are the bucket's, one per data-parallel rank with ``require_mlp_tp_gather``.

    Raises SlotNotFoundError where ``source`` lacks tensors that slots need; it names all of them.
    """
    slots = StandardSlots(device, max_bs, max_num_token, share_pool, source)
    slots.add_on_tokens("input_ids", torch.int64, FOREACH_COPY)
    slots.add_on_tokens("positions", torch.int64, ZERO)
    slots.add_on_tokens("out_cache_loc", cache_loc_dtype, ZERO)
    slots.add_on_bs("req_pool_indices", torch.int64, ZERO)
    slots.add_lengths("seq_lens", seq_len_fill_value, device=None)
    slots.add_lengths("seq_lens_cpu", seq_len_fill_value, device="cpu")
    slots.add_mrope_positions(contiguous_views=contiguous_views)
    if enable_mamba_track:
        slots.add_on_bs("mamba_track_indices", torch.int64, ZERO)
        slots.add_on_bs("mamba_track_mask", torch.bool, ZERO)
    if is_encoder_decoder:
        slots.add(
            "encoder_lens",
            (max_bs,),
            encoder_lens_dtype,
            axis="bs",
            padding_policy=PaddingPolicy.FILL_ONCE,
            pad_value=encoder_len_fill_value,
        )
    for name in ("rids_int", "bootstrap_room_ids_int"):
        slots.adopt_on_bs_if_present(name)
    if enable_num_token_non_padded:
        slots.add_num_token_non_padded(require_gathered_buffer, attn_tp_size, attn_tp_rank)
    if require_gathered_buffer and register_global_num_tokens:
        slots.add_global_num_tokens(dp_size if require_mlp_tp_gather else 1)
    slots.adopt_pp_proxy_tensors(PaddingPolicy.KEEP_PAD, always_on_tokens=False)
    slots.add_pp_proxy_tensors(pp_proxy_rows or {}, PaddingPolicy.KEEP_PAD)
    slots.adopt_ngram_embedding_info()
    return slots.build()


def build_prefill_registry(
    *,
    device: torch.device | str,
    max_bs: int,
    max_num_token: int,
    cache_loc_dtype: torch.dtype,
    is_multimodal: bool = False,
    hidden_size: int = 0,
    embed_dtype: torch.dtype | None = None,
    enable_mamba_track: bool = False,
    register_input_embeds: bool | None = None,
    enable_num_token_non_padded: bool = False,
    require_gathered_buffer: bool = False,
    attn_tp_size: int = 1,
    attn_tp_rank: int = 0,
    share_pool: bool = True,
    source: Any = None,
    contiguous_views: bool = False,
    pp_proxy_rows: ProxyRows | None = None,
) -> CudaGraphBufferRegistry:
    """The slots of a prefill graph, whose buckets are on the token axis.

    ``input_embeds`` [max_num_token, hidden_size] is written inside the graph, so a fill only zeroes
    its tail; ``register_input_embeds`` None means: where the model is multimodal. Where it is not
    registered the batch's own tensor is carried into the view.

    Raises SlotDefinitionError where ``input_embeds`` is wanted without ``hidden_size`` and
    ``embed_dtype``, SlotNotFoundError where ``source`` lacks a tensor that a slot needs.
    """
    slots = StandardSlots(device, max_bs, max_num_token, share_pool, source)
    slots.add_on_tokens("input_ids", torch.int64, ZERO)
    slots.add_on_tokens("positions", torch.int64, ZERO)
    slots.add_on_tokens("out_cache_loc", cache_loc_dtype, ZERO)
    slots.add_mrope_positions(contiguous_views=contiguous_views)
    if is_multimodal if register_input_embeds is None else register_input_embeds:
        slots.add_input_embeds(hidden_size, embed_dtype)
    if enable_mamba_track:
        slots.add_on_bs("mamba_track_indices", torch.int64, FOREACH_COPY)
        slots.add_on_bs("mamba_track_mask", torch.bool, FOREACH_COPY)
        slots.add_on_bs("mamba_track_seqlens", torch.int64, FOREACH_COPY)
    if enable_num_token_non_padded:
        slots.add_num_token_non_padded(require_gathered_buffer, attn_tp_size, attn_tp_rank)
    slots.adopt_pp_proxy_tensors(ZERO, always_on_tokens=True)
    slots.add_pp_proxy_tensors(pp_proxy_rows or {}, ZERO)
    return slots.build()


def build_eager_registry(
    *,
    device: torch.device | str,
    max_bs: int,
    max_num_token: int,
    cache_loc_dtype: torch.dtype,
    enable_mamba_track: bool = False,
    is_encoder_decoder: bool = False,
    encoder_len_fill_value: int = 0,
    encoder_lens_dtype: torch.dtype = torch.int32,
    enable_num_token_non_padded: bool = False,
    require_gathered_buffer: bool = False,
    attn_tp_size: int = 1,
    attn_tp_rank: int = 0,
    share_pool: bool = True,
    source: Any = None,
    contiguous_views: bool = False,
    pp_proxy_rows: ProxyRows | None = None,
) -> CudaGraphBufferRegistry:
    """The decode slots at the largest sizes of any mode, for forwards that run without a graph.

    Padded lengths are 0. There are no global-token slots: the batch's own values are carried.
    Raises as :func:`build_decode_registry`.
    """
    return build_decode_registry(
        device=device,
        max_bs=max_bs,
        max_num_token=max_num_token,
        seq_len_fill_value=0,
        cache_loc_dtype=cache_loc_dtype,
        enable_mamba_track=enable_mamba_track,
        is_encoder_decoder=is_encoder_decoder,
        encoder_len_fill_value=encoder_len_fill_value,
        encoder_lens_dtype=encoder_lens_dtype,
        enable_num_token_non_padded=enable_num_token_non_padded,
        require_gathered_buffer=require_gathered_buffer,
        attn_tp_size=attn_tp_size,
        attn_tp_rank=attn_tp_rank,
        register_global_num_tokens=False,
        share_pool=share_pool,
        source=source,
        contiguous_views=contiguous_views,
        pp_proxy_rows=pp_proxy_rows,
    )
