"""The paged attention operator beside a plain loop over rows."""

import math

import pytest
import torch

from examples.llama.attention import SCRATCH_PAGE, paged_attention

LAYERS, PAGES, PAGE_SIZE, HEADS, KV_HEADS, DIM = 2, 9, 4, 6, 2, 8


def attend_row_by_row(q, k_cache, v_cache, page_table, rows, seq_lens, layer):
    """The definition: for one row and head at a time, over the slots that its table row lists."""
    out = torch.empty_like(q)
    for i, (row, length) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
        pages = page_table[row].tolist()
        slots = [pages[t // PAGE_SIZE] * PAGE_SIZE + t % PAGE_SIZE for t in range(length)]
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            keys, values = k_cache[layer, slots, kv_head], v_cache[layer, slots, kv_head]
            weights = (keys @ q[i, head] / math.sqrt(DIM)).softmax(0)
            out[i, head] = weights @ values
    return out


@pytest.fixture
def caches():
    generator = torch.Generator().manual_seed(0)
    shape = (LAYERS, PAGES * PAGE_SIZE, KV_HEADS, DIM)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


@pytest.fixture
def page_table():
    return torch.tensor([[0, 0, 0], [5, 2, 7], [1, 8, 0], [3, 0, 0]])


@pytest.mark.parametrize("seq_lens", [[1, 1, 1], [12, 5, 2], [4, 8, 3], [9, 1, 4]])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_it_equals_a_loop_over_rows(caches, page_table, seq_lens, layer):
    k_cache, v_cache = caches
    rows, lens = torch.tensor([1, 2, 3]), torch.tensor(seq_lens)
    last = lens - 1
    loc = page_table[rows, last // PAGE_SIZE] * PAGE_SIZE + last % PAGE_SIZE
    q, k, v = (
        torch.randn(3, HEADS, DIM),
        torch.randn(3, KV_HEADS, DIM),
        torch.randn(3, KV_HEADS, DIM),
    )

    want_k, want_v = k_cache.clone(), v_cache.clone()
    want_k[layer, loc], want_v[layer, loc] = k, v
    want = attend_row_by_row(q, want_k, want_v, page_table, rows, lens, layer)

    out = paged_attention(q, k, v, k_cache, v_cache, loc, page_table, rows, lens, layer, PAGE_SIZE)
    torch.testing.assert_close(out, want)
    assert torch.equal(k_cache, want_k)  # nothing but the rows' own slots was written
    assert torch.equal(v_cache, want_v)


def test_rows_of_one_prompt_see_each_other_up_to_their_own_position(caches, page_table):
    k_cache, v_cache = caches
    q, k, v = (
        torch.randn(5, HEADS, DIM),
        torch.randn(5, KV_HEADS, DIM),
        torch.randn(5, KV_HEADS, DIM),
    )
    at = torch.arange(5)
    rows = torch.ones(5, dtype=torch.int64)
    loc = page_table[rows, at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE
    out = paged_attention(q, k, v, k_cache, v_cache, loc, page_table, rows, at + 1, 0, PAGE_SIZE)

    dense = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(0, 1) for t in (q, k, v)), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(out, dense.transpose(0, 1))


def test_padded_rows_are_finite_and_write_only_the_scratch_page(caches, page_table):
    k_cache, v_cache = caches
    rows, lens, loc = torch.tensor([1, 0, 0]), torch.tensor([6, 1, 1]), torch.tensor([9, 0, 0])
    q, k, v = (
        torch.randn(3, HEADS, DIM),
        torch.randn(3, KV_HEADS, DIM),
        torch.randn(3, KV_HEADS, DIM),
    )
    alone_k, alone_v = k_cache.clone(), v_cache.clone()

    args = (page_table, rows, lens, 0, PAGE_SIZE)
    out = paged_attention(q, k, v, k_cache, v_cache, loc, *args)
    alone_args = (page_table, rows[:1], lens[:1], 0, PAGE_SIZE)
    alone = paged_attention(q[:1], k[:1], v[:1], alone_k, alone_v, loc[:1], *alone_args)

    assert out.isfinite().all()
    torch.testing.assert_close(out[:1], alone)
    scratch = slice(SCRATCH_PAGE * PAGE_SIZE, (SCRATCH_PAGE + 1) * PAGE_SIZE)
    for padded, unpadded in ((k_cache, alone_k), (v_cache, alone_v)):
        padded[:, scratch] = unpadded[:, scratch]
        assert torch.equal(padded, unpadded)


def test_no_rows_at_all(caches, page_table):
    k_cache, v_cache = caches
    before = k_cache.clone()
    empty = torch.empty(0, dtype=torch.int64)
    q, kv = torch.empty(0, HEADS, DIM), torch.empty(0, KV_HEADS, DIM)
    out = paged_attention(
        q, kv, kv, k_cache, v_cache, empty, page_table, empty, empty, 0, PAGE_SIZE
    )
    assert out.shape == q.shape
    assert torch.equal(k_cache, before)


def test_the_operator_is_declared_as_it_behaves(caches, page_table):
    k_cache, v_cache = caches
    rows, lens, loc = torch.tensor([1, 2]), torch.tensor([6, 3]), torch.tensor([9, 6])
    q, k, v = (
        torch.randn(2, HEADS, DIM),
        torch.randn(2, KV_HEADS, DIM),
        torch.randn(2, KV_HEADS, DIM),
    )
    args = (q, k, v, k_cache, v_cache, loc, page_table, rows, lens, 1, PAGE_SIZE)
    torch.library.opcheck(
        paged_attention,
        args,
        test_utils=["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"],
    )
