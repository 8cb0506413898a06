"""A Llama-style decoder, written plainly: RMSNorm, rotary positions, grouped queries, SwiGLU.

Nothing in this file knows how it will be compiled. ``Llama.forward`` serves a batch of token rows
over a paged KV cache; ``Llama.forward_serving`` serves a ``ForwardBatch`` over whatever cache the
attention backend of the current forward has; ``Llama.forward_dense`` runs whole sequences without
a cache, for training and as the oracle of the tests. All use the same weights.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compile_backend.attention import attention
from examples.llama.attention import PagedKVCache, paged_attention
from examples.llama.tokenizer import VOCAB_SIZE

if TYPE_CHECKING:
    from compile_backend import ForwardBatch
    from examples.llama.batch import LlamaBatch

WEIGHTS = Path(__file__).with_name("kjv-2m.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """The sizes of a model. The defaults are those of the committed weights."""

    vocab_size: int = VOCAB_SIZE
    dim: int = 192
    num_layers: int = 6
    num_heads: int = 6
    num_kv_heads: int = 2
    ffn_dim: int = 512
    max_seq_len: int = 512
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads


class RMSNorm(nn.Module):
    """Scale each row to unit mean square, then by a learned gain."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class RotaryTable(nn.Module):
    """Cosines and sines of every position, looked up by position."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_seq_len: int, theta: float) -> None:
        super().__init__()
        frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angle = torch.arange(max_seq_len, dtype=torch.float32)[:, None] * frequency
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of ``positions`` [...], each [..., 1, head_dim / 2]."""
        return self.cos[positions].unsqueeze(-2), self.sin[positions].unsqueeze(-2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + head_dim / 2) of ``x`` [..., heads, head_dim] by its angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        kv_dim = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.dim, config.dim, bias=False)
        self.k_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.o_proj = nn.Linear(config.dim, config.dim, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated q, rotated k, and v, each [..., heads, head_dim]."""
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, batch: LlamaBatch, cache: PagedKVCache
    ) -> Tensor:
        q, k, v = self.project(x, cos, sin)
        out = paged_attention(
            q,
            k,
            v,
            cache.k,
            cache.v,
            batch.out_cache_loc,
            cache.page_table,
            batch.req_pool_indices,
            batch.seq_lens,
            self.layer,
            cache.page_size,
        )
        return self.o_proj(out.flatten(-2))

    def forward_serving(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        linears = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (linear(x).view(x.shape[0], -1, self.head_dim) for linear in linears)
        out = attention(rotate(q, cos, sin), rotate(k, cos, sin), v, self.layer)
        return self.o_proj(out.flatten(-2))

    def forward_dense(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.project(x, cos, sin))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down_proj = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config, layer)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, batch: LlamaBatch, cache: PagedKVCache
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, batch, cache)
        return x + self.ffn(self.ffn_norm(x))

    def forward_serving(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention.forward_serving(self.attention_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))

    def forward_dense(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention.forward_dense(self.attention_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))


class Llama(nn.Module):
    """The decoder. The embedding is also the output projection.

    ``forward`` needs a cache: call ``allocate_cache`` once, before compiling.
    """

    cache: PagedKVCache

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.rotary = RotaryTable(config.head_dim, config.max_seq_len, config.rope_theta)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def allocate_cache(
        self, *, num_pages: int, page_size: int = 16, max_requests: int = 32
    ) -> PagedKVCache:
        """Give the model its KV cache, page 0 and table row 0 of which stay scratch."""
        self.cache = PagedKVCache(
            num_layers=self.config.num_layers,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            num_pages=num_pages,
            page_size=page_size,
            max_requests=max_requests,
            max_seq_len=self.config.max_seq_len,
        )
        return self.cache

    def hidden_states(self, batch: LlamaBatch) -> Tensor:
        """Return the normalised last hidden state of every row, [rows, dim]."""
        x = self.embed(batch.input_ids)
        cos, sin = self.rotary(batch.positions)
        for block in self.blocks:
            x = block(x, cos, sin, batch, self.cache)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embed.weight)

    def forward(self, batch: LlamaBatch) -> Tensor:
        """Return the logits of every row, [rows, vocab_size]; writes the KV cache."""
        return self.logits(self.hidden_states(batch))

    def forward_serving(self, batch: ForwardBatch) -> Tensor:
        """Return the normalised last hidden state of every token, [tokens, dim].

        Runs inside a ``compile_backend.attention.forward_context``, whose attention backend writes
        and reads its KV cache.
        """
        x = self.embed(batch.input_ids)
        cos, sin = self.rotary(batch.positions)
        for block in self.blocks:
            x = block.forward_serving(x, cos, sin)
        return self.norm(x)

    def forward_dense(self, input_ids: Tensor) -> Tensor:
        """Return the logits of whole sequences, [batch, length, vocab_size]; uses no cache."""
        x = self.embed(input_ids)
        cos, sin = self.rotary(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block.forward_dense(x, cos, sin)
        return self.logits(self.norm(x))


class ServedLlama(nn.Module):
    """The same weights as a runner wants them: hidden states from ``forward``, then ``lm_head``."""

    def __init__(self, llama: Llama) -> None:
        super().__init__()
        self.llama = llama

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self.llama.forward_serving(batch)

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Return the logits of ``hidden`` [rows, dim], [rows, vocab_size]."""
        return self.llama.logits(hidden)


def save_weights(model: Llama, path: Path, notes: dict[str, str]) -> None:
    """Write the weights in bfloat16, with the config and ``notes`` as the file's metadata."""
    from safetensors.torch import save_file

    tensors = {name: t.to(torch.bfloat16) for name, t in model.state_dict().items()}
    save_file(tensors, path, {"config": json.dumps(asdict(model.config)), **notes})


def load_model(path: Path = WEIGHTS) -> Llama:
    """Read a model that ``save_weights`` wrote, as float32, in eval mode and without gradients."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        model = Llama(LlamaConfig(**json.loads(file.metadata()["config"])))
        model.load_state_dict({name: file.get_tensor(name).float() for name in file.keys()})  # noqa: SIM118
    return model.eval().requires_grad_(False)
