"""Port a hand-written graph runner to graphbuf, and see what that catches.

    python -m examples.port_a_runner

``HandWrittenRunner`` is the decode-graph runner that small inference engines carry: static tensors,
a graph per bucket, ``[:n]`` copies, tails reset field by field. (Its graphs are recorded by the
host engine here, so that it runs without a GPU; on one it would be ``torch.cuda.CUDAGraph``.)
``PortedRunner`` is the same thing on ``ModelRunner``. The script counts the lines of both, serves
the same requests through both, and then makes four mistakes that such runners are known for.
"""

from __future__ import annotations

import ast
import copy
import inspect
import io
import sys
import textwrap
import tokenize
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from compile_backend import ForwardBatch, ForwardMode, GraphbufError, ModelRunner, RunnerConfig
from compile_backend.attention import (
    AttentionBackend,
    ForwardContext,
    TorchNativeBackend,
    forward_context,
)
from compile_backend.engines import HostEngine, Replay
from compile_backend.runners import ForwardOutput
from examples.llama.arrivals import Trace
from examples.llama.model import Llama, ServedLlama, load_model
from examples.llama.server import PlainModel, Server, serve
from examples.llama.token_scheduler import Plan, ServedRequest, ServingMemory, build_forward_batch

BUCKETS = (1, 2, 4, 8)
MAX_RUNNING = 12
MAX_STEP_TOKENS = 64
RESETS = {"out_cache_loc": 0, "req_pool_indices": 0, "seq_lens": 1, "seq_lens_cpu": 1}


class HandWrittenRunner:
    """Decode batches out of graphs, everything else as the model is written."""

    def __init__(
        self, model: ServedLlama, attn_backend: AttentionBackend, resets: dict[str, int] = RESETS
    ) -> None:
        self.model = model
        self.attn_backend = attn_backend
        self.resets = resets
        self.plain = PlainModel(model, attn_backend)
        self.input_ids = torch.zeros(BUCKETS[-1], dtype=torch.int64)
        self.positions = torch.zeros(BUCKETS[-1], dtype=torch.int64)
        self.out_cache_loc = torch.zeros(BUCKETS[-1], dtype=torch.int64)
        self.req_pool_indices = torch.zeros(BUCKETS[-1], dtype=torch.int64)
        self.seq_lens = torch.ones(BUCKETS[-1], dtype=torch.int64)
        self.seq_lens_cpu = torch.ones(BUCKETS[-1], dtype=torch.int64)
        self.graphs: dict[tuple[int, tuple[int, ...]], Replay] = {}

    def view(self, bucket: int) -> ForwardBatch:
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=bucket,
            input_ids=self.input_ids[:bucket],
            positions=self.positions[:bucket],
            out_cache_loc=self.out_cache_loc[:bucket],
            req_pool_indices=self.req_pool_indices[:bucket],
            seq_lens=self.seq_lens[:bucket],
            seq_lens_cpu=self.seq_lens_cpu[:bucket],
        )

    def warmup(self) -> None:
        self.attn_backend.init_graph_state(max_bs=BUCKETS[-1], max_num_tokens=BUCKETS[-1])
        for bucket in reversed(BUCKETS):
            for key in self.attn_backend.capture_keys(ForwardMode.DECODE, bucket):
                self.graphs[bucket, key] = self.capture(bucket, key)
        self.attn_backend.reset_scratch()

    def capture(self, bucket: int, key: tuple[int, ...]) -> Replay:
        batch = self.view(bucket)
        tensors = [each for each in vars(batch).values() if isinstance(each, Tensor)]

        def run(*_: Tensor) -> list[Tensor]:
            return [self.model.lm_head(self.model(batch))]

        with self.context(batch, key):
            return HostEngine().capture(run, static_inputs=tensors)

    def context(self, batch: ForwardBatch, key: tuple[int, ...]) -> Any:
        metadata = self.attn_backend.init_forward_metadata(batch, graph_key=key)
        return forward_context(ForwardContext(self.attn_backend, batch, metadata))

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        if not batch.forward_mode.is_decode():
            return self.plain.forward(batch)
        n = batch.batch_size
        bucket = min((b for b in BUCKETS if b >= n), default=BUCKETS[-1])
        static = self.view(bucket)
        for name, buffer in vars(static).items():
            source = getattr(batch, name, None)
            if isinstance(buffer, Tensor) and source is not None:
                buffer[:n] = source[:bucket]
            if name in self.resets:
                buffer[n:] = self.resets[name]
        key = self.attn_backend.graph_key(static)
        with self.context(static, key):
            (logits,) = self.graphs[bucket, key]()
        return ForwardOutput(
            logits=logits[:n],
            hidden_states=None,
            path="decode",
            reason=None,
            bucket=bucket,
            batch_size=n,
            num_tokens=n,
        )


