"""A small decoder with random weights, and a world of requests to serve it.

The decoder attends through :func:`compile_backend.attention.attention`; :meth:`Decoder.dense`
computes the same from a whole sequence, without cache, batch or backend: the oracle.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compile_backend import ForwardBatch, ForwardMode, ModelRunner, RunnerConfig
from compile_backend.attention import (
    ForwardContext,
    KVCache,
    RequestTable,
    TokenSlotAllocator,
    TorchNativeBackend,
    attention,
    forward_context,
)

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 48, 24, 4, 2, 8

# --- the model --------------------------------------------------------------------------------


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding: x [tokens, heads, head_dim], angles [tokens, head_dim / 2]."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    even, odd = x.chunk(2, dim=-1)
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=-1)


class Layer(nn.Module):
    """Pre-norm attention with fewer KV heads than heads, and a gated MLP."""

    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.attn_norm, self.mlp_norm = nn.RMSNorm(HIDDEN, eps=1e-6), nn.RMSNorm(HIDDEN, eps=1e-6)
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, h: Tensor, angles: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        heads = self.qkv(self.attn_norm(h)).view(-1, HEADS + 2 * KV_HEADS, HEAD_DIM)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        attended = attend(rotate(q, angles), rotate(k, angles), v, self.layer_id)
        h = h + self.out(attended.flatten(1))
        gate, up = self.up(self.mlp_norm(h)).chunk(2, dim=-1)
        return h + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """Hidden states [tokens, HIDDEN] of a batch. Subclasses change ``before`` and ``after``."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer(layer_id) for layer_id in range(num_layers))
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-6)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        frequencies = 100.0 ** -(torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
        self.register_buffer("frequencies", frequencies)
        self.eval()

    def forward(self, batch: ForwardBatch) -> Any:
        h = self.before(self.embed(batch.input_ids), batch)
        angles = self.angles(batch.positions)
        for layer in self.layers:
            h = layer(h, angles, attention)
        return self.after(self.norm(h), batch)

    def angles(self, positions: Tensor) -> Tensor:
        return (positions[:, None] * self.frequencies).to(self.frequencies.dtype)

    def before(self, h: Tensor, batch: ForwardBatch) -> Tensor:
        return h

    def after(self, h: Tensor, batch: ForwardBatch) -> Any:
        return h

    @torch.no_grad()
    def dense(self, tokens: Sequence[int]) -> Tensor:
        """Hidden states of one whole sequence."""
        h = self.embed(torch.tensor(tokens))
        angles = self.angles(torch.arange(len(tokens)))
        for layer in self.layers:
            h = layer(h, angles, _attend_densely)
        return self.norm(h)


def _attend_densely(q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
    future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, float("-inf")).softmax(-1), v)


# --- requests ---------------------------------------------------------------------------------


@dataclass(eq=False)
class Request:
    """One request. ``tokens`` are known, the first ``num_cached`` of them are in the cache."""

    row: int
    tokens: list[int]
    num_cached: int = 0
    slots: list[int] = field(default_factory=list)


SMALL: dict[str, Any] = {
    "max_running_requests": 8,
    "chunked_prefill_size": 16,
    "cudagraph_capture_sizes": (1, 2, 4, 8),
    "prefill_capture_sizes": (4, 8, 16),
    "max_padding_waste": 4.0,
    "compiler": "eager",
    "show_progress": False,
}


