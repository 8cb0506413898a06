"""The attention backend in plain PyTorch: gather the slots of each request, then SDPA.

Any device and floating dtype. Decode reads nothing on the host and fits a FULL graph; the number it
bakes is the KV length that is gathered, so that length is a bucket and part of the graph key.
"""

from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from compile_backend.attention.base import AttentionBackend
from compile_backend.attention.batch_fields import (
    cache_locations,
    extend_lengths,
    on_requests,
    unplanned,
)
from compile_backend.attention.context import ForwardContext
from compile_backend.attention.kv_cache import SCRATCH_SLOT, KVCache, RequestTable
from compile_backend.attention.request_groups import (
    SHORT_EXTEND,
    DecodePlan,
    ExtendPlan,
    RequestGroup,
    extend_groups,
)
from compile_backend.errors import ConfigError, ContextError
from compile_backend.forward_batch import ForwardBatch, ForwardMode

__all__ = ["TorchNativeBackend"]


class TorchNativeBackend(AttentionBackend):
    """Attention over ``kv_cache``, whose slots ``request_table`` gives to requests.

    ``kv_len_buckets`` are the KV lengths that decode graphs span; None means 64, then four to each
    doubling.
    The table's ``max_context_len`` always is the largest. Raises ConfigError for buckets outside 1
    to ``max_context_len``.
    """

    name: ClassVar[str] = "torch_native"
    full_graph_modes: ClassVar[frozenset[ForwardMode]] = frozenset({ForwardMode.DECODE})

    def __init__(
        self,
        kv_cache: KVCache,
        request_table: RequestTable,
        kv_len_buckets: Sequence[int] | None = None,
    ) -> None:
        self.kv_cache = kv_cache
        self.request_table = request_table
        self.kv_len_buckets = _kv_len_buckets(kv_len_buckets, request_table.max_context_len)
        self._device = request_table.req_to_token.device
        with torch.inference_mode(False):
            self._positions = torch.arange(request_table.max_context_len, device=self._device)
        self._max_bs = 0
        self._buffers = DecodePlan.buffers(0, 0, self._device)
        self._plans: dict[tuple[int, int], DecodePlan] = {}

    @property
    def seq_len_fill_value(self) -> int:
        return 1

    @property
    def max_seq_len(self) -> int:
        return self.request_table.max_context_len

    def init_graph_state(self, *, max_bs: int, max_num_tokens: int) -> None:
        """As the contract says. 5 bytes per request and token of context."""
        if max_bs <= self._max_bs:
            return
        if self._plans:
            raise ConfigError(
                f"init_graph_state(max_bs={max_bs}) after plans for up to {self._max_bs} requests "
                "were handed out: a graph may read them where they are; call it once, before the "
                "first capture, with the largest batch size"
            )
        size = max_bs * self.request_table.max_context_len
        self._buffers = DecodePlan.buffers(size, max_bs, self._device)
        self._max_bs = max_bs

    def captured_tensors(self) -> Sequence[Tensor]:
        return (self.kv_cache.k, self.kv_cache.v, self.request_table.req_to_token)

    def graph_key(self, forward_batch: ForwardBatch) -> tuple[int, ...]:
        """For a decode the smallest KV length bucket that holds the longest request, else ().

        Reads ``seq_lens_cpu``, or ``seq_lens`` (a synchronisation) where that is None. Raises
        ContextError for a request longer than ``max_context_len``.
        """
        if not forward_batch.forward_mode.is_decode_or_idle():
            return ()
        longest = self._longest(forward_batch)
        return (next(bucket for bucket in self.kv_len_buckets if bucket >= longest),)

    def capture_keys(self, forward_mode: ForwardMode, batch_size: int) -> Sequence[tuple[int, ...]]:
        if not forward_mode.is_decode_or_idle():
            return [()]
        return [(kv_len,) for kv_len in self.kv_len_buckets]

    def init_forward_metadata(
        self, forward_batch: ForwardBatch, *, graph_key: tuple[int, ...] | None = None
    ) -> RequestGroup | ExtendPlan:
        """A RequestGroup for a decode, else an ExtendPlan, which is eager whatever the key."""
        if not forward_batch.forward_mode.is_decode_or_idle():
            return self._plan_extend(forward_batch)
        longest = self._longest(forward_batch)
        if graph_key is None:
            plan = self._own_plan(forward_batch.batch_size, longest)
        else:
            plan = self._static_plan(forward_batch.batch_size, longest, graph_key)
        if forward_batch.batch_size == 0:
            return plan.group
        return plan.write(
            self.request_table.req_to_token,
            self._positions,
            on_requests(forward_batch, "req_pool_indices"),
            on_requests(forward_batch, "seq_lens"),
        )

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        layer_id: int,
        scale: float | None,
        context: ForwardContext,
    ) -> Tensor:
        group = context.metadata
        if not isinstance(group, RequestGroup):
            raise unplanned(context)
        if group.num_requests == 0 and context.forward_batch.forward_mode.is_idle():
            return q.new_zeros(q.shape)  # padded rows of a rank without requests
        if q.shape[0] != group.num_requests:
            raise ContextError(
                f"layer {layer_id}: {q.shape[0]} query rows for a decode that was planned for "
                f"{group.num_requests} requests; give one row per request, and call "
                "init_forward_metadata with the batch that the model runs on"
            )
        cache = self._store(layer_id, q, k, v, cache_locations(context, q.shape[0]))
        return _attend(q, *cache, group, scale)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        layer_id: int,
        scale: float | None,
        context: ForwardContext,
    ) -> Tensor:
        plan = context.metadata
        if not isinstance(plan, ExtendPlan):
            raise unplanned(context)
        num_live = plan.num_tokens
        if q.shape[0] < num_live:
            raise ContextError(
                f"layer {layer_id}: {q.shape[0]} query rows, but extend_seq_lens_cpu adds up to "
                f"{num_live} tokens; give one row per token"
            )
        locations = cache_locations(context, num_live)
        cache = self._store(layer_id, q, k, v, locations)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        start = 0
        for group in plan.groups:
            rows = q.narrow(0, start, group.num_tokens)
            out.narrow(0, start, group.num_tokens).copy_(_attend(rows, *cache, group, scale))
            start += group.num_tokens
        out.narrow(0, num_live, q.shape[0] - num_live).zero_()
        return out

    def reset_scratch(self) -> None:
        for cache in (self.kv_cache.k, self.kv_cache.v):
            cache[:, SCRATCH_SLOT].zero_()

    # --- planning -------------------------------------------------------------------------------

    def _longest(self, batch: ForwardBatch) -> int:
        """Tokens of the longest request, at least 1. Raises ContextError above the maximum."""
        if batch.batch_size == 0:
            return 1
        on_host = "seq_lens" if batch.seq_lens_cpu is None else "seq_lens_cpu"
        longest = max(1, int(on_requests(batch, on_host).max()))
        if longest > self.request_table.max_context_len:
            raise self._too_long(longest)
        return longest

    def _too_long(self, length: int) -> ContextError:
        return ContextError(
            f"a request of the batch has {length} tokens; the request table holds "
            f"{self.request_table.max_context_len}; end the request, or raise max_context_len"
        )

    def _own_plan(self, batch_size: int, kv_len: int) -> DecodePlan:
        buffers = DecodePlan.buffers(batch_size * kv_len, batch_size, self._device)
        return DecodePlan(*buffers, batch_size=batch_size, kv_len=kv_len)

    def _static_plan(self, batch_size: int, longest: int, graph_key: tuple[int, ...]) -> DecodePlan:
        if len(graph_key) != 1 or graph_key[0] not in self.kv_len_buckets:
            raise ContextError(
                f"graph_key {graph_key} is none of {self.capture_keys(ForwardMode.DECODE, 1)}; use "
                "what graph_key(forward_batch) returned"
            )
        (kv_len,) = graph_key
        if longest > kv_len:
            raise ContextError(
                f"a request of the batch has {longest} tokens and the graph of key {graph_key} "
                f"spans {kv_len}; replay the graph of key graph_key(forward_batch)"
            )
        if batch_size > self._max_bs:
            raise ContextError(
                f"a plan for {batch_size} requests was asked for in buffers for {self._max_bs}; "
                f"call init_graph_state(max_bs={batch_size}, ...) before the first capture"
            )
        plan = self._plans.get((batch_size, kv_len))
        if plan is None:
            plan = DecodePlan(*self._buffers, batch_size=batch_size, kv_len=kv_len)
            self._plans[batch_size, kv_len] = plan
        return plan

    def _plan_extend(self, batch: ForwardBatch) -> ExtendPlan:
        if batch.batch_size == 0:
            return ExtendPlan(groups=(), num_tokens=0)
        new_lens, prefix_lens = extend_lengths(batch)
        longest = max(new + prefix for new, prefix in zip(new_lens, prefix_lens, strict=True))
        if longest > self.request_table.max_context_len:
            raise self._too_long(longest)
        groups = extend_groups(
            self.request_table.req_to_token,
            self._positions,
            on_requests(batch, "req_pool_indices"),
            new_lens=new_lens,
            prefix_lens=prefix_lens,
            is_causal=batch.forward_mode is not ForwardMode.DLLM_EXTEND,
        )
        return ExtendPlan(groups=tuple(groups), num_tokens=sum(new_lens))

    # --- the cache ------------------------------------------------------------------------------

    def _store(
        self, layer_id: int, q: Tensor, k: Tensor, v: Tensor, locations: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write the first rows of k and v where ``locations`` says; return the layer's cache."""
        cache = self.kv_cache
        row = (cache.num_kv_heads, cache.head_dim)
        fits = k.shape == v.shape == (q.shape[0], *row) and q.shape[2] == cache.head_dim
        if not fits or q.shape[1] % cache.num_kv_heads:
            raise ContextError(
                f"layer {layer_id}: q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do "
                f"not fit a KV cache of {row[0]} heads of {row[1]}; k and v must be "
                f"[tokens, {row[0]}, {row[1]}], and q's heads a multiple of {row[0]}"
            )
        k_layer, v_layer = cache.layer(layer_id)
        num_tokens = locations.shape[0]
        k_layer[locations] = k.narrow(0, 0, num_tokens).to(k_layer.dtype)
        v_layer[locations] = v.narrow(0, 0, num_tokens).to(v_layer.dtype)
        return k_layer, v_layer


def _attend(
    q: Tensor, k_layer: Tensor, v_layer: Tensor, group: RequestGroup, scale: float | None
) -> Tensor:
    """The attention of one group: q and the result are [group.num_tokens, num_heads, head_dim]."""
    keys = _gather(k_layer, group).to(q.dtype)
    values = _gather(v_layer, group).to(q.dtype)
    num_requests, num_new = group.num_requests, group.num_new
    num_heads, head_dim = q.shape[1:]
    out: Tensor
    if num_new > SHORT_EXTEND:
        out = F.scaled_dot_product_attention(
            q.view(num_requests, num_new, num_heads, head_dim).transpose(1, 2),
            keys,
            values,
            attn_mask=group.mask,
            is_causal=group.is_causal,
            scale=scale,
            enable_gqa=True,
        )
        return out.transpose(1, 2).reshape(q.shape)
    # The heads that share a KV head take the place of the query length, in the order (token, head):
    # quicker where there are few tokens, but the mask must be as long.
    num_kv_heads = k_layer.shape[1]
    num_sharing = num_heads // num_kv_heads
    by_kv_head = q.view(num_requests, num_new, num_kv_heads, num_sharing, head_dim).transpose(1, 2)
    mask = group.mask
    if mask is not None and num_new > 1:
        mask = mask.repeat_interleave(num_sharing, dim=2)
    out = F.scaled_dot_product_attention(
        by_kv_head.flatten(2, 3), keys, values, attn_mask=mask, scale=scale
    )
    by_token = out.view(num_requests, num_kv_heads, num_new, num_sharing, head_dim).transpose(1, 2)
    return by_token.reshape(q.shape)


def _gather(cache: Tensor, group: RequestGroup) -> Tensor:
    """The group's tokens as [num_requests, num_kv_heads, kv_len, head_dim]."""
    tokens = cache.flatten(1).index_select(0, group.slots)
    return tokens.view(group.num_requests, group.kv_len, *cache.shape[1:]).transpose(1, 2)


def _kv_len_buckets(asked: Sequence[int] | None, max_context_len: int) -> tuple[int, ...]:
    if asked is None:
        asked = list(_quarter_steps(max_context_len))
    wrong = [bucket for bucket in asked if not 1 <= bucket <= max_context_len]
    if wrong:
        raise ConfigError(
            f"kv_len_buckets {wrong} are outside 1 to max_context_len {max_context_len}; remove "
            "them, or raise max_context_len of the request table"
        )
    return tuple(sorted({*asked, max_context_len}))


def _quarter_steps(longest: int) -> Iterator[int]:
    """64, then four steps to each doubling, below ``longest``: at most a quarter is gathered for
    nothing, and each doubling of the context costs four graphs for each batch size."""
    length = 64
    while length < longest:
        yield length
        length += 2 ** (length.bit_length() - 1) // 4
