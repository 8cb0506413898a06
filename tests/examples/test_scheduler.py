import random

import pytest
import torch

from examples.llama.attention import SCRATCH_PAGE, SCRATCH_ROW, PagedKVCache
from examples.llama.scheduler import PageAllocator, Request, Scheduler, build_batch
from examples.llama.traffic import SlowReaders, seeded_requests


def make_cache(num_pages: int = 17, max_requests: int = 4) -> PagedKVCache:
    return PagedKVCache(
        num_layers=1,
        num_kv_heads=1,
        head_dim=2,
        num_pages=num_pages,
        page_size=4,
        max_requests=max_requests,
        max_seq_len=64,
    )


def run(scheduler: Scheduler) -> list[list[tuple[int, int, int]]]:
    """Serve every request, token 1 each time; per step, (index, start, stop) of each chunk."""
    steps = []
    while scheduler.has_work:
        chunks = scheduler.plan()
        steps.append([(c.sequence.index, c.start, c.stop) for c in chunks])
        scheduler.commit(chunks, [1 for c in chunks if c.samples])
    return steps


def test_the_allocator_hands_out_every_page_but_the_scratch_page():
    pages = PageAllocator(8)
    rng = random.Random(0)
    held: list[list[int]] = []
    seen: set[int] = set()
    for _ in range(500):
        if held and (rng.random() < 0.5 or pages.num_free == 0):
            pages.free(held.pop(rng.randrange(len(held))))
        else:
            held.append(pages.allocate(rng.randint(1, pages.num_free)))
        live = [page for group in held for page in group]
        assert len(set(live)) == len(live) == 7 - pages.num_free
        seen.update(live)
    assert seen == set(range(8)) - {SCRATCH_PAGE}


def test_live_requests_never_use_the_scratch_page_or_row():
    cache = make_cache()
    scheduler = Scheduler(cache, max_tokens=16, prefill_chunk=6)
    for i in range(12):
        scheduler.add(Request(prompt="x" * (3 * i % 17), max_new_tokens=1 + i % 7, arrival_step=i))
    while scheduler.has_work:
        chunks = scheduler.plan()
        batch = build_batch(chunks, cache.page_size)
        assert (batch.out_cache_loc >= cache.page_size).all()
        assert (batch.req_pool_indices != SCRATCH_ROW).all()
        assert torch.equal(
            cache.page_table[batch.req_pool_indices, batch.positions // 4] * 4
            + batch.positions % 4,
            batch.out_cache_loc,
        )
        assert len(set(batch.out_cache_loc.tolist())) == len(batch.out_cache_loc)
        scheduler.commit(chunks, [1 for c in chunks if c.samples])
    assert (cache.page_table == SCRATCH_PAGE).all()  # everything was given back


def test_prompts_are_chunked_and_decoding_requests_go_first():
    scheduler = Scheduler(make_cache(), max_tokens=4, prefill_chunk=3)
    scheduler.add(Request(prompt="ab", max_new_tokens=3))
    scheduler.add(Request(prompt="abcdef", max_new_tokens=2))
    assert run(scheduler) == [
        [(0, 0, 3), (1, 0, 1)],
        [(0, 3, 4), (1, 1, 4)],
        [(0, 4, 5), (1, 4, 7)],
        [(1, 7, 8)],
    ]


def test_more_requests_than_pages_wait_their_turn_in_order():
    scheduler = Scheduler(make_cache(num_pages=5), max_tokens=16, prefill_chunk=16)
    for _ in range(6):
        scheduler.add(Request(prompt="abcdefg", max_new_tokens=5))  # three of four pages each
    run(scheduler)
    assert [s.index for s in scheduler.finished] == list(range(6))
    assert all(len(s.output) == 5 for s in scheduler.finished)


def test_idle_steps_are_skipped_until_the_next_arrival():
    scheduler = Scheduler(make_cache(), max_tokens=16, prefill_chunk=16)
    scheduler.add(Request(prompt="a", max_new_tokens=1, arrival_step=0))
    scheduler.add(Request(prompt="a", max_new_tokens=1, arrival_step=90))
    assert run(scheduler) == [[(0, 0, 2)], [(1, 0, 2)]]


def test_a_request_that_cannot_ever_run_is_refused_with_a_remedy():
    scheduler = Scheduler(make_cache(num_pages=5), max_tokens=16, prefill_chunk=16)
    with pytest.raises(ValueError, match=r"needs 21 tokens .* at most 16"):
        scheduler.add(Request(prompt="x" * 10, max_new_tokens=10))
    scheduler.add(Request(prompt="x" * 5, max_new_tokens=10))  # the advice: 16 in all
    run(scheduler)
    assert len(scheduler.finished) == 1


def test_a_step_too_small_for_the_decoding_requests_is_refused():
    with pytest.raises(ValueError, match="max_tokens is 3, but up to 4 requests"):
        Scheduler(make_cache(max_requests=4), max_tokens=3, prefill_chunk=1)


@pytest.mark.parametrize("seed", range(3))
def test_slow_readers_change_the_batch_size_at_every_step_with_two_or_more_requests(seed):
    cache = make_cache(num_pages=1000, max_requests=16)
    cache.max_seq_len = 4000
    cache.page_table = torch.zeros(17, 1000, dtype=torch.int64)
    scheduler = Scheduler(cache, max_tokens=64, prefill_chunk=32, thin=SlowReaders(seed))
    for request in seeded_requests(16, seed):
        scheduler.add(request)
    steps = run(scheduler)
    sizes = [sum(stop - start for _, start, stop in step) for step in steps]
    for before, after, step in zip(sizes, sizes[1:], steps[1:], strict=False):
        assert before != after or len(step) == 1


def test_the_same_seed_gives_the_same_traffic():
    assert seeded_requests(8, seed=3) == seeded_requests(8, seed=3)
    assert seeded_requests(8, seed=3) != seeded_requests(8, seed=4)
