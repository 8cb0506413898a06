"""The declarations behind the builders: what each standard slot holds and how it is filled."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compile_backend.errors import SlotDefinitionError, SlotNotFoundError
from compile_backend.registry.layout import Axis
from compile_backend.registry.registry import CudaGraphBufferRegistry
from compile_backend.registry.slot import (
    ComputedNumber,
    FillContext,
    GraphSlot,
    PaddingPolicy,
    PostFill,
    SourceFn,
)

__all__ = ["StandardSlots"]


class StandardSlots:
    """Collects slot declarations, then registers them all, bound to ``source`` where there is one.

    ``build`` comes last so that one error can name everything that ``source`` lacks.
    """

    def __init__(
        self,
        device: torch.device | str,
        max_bs: int,
        max_num_token: int,
        share_pool: bool,
        source: Any,
    ) -> None:
        self.registry = CudaGraphBufferRegistry(
            device=device, max_bs=max_bs, max_num_tokens=max_num_token, share_pool=share_pool
        )
        self.max_bs, self.max_num_token = max_bs, max_num_token
        self.source = source
        self._declared: list[tuple[GraphSlot, Tensor | None]] = []
        self._missing: list[str] = []

    def build(self) -> CudaGraphBufferRegistry:
        """Register every slot. Raises SlotNotFoundError naming what ``source`` lacks."""
        if self._missing:
            raise SlotNotFoundError(
                f"the source ({type(self.source).__name__}) lacks the tensors {self._missing}; "
                f"allocate them there, or pass source=None to have the registry allocate"
            )
        for slot, bind in self._declared:
            self.registry.register_slot(slot, bind=bind)
        return self.registry

    def add(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        axis: Axis,
        padding_policy: PaddingPolicy,
        pad_value: float | None = None,
        device: torch.device | str | None = None,
        copy_from_fb: bool = True,
        post_fill: PostFill | None = None,
        slice_fn: Callable[[Tensor, int, int], Tensor] | None = None,
        source_fn: SourceFn | None = None,
        bind: Tensor | None = None,
    ) -> None:
        """Declare a slot; without ``bind`` it adopts the source's tensor of the same name."""
        if bind is None and self.source is not None:
            bind = getattr(self.source, name, None)
            if not isinstance(bind, Tensor):
                self._missing.append(name)
        slot = GraphSlot(
            name,
            lambda max_bs, max_num_tokens: shape,
            dtype,
            axis=axis,
            device=device,
            padding_policy=padding_policy,
            pad_value=pad_value,
            copy_from_fb=copy_from_fb,
            post_fill=post_fill,
            slice_fn=slice_fn,
            source_fn=source_fn,
        )
        self._declared.append((slot, bind))

    def add_on_tokens(self, name: str, dtype: torch.dtype, policy: PaddingPolicy) -> None:
        self.add(name, (self.max_num_token,), dtype, axis="tokens", padding_policy=policy)

    def add_on_bs(self, name: str, dtype: torch.dtype, policy: PaddingPolicy) -> None:
        self.add(name, (self.max_bs,), dtype, axis="bs", padding_policy=policy)

    def add_lengths(self, name: str, fill_value: int, *, device: str | None) -> None:
        self.add(
            name,
            (self.max_bs,),
            torch.int64,
            axis="bs",
            padding_policy=PaddingPolicy.FILL_SENTINEL,
            pad_value=fill_value,
            device=device,
        )

    def add_mrope_positions(self, *, contiguous_views: bool) -> None:
        """[3, tokens], cut on dimension 1: the rows of a view are max_num_token apart, or with
        ``contiguous_views`` it is a reshape of the flat buffer."""
        self.add(
            "mrope_positions",
            (3, self.max_num_token),
            torch.int64,
            axis=(None, "tokens"),
            padding_policy=PaddingPolicy.ZERO,
            slice_fn=None if contiguous_views else _cut_tokens_of_rows,
        )

    def add_input_embeds(self, hidden_size: int, dtype: torch.dtype | None) -> None:
        if hidden_size < 1 or dtype is None:
            raise SlotDefinitionError(
                f"slot 'input_embeds' needs the embedding's size and dtype but hidden_size is "
                f"{hidden_size} and embed_dtype is {dtype}; pass both, or "
                f"register_input_embeds=False"
            )
        self.add(
            "input_embeds",
            (self.max_num_token, hidden_size),
            dtype,
            axis="tokens",
            padding_policy=PaddingPolicy.ZERO,
            copy_from_fb=False,
        )

    def add_num_token_non_padded(
        self, is_sharded: bool, attn_tp_size: int, attn_tp_rank: int
    ) -> None:
        self.add(
            "num_token_non_padded",
            (1,),
            torch.int32,
            axis="none",
            padding_policy=PaddingPolicy.KEEP_PAD,
            copy_from_fb=False,
            source_fn=None if is_sharded else _live_tokens_tensor,
            post_fill=ComputedNumber(
                _LiveTokenShare(attn_tp_size, attn_tp_rank)
                if is_sharded
                else _live_tokens_without_tensor
            ),
        )

    def add_global_num_tokens(self, num_ranks: int) -> None:
        for name in ("global_num_tokens_gpu", "global_num_tokens_for_logprob_gpu"):
            self.add(
                name,
                (num_ranks,),
                torch.int64,
                axis="none",
                padding_policy=PaddingPolicy.KEEP_PAD,
                copy_from_fb=False,
                post_fill=ComputedNumber(_padded_tokens),
            )

    def adopt_on_bs_if_present(self, name: str) -> None:
        """A head copy of whatever dtype the source has under ``name``, if it has that."""
        tensor = getattr(self.source, name, None)
        if tensor is not None:
            self.add_on_bs(name, tensor.dtype, PaddingPolicy.FOREACH_COPY)

    def add_pp_proxy_tensors(
        self, rows: Mapping[str, tuple[tuple[int, ...], torch.dtype]], policy: PaddingPolicy
    ) -> None:
        """One slot [max_num_token, *row] per tensor of the previous pipeline stage's output."""
        for key, (row, dtype) in rows.items():
            self.add(
                f"pp_proxy_tensors.{key}",
                (self.max_num_token, *row),
                dtype,
                axis="tokens",
                padding_policy=policy,
                source_fn=_ProxyTensor(key),
            )

    def adopt_pp_proxy_tensors(self, policy: PaddingPolicy, *, always_on_tokens: bool) -> None:
        """One slot per tensor that the source has for the previous pipeline stage's output.

        On tokens, or on requests where a decode source has only a row for each of those.
        """
        proxies = getattr(self.source, "pp_proxy_tensors", None)
        for key, tensor in _named_tensors(proxies):
            on_tokens = always_on_tokens or tensor.shape[0] >= self.max_num_token
            self.add(
                f"pp_proxy_tensors.{key}",
                tuple(tensor.shape),
                tensor.dtype,
                axis="tokens" if on_tokens else "bs",
                padding_policy=policy,
                device=tensor.device,
                source_fn=_ProxyTensor(key),
                bind=tensor,
            )

    def adopt_ngram_embedding_info(self) -> None:
        """One slot per tensor field; per-request fields get zero tails, tables are kept whole."""
        info = getattr(self.source, "ngram_embedding_info", None)
        for field, tensor in _named_tensors(info):
            per_request = tensor.shape[0] == self.max_bs
            self.add(
                f"ngram_embedding_info.{field}",
                tuple(tensor.shape),
                tensor.dtype,
                axis="bs" if per_request else "none",
                padding_policy=PaddingPolicy.ZERO if per_request else PaddingPolicy.KEEP_PAD,
                device=tensor.device,
                source_fn=_NgramField(field),
                bind=tensor,
            )


