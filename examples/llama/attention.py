"""Attention over a paged KV cache, as one custom operator that writes the cache and reads lengths.

This is what a serving engine's attention looks like to a compiler: it mutates its arguments, its
work depends on values (the longest request), and it has to run as written. A backend that captures
graphs therefore keeps it out of every compiled piece.

The cache is one tensor for keys and one for values, both [num_layers, num_slots, num_kv_heads,
head_dim]. A *KV slot* holds one token; ``page_size`` consecutive slots make a page; a row of the
page table lists the pages of one request in order. Page 0 and row 0 belong to nobody: padded rows
read row 0 and write page 0.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SCRATCH_PAGE = 0
SCRATCH_ROW = 0


class PagedKVCache(nn.Module):
    """The keys and values of every request, and the table that says which pages are whose.

    All three tensors are non-persistent buffers: they keep their address for the life of the
    model and are no part of its state dict.
    """

    k: Tensor
    v: Tensor
    page_table: Tensor

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_pages: int,
        page_size: int,
        max_requests: int,
        max_seq_len: int,
    ) -> None:
        super().__init__()
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_requests = max_requests
        self.max_seq_len = max_seq_len
        shape = (num_layers, num_pages * page_size, num_kv_heads, head_dim)
        pages_per_request = -(-max_seq_len // page_size)
        table = torch.full((max_requests + 1, pages_per_request), SCRATCH_PAGE, dtype=torch.int64)
        self.register_buffer("k", torch.zeros(shape), persistent=False)
        self.register_buffer("v", torch.zeros(shape), persistent=False)
        self.register_buffer("page_table", table, persistent=False)


@torch.library.custom_op("graphbuf_llama::paged_attention", mutates_args=("k_cache", "v_cache"))
def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out_cache_loc: Tensor,
    page_table: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    layer: int,
    page_size: int,
) -> Tensor:
    """Write each row's key and value, then let each row attend to its request so far.

    q is [rows, num_heads, head_dim]; k and v are [rows, num_kv_heads, head_dim]; the four index
    tensors have one entry per row. Row i writes KV slot ``out_cache_loc[i]`` and attends to the
    first ``seq_lens[i]`` tokens of request ``req_pool_indices[i]``; every row is written before any
    is read, so rows of one prompt see each other. Lengths are at least 1. Returns a new tensor
    shaped like q. Reads the longest length back to the host.
    """
    k_layer, v_layer = k_cache[layer], v_cache[layer]
    k_layer[out_cache_loc] = k
    v_layer[out_cache_loc] = v

    longest = int(seq_lens.max()) if seq_lens.numel() else 1
    num_pages = -(-longest // page_size)
    pages = page_table[req_pool_indices, :num_pages]
    is_past = torch.arange(num_pages * page_size, device=q.device) < seq_lens[:, None]

    # The heads that share a KV head take the place of the query length: [rows, kv, group, dim].
    grouped_q = q.unflatten(1, (k.shape[1], -1))
    out = F.scaled_dot_product_attention(
        grouped_q,
        _gather_pages(k_layer, pages, page_size),
        _gather_pages(v_layer, pages, page_size),
        attn_mask=is_past[:, None, None, :],
    )
    return out.reshape(q.shape)


def _gather_pages(kv: Tensor, pages: Tensor, page_size: int) -> Tensor:
    """Return the tokens of ``pages`` [rows, num_pages] as [rows, kv_heads, tokens, head_dim]."""
    by_page = kv.view(kv.shape[0] // page_size, -1)
    gathered = by_page.index_select(0, pages.flatten())
    return gathered.view(pages.shape[0], pages.shape[1] * page_size, *kv.shape[1:]).transpose(1, 2)


@paged_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out_cache_loc: Tensor,
    page_table: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    layer: int,
    page_size: int,
) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)
