"""Two processes that meet over gloo: data-parallel ranks in step, and a pipeline of two stages.

This file is also what each process runs: ``python -m tests.runners.test_two_processes``.
"""

import json
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from compile_backend import ForwardMode, ModelRunner, PPProxyTensors, RunnerConfig
from compile_backend.registry.mlp_sync import prepare_mlp_sync_batch
from tests.runners.mode_models import Stage, hits, proxy_example
from tests.runners.models import HIDDEN, SMALL, Decoder, World, make_world

ROOT = Path(__file__).parents[2]
SECONDS = 90  # for both to finish; far more than they take
SIZES: dict[str, Any] = {"cudagraph_capture_sizes": (1, 2, 4), "prefill_capture_sizes": (4, 8)}


def run_both(scenario: str, engine: str, folder: Path) -> list[dict[str, Any]]:
    """What the two processes of ``scenario`` report; fails with what they said if one does."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-W", "error", "-m", __spec__.name, scenario, engine, str(folder)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    return [json.loads(text.splitlines()[-1]) for text in said]


def test_data_parallel_ranks_of_unequal_sizes_stay_in_step(tmp_path):
    # "host" calls the operator anew; "host_strict" would record it, and gloo waits outside of that.
    reports = run_both("ranks", "host", tmp_path)
    for rank, report in enumerate(reports):
        assert report["max_error"] < 1e-4
        assert report["hits"] == 5
        live = [step["live"] for step in report["steps"]]
        assert live == [[7, 0, 2, 0, 2, 2, 0], [0, 3, 1, 1, 0, 1, 3]][rank]
        paths = [step["path"] for step in report["steps"]]
        assert paths[:2] == [["eager", "idle"], ["idle", "eager"]][rank]
        assert paths[2:] == ["decode"] * 5
        assert [step["bucket"] for step in report["steps"][2:]] == [2, 1, 2, 2, 4]
    # Each met the other with as many rows, at every step.
    gathered = [[7, 7], [3, 3], [2, 2], [1, 1], [2, 2], [2, 2], [4, 4]]
    assert [step["gathered"] for step in reports[0]["steps"]] == gathered
    assert [step["gathered"] for step in reports[1]["steps"]] == gathered


def test_a_pipeline_of_two_stages_equals_the_whole_model(tmp_path):
    first, last = run_both("pipeline", "host_strict", tmp_path)
    assert last["max_error"] < 1e-4
    assert first["tokens"] == last["tokens"]
    for report in (first, last):
        assert report["paths"] == ["prefill", "prefill", *["decode"] * 4]
        assert (report["prefill_hits"], report["decode_hits"]) == (2, 4)


# --- what one process runs ----------------------------------------------------------------------

gathered_rows: list[int] = []


@torch.library.custom_op("graphbuf_modes::mix_over_ranks", mutates_args=())
def mix_over_ranks(h: Tensor, weight: Tensor) -> Tensor:
    """h @ weight, computed for the tokens of every rank at once, as an MLP of experts is."""
    each = [torch.empty_like(h) for _ in range(dist.get_world_size())]
    dist.all_gather(each, h.contiguous())
    gathered_rows[:] = [len(rows) for rows in each]
    every = torch.cat(each) @ weight
    return every.split([len(rows) for rows in each])[dist.get_rank()].clone()


@mix_over_ranks.register_fake
def _(h: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(h)


class Mixes(Decoder):
    """Meets the other ranks once per forward."""

    def after(self, h: Tensor, batch: Any) -> Tensor:
        return h + torch.ops.graphbuf_modes.mix_over_ranks(h, self.layers[0].down.weight)

    @torch.no_grad()
    def dense(self, tokens: list[int]) -> Tensor:
        h = super().dense(tokens)
        return h + h @ self.layers[0].down.weight


def settings(engine: str, **config: Any) -> RunnerConfig:
    return RunnerConfig(**{**SMALL, **SIZES, "engine": engine, **config})


def run_ranks(rank: int, engine: str) -> dict[str, Any]:
    world = make_world(Mixes, 1)
    config = settings(
        engine,
        enable_mlp_sync=True,
        require_mlp_tp_gather=True,
        dp_size=2,
        dp_rank=rank,
        splitting_ops=("graphbuf_modes::mix_over_ranks",),
    )
    runner = ModelRunner(world.model, world.backend, config)
    runner.warmup()  # in step: every rank captures the same buckets
    torch.manual_seed(rank)
    steps: list[dict[str, Any]] = []
    errors = []

    def serve(pairs: list[Any], mode: ForwardMode) -> None:
        batch = world.batch(pairs, mode if pairs else ForwardMode.IDLE)
        mine = torch.tensor([batch.num_tokens, batch.forward_mode.is_decode_or_idle()])
        both = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(both, mine)
        batch.can_run_dp_cuda_graph = all(bool(can) for _, can in both)
        counts = [int(num_tokens) for num_tokens, _ in both]
        out = runner.forward(prepare_mlp_sync_batch(batch, config, counts))
        errors.append(error(out.hidden_states, world.dense(pairs)))
        ends = torch.tensor([n for _, n in pairs], dtype=torch.int64).cumsum(0) - 1
        errors.append(error(out.logits, world.model.lm_head(world.dense(pairs)[ends])))
        step = {"live": batch.num_tokens, "path": out.path, "bucket": out.bucket}
        steps.append({**step, "gathered": list(gathered_rows)})

    def decode(requests: list[Any]) -> None:
        for request in requests:
            request.tokens.append(int(torch.randint(1, 40, ())))
        serve([(request, 1) for request in requests], ForwardMode.DECODE)

    mine = [world.request(n) for n in ([5, 2], [3])[rank]]
    prompts = [(request, len(request.tokens)) for request in mine]
    serve(prompts if rank == 0 else [], ForwardMode.EXTEND)
    serve(prompts if rank == 1 else [], ForwardMode.EXTEND)
    decode(mine)
    decode([] if rank == 0 else mine)
    decode(mine if rank == 0 else [])
    decode(mine)
    newcomers = [world.request(1) for _ in range(2 * rank)]  # a prompt of one token is a decode
    for request in mine * rank:
        request.tokens.append(7)
    serve([(request, 1) for request in mine * rank + newcomers], ForwardMode.DECODE)
    return {"steps": steps, "max_error": max(errors), "hits": hits(runner, "decode")}


def run_pipeline(rank: int, engine: str) -> dict[str, Any]:
    torch.manual_seed(1)
    whole = Decoder(2)
    world = World(Stage(whole, rank, 2))
    config = settings(engine, pp_size=2, pp_rank=rank)
    example = proxy_example() if rank else None
    runner = ModelRunner(world.model, world.backend, config, pp_proxy_example=example)
    runner.warmup()
    torch.manual_seed(2)  # both make the same requests
    paths, errors, tokens = [], [0.0], []

    def serve(pairs: list[Any], mode: ForwardMode) -> None:
        batch = world.batch(pairs, mode)
        keys = list(proxy_example().tensors)
        if rank == 1:
            handed = {key: torch.empty(batch.num_tokens, HIDDEN) for key in keys}
            for tensor in handed.values():
                dist.recv(tensor, 0)
            batch.pp_proxy_tensors = PPProxyTensors(handed)
        out = runner.forward(batch)
        paths.append(out.path)
        new = torch.empty(len(pairs), dtype=torch.int64)
        if rank == 0:
            for key in keys:
                dist.send(out.hidden_states[key].contiguous(), 1)
            dist.recv(new, 1)
        else:
            hidden = torch.cat([whole.dense(r.tokens[: r.num_cached])[-n:] for r, n in pairs])
            errors.append(error(out.hidden_states, hidden))
            ends = torch.tensor([n for _, n in pairs]).cumsum(0) - 1
            errors.append(error(out.logits, whole.lm_head(hidden[ends])))
            new = out.logits.argmax(-1)
            dist.send(new, 0)
        for (request, _), token in zip(pairs, new.tolist(), strict=True):
            request.tokens.append(token)
        tokens.append(new.tolist())

    requests = [world.request(n) for n in (5, 3, 4)]
    serve([(r, len(r.tokens)) for r in requests[:2]], ForwardMode.EXTEND)
    serve([(r, len(r.tokens)) for r in requests[2:]], ForwardMode.EXTEND)
    for count in (3, 1, 2, 3):
        serve([(r, 1) for r in requests[:count]], ForwardMode.DECODE)
    return {
        "paths": paths,
        "tokens": tokens,
        "max_error": max(errors),
        "prefill_hits": hits(runner, "prefill"),
        "decode_hits": hits(runner, "decode"),
    }


def error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape, f"{list(got.shape)} instead of {list(want.shape)}"
    return float((got - want).abs().max()) if len(want) else 0.0


@torch.no_grad()
def main(scenario: str, engine: str, folder: str, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=SECONDS / 2),
    )
    report = {"ranks": run_ranks, "pipeline": run_pipeline}[scenario](rank, engine)
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(report))  # noqa: T201  (what the test reads)


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))
