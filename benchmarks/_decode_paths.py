"""What ``gpu_decode`` measures: Llama blocks over a full KV cache, and every way to run them.

A path is called with a batch and returns its hidden states. Each is complete when it is made;
nothing here knows how it is timed.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Mapping
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
    TorchNativeBackend,
    attention,
    forward_context,
)
from compile_backend.engines import CompiledPiece, HostEngine

__all__ = [
    "COMPILE",
    "DRY_RUN",
    "EAGER",
    "HAND_WRITTEN",
    "HAND_WRITTEN_COMPILED",
    "REDUCE",
    "Maker",
    "RunnerPath",
    "Step",
    "Workload",
    "World",
    "bare_name",
    "path_makers",
    "runner_name",
]

Step = Callable[[ForwardBatch], Tensor]  # one decode step: hidden states [batch size, hidden]

EAGER, COMPILE, REDUCE = "eager", "torch.compile", "torch.compile(reduce-overhead)"
HAND_WRITTEN, HAND_WRITTEN_COMPILED = "hand-written graph", "hand-written graph, compiled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The model, what it serves, and how. The defaults are the benchmark's."""

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    num_layers: int = 8
    hidden: int = 2048
    num_heads: int = 16
    num_kv_heads: int = 8
    head_dim: int = 128
    ffn: int = 5632
    vocab: int = 8192
    context: int = 512  # tokens of every request, the new one included
    batch_sizes: tuple[int, ...] = (1, 8, 32, 128)
    buckets: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128)
    num_changes: int = 160  # steps of the sequence in which the batch size changes
    num_queued: int = 10
    most_rounds: int = 200
    engines: tuple[str, ...] = ("cuda", "trees")
    compiler: str = "inductor"
    compile_options: Mapping[str, Mapping[str, Any]] = field(
        default_factory=lambda: {COMPILE: {}, REDUCE: {"mode": "reduce-overhead"}}
    )
    tolerance: float = 0.03  # norm of a row's difference from eager's, relative to the row's norm

    @property
    def is_on_device(self) -> bool:
        return self.device == "cuda"


DRY_RUN = Workload(
    device="cpu",
    dtype=torch.float32,
    num_layers=2,
    hidden=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn=176,
    vocab=128,
    context=16,
    batch_sizes=(1, 3),
    buckets=(1, 2, 4),
    num_changes=16,
    num_queued=3,
    most_rounds=20,
    engines=("host", "host_strict"),
    compiler="eager",
    compile_options={COMPILE: {"backend": "eager"}, REDUCE: {"backend": "eager"}},
    tolerance=1e-3,
)


# --- the model ------------------------------------------------------------------------------------


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + head_dim / 2) of ``x`` [tokens, heads, head_dim] by its angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Block(nn.Module):
    def __init__(self, w: Workload, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = w.head_dim
        self.heads = [w.num_heads, w.num_kv_heads, w.num_kv_heads]
        self.attention_norm, self.ffn_norm = nn.RMSNorm(w.hidden, 1e-5), nn.RMSNorm(w.hidden, 1e-5)
        self.qkv = nn.Linear(w.hidden, sum(self.heads) * w.head_dim, bias=False)
        self.out = nn.Linear(w.num_heads * w.head_dim, w.hidden, bias=False)
        self.gate_up = nn.Linear(w.hidden, 2 * w.ffn, bias=False)
        self.down = nn.Linear(w.ffn, w.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).view(x.shape[0], -1, self.head_dim)
        q, k, v = heads.split(self.heads, dim=1)
        attended = attention(rotate(q, cos, sin), rotate(k, cos, sin), v, self.layer)
        x = x + self.out(attended.flatten(1))
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Stack(nn.Module):
    """Hidden states [tokens, hidden] of tokens [tokens] at positions [tokens]."""

    cos: Tensor
    sin: Tensor

    def __init__(self, w: Workload) -> None:
        super().__init__()
        self.embed = nn.Embedding(w.vocab, w.hidden)
        self.blocks = nn.ModuleList(Block(w, layer) for layer in range(w.num_layers))
        self.norm = nn.RMSNorm(w.hidden, 1e-5)
        frequency = 10_000.0 ** -(torch.arange(0, w.head_dim, 2) / w.head_dim)
        angle = torch.arange(w.context)[:, None] * frequency
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(input_ids)
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.norm(x)


class Served(nn.Module):
    """The stack as a runner calls it."""

    def __init__(self, stack: Stack) -> None:
        super().__init__()
        self.stack = stack

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self.stack(batch.input_ids, batch.positions)


class World:
    """The model, one cache in which every request has all of its context, and batches of them."""

    def __init__(self, workload: Workload) -> None:
        self.workload = w = workload
        torch.manual_seed(0)
        with torch.device(w.device):
            self.stack = Stack(w).to(w.dtype).eval().requires_grad_(False)
        self.largest = max(w.buckets)
        num_slots = self.largest * w.context + 1
        self._cache = KVCache(
            num_slots, w.num_layers, w.num_kv_heads, w.head_dim, w.dtype, w.device
        )
        for kept in (self._cache.k, self._cache.v):
            kept.normal_()
            kept[:, 0].zero_()
        self._table = RequestTable(self.largest, w.context, w.device)
        slots = torch.randperm(num_slots - 1).view(self.largest, w.context) + 1
        self._rows = torch.tensor([self._table.allocate() for _ in slots])
        for row, own in zip(self._rows.tolist(), slots, strict=True):
            self._table.write(row, 0, own)
        self._last_slots = slots[:, -1]

    def backend(self) -> TorchNativeBackend:
        """A new backend over the one cache: plans in static memory are each path's own."""
        return TorchNativeBackend(self._cache, self._table, kv_len_buckets=(self.workload.context,))

    def batch(self, size: int) -> ForwardBatch:
        """A decode of ``size`` requests, with other tokens and requests each time."""
        w = self.workload
        chosen = torch.randperm(self.largest)[:size]
        lengths = torch.full((size,), w.context)
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=size,
            input_ids=torch.randint(w.vocab, (size,)).to(w.device),
            positions=(lengths - 1).to(w.device),
            out_cache_loc=self._last_slots[chosen].to(w.device),
            req_pool_indices=self._rows[chosen].to(w.device),
            seq_lens=lengths.to(w.device),
            seq_lens_cpu=lengths,
        )

    @functools.cached_property
    def compiled(self) -> Callable[[Tensor, Tensor], Tensor]:
        return torch.compile(self.stack, **self.workload.compile_options[COMPILE])

    @functools.cached_property
    def compiled_as_piece(self) -> Callable[[Tensor, Tensor], Tensor]:
        """The same, for whoever records it."""
        return CompiledPiece(self.compiled, "stack")


