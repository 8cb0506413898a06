"""The attention backend on FlashInfer's paged kernels, with a page of one token slot.

Every batch is planned on the host, before each run and each replay. For a graph the plan goes into
buffers at fixed addresses, which all sizes share, since a plan lives until the next one only. The
package is imported when a backend is made.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
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
from compile_backend.attention.paged_indices import indptr_of, write_indices
from compile_backend.errors import ConfigError, ContextError
from compile_backend.extras import import_extra
from compile_backend.forward_batch import ForwardBatch, ForwardMode

__all__ = ["FlashInferBackend", "FlashInferPlan"]

PAGE_SIZE = 1
WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends for partial results of split requests
PLAN_BYTES = 8 << 20  # the size of the planner's workspace in FlashInfer's own wrappers
LARGE_GROUP = 4  # query heads per KV head from which tensor cores are faster in decode
QUERY_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class FlashInferPlan:
    """What a forward pass runs on. ``wrapper`` is FlashInfer's, None where nothing is live."""

    wrapper: Any
    is_decode: bool
    num_requests: int
    num_tokens: int  # live ones; rows past them are padding


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lengths:
    """New tokens and keys of each request, on the host."""

    new: list[int]
    keys: list[int]


class _Planner:
    """One of FlashInfer's wrappers. Planning writes pinned memory that is copied to the device in
    the background, so the next plan waits for the copy of the one before."""

    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self.wrapper = wrapper
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def plan(self, arguments: dict[str, Any]) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        self.wrapper.plan(**arguments)
        if self._copied is not None:
            self._copied.record()


