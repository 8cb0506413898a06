import pytest
import torch

from examples.llama.generate import generate
from examples.llama.scheduler import Request
from examples.llama.traffic import SlowReaders

PROMPTS = ["In", "And it came to pass", "", "Hear, O", "a" * 30]
REQUESTS = [
    Request(prompt=prompt, max_new_tokens=6 + 3 * i, arrival_step=2 * i)
    for i, prompt in enumerate(PROMPTS)
]


@pytest.mark.parametrize("thin", [None, SlowReaders(0)], ids=["everyone", "slow readers"])
def test_a_batch_generates_what_each_request_generates_alone(model, thin):
    together = generate(
        model, model.cache, REQUESTS, max_tokens=16, prefill_chunk=5, thin=thin, keep_logits=True
    )
    assert max(step.num_sequences for step in together.steps) > 2
    assert [len(o) for o in together.outputs] == [r.max_new_tokens for r in REQUESTS]
    for request, output, logits in zip(REQUESTS, together.outputs, together.logits, strict=True):
        alone = generate(model, model.cache, [request], keep_logits=True)
        assert alone.outputs == [output]
        torch.testing.assert_close(alone.logits[0], logits, rtol=1e-4, atol=1e-3)


def test_forced_tokens_are_followed_and_the_logits_are_those_of_their_prefix(model):
    request = Request(prompt="Woe", max_new_tokens=4)
    forced = [list(b"unto")]
    led = generate(model, model.cache, [request], forced=forced, keep_logits=True)
    assert led.outputs == forced
    with torch.inference_mode():
        dense = model.forward_dense(torch.tensor([[0, *b"Woeunt"]]))[0, 3:]
    torch.testing.assert_close(led.logits[0], dense, rtol=1e-4, atol=1e-3)


def test_steps_count_rows_and_sequences(model):
    run = generate(model, model.cache, [Request(prompt="abc", max_new_tokens=3)], prefill_chunk=3)
    assert [(s.num_rows, s.num_sequences) for s in run.steps] == [(3, 1), (1, 1), (1, 1), (1, 1)]
    assert run.num_new_tokens == 3
    assert run.num_size_changes == 1


def test_two_runs_see_the_same_batches_whatever_the_model_says(model):
    kept = generate(model, model.cache, REQUESTS, thin=SlowReaders(1))
    silent = generate(
        lambda batch: torch.zeros(len(batch.input_ids), 256),
        model.cache,
        REQUESTS,
        thin=SlowReaders(1),
    )
    assert [s.num_rows for s in kept.steps] == [s.num_rows for s in silent.steps]
    assert kept.outputs != silent.outputs
