"""Which tokens run next: requests queue for token slots, are admitted, and share steps.

First come, first served. A request is admitted when it has a row of the request table and the token
slots of its whole life, so it is never preempted and one that fits the pool at all is served in the
end; one that does not is refused when it arrives.

**Prefill first.** While an admitted prompt is incomplete, a step is an EXTEND batch: chunks of the
prompts in the order of arrival, ``max_step_tokens`` in all. Otherwise it is a DECODE batch: one
token for each running request. So new requests start soon and decode batches are as large as they
can be, and running requests wait while prompts are taken in. With ``mixed=True`` they do not wait:
their tokens come first in a MIXED batch, and the chunks get what is left of it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

import torch

from compile_backend import ForwardBatch, ForwardMode
from compile_backend.attention import KVCache, RequestTable, TokenSlotAllocator
from examples.llama.model import LlamaConfig
from examples.llama.sampling import GREEDY, Sampler, SamplingParams
from examples.llama.scheduler import Request
from examples.llama.tokenizer import BOS, encode


class RequestRefusedError(ValueError):
    """A request can never be served as it is. The message says why and what to change."""


class Finish(Enum):
    """How a request ended."""

    LENGTH = "all new tokens"
    STOP = "a stop text, or the end of the document"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRequest(Request):
    """A request that says how to sample, and the texts behind each of which it ends.

    It also ends where the model starts another document. What ended it is part of its output.
    """

    sampling: SamplingParams = GREEDY
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ServingMemory:
    """Where the tokens of all requests are kept: the cache, who owns which slot, and the table."""

    cache: KVCache
    slots: TokenSlotAllocator
    table: RequestTable

    @property
    def max_tokens(self) -> int:
        """How many tokens there is room for; the scratch slot is nobody's."""
        return self.cache.num_slots - 1

    @property
    def max_requests(self) -> int:
        return self.table.req_to_token.shape[0] - 1

    @classmethod
    def allocate(
        cls, config: LlamaConfig, *, num_slots: int, max_requests: int, device: str = "cpu"
    ) -> ServingMemory:
        """Memory for ``num_slots - 1`` tokens of at most ``max_requests`` requests at a time."""
        return cls(
            cache=KVCache(
                num_slots=num_slots,
                num_layers=config.num_layers,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                dtype=torch.float32,
                device=device,
            ),
            slots=TokenSlotAllocator(num_slots),
            table=RequestTable(max_requests, config.max_seq_len, device),
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """A request's tokens so far and, while it runs, where they are cached."""

    index: int  # of the request, in the order of arrival
    request: ServedRequest
    tokens: list[int]
    prompt_len: int
    sampler: Sampler
    row: int = 0  # of the request table; 0 is nobody's
    slots: list[int] = field(default_factory=list)  # one per token of its whole life
    num_cached: int = 0
    finish: Finish | None = None

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def max_cached(self) -> int:
        """The last new token is returned, never fed back, so it needs no slot."""
        return self.prompt_len + self.request.max_new_tokens - 1

    @property
    def num_prompt_left(self) -> int:
        return max(0, self.prompt_len - self.num_cached)

    def append(self, token: int) -> None:
        """Add a new token; ``finish`` says whether it was the last."""
        self.tokens.append(token)
        if token == BOS or any(bytes(self.output).endswith(s.encode()) for s in self.request.stop):
            self.finish = Finish.STOP
        elif len(self.output) == self.request.max_new_tokens:
            self.finish = Finish.LENGTH


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens ``[start, stop)`` of a sequence: what it is given in one step."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def samples(self) -> bool:
        """Whether its last token is the sequence's last, so the logits there name the next one."""
        return self.stop == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: its mode and the chunks in it, one per request."""

    mode: ForwardMode
    chunks: list[Chunk]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.stop - chunk.start for chunk in self.chunks)


class TokenScheduler:
    """Plans steps over ``memory``, whose slots and table rows it hands out and takes back.

    ``finished`` collects the sequences that have ended, in the order in which they did.
    """

    def __init__(self, memory: ServingMemory, *, max_step_tokens: int, mixed: bool = False) -> None:
        least = memory.max_requests + 1 if mixed else 1
        if max_step_tokens < least:
            raise ValueError(
                f"max_step_tokens is {max_step_tokens}; pass at least {least}"
                + (", a token for each running request and one of a prompt" if mixed else "")
            )
        self.memory = memory
        self.max_step_tokens = max_step_tokens
        self.mixed = mixed
        self.finished: list[Sequence] = []
        self._num_submitted = 0
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def submit(self, request: ServedRequest) -> int:
        """Queue ``request``; its index. Raises RequestRefusedError for one that can never run."""
        index = self._num_submitted
        self._num_submitted += 1
        try:
            tokens = encode(request.prompt)
        except ValueError as error:
            raise RequestRefusedError(f"request {index}: {error}") from error
        sequence = Sequence(
            index=index,
            request=request,
            tokens=tokens,
            prompt_len=len(tokens),
            sampler=Sampler(request.sampling),
        )
        self._refuse_if_too_long(sequence)
        self._waiting.append(sequence)
        return index

    def _refuse_if_too_long(self, sequence: Sequence) -> None:
        new, prompt = sequence.request.max_new_tokens, sequence.prompt_len
        if new < 1:
            raise RequestRefusedError(
                f"request {sequence.index} asks for {new} new tokens; ask for at least 1"
            )
        pool, context = self.memory.max_tokens, self.memory.table.max_context_len
        most = min(pool, context)
        if sequence.max_cached > most:
            what = f"token pool of {pool} slots" if pool < context else f"context of {context}"
            raise RequestRefusedError(
                f"request {sequence.index} needs {sequence.max_cached} token slots ({prompt} for "
                f"its prompt, {new - 1} to feed new tokens back) but the {what} never has more; "
                f"shorten the prompt, ask for fewer new tokens, or serve it with at least "
                f"{sequence.max_cached + (pool < context)} "
                + ("num_slots" if pool < context else "max_seq_len")
            )

    def cancel(self, index: int) -> bool:
        """End request ``index`` now, giving back what it holds. False where it is not live."""
        for sequence in (*self._waiting, *self._running):
            if sequence.index == index:
                sequence.finish = Finish.CANCELLED
                self._remove(sequence)
                return True
        return False

    def cancel_all(self) -> None:
        """End every request that waits or runs."""
        for sequence in (*self._running, *self._waiting):
            self.cancel(sequence.index)

    def plan(self) -> Plan:
        """Return the next step, after admitting what fits; no chunk only without ``has_work``."""
        self._admit()
        prompts = [s for s in self._running if s.num_prompt_left]
        decoding = [s for s in self._running if not s.num_prompt_left]
        chunks = []
        if self.mixed or not prompts:
            chunks = [Chunk(s, s.num_cached, len(s.tokens)) for s in decoding]
        if not prompts:
            return Plan(ForwardMode.DECODE if chunks else ForwardMode.IDLE, chunks)

        mode = ForwardMode.MIXED if chunks else ForwardMode.EXTEND
        budget = self.max_step_tokens - len(chunks)
        for sequence in prompts:
            size = min(sequence.num_prompt_left, budget)
            if size == 0:
                break
            chunks.append(Chunk(sequence, sequence.num_cached, sequence.num_cached + size))
            budget -= size
        return Plan(mode, chunks)

    def commit(self, plan: Plan, next_tokens: list[int]) -> None:
        """Record that ``plan`` ran; ``next_tokens`` has one token per chunk that samples."""
        tokens = iter(next_tokens)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            token = next(tokens) if chunk.samples else None
            if sequence.finish is not None:  # cancelled since it was planned
                continue
            sequence.num_cached = chunk.stop
            if token is not None:
                sequence.append(token)
            if sequence.finish is not None:
                self._remove(sequence)

    def _admit(self) -> None:
        memory = self.memory
        while self._waiting and len(self._running) < memory.max_requests:
            sequence = self._waiting[0]
            if sequence.max_cached > memory.slots.num_free:
                return
            sequence.slots = memory.slots.allocate(sequence.max_cached)
            sequence.row = memory.table.allocate()
            memory.table.write(sequence.row, 0, sequence.slots)
            self._running.append(self._waiting.popleft())

    def _remove(self, sequence: Sequence) -> None:
        if sequence in self._running:
            self._running.remove(sequence)
            self.memory.table.free(sequence.row)
            self.memory.slots.free(sequence.slots)
            sequence.row, sequence.slots = 0, []
        else:
            self._waiting.remove(sequence)
        self.finished.append(sequence)


def build_forward_batch(plan: Plan, device: str | torch.device = "cpu") -> ForwardBatch:
    """Lay the tokens of ``plan`` out one request after the other."""
    chunks = plan.chunks
    spans = [(c.sequence, range(c.start, c.stop)) for c in chunks]
    lengths = [c.stop for c in chunks]

    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    batch = ForwardBatch(
        forward_mode=plan.mode,
        batch_size=len(chunks),
        input_ids=tensor([s.tokens[p] for s, span in spans for p in span]),
        positions=tensor([p for _, span in spans for p in span]),
        out_cache_loc=tensor([s.slots[p] for s, span in spans for p in span]),
        req_pool_indices=tensor([s.row for s, _ in spans]),
        seq_lens=tensor(lengths),
        seq_lens_cpu=torch.tensor(lengths, dtype=torch.int64),
        seq_lens_sum=sum(lengths),
    )
    if plan.mode.is_extend():
        new, prefix = [c.stop - c.start for c in chunks], [c.start for c in chunks]
        batch.extend_num_tokens = sum(new)
        batch.extend_seq_lens, batch.extend_prefix_lens = tensor(new), tensor(prefix)
        batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu = new, prefix
        batch.extend_start_loc = tensor([sum(new[:i]) for i in range(len(new))])
    return batch