class World:
    """A cache, its requests, and the batches that a scheduler would make of them."""

    def __init__(
        self,
        model: nn.Module,
        *,
        num_layers: int = 2,
        num_slots: int = 512,
        max_requests: int = 16,
        context: int = 64,
        kv_len_buckets: Sequence[int] | None = (16,),
        dtype: torch.dtype = torch.float32,
        backend: type[TorchNativeBackend] = TorchNativeBackend,
    ) -> None:
        self.model = model
        self.kv = KVCache(num_slots, num_layers, KV_HEADS, HEAD_DIM, dtype, "cpu")
        self.table = RequestTable(max_requests, context, "cpu")
        self.allocator = TokenSlotAllocator(num_slots)
        self.backend = backend(self.kv, self.table, kv_len_buckets)

    def runner(self, *, warm: bool = True, lm_head: Any = None, **config: Any) -> ModelRunner:
        runner = ModelRunner(self.model, self.backend, RunnerConfig(**{**SMALL, **config}), lm_head)
        if warm:
            runner.warmup()
        return runner

    def request(self, length: int = 5) -> Request:
        return Request(self.table.allocate(), torch.randint(1, VOCAB, (length,)).tolist())

    def cached(self, count: int, length: int = 5) -> list[Request]:
        """Requests whose prompts, less the last token, went through an eager prefill."""
        requests = [self.request(length) for _ in range(count)]
        for request in requests:
            if length > 1:
                self.eagerly(self.batch([(request, length - 1)]), keep=True)
        return requests

    def finish(self, request: Request) -> None:
        self.allocator.free(request.slots)
        self.table.free(request.row)

    def batch(
        self,
        pairs: Sequence[tuple[Request, int]],
        mode: ForwardMode = ForwardMode.EXTEND,
        **fields: Any,
    ) -> ForwardBatch:
        """The next ``n`` tokens of each request; they count as cached from now on."""
        ids, positions, locations = [], [], []
        prefixes = [request.num_cached for request, _ in pairs]
        for request, n in pairs:
            start = request.num_cached
            assert start + n <= len(request.tokens)
            slots = self.allocator.allocate(n)
            self.table.write(request.row, start, slots)
            request.slots += slots
            request.num_cached += n
            ids += request.tokens[start : start + n]
            positions += range(start, start + n)
            locations += slots
        lengths = torch.tensor([request.num_cached for request, _ in pairs], dtype=torch.int64)
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(pairs),
            input_ids=torch.tensor(ids, dtype=torch.int64),
            positions=torch.tensor(positions, dtype=torch.int64),
            out_cache_loc=torch.tensor(locations, dtype=torch.int64),
            req_pool_indices=torch.tensor([r.row for r, _ in pairs], dtype=torch.int64),
            seq_lens=lengths,
            seq_lens_cpu=lengths.clone(),
        )
        if mode.is_extend():
            new = [n for _, n in pairs]
            batch.extend_num_tokens = sum(new)
            batch.extend_seq_lens = torch.tensor(new, dtype=torch.int64)
            batch.extend_prefix_lens = torch.tensor(prefixes, dtype=torch.int64)
            batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu = new, prefixes
        for name, value in fields.items():
            setattr(batch, name, value)
        return batch

    def decode(self, requests: Sequence[Request], **fields: Any) -> ForwardBatch:
        """One token of each request, made up where its next one is not known."""
        for request in requests:
            if request.num_cached == len(request.tokens):
                request.tokens.append(int(torch.randint(1, VOCAB, ())))
        return self.batch([(r, 1) for r in requests], ForwardMode.DECODE, **fields)

    def extend(self, lengths: Sequence[int], mode=ForwardMode.EXTEND, **fields: Any):
        """New requests of these lengths: the pairs and their batch."""
        pairs = [(self.request(n), n) for n in lengths]
        return pairs, self.batch(pairs, mode, **fields)

    def eagerly(self, batch: ForwardBatch, *, keep: bool = False) -> Any:
        """What the model itself returns, without any runner; the cache is put back unless kept."""
        before = self.kv.k.clone(), self.kv.v.clone()
        metadata = self.backend.init_forward_metadata(batch)
        with torch.no_grad(), forward_context(ForwardContext(self.backend, batch, metadata)):
            result = self.model(copy.copy(batch))
        if not keep:
            self.kv.k.copy_(before[0])
            self.kv.v.copy_(before[1])
        return result

    def dense(self, pairs: Sequence[tuple[Request, int]]) -> Tensor:
        """The oracle's hidden states of the last ``n`` cached tokens of each request."""
        rows = [self.model.dense(r.tokens[: r.num_cached])[r.num_cached - n :] for r, n in pairs]
        return torch.cat(rows) if rows else torch.zeros(0, HIDDEN)

    def check(self, out: Any, pairs: Sequence[tuple[Request, int]], tolerance=2e-4) -> None:
        """Hidden states and logits of a forward against the oracle."""
        hidden = self.dense(pairs)
        close(out.hidden_states, hidden, tolerance)
        if out.logits is not None:
            wanted = hidden
            if len(out.logits) != len(hidden):
                ends = torch.tensor([n for _, n in pairs]).cumsum(0) - 1
                wanted = hidden[ends]
            with torch.no_grad():
                close(out.logits, self.model.lm_head(wanted), tolerance)

    def serve(self, runner: ModelRunner, requests: Sequence[Request], **fields: Any) -> Any:
        """A decode of ``requests`` through ``runner``, checked."""
        out = runner.forward(self.decode(requests, **fields))
        self.check(out, [(request, 1) for request in requests])
        return out


def close(got: Any, want: Any, tolerance: float = 2e-4) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def make_world(model_type: type[Decoder] = Decoder, *args: Any, **world: Any) -> World:
    torch.manual_seed(1)
    model = model_type(*args)
    return World(model, num_layers=len(model.layers), **world)
