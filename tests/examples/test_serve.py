"""Whoever else is served, a request gets the tokens that it would get alone."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compile_backend import ForwardMode, ModelRunner, RunnerConfig
from compile_backend.attention import SCRATCH_REQUEST, SCRATCH_SLOT, TorchNativeBackend
from examples.llama.arrivals import Lines, Trace
from examples.llama.model import Llama, ServedLlama
from examples.llama.sampling import Sampler, SamplingParams
from examples.llama.serve import main, path_rows
from examples.llama.server import PlainModel, Server, serve
from examples.llama.token_scheduler import (
    Finish,
    RequestRefusedError,
    ServedRequest,
    ServingMemory,
    TokenScheduler,
    build_forward_batch,
)
from examples.llama.tokenizer import BOS, encode

ROOT = Path(__file__).parents[2]
PROMPTS = ["In", "And it came to pass", "", "Hear, O", "a" * 30, "Woe unto"]
REQUESTS = [
    ServedRequest(prompt=prompt, max_new_tokens=5 + 3 * i, arrival_step=2 * i)
    for i, prompt in enumerate(PROMPTS)
]


def request(prompt: str, new: int, **rest) -> ServedRequest:
    return ServedRequest(prompt=prompt, max_new_tokens=new, **rest)


def allocate(model: Llama, num_slots: int = 129, max_requests: int = 4) -> ServingMemory:
    return ServingMemory.allocate(model.config, num_slots=num_slots, max_requests=max_requests)


def plain_server(model: Llama, num_slots: int = 129, max_requests: int = 4, **rest) -> Server:
    memory = allocate(model, num_slots, max_requests)
    backend = TorchNativeBackend(memory.cache, memory.table)
    return Server(
        PlainModel(ServedLlama(model), backend), memory, **{"max_step_tokens": 16, **rest}
    )


def graph_server(model: Llama, num_slots: int = 129, max_requests: int = 4, **rest) -> Server:
    memory = allocate(model, num_slots, max_requests)
    config = RunnerConfig(
        max_running_requests=max_requests,
        chunked_prefill_size=16,
        max_prefill_tokens=16,
        max_total_num_tokens=num_slots,
        cudagraph_capture_sizes=(1, 2, max_requests),
        prefill_capture_sizes=(1, 2, 4, 8, 16),
        compiler="eager",
        show_progress=False,
    )
    backend = TorchNativeBackend(memory.cache, memory.table, kv_len_buckets=[32])
    runner = ModelRunner(ServedLlama(model), backend, config)
    runner.warmup()
    return Server(runner, memory, max_step_tokens=16, **rest)


def outputs(server: Server) -> list[list[int]]:
    return [s.output for s in sorted(server.finished, key=lambda s: s.index)]


def dense_greedy(model: Llama, request: ServedRequest) -> list[int]:
    """The oracle: the whole sequence anew for each token, without a cache."""
    tokens = encode(request.prompt)
    new: list[int] = []
    with torch.inference_mode():
        while len(new) < request.max_new_tokens and BOS not in new:
            logits = model.forward_dense(torch.tensor([tokens + new]))
            new.append(int(logits[0, -1].argmax()))
    return new


def everything_is_free(memory: ServingMemory) -> bool:
    return (
        memory.slots.num_free == memory.max_tokens
        and memory.table.num_free == memory.max_requests
        and not memory.table.req_to_token.any()
    )


class Counting:
    """A runner that calls ``before(n)`` before its n-th forward."""

    def __init__(self, runner, before) -> None:
        self.runner, self.before, self.count = runner, before, 0

    def forward(self, batch):
        self.before(self.count)
        self.count += 1
        return self.runner.forward(batch)


# -- tokens ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixed", [False, True], ids=["prefill first", "mixed"])
@pytest.mark.parametrize("make", [plain_server, graph_server])
def test_greedy_tokens_are_those_of_the_dense_model(model, make, mixed):
    server = make(model, mixed=mixed)
    serve(server, Trace(REQUESTS))
    assert outputs(server) == [dense_greedy(model, r) for r in REQUESTS]
    assert max(step.batch_size for step in server.steps) == 4
    assert everything_is_free(server.memory)


def test_the_runner_takes_every_batch_out_of_a_graph(model):
    server = graph_server(model)
    serve(server, Trace(REQUESTS))
    by_mode = {(step.mode, step.path) for step in server.steps}
    assert by_mode == {(ForwardMode.DECODE, "decode"), (ForwardMode.EXTEND, "prefill")}
    assert all(step.padded_rows >= step.rows > 0 for step in server.steps)
    header, *rows = path_rows(server.steps)
    assert [row[0] for row in rows] == ["decode graph", "prefill graph"]
    assert [int(row[header.index("hits")]) for row in rows] == [
        sum(step.path == path for step in server.steps) for path in ("decode", "prefill")
    ]


def test_a_runner_without_graphs_says_why(model):
    memory = allocate(model)
    config = RunnerConfig(
        max_running_requests=4,
        chunked_prefill_size=16,
        max_prefill_tokens=16,
        max_total_num_tokens=129,
        enable_decode_graph=False,
        enable_prefill_graph=False,
        compiler="eager",
        show_progress=False,
    )
    backend = TorchNativeBackend(memory.cache, memory.table)
    runner = ModelRunner(ServedLlama(model), backend, config)
    runner.warmup()
    server = Server(runner, memory, max_step_tokens=16)
    serve(server, Trace(REQUESTS))
    assert outputs(server) == [dense_greedy(model, r) for r in REQUESTS]
    assert all(step.path == "eager" and step.reason is not None for step in server.steps)
    assert all(row[0].startswith("eager: ") for row in path_rows(server.steps)[1:])


def test_a_server_can_be_used_again(model):
    server = plain_server(model)
    serve(server, Trace(REQUESTS))
    serve(server, Trace(REQUESTS))
    first, second = outputs(server)[: len(REQUESTS)], outputs(server)[len(REQUESTS) :]
    assert first == second


def test_forced_tokens_are_followed_and_scores_are_kept(model):
    led = [list(b"unto")]
    server = plain_server(model, keep_scores=True, forced=led)
    serve(server, Trace([request("Woe", 4)]))
    generation = server.generation(seconds=1.0)
    assert generation.outputs == led
    with torch.inference_mode():
        dense = model.forward_dense(torch.tensor([[0, *b"Woeunt"]]))[0, 3:]
    torch.testing.assert_close(generation.logits[0], dense, rtol=1e-4, atol=1e-3)


def test_a_request_ends_behind_its_stop_text(model):
    server = plain_server(model, forced=[list(b"unto you"), list(b"unto you")])
    serve(server, Trace([request("Woe", 8, stop=("ye", "to")), request("Woe", 8, stop=("ye",))]))
    assert outputs(server) == [list(b"unto"), list(b"unto you")]
    assert [s.finish for s in server.finished] == [Finish.STOP, Finish.LENGTH]


def test_a_request_ends_where_another_document_starts(model):
    server = plain_server(model, forced=[[65, BOS, 66, 67]])
    serve(server, Trace([request("Hear", 4)]))
    assert outputs(server) == [[65, BOS]]
    assert server.finished[0].finish is Finish.STOP


# -- sampling --------------------------------------------------------------------------------------


def test_sampled_tokens_depend_on_the_request_and_not_on_its_company(model):
    sampled = [
        request(p, 8, arrival_step=i, sampling=SamplingParams(temperature=1.5, seed=i))
        for i, p in enumerate(PROMPTS)
    ]
    together = plain_server(model)
    serve(together, Trace(sampled))
    for one, output in zip(sampled, outputs(together), strict=True):
        alone = plain_server(model)
        serve(alone, Trace([one]))
        assert outputs(alone) == [output]
    assert outputs(together) != [dense_greedy(model, r) for r in sampled]


def draw(logits: Tensor, count: int, **params) -> Tensor:
    sampler = Sampler(SamplingParams(**params))
    picked = [int(sampler.score_(logits.clone()).argmax()) for _ in range(count)]
    return torch.bincount(torch.tensor(picked), minlength=logits.numel()) / count


def test_tokens_are_drawn_in_proportion_to_the_softmax():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    frequency = draw(logits, 20_000, temperature=0.7)
    torch.testing.assert_close(frequency, (logits / 0.7).softmax(-1), atol=0.015, rtol=0)


def test_top_k_draws_from_the_k_likeliest_only():
    logits = torch.tensor([0.0, 3.0, 2.0, 2.9])
    frequency = draw(logits, 5_000, temperature=1.0, top_k=2)
    expected = torch.zeros(4)
    expected[[1, 3]] = logits[[1, 3]].softmax(-1)
    torch.testing.assert_close(frequency, expected, atol=0.03, rtol=0)


def test_the_seed_repeats_the_draw_and_another_seed_does_not():
    logits = torch.zeros(256)
    one, again, other = (Sampler(SamplingParams(temperature=1.0, seed=s)) for s in (1, 1, 2))
    scores = [sampler.score_(logits.clone()) for sampler in (one, again, other)]
    assert torch.equal(scores[0], scores[1])
    assert not torch.equal(scores[0], scores[2])


@pytest.mark.parametrize(
    "bad", [{"temperature": -0.1}, {"temperature": float("nan")}, {"top_k": 0}]
)
def test_impossible_sampling_is_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingParams(**bad)


# -- queueing and memory ---------------------------------------------------------------------------


def drain(scheduler: TokenScheduler) -> list[tuple[ForwardMode, list[tuple[int, int, int]]]]:
    """Serve every request, token 1 each time; per step its mode and (index, start, stop)s."""
    steps = []
    while scheduler.has_work:
        plan = scheduler.plan()
        steps.append((plan.mode, [(c.sequence.index, c.start, c.stop) for c in plan.chunks]))
        scheduler.commit(plan, [1 for c in plan.chunks if c.samples])
    return steps


def test_prompts_go_first_in_chunks_and_then_everyone_decodes(model):
    scheduler = TokenScheduler(allocate(model), max_step_tokens=5)
    scheduler.submit(request("ab", 3))
    scheduler.submit(request("abcdef", 2))
    extend, decode = ForwardMode.EXTEND, ForwardMode.DECODE
    assert drain(scheduler) == [
        (extend, [(0, 0, 3), (1, 0, 2)]),
        (extend, [(1, 2, 7)]),
        (decode, [(0, 3, 4), (1, 7, 8)]),
        (decode, [(0, 4, 5)]),
    ]


def test_mixed_steps_decode_first_and_give_the_rest_to_prompts(model):
    scheduler = TokenScheduler(allocate(model), max_step_tokens=5, mixed=True)
    scheduler.submit(request("ab", 3))
    scheduler.submit(request("abcdef", 2))
    extend, mixed, decode = ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DECODE
    assert drain(scheduler) == [
        (extend, [(0, 0, 3), (1, 0, 2)]),
        (mixed, [(0, 3, 4), (1, 2, 6)]),
        (mixed, [(0, 4, 5), (1, 6, 7)]),
        (decode, [(1, 7, 8)]),
    ]


def test_a_mixed_step_too_small_for_the_decoding_requests_is_refused(model):
    with pytest.raises(ValueError, match="max_step_tokens is 4; pass at least 5"):
        TokenScheduler(allocate(model, max_requests=4), max_step_tokens=4, mixed=True)
    TokenScheduler(allocate(model, max_requests=4), max_step_tokens=5, mixed=True)


@pytest.mark.parametrize("mixed", [False, True])
def test_live_tokens_never_use_the_scratch_slot_and_never_share_one(model, mixed):
    memory = allocate(model, num_slots=60, max_requests=5)
    scheduler = TokenScheduler(memory, max_step_tokens=9, mixed=mixed)
    for i in range(20):
        scheduler.submit(request("x" * (5 * i % 23), 1 + i % 7))
    while scheduler.has_work:
        plan = scheduler.plan()
        batch = build_forward_batch(plan)
        slots = batch.out_cache_loc.tolist()
        assert SCRATCH_SLOT not in slots
        assert len(set(slots)) == len(slots) == plan.num_tokens <= 9
        rows = batch.req_pool_indices.tolist()
        assert SCRATCH_REQUEST not in rows
        assert len(set(rows)) == len(rows)
        held = [slot for chunk in plan.chunks for slot in chunk.sequence.slots]
        assert len(set(held)) == len(held)
        row_of_token = torch.tensor(rows).repeat_interleave(
            torch.tensor([c.stop - c.start for c in plan.chunks])
        )
        assert memory.table.req_to_token[row_of_token, batch.positions].tolist() == slots
        scheduler.commit(plan, [1 for c in plan.chunks if c.samples])
    assert everything_is_free(memory)
    assert len(scheduler.finished) == 20


def test_more_requests_than_slots_wait_their_turn_in_order(model):
    server = plain_server(model, num_slots=17, max_requests=4)
    wanted = [request("abcdefg", 5) for _ in range(6)]  # 12 of 16 slots each
    serve(server, Trace(wanted))
    assert [s.index for s in server.finished] == list(range(6))
    assert max(step.batch_size for step in server.steps) == 1
    assert outputs(server) == [dense_greedy(model, wanted[0])] * 6
    assert everything_is_free(server.memory)


def test_more_requests_than_rows_wait_their_turn(model):
    server = plain_server(model, max_requests=2)
    serve(server, Trace([request("ab", 4) for _ in range(5)]))
    assert [s.index for s in server.finished] == list(range(5))
    assert max(step.batch_size for step in server.steps) == 2


def test_an_idle_server_skips_to_the_next_arrival(model):
    server = plain_server(model)
    serve(server, Trace([request("a", 1), request("a", 1, arrival_step=10**9)]))
    assert len(server.steps) == 2


def test_a_prompt_longer_than_the_pool_is_refused_and_the_others_are_served(model):
    server = plain_server(model, num_slots=17)
    refused: list[RequestRefusedError] = []
    wanted = [request("ab", 3), request("x" * 20, 3), request("abc", 4)]
    serve(server, Trace(wanted), on_refuse=refused.append)
    assert outputs(server) == [dense_greedy(model, wanted[0]), dense_greedy(model, wanted[2])]
    (message,) = map(str, refused)
    assert "request 1 needs 23 token slots (21 for its prompt" in message
    assert "token pool of 16 slots never has more" in message
    assert everything_is_free(server.memory)

    at_least = int(re.search(r"at least (\d+) num_slots", message)[1])  # the advice, followed
    larger = plain_server(model, num_slots=at_least)
    serve(larger, Trace([wanted[1]]))
    assert outputs(larger) == [dense_greedy(model, wanted[1])]


def test_a_refusal_that_nobody_listens_to_is_raised(model):
    server = plain_server(model)
    with pytest.raises(RequestRefusedError, match="request 1 asks for 0 new tokens"):
        serve(server, Trace([request("ab", 3), request("ab", 0)]))
    assert everything_is_free(server.memory)


def test_a_request_longer_than_the_context_is_refused(model):
    server = plain_server(model)
    with pytest.raises(RequestRefusedError, match=r"context of 64 never has more.*65 max_seq_len"):
        server.submit(request("x" * 61, 4))
    server.submit(request("x" * 61, 3))


@pytest.mark.parametrize(("prompt", "new"), [("a\0b", 3), ("ab", 0)])
def test_a_request_that_makes_no_sense_is_refused(model, prompt, new):
    with pytest.raises(RequestRefusedError, match="request 0"):
        plain_server(model).submit(request(prompt, new))


# -- cancelling and failing ------------------------------------------------------------------------


@pytest.mark.parametrize("make", [plain_server, graph_server])
def test_a_cancelled_request_frees_its_slots_and_leaves_the_others_alone(model, make):
    server = make(model)
    for one in REQUESTS:
        server.submit(one)
    while not server.finished:
        server.step()
    victim = max((s for s in server.scheduler._running), key=lambda s: len(s.slots))
    assert 0 < len(victim.output) < victim.request.max_new_tokens
    held, free = victim.max_cached, server.memory.slots.num_free
    assert server.cancel(victim.index)
    assert server.memory.slots.num_free == free + held
    assert not server.cancel(victim.index)
    while server.has_work:
        server.step()
    wanted = [dense_greedy(model, r) for r in REQUESTS]
    got = {s.index: s.output for s in server.finished}
    assert victim.finish is Finish.CANCELLED
    assert got.pop(victim.index) == wanted[victim.index][: len(victim.output)]
    assert got == {i: o for i, o in enumerate(wanted) if i != victim.index}
    assert everything_is_free(server.memory)


def test_a_waiting_request_can_be_cancelled(model):
    server = plain_server(model, max_requests=1)
    for _ in range(3):
        server.submit(request("ab", 3))
    server.step()
    assert server.cancel(1)
    assert not server.cancel(99)
    while server.has_work:
        server.step()
    assert [(s.index, len(s.output)) for s in server.finished] == [(1, 0), (0, 3), (2, 3)]


def test_a_request_cancelled_while_its_step_runs_is_not_continued(model):
    server = plain_server(model)
    server.runner = Counting(server.runner, lambda n: n == 2 and server.cancel(0))
    serve(server, Trace([request("ab", 6), request("abc", 6)]))
    assert [len(o) for o in outputs(server)] == [2, 6]
    assert everything_is_free(server.memory)


def test_a_runner_that_fails_leaves_nothing_behind_and_the_server_goes_on(model):
    server = plain_server(model)
    working = server.runner

    def fail(n: int) -> None:
        if n == 3:
            raise RuntimeError("the device is gone")

    server.runner = Counting(working, fail)
    told = []
    with pytest.raises(RuntimeError, match="the device is gone"):
        serve(server, Trace(REQUESTS), on_finish=told.append)
    assert everything_is_free(server.memory)
    assert {s.finish for s in told} == {Finish.CANCELLED}
    server.runner = working
    serve(server, Trace([REQUESTS[1]]))
    assert server.finished[-1].output == dense_greedy(model, REQUESTS[1])


# -- Ctrl-C and standard input ---------------------------------------------------------------------


def test_an_interrupt_ends_the_step_and_cancels_the_rest(model):
    server = plain_server(model)
    previous = signal.getsignal(signal.SIGINT)
    server.runner = Counting(
        server.runner, lambda n: n == 12 and os.kill(os.getpid(), signal.SIGINT)
    )
    told = []
    with pytest.raises(KeyboardInterrupt):
        serve(server, Trace(REQUESTS), on_finish=told.append)
    assert len(server.steps) == 13  # the step that ran was finished
    assert {s.finish for s in told} == {Finish.LENGTH, Finish.CANCELLED}
    assert everything_is_free(server.memory)
    assert signal.getsignal(signal.SIGINT) is previous


def test_lines_become_requests_as_they_are_completed():
    reader, writer = os.pipe()
    lines = Lines(reader, lambda text: request(text, 1))

    def take() -> list[str]:
        return [r.prompt for r in lines.take(0, is_idle=False)]

    assert take() == []
    os.write(writer, b"In the beg")
    assert take() == []
    os.write(writer, b"inning\r\n\n  \nHear\nWoe \xff unto")
    assert take() == ["In the beginning", "Hear"]
    assert not lines.is_exhausted
    os.close(writer)
    assert take() == ["Woe \ufffd unto"]
    assert lines.is_exhausted
    assert take() == []
    os.close(reader)


def test_a_server_waits_for_lines_and_ends_with_them(model):
    reader, writer = os.pipe()
    os.write(writer, b"In\nHear, O\n")
    server = plain_server(model)
    prompts = ["In", "Hear, O", "Woe unto"]

    def hang_up(sequence) -> None:
        if sequence.index == 0:
            os.write(writer, b"Woe unto")
            os.close(writer)

    serve(server, Lines(reader, lambda text: request(text, 4)), on_finish=hang_up)
    assert outputs(server) == [dense_greedy(model, request(p, 4)) for p in prompts]
    os.close(reader)


def start(*arguments: str, **pipes) -> subprocess.Popen:
    command = [sys.executable, "-m", "examples.llama.serve", "--stdin", "--compiler", "eager"]
    pipes = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        **pipes,
    }
    return subprocess.Popen([*command, *arguments], cwd=ROOT, text=True, **pipes)


def interrupt(process: subprocess.Popen) -> str:
    """Send Ctrl-C, leaving standard input open, and return what was said on stderr."""
    try:
        process.send_signal(signal.SIGINT)
        err = process.stderr.read()
        assert process.wait(timeout=60) == 130, err
    finally:
        process.kill()
        process.stdin.close()
        process.stderr.close()
    assert "Traceback" not in err
    return err


def test_standard_input_is_served_line_by_line():
    process = start("--max-new-tokens", "12")
    out, err = process.communicate(f"Thou shalt not\n{'x' * 600}\nBlessed are", timeout=120)
    assert process.returncode == 0, err
    prompts = [line.split(" |")[0] for line in out.splitlines()]
    assert prompts == ["Thou shalt not", "Blessed are"]
    assert "refused: request 1 needs 612 token slots" in err


def test_ctrl_c_prints_what_is_finished_frees_everything_and_exits_with_130(tmp_path):
    results = tmp_path / "results"
    with results.open("w") as file:
        process = start("--max-new-tokens", "120", "--engine", "none", stdout=file)
    process.stdin.write("Hear\n" * 60)  # 16 run at a time
    process.stdin.flush()
    deadline = time.monotonic() + 120
    while "\n" not in results.read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    err = interrupt(process)
    lines = results.read_text().splitlines()
    assert all(line.startswith("Hear |") for line in lines)
    counts = re.search(r"(\d+) requests finished, (\d+) cancelled; (\d+) of (\d+) token", err)
    num_finished, num_cancelled, free, slots = map(int, counts.groups())
    assert num_finished >= 16
    assert num_cancelled == sum("[cancelled after" in line for line in lines) > 0
    assert num_finished + num_cancelled == len(lines) == 60
    assert free == slots == 2048


def test_ctrl_c_while_waiting_for_a_line_exits_with_130():
    process = start("--engine", "none")
    assert "one prompt per line" in process.stderr.readline()
    time.sleep(0.2)
    assert "0 requests finished, 0 cancelled; 2048 of 2048" in interrupt(process)
    process.stdout.close()


def test_the_command_compares_both_ways_and_prints_the_table_by_path(capsys):
    arguments = ["--prompts", "5", "--runs", "1", "--compiler", "eager", "--temperature", "0.6"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "Every token of every run equals the eager model's." in out or "within tolerance" in out
    for row in ("decode graph", "prefill graph", "tokens/s, eager", "slot bytes", "pool bytes"):
        assert row in out


def test_a_bad_option_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--temperature", "-1"])
    assert exit_.value.code == 2
    assert "temperature is -1.0" in capsys.readouterr().err
