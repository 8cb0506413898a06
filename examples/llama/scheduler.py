"""Which token rows run next: requests queue, are admitted, and share a bounded step.

First come, first served. A request is admitted when a row of the page table and the pages for its
whole life are free, so it never has to be preempted. Each step gives one row to every request that
is decoding, then spends what is left of the token budget on chunks of the prompts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from examples.llama.attention import SCRATCH_PAGE, SCRATCH_ROW, PagedKVCache
from examples.llama.batch import LlamaBatch
from examples.llama.tokenizer import encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt, how many tokens to add to it, and the step at which it arrives."""

    prompt: str
    max_new_tokens: int
    arrival_step: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """An admitted request: its tokens so far and where they are cached."""

    index: int  # of the request, in the order in which requests were added
    row: int  # of the page table
    pages: list[int]
    tokens: list[int]
    prompt_len: int
    max_new_tokens: int
    num_cached: int = 0

    @property
    def num_left(self) -> int:
        """How many tokens still have to be fed before the request is done."""
        return self.prompt_len + self.max_new_tokens - 1 - self.num_cached

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def is_finished(self) -> bool:
        return self.num_left <= 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens ``[start, stop)`` of a sequence: the rows it gets in one step."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    @property
    def samples(self) -> bool:
        """Whether the last row is the sequence's last token, so its logits name the next one."""
        return self.stop == len(self.sequence.tokens)


class PageAllocator:
    """Hands out the pages of a cache, all but the scratch page."""

    def __init__(self, num_pages: int) -> None:
        self._free = deque(page for page in range(num_pages) if page != SCRATCH_PAGE)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Return ``count`` pages that nobody holds. The caller has checked ``num_free``."""
        assert count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        return [self._free.popleft() for _ in range(count)]

    def free(self, pages: list[int]) -> None:
        assert SCRATCH_PAGE not in pages, "the scratch page was never handed out"
        assert not set(pages) & set(self._free), f"pages {pages} are partly free already"
        self._free.extend(pages)


class Scheduler:
    """Plans steps over ``cache``, whose page table it owns.

    ``max_tokens`` bounds the rows of a step, ``prefill_chunk`` those of one prompt in it. ``thin``
    may take chunks out of a plan, which then wait for a later step. ``finished`` collects the
    sequences that are done, in the order in which they finish.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        *,
        max_tokens: int,
        prefill_chunk: int,
        thin: Callable[[list[Chunk]], list[Chunk]] | None = None,
    ) -> None:
        if max_tokens < cache.max_requests:
            raise ValueError(
                f"max_tokens is {max_tokens}, but up to {cache.max_requests} requests decode at "
                f"once and each needs a row; raise max_tokens or lower the cache's max_requests"
            )
        self.cache = cache
        self.max_tokens = max_tokens
        self.prefill_chunk = prefill_chunk
        self.thin = thin
        self.finished: list[Sequence] = []
        self._step = 0
        self._num_added = 0
        self._waiting: deque[tuple[int, Request]] = deque()
        self._running: list[Sequence] = []
        self._pages = PageAllocator(cache.num_pages)
        self._rows = deque(r for r in range(cache.page_table.shape[0]) if r != SCRATCH_ROW)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> None:
        """Queue a request. Requests are added in the order of their arrival steps.

        Raises ValueError for one that could never run.
        """
        num_tokens = len(encode(request.prompt)) + request.max_new_tokens
        most = min(self.cache.max_seq_len, (self.cache.num_pages - 1) * self.cache.page_size)
        if request.max_new_tokens < 1 or num_tokens > most:
            raise ValueError(
                f"request {self._num_added} needs {num_tokens} tokens "
                f"({request.max_new_tokens} of them new); ask for at least 1 new token and at "
                f"most {most} in all, or give the cache more pages"
            )
        self._waiting.append((self._num_added, request))
        self._num_added += 1

    def plan(self) -> list[Chunk]:
        """Return the chunks of the next step: none only when ``has_work`` is false."""
        if not self._running and self._waiting:  # nothing to do until the next arrival
            self._step = max(self._step, self._waiting[0][1].arrival_step)
        self._admit()
        self._step += 1

        chunks = [
            Chunk(s, s.num_cached, len(s.tokens))
            for s in self._running
            if s.num_cached >= s.prompt_len
        ]
        budget = self.max_tokens - len(chunks)
        for s in self._running:
            rows = min(s.prompt_len - s.num_cached, self.prefill_chunk, budget)
            if rows > 0:
                chunks.append(Chunk(s, s.num_cached, s.num_cached + rows))
                budget -= rows
        return self.thin(chunks) if self.thin and chunks else chunks

    def commit(self, chunks: list[Chunk], next_tokens: list[int]) -> None:
        """Record that ``chunks`` ran; ``next_tokens`` has one token per chunk that samples."""
        tokens = iter(next_tokens)
        for chunk in chunks:
            samples = chunk.samples
            chunk.sequence.num_cached = chunk.stop
            if samples:
                chunk.sequence.tokens.append(next(tokens))
        for sequence in [s for s in self._running if s.is_finished]:
            self._release(sequence)

    def _admit(self) -> None:
        while self._waiting and self._rows:
            index, request = self._waiting[0]
            tokens = encode(request.prompt)
            # The last new token is returned, never fed back, so it needs no KV slot.
            num_pages = -(-(len(tokens) + request.max_new_tokens - 1) // self.cache.page_size)
            if request.arrival_step > self._step or num_pages > self._pages.num_free:
                return
            self._waiting.popleft()
            sequence = Sequence(
                index=index,
                row=self._rows.popleft(),
                pages=self._pages.allocate(num_pages),
                tokens=tokens,
                prompt_len=len(tokens),
                max_new_tokens=request.max_new_tokens,
            )
            self.cache.page_table[sequence.row, :num_pages] = torch.tensor(sequence.pages)
            self._running.append(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self.finished.append(sequence)
        self.cache.page_table[sequence.row].fill_(SCRATCH_PAGE)
        self._rows.append(sequence.row)
        self._pages.free(sequence.pages)


def build_batch(chunks: list[Chunk], page_size: int) -> LlamaBatch:
    """Lay the rows of ``chunks`` out one after the other."""
    input_ids, positions, out_cache_loc, rows = [], [], [], []
    for chunk in chunks:
        sequence = chunk.sequence
        for position in range(chunk.start, chunk.stop):
            page = sequence.pages[position // page_size]
            input_ids.append(sequence.tokens[position])
            positions.append(position)
            out_cache_loc.append(page * page_size + position % page_size)
            rows.append(sequence.row)
    at = torch.tensor(positions)
    return LlamaBatch(
        input_ids=torch.tensor(input_ids),
        positions=at,
        out_cache_loc=torch.tensor(out_cache_loc),
        req_pool_indices=torch.tensor(rows),
        seq_lens=at + 1,
    )