class FlashInferBackend(AttentionBackend):
    """Attention over ``kv_cache``, whose slots ``request_table`` gives to requests, by FlashInfer.

    Queries have ``num_qo_heads`` heads and ``q_dtype``, by default the cache's. ``kernel`` is the
    ``backend`` of FlashInfer's wrappers. Padded requests read the scratch slot.
    Decode and DLLM_EXTEND fit a FULL graph. TARGET_VERIFY runs as written between the segments: a
    draft tree brings another mask (``spec_info.custom_mask``, flat bool) each time.

    Raises MissingExtraError without the package, ConfigError for heads and dtypes that do not fit.
    """

    name: ClassVar[str] = "flashinfer"
    full_graph_modes: ClassVar[frozenset[ForwardMode]] = frozenset(
        {ForwardMode.DECODE, ForwardMode.DLLM_EXTEND}
    )

    def __init__(
        self,
        kv_cache: KVCache,
        request_table: RequestTable,
        *,
        num_qo_heads: int,
        q_dtype: torch.dtype | None = None,
        kernel: str = "fa2",
        use_tensor_cores: bool | None = None,
        workspace_bytes: int = WORKSPACE_BYTES,
    ) -> None:
        self._flashinfer = import_extra(
            "flashinfer", extra="cuda", needed_for="the flashinfer attention backend"
        )
        self.kv_cache = kv_cache
        self.request_table = request_table
        self.num_qo_heads = num_qo_heads
        self.q_dtype = kv_cache.k.dtype if q_dtype is None else q_dtype
        group = _heads_per_kv_head(num_qo_heads, kv_cache.num_kv_heads)
        if self.q_dtype not in QUERY_DTYPES:
            raise ConfigError(
                f"queries of {self.q_dtype} on a KV cache of {kv_cache.k.dtype}: FlashInfer's "
                f"queries are {QUERY_DTYPES[0]} or {QUERY_DTYPES[1]}; pass one as q_dtype, or use "
                "TorchNativeBackend"
            )
        self._kernel = kernel
        self._use_tensor_cores = (
            group >= LARGE_GROUP if use_tensor_cores is None else (use_tensor_cores)
        )
        self._device = request_table.req_to_token.device
        self._max_bs = 0
        self._static: dict[tuple[bool, int, int], tuple[_Planner, FlashInferPlan]] = {}
        self._free: dict[bool, list[_Planner]] = {True: [], False: []}  # by whether they decode
        with torch.inference_mode(False):
            self._workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=self._device)
        self._make_buffers(0)

    @property
    def seq_len_fill_value(self) -> int:
        """1: a request of length 0 would be a softmax over nothing."""
        return 1

    @property
    def max_seq_len(self) -> int:
        return self.request_table.max_context_len

    def init_graph_state(self, *, max_bs: int, max_num_tokens: int) -> None:
        """As the contract says. 4 bytes per request and token of context."""
        if max_bs <= self._max_bs:
            return
        if self._static:
            raise ConfigError(
                f"init_graph_state(max_bs={max_bs}) after plans for up to {self._max_bs} requests "
                "were handed out: a graph may read them where they are; call it once, before the "
                "first capture, with the largest batch size"
            )
        self._make_buffers(max_bs)

    def captured_tensors(self) -> Sequence[Tensor]:
        return (self.kv_cache.k, self.kv_cache.v)

    def init_forward_metadata(
        self, forward_batch: ForwardBatch, *, graph_key: tuple[int, ...] | None = None
    ) -> FlashInferPlan:
        """As the contract says; reads lengths from ``seq_lens_cpu``, or from ``seq_lens`` (a
        synchronisation) where that is None."""
        is_decode = forward_batch.forward_mode.is_decode_or_idle()
        if forward_batch.batch_size == 0:
            return FlashInferPlan(wrapper=None, is_decode=is_decode, num_requests=0, num_tokens=0)
        if is_decode:
            lengths = _uniform_lengths(forward_batch, 1)
        elif graph_key is None:
            lengths = _extend_lengths(forward_batch)
        else:
            lengths = _uniform_lengths(forward_batch, _tokens_per_request(forward_batch))
        self._check(forward_batch, lengths, graph_key)
        if graph_key is None:
            planner, plan = self._own_plan(is_decode, lengths)
            indices = self._indices.new_empty(sum(lengths.keys))
        else:
            planner, plan = self._static_plan(is_decode, lengths)
            indices = self._indices
        planner.plan(self._plan_arguments(forward_batch, lengths, indices))
        return plan

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
        plan = _plan_of(context, is_decode=True)
        if plan.wrapper is None and context.forward_batch.forward_mode.is_idle():
            return q.new_zeros(q.shape)  # padded rows of a rank without requests
        if q.shape[0] != plan.num_requests:
            raise ContextError(
                f"layer {layer_id}: {q.shape[0]} query rows for a decode that was planned for "
                f"{plan.num_requests} requests; give one row per request, and call "
                "init_forward_metadata with the batch that the model runs on"
            )
        return self._attend(q, k, v, plan, layer_id, scale, context)

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
        plan = _plan_of(context, is_decode=False)
        if q.shape[0] < plan.num_tokens:
            raise ContextError(
                f"layer {layer_id}: {q.shape[0]} query rows, but {plan.num_tokens} tokens were "
                "planned; give one row per token"
            )
        return self._attend(q, k, v, plan, layer_id, scale, context)

    def reset_scratch(self) -> None:
        for cache in (self.kv_cache.k, self.kv_cache.v):
            cache[:, SCRATCH_SLOT].zero_()

    # --- planning -------------------------------------------------------------------------------

    def _make_buffers(self, max_bs: int) -> None:
        """What the plans of graphs are written to: the CSR arrays, and the planner's workspace."""
        size = max_bs * self.request_table.max_context_len
        with torch.inference_mode(False):

            def buffer(length: int, value: int = 0) -> Tensor:
                return torch.full((length,), value, dtype=torch.int32, device=self._device)

            self._indices = buffer(size)
            self._indptr, self._qo_indptr = buffer(max_bs + 1), buffer(max_bs + 1)
            self._last_page_len = buffer(max_bs, PAGE_SIZE)
            self._plan_workspace = torch.zeros(
                PLAN_BYTES if max_bs else 0, dtype=torch.uint8, device=self._device
            )
        self._max_bs = max_bs

    def _check(
        self, batch: ForwardBatch, lengths: _Lengths, graph_key: tuple[int, ...] | None
    ) -> None:
        longest, limit = max(lengths.keys), self.request_table.max_context_len
        if longest > limit:
            raise ContextError(
                f"a request of the batch has {longest} tokens; the request table holds {limit}; "
                "end the request, or raise max_context_len"
            )
        if graph_key is None:
            return
        if graph_key != ():
            raise ContextError(
                f"graph_key {graph_key} is not (); use what graph_key(forward_batch) returned"
            )
        if _custom_mask(batch) is not None:
            raise ContextError(
                f"a {batch.forward_mode.name} batch of a graph brings a custom_mask, which the "
                "graph does not read; run it without graph_key"
            )
        batch_size = batch.batch_size
        if batch_size > self._max_bs:
            raise ContextError(
                f"a plan for {batch_size} requests was asked for in buffers for {self._max_bs}; "
                f"call init_graph_state(max_bs={batch_size}, ...) before the first capture"
            )

    def _own_plan(self, is_decode: bool, lengths: _Lengths) -> tuple[_Planner, FlashInferPlan]:
        """A plan that nobody else writes to until it is dropped, whose wrapper is then free."""
        free = self._free[is_decode]
        planner = free.pop() if free else _Planner(self._wrapper(is_decode, None), self._device)
        plan = _plan(planner, is_decode, lengths)
        weakref.finalize(plan, free.append, planner).atexit = False
        return planner, plan

    def _static_plan(self, is_decode: bool, lengths: _Lengths) -> tuple[_Planner, FlashInferPlan]:
        """The plan of a bucket, which is the same object from the capture on."""
        batch_size = len(lengths.keys)
        key = (is_decode, batch_size, sum(lengths.new))
        found = self._static.get(key)
        if found is None:
            planner = _Planner(self._wrapper(is_decode, batch_size), self._device)
            # One plan is live at a time, so the planner's workspace on the device is shared.
            planner.wrapper.reset_workspace_buffer(self._workspace, self._plan_workspace)
            found = self._static[key] = planner, _plan(planner, is_decode, lengths)
        return found

    def _wrapper(self, is_decode: bool, batch_size: int | None) -> Any:
        """FlashInfer's wrapper: for graphs of ``batch_size``, or None for any batch."""
        kind = "Decode" if is_decode else "Prefill"
        make = getattr(self._flashinfer, f"Batch{kind}WithPagedKVCacheWrapper")
        return make(self._workspace, "NHD", **self._wrapper_arguments(is_decode, batch_size))

    def _wrapper_arguments(self, is_decode: bool, batch_size: int | None) -> dict[str, Any]:
        arguments: dict[str, Any] = {"backend": self._kernel}
        if is_decode:
            arguments["use_tensor_cores"] = self._use_tensor_cores
        if batch_size is None:
            return arguments
        suffix = "buffer" if is_decode else "buf"
        arguments["use_cuda_graph"] = True
        arguments[f"paged_kv_indptr_{suffix}"] = self._indptr.narrow(0, 0, batch_size + 1)
        arguments[f"paged_kv_indices_{suffix}"] = self._indices
        last_page_len = self._last_page_len.narrow(0, 0, batch_size)
        arguments[f"paged_kv_last_page_len_{suffix}"] = last_page_len
        if not is_decode:
            arguments["qo_indptr_buf"] = self._qo_indptr.narrow(0, 0, batch_size + 1)
        return arguments

    def _plan_arguments(
        self, batch: ForwardBatch, lengths: _Lengths, indices: Tensor
    ) -> dict[str, Any]:
        """What ``plan`` is given. Lengths stay on the host, where it reads them; the indices are
        written to the head of ``indices``."""
        cache = self.kv_cache
        indptr = indptr_of(lengths.keys)
        written = write_indices(
            self.request_table.req_to_token,
            on_requests(batch, "req_pool_indices"),
            indptr.to(self._device),
            int(indptr[-1]),
            indices,
        )
        last_page_len = torch.full((len(lengths.keys),), PAGE_SIZE, dtype=torch.int32)
        arguments: dict[str, Any] = {
            "num_qo_heads": self.num_qo_heads,
            "num_kv_heads": cache.num_kv_heads,
            "page_size": PAGE_SIZE,
            "q_data_type": self.q_dtype,
            "kv_data_type": cache.k.dtype,
        }
        if batch.forward_mode.is_decode_or_idle():
            arguments |= {"indptr": indptr, "indices": written, "last_page_len": last_page_len}
            arguments["head_dim"] = cache.head_dim
            return arguments
        arguments |= {
            "qo_indptr": indptr_of(lengths.new),
            "paged_kv_indptr": indptr,
            "paged_kv_indices": written,
            "paged_kv_last_page_len": last_page_len,
            "head_dim_qk": cache.head_dim,
            "causal": batch.forward_mode is not ForwardMode.DLLM_EXTEND,
        }
        mask = _custom_mask(batch)
        return arguments if mask is None else {**arguments, "custom_mask": mask}

    # --- running --------------------------------------------------------------------------------

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: FlashInferPlan,
        layer_id: int,
        scale: float | None,
        context: ForwardContext,
    ) -> Tensor:
        """Store k and v of the live rows and attend; rows past them come out as zeros."""
        num_live = plan.num_tokens
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if num_live < q.shape[0]:
            out.narrow(0, num_live, q.shape[0] - num_live).zero_()
        if num_live == 0:
            return out
        self._check_shapes(layer_id, q, k, v)
        locations = cache_locations(context, num_live)
        k_layer, v_layer = self.kv_cache.layer(layer_id)
        k_layer[locations] = k.narrow(0, 0, num_live).to(k_layer.dtype)
        v_layer[locations] = v.narrow(0, 0, num_live).to(v_layer.dtype)
        rows = q.narrow(0, 0, num_live)
        plan.wrapper.run(
            rows if rows.stride(-1) == 1 else rows.contiguous(),  # the kernels take other strides
            (k_layer.unsqueeze(1), v_layer.unsqueeze(1)),  # pages of one slot
            # Multiplies the scale of the plan, head_dim ** -0.5, which is the same for all layers.
            q_scale=None if scale is None else scale * self.kv_cache.head_dim**0.5,
            out=out.narrow(0, 0, num_live),
        )
        return out

    def _check_shapes(self, layer_id: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        cache = self.kv_cache
        row = (cache.num_kv_heads, cache.head_dim)
        wanted = (q.shape[0], self.num_qo_heads, cache.head_dim)
        fits = q.shape == wanted and k.shape == v.shape == (q.shape[0], *row)
        if not fits or q.dtype != self.q_dtype:
            raise ContextError(
                f"layer {layer_id}: q {list(q.shape)} of {q.dtype}, k {list(k.shape)} and v "
                f"{list(v.shape)} do not fit what was planned: q [tokens, {self.num_qo_heads}, "
                f"{row[1]}] of {self.q_dtype}, k and v [tokens, {row[0]}, {row[1]}]; make the "
                "backend with the model's num_qo_heads and q_dtype"
            )


def _heads_per_kv_head(num_qo_heads: int, num_kv_heads: int) -> int:
    if num_qo_heads < 1 or num_qo_heads % num_kv_heads:
        raise ConfigError(
            f"num_qo_heads is {num_qo_heads}, which is no multiple of the cache's {num_kv_heads} "
            "KV heads; pass the model's number of query heads on this rank"
        )
    return num_qo_heads // num_kv_heads


def _plan(planner: _Planner, is_decode: bool, lengths: _Lengths) -> FlashInferPlan:
    return FlashInferPlan(
        wrapper=planner.wrapper,
        is_decode=is_decode,
        num_requests=len(lengths.keys),
        num_tokens=sum(lengths.new),
    )


def _plan_of(context: ForwardContext, *, is_decode: bool) -> FlashInferPlan:
    plan = context.metadata
    if not isinstance(plan, FlashInferPlan) or plan.is_decode is not is_decode:
        raise unplanned(context)
    return plan


def _custom_mask(batch: ForwardBatch) -> Tensor | None:
    mask: Tensor | None = getattr(batch.spec_info, "custom_mask", None)
    return mask


def _uniform_lengths(batch: ForwardBatch, tokens_each: int) -> _Lengths:
    """Of a batch whose requests have ``tokens_each`` new tokens, padded ones included: those read
    the scratch slot as often as they have tokens, so that none of them sees nothing."""
    field = "seq_lens" if batch.seq_lens_cpu is None else "seq_lens_cpu"
    keys = [max(length, tokens_each) for length in on_requests(batch, field).tolist()]
    return _Lengths(new=[tokens_each] * batch.batch_size, keys=keys)


def _extend_lengths(batch: ForwardBatch) -> _Lengths:
    new, prefixes = extend_lengths(batch)
    return _Lengths(
        new=list(new), keys=[n + prefix for n, prefix in zip(new, prefixes, strict=True)]
    )


def _tokens_per_request(batch: ForwardBatch) -> int:
    """Of a batch of a graph, in which every request has the same number."""
    each, rest = divmod(batch.num_tokens, batch.batch_size)
    if rest or set(batch.extend_seq_lens_cpu or [each]) != {each}:
        raise ContextError(
            f"a {batch.forward_mode.name} batch of a graph has {batch.num_tokens} tokens for "
            f"{batch.batch_size} requests (extend_seq_lens_cpu {batch.extend_seq_lens_cpu}); give "
            "each the same number of new tokens, or run it without graph_key"
        )
    return each
