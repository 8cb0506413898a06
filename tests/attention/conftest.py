"""A cache with requests in it, and the same attention computed from whole sequences."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from compile_backend import ForwardBatch, ForwardMode
from compile_backend.attention import (
    ForwardContext,
    KVCache,
    RequestTable,
    TokenSlotAllocator,
    TorchNativeBackend,
    attention,
    forward_context,
)

LAYERS = 2


@dataclass
class Request:
    """One request: its row, its token slots, and every key and value it ever brought."""

    row: int
    slots: list[int] = field(default_factory=list)
    keys: list[list[Tensor]] = field(default_factory=lambda: [[] for _ in range(LAYERS)])
    values: list[list[Tensor]] = field(default_factory=lambda: [[] for _ in range(LAYERS)])


@dataclass
class Step:
    """One forward pass over ``requests``: its inputs per layer, and what should come out."""

    batch: ForwardBatch
    requests: list[Request]
    new_lens: list[int]
    qkv: list[tuple[Tensor, Tensor, Tensor]]
    expected: list[Tensor]


class World:
    """A backend over a small cache, requests that grow in it, and the dense oracle."""

    def __init__(
        self, *, kv_heads=2, ratio=2, head_dim=8, context=256, dtype=torch.float64, buckets=None
    ):
        self.kv_heads, self.num_heads, self.head_dim = kv_heads, kv_heads * ratio, head_dim
        self.dtype = dtype
        self.cache = KVCache(2048, LAYERS, kv_heads, head_dim, dtype, "cpu")
        self.allocator = TokenSlotAllocator(2048)
        self.table = RequestTable(8, context, "cpu")
        self.backend = TorchNativeBackend(self.cache, self.table, buckets)
        self.backend.init_graph_state(max_bs=8, max_num_tokens=64)
        # Slots in no order, so that an answer read from consecutive slots is wrong
        free = self.allocator.allocate(self.allocator.num_free)
        self.allocator.free([free[i] for i in torch.randperm(len(free)).tolist()])

    def request(self, cached: int = 0) -> Request:
        """A new request with ``cached`` tokens, which went through a prefill of their own."""
        request = Request(self.table.allocate())
        if cached:
            self.check(self.step([request], [cached], ForwardMode.EXTEND))
        return request

    def finish(self, request: Request, poison: float | None = None) -> None:
        if poison is not None:
            self.cache.k[:, request.slots] = poison
            self.cache.v[:, request.slots] = poison
        self.allocator.free(request.slots)
        self.table.free(request.row)

    def step(self, requests, new_lens, mode, *, scale=None) -> Step:
        """Give each request that many new random tokens; nothing runs yet."""
        new_slots = []
        prefix_lens = [len(request.slots) for request in requests]
        for request, num_new in zip(requests, new_lens, strict=True):
            slots = self.allocator.allocate(num_new)
            self.table.write(request.row, len(request.slots), slots)
            request.slots += slots
            new_slots += slots
        seq_lens = torch.tensor([len(request.slots) for request in requests], dtype=torch.int64)
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(requests),
            input_ids=torch.zeros(len(new_slots), dtype=torch.int64),
            out_cache_loc=torch.tensor(new_slots, dtype=torch.int64),
            req_pool_indices=torch.tensor([r.row for r in requests], dtype=torch.int64),
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens.clone(),
        )
        if mode is not ForwardMode.DECODE:
            batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu = list(new_lens), prefix_lens
            batch.extend_num_tokens = len(new_slots)
        qkv = [self.random_qkv(len(new_slots)) for _ in range(LAYERS)]
        is_causal = mode is not ForwardMode.DLLM_EXTEND
        expected = [
            self._oracle(layer, requests, new_lens, *qkv[layer], scale, is_causal)
            for layer in range(LAYERS)
        ]
        return Step(batch, list(requests), list(new_lens), qkv, expected)

    def random_qkv(self, num_tokens):
        shape = (num_tokens, self.num_heads + 2 * self.kv_heads, self.head_dim)
        heads = [self.num_heads, self.kv_heads, self.kv_heads]
        return torch.randn(shape, dtype=torch.float64).to(self.dtype).split(heads, dim=1)

    def run(self, step: Step, metadata=None, *, scale=None) -> list[Tensor]:
        """Every layer of the step, eagerly."""
        if metadata is None:
            metadata = self.backend.init_forward_metadata(step.batch)
        with forward_context(ForwardContext(self.backend, step.batch, metadata)):
            return [attention(*qkv, layer, scale) for layer, qkv in enumerate(step.qkv)]

    def check(self, step: Step, **run) -> None:
        for got, expected in zip(self.run(step, **run), step.expected, strict=True):
            assert_attends(got, expected)

    def _oracle(self, layer, requests, new_lens, q, k, v, scale, is_causal):
        """Full sequences in float64, head by head and token by token."""
        out, start = [], 0
        for request, num_new in zip(requests, new_lens, strict=True):
            rows = slice(start, start + num_new)
            request.keys[layer] += k[rows].double().unbind(0)
            request.values[layer] += v[rows].double().unbind(0)
            prefix = len(request.slots) - num_new
            for i, token in enumerate(q[rows].double()):
                end = prefix + i + 1 if is_causal else len(request.slots)
                keys = torch.stack(request.keys[layer][:end])
                values = torch.stack(request.values[layer][:end])
                for head in range(self.num_heads):
                    kv_head = head // (self.num_heads // self.kv_heads)
                    scores = keys[:, kv_head] @ token[head]
                    scores *= self.head_dim**-0.5 if scale is None else scale
                    out.append(scores.softmax(0) @ values[:, kv_head])
            start += num_new
        return torch.stack(out).view(q.shape) if out else torch.zeros(q.shape, dtype=torch.float64)


TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def assert_attends(got: Tensor, expected: Tensor) -> None:
    assert got.is_contiguous()
    bound = TOLERANCES[got.dtype]
    torch.testing.assert_close(got.double(), expected, rtol=bound, atol=bound)


@pytest.fixture
def world():
    return World()