class PortedRunner:
    """Decode batches out of graphs, prompts out of graphs, everything else on the same slots."""

    def __init__(self, model: ServedLlama, attn_backend: AttentionBackend) -> None:
        config = RunnerConfig(
            max_running_requests=MAX_RUNNING,
            cudagraph_capture_sizes=BUCKETS,
            chunked_prefill_size=MAX_STEP_TOKENS,
            max_prefill_tokens=MAX_STEP_TOKENS,
            compiler="eager",
            show_progress=False,
        )
        self.runner = ModelRunner(model, attn_backend, config)

    def warmup(self) -> None:
        self.runner.warmup()

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        return self.runner.forward(batch)


# -- the same tokens, in fewer lines ---------------------------------------------------------------

MakeRunner = Callable[[ServedLlama, AttentionBackend], Any]
PROMPTS = ("In the beginning", "Blessed are", "Hear", "My son,", "Woe unto", "The wise man")


def build_server(model: Llama, make_runner: MakeRunner) -> Server:
    """Return a server of its own memory; a runner that needs warming up is warmed up."""
    memory = ServingMemory.allocate(model.config, num_slots=2049, max_requests=MAX_RUNNING)
    backend = TorchNativeBackend(memory.cache, memory.table)
    runner = make_runner(ServedLlama(model), backend)
    with torch.inference_mode():
        getattr(runner, "warmup", lambda: None)()
    return Server(runner, memory, max_step_tokens=MAX_STEP_TOKENS)


def serve_prompts(model: Llama, make_runner: MakeRunner) -> list[list[int]]:
    """Return the new tokens of each prompt; the batch has another size at many steps."""
    server = build_server(model, make_runner)
    requests = [
        ServedRequest(prompt=prompt, max_new_tokens=24 + 4 * i, arrival_step=3 * i)
        for i, prompt in enumerate(PROMPTS)
    ]
    serve(server, Trace(requests))
    return [s.output for s in sorted(server.finished, key=lambda s: s.index)]


def count_code_lines(cls: type) -> int:
    """Lines of a class that hold code: neither blank, nor a comment, nor a docstring."""
    source = textwrap.dedent(inspect.getsource(cls))
    no_code = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in no_code and token.string:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            text = node.body[0]
            lines.difference_update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return len(lines)


# -- four mistakes ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a runner made of a batch."""

    kind: str  # "right", "refused" or "silently wrong"
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


class Probe:
    """A runner, and beside it the model as written with the same history, to judge it by."""

    def __init__(self, model: Llama, make_runner: MakeRunner, prompts: list[str]) -> None:
        self.probed = build_server(model, make_runner)
        self.truth = build_server(model, PlainModel)
        for server in (self.probed, self.truth):
            for prompt in prompts:
                server.submit(ServedRequest(prompt=prompt, max_new_tokens=16))
            while not server.scheduler.plan().mode.is_decode():
                server.step()

    @torch.inference_mode()
    def decode(
        self,
        who: list[int] | None = None,
        change: Callable[[ForwardBatch], ForwardBatch] = lambda batch: batch,
    ) -> Verdict:
        """Decode one token for the requests ``who`` (all), the probed runner's batch changed."""
        plans = [pick(server.scheduler.plan(), who) for server in (self.probed, self.truth)]
        batches = [build_forward_batch(plan) for plan in plans]
        verdict, expected = None, self.truth.runner.forward(batches[1]).logits
        assert expected is not None
        try:
            verdict = judge(self.probed.runner.forward(change(batches[0])), expected)
        except GraphbufError as error:
            verdict = Verdict("refused", f"{type(error).__name__}: {error}")
        for server, plan in zip((self.probed, self.truth), plans, strict=True):
            server.scheduler.commit(plan, expected.argmax(-1).tolist())
        return verdict