# --- the paths ------------------------------------------------------------------------------------


class PlainPath:
    """The stack as it is, or compiled; attention plans each step in new memory."""

    def __init__(self, world: World, run: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._run = run
        self._backend = world.backend()

    def __call__(self, batch: ForwardBatch) -> Tensor:
        metadata = self._backend.init_forward_metadata(batch)
        with forward_context(ForwardContext(self._backend, batch, metadata)):
            return self._run(batch.input_ids, batch.positions)


class ReduceOverheadPath:
    """``mode="reduce-overhead"``. What attention reads besides the arguments is static memory,
    since the recordings bake its addresses; each step is marked, as its documentation asks."""

    def __init__(self, world: World) -> None:
        w = world.workload
        self._graph_key = (w.context,)
        self._backend = world.backend()
        self._backend.init_graph_state(max_bs=world.largest, max_num_tokens=world.largest)
        self._run = torch.compile(world.stack, **w.compile_options[REDUCE])
        self._out_cache_loc = torch.zeros(world.largest, dtype=torch.int64, device=w.device)

    def __call__(self, batch: ForwardBatch) -> Tensor:
        size = batch.batch_size
        self._out_cache_loc[:size].copy_(batch.out_cache_loc)
        static = copy.copy(batch)
        static.out_cache_loc = self._out_cache_loc[:size]
        metadata = self._backend.init_forward_metadata(batch, graph_key=self._graph_key)
        torch.compiler.cudagraph_mark_step_begin()
        with forward_context(ForwardContext(self._backend, static, metadata)):
            return self._run(batch.input_ids, batch.positions)


class HandWrittenPath:
    """What engines write by hand: static tensors, a graph per bucket, copies, tails by hand."""

    TAILS = {
        "input_ids": 0,
        "positions": 0,
        "out_cache_loc": 0,
        "req_pool_indices": 0,
        "seq_lens": 1,
        "seq_lens_cpu": 1,
    }

    def __init__(self, world: World, run: Callable[[Tensor, Tensor], Tensor]) -> None:
        w = world.workload
        self._graph_key = (w.context,)
        self._run = run
        self._backend = world.backend()
        self._backend.init_graph_state(max_bs=world.largest, max_num_tokens=world.largest)
        self._static = {
            name: torch.full(
                (world.largest,), tail, device="cpu" if name == "seq_lens_cpu" else w.device
            )
            for name, tail in self.TAILS.items()
        }
        self._buckets = w.buckets
        self._views = {size: self._view(size) for size in w.buckets}
        self._pool = torch.cuda.graph_pool_handle() if w.is_on_device else None
        began = time.perf_counter()
        self._graphs = {size: self._capture(size) for size in reversed(w.buckets)}
        self.capture_seconds = time.perf_counter() - began

    def __call__(self, batch: ForwardBatch) -> Tensor:
        size = batch.batch_size
        bucket = next(each for each in self._buckets if each >= size)
        for name, tail in self.TAILS.items():
            static = self._static[name]
            static[:size].copy_(getattr(batch, name))
            if size < bucket:
                static[size:bucket].fill_(tail)
        self._backend.init_forward_metadata(self._views[bucket], graph_key=self._graph_key)
        replay, hidden = self._graphs[bucket]
        replayed = replay()
        return (hidden if replayed is None else replayed)[:size]

    def _view(self, size: int) -> ForwardBatch:
        fields = {name: static[:size] for name, static in self._static.items()}
        return ForwardBatch(forward_mode=ForwardMode.DECODE, batch_size=size, **fields)

    def _capture(self, size: int) -> tuple[Callable[[], Tensor | None], Tensor]:
        """What replays the graph of a bucket, and where its result is if that returns none."""
        view = self._views[size]
        metadata = self._backend.init_forward_metadata(view, graph_key=self._graph_key)
        context = ForwardContext(self._backend, view, metadata)

        def run() -> Tensor:
            with forward_context(context):
                return self._run(view.input_ids, view.positions)

        if self._pool is None:
            return self._capture_on_host(run, context)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            hidden = run()
        return graph.replay, hidden

    def _capture_on_host(
        self, run: Callable[[], Tensor], context: ForwardContext
    ) -> tuple[Callable[[], Tensor], Tensor]:
        """Attention is called again by a replay on the host, so it needs its context then too."""
        run()
        statics = [tensor for name, tensor in self._static.items() if name != "seq_lens_cpu"]
        recording = HostEngine().capture(lambda *_: [run()], static_inputs=statics)
        (hidden,) = recording.outputs

        def replay() -> Tensor:
            with forward_context(context):
                return recording()[0]

        return replay, hidden


class RunnerPath:
    """``ModelRunner``, decode only; a step for which it has no graph fails."""

    def __init__(self, world: World, engine: str) -> None:
        w = world.workload
        self._graph_key = (w.context,)
        self._buckets = w.buckets
        self._backend = world.backend()
        self.runner = ModelRunner(
            Served(world.stack),
            self._backend,
            RunnerConfig(
                max_running_requests=world.largest,
                cudagraph_capture_sizes=w.buckets,
                enable_prefill_graph=False,
                engine=engine,
                compiler=w.compiler,
                strict=True,
                show_progress=False,
            ),
        )
        facts = self.runner.warmup()
        self.capture_seconds = facts.capture_seconds
        self.host_pool_bytes = facts.pool_bytes

    def __call__(self, batch: ForwardBatch) -> Tensor:
        return self.runner.forward(batch).hidden_states

    def bare_replay(self, batch: ForwardBatch) -> Callable[[], Any]:
        """What launches the captured graph that serves ``batch``, and does nothing else.

        Reaches into the recording: nothing else needs the graph itself.
        """
        decode = self.runner.decode
        assert decode is not None
        bucket = next(each for each in self._buckets if each >= batch.batch_size)
        (key,) = [each for each in decode.graphs.keys if each.bs == bucket]
        program = decode.graphs._programs[key]
        recording: Any = program._replay
        if recording is None:
            raise RuntimeError(
                f"decode of {bucket} is in {program.num_segments} segments, so it has no one "
                f"graph: {program.refused_whole}"
            )
        if hasattr(recording, "_graph"):  # of the cuda engine
            return recording._graph.replay
        if hasattr(recording, "_function"):  # of the trees
            function = recording._function
            (node,) = function._manager.roots[function._function_id]
            return node.graph.replay
        view = decode.load_batch(batch)
        metadata = self._backend.init_forward_metadata(view, graph_key=self._graph_key)
        context = ForwardContext(self._backend, view, metadata)
        (traced,) = self.runner.traced.graphs
        sizes = {"bs": key.bs, "tokens": key.tokens}
        views = {name: decode.registry.view(name, sizes) for name in traced.slots.values()}
        tensors = traced.tensors(views) if self.runner.served.engine.late_binding else None

        def replay() -> list[Any]:
            with forward_context(context):
                return recording(tensors)

        return replay


def runner_name(engine: str) -> str:
    return f"graphbuf, engine {engine}"


def bare_name(engine: str) -> str:
    return f"bare replay, engine {engine}"


Maker = Callable[[World], Step]


def path_makers(workload: Workload) -> dict[str, Maker]:
    """Every path, in the order in which they are set up."""
    makers: dict[str, Maker] = {
        EAGER: lambda world: PlainPath(world, world.stack),
        COMPILE: lambda world: PlainPath(world, world.compiled),
        REDUCE: ReduceOverheadPath,
        HAND_WRITTEN: lambda world: HandWrittenPath(world, world.stack),
        HAND_WRITTEN_COMPILED: lambda world: HandWrittenPath(world, world.compiled_as_piece),
    }
    for engine in workload.engines:
        makers[runner_name(engine)] = functools.partial(RunnerPath, engine=engine)
    return makers