def _cut_tokens_of_rows(buffer: Tensor, bs: int, num_tokens: int) -> Tensor:
    return buffer.narrow(1, 0, num_tokens)


def _named_tensors(holder: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one or more dimensions of a mapping or an object, by key or field name."""
    if holder is None:
        return
    has_items = isinstance(holder, Mapping) or callable(getattr(holder, "items", None))
    for name, value in holder.items() if has_items else vars(holder).items():
        if isinstance(value, Tensor) and value.dim():
            yield name, value


@dataclass(frozen=True, slots=True)
class _ProxyTensor:
    """Source of one ``pp_proxy_tensors`` slot. None on the first pipeline stage."""

    key: str

    def __call__(self, batch: Any, context: FillContext) -> Tensor | None:
        proxies = context.pp_proxy_tensors
        if proxies is None:
            proxies = getattr(batch, "pp_proxy_tensors", None)
        if proxies is None:
            return None
        try:
            found: Tensor = proxies[self.key]
        except KeyError as error:
            raise SlotNotFoundError(
                f"slot 'pp_proxy_tensors.{self.key}' finds no {self.key!r} among the proxy tensors "
                f"of this step; send it from the previous stage, or pass none at all"
            ) from error
        return found


@dataclass(frozen=True, slots=True)
class _NgramField:
    """Source of one ``ngram_embedding_info`` slot."""

    field: str

    def __call__(self, batch: Any, context: FillContext) -> Tensor | None:
        info = getattr(batch, "ngram_embedding_info", None)
        found: Tensor | None = None if info is None else getattr(info, self.field)
        return found


def _live_tokens_tensor(batch: Any, context: FillContext) -> Tensor | None:
    """The batch's own tensor, which may have no dimension."""
    tensor: Tensor | None = getattr(batch, "num_token_non_padded", None)
    return tensor.view(1) if isinstance(tensor, Tensor) and tensor.dim() == 0 else tensor


def _live_tokens_without_tensor(batch: Any, context: FillContext) -> int | None:
    """The number of live tokens, where the batch brings no tensor of it."""
    has_tensor = getattr(batch, "num_token_non_padded", None) is not None
    return None if has_tensor else _live_tokens(batch, context)


@dataclass(frozen=True, slots=True)
class _LiveTokenShare:
    """This attention-TP rank's part of the live tokens, when the *bucket* is split evenly.

    Always from the count over the whole group: the batch's device field may hold a share that was
    worked out for the raw length, which is split at other places than the bucket.
    """

    attn_tp_size: int
    attn_tp_rank: int

    def __call__(self, batch: Any, context: FillContext) -> int:
        shard = context.padded_num_tokens // self.attn_tp_size
        share = _live_tokens(batch, context) - self.attn_tp_rank * shard
        return min(max(share, 0), shard)


def _live_tokens(batch: Any, context: FillContext) -> int:
    count: int | None = getattr(batch, "num_token_non_padded_cpu", None)
    return context.raw_num_tokens if count is None else count


def _padded_tokens(batch: Any, context: FillContext) -> int:
    return context.padded_num_tokens