def pick(plan: Plan, who: list[int] | None) -> Plan:
    """Return the part of a decode step that is for the requests ``who``."""
    assert plan.mode.is_decode()
    return Plan(plan.mode, [c for c in plan.chunks if who is None or c.sequence.index in who])


def judge(out: ForwardOutput, expected: Tensor) -> Verdict:
    assert out.logits is not None
    if out.logits.shape != expected.shape:
        detail = f"logits for {len(out.logits)} of {len(expected)} requests"
        return Verdict("silently wrong", detail)
    error = float((out.logits - expected).abs().max())
    detail = f"logits differ from the model's by at most {error:.1e}"
    if error > 1e-3:
        return Verdict("silently wrong", detail)
    how = "out of a graph" if out.path != "eager" else f"eagerly, {out.reason and out.reason.value}"
    return Verdict("right", f"{how}; {detail}")


def misspelt_field(model: Llama, make_runner: MakeRunner) -> Verdict:
    """``batch.seq_len = ...`` where the field is ``seq_lens``: Python lets you."""

    def misspell(batch: ForwardBatch) -> ForwardBatch:
        broken: Any = copy.copy(batch)
        broken.seq_len, broken.seq_lens = batch.seq_lens, None
        return broken

    probe = Probe(model, make_runner, list(PROMPTS[:3]))
    probe.decode()
    return probe.decode(change=misspell)


def too_many_rows(model: Llama, make_runner: MakeRunner) -> Verdict:
    """Nine requests where the largest graph is for eight."""
    return Probe(model, make_runner, ["And"] * 9).decode()


def wrong_dtype(model: Llama, make_runner: MakeRunner) -> Verdict:
    """Positions that went through bfloat16, which counts in twos from 256."""

    def round_positions(batch: ForwardBatch) -> ForwardBatch:
        assert batch.positions is not None
        broken = copy.copy(batch)
        broken.positions = batch.positions.to(torch.bfloat16)
        return broken

    return Probe(model, make_runner, ["And he said unto them, " * 12]).decode(
        change=round_positions
    )


def stale_row(model: Llama, make_runner: MakeRunner) -> Verdict:
    """Four requests, then three: what does the fourth row of the graph write over?

    The fourth request sits a step out and comes back. Its last token lies where the row wrote.
    """
    probe = Probe(model, make_runner, list(PROMPTS[-4:]))
    probe.decode()
    probe.decode([0, 1, 2])
    return probe.decode([3])


def forgetful(model: ServedLlama, attn_backend: AttentionBackend) -> HandWrittenRunner:
    """The hand-written runner before somebody added the reset of one field."""
    resets = {name: value for name, value in RESETS.items() if name != "out_cache_loc"}
    return HandWrittenRunner(model, attn_backend, resets)


MISTAKES: list[tuple[str, Callable[[Llama, MakeRunner], Verdict], MakeRunner]] = [
    ("a misspelt field", misspelt_field, HandWrittenRunner),
    ("more rows than the largest graph", too_many_rows, HandWrittenRunner),
    ("a wrong dtype", wrong_dtype, HandWrittenRunner),
    ("a stale row past the live batch", stale_row, forgetful),
]


def main() -> int:
    torch.set_num_threads(1)
    model = load_model()
    expected = serve_prompts(model, PlainModel)
    is_fine = True
    for cls in (HandWrittenRunner, PortedRunner):
        is_same = serve_prompts(model, cls) == expected
        is_fine &= is_same
        verdict = "the model's own tokens" if is_same else "OTHER TOKENS than the model"
        print(f"{cls.__name__:<17} {count_code_lines(cls):3d} lines of code, {verdict}")
    for name, mistake, by_hand in MISTAKES:
        ported = mistake(model, PortedRunner)
        is_fine &= ported.kind != "silently wrong"
        print(f"\n{name}\n  by hand   {mistake(model, by_hand)}\n  graphbuf  {ported}")
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
