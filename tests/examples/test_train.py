import math

import pytest
import torch

from examples.llama import train
from examples.llama.model import Llama, LlamaConfig

CONFIG = train.TrainConfig(steps=1000, batch_size=2, seq_len=8, peak_lr=1e-2)


def test_verses_are_grouped_by_chapter_and_lose_their_references():
    text = "Ge1:1 In the beginning\nGe1:2 And the earth\nGe2:1 Thus\n1Joh1:1 That which was\n"
    assert train.split_chapters(text) == [
        "In the beginning\nAnd the earth\n",
        "Thus\n",
        "That which was\n",
    ]


def test_a_line_that_is_no_verse_is_shown():
    with pytest.raises(ValueError, match="'no reference'"):
        train.split_chapters("Ge1:1 In the beginning\nno reference\n")


def test_targets_are_the_inputs_one_byte_later():
    ids = train.to_ids(["abc", "defghijklm"])
    inputs, targets = train.windows(ids, torch.tensor([0, 4]), seq_len=5)
    assert inputs.tolist() == [[0, *b"abc", 0], [0, *b"defg"]]
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_the_learning_rate_warms_up_and_falls_to_a_twentieth():
    rates = [train.learning_rate(step, CONFIG) for step in range(1001)]
    assert rates[0] == pytest.approx(1e-4)
    assert max(rates) == pytest.approx(1e-2)
    assert rates.index(max(rates)) in (99, 100)
    assert rates[-1] == pytest.approx(5e-4)


def test_a_few_steps_lower_the_loss():
    torch.manual_seed(0)
    model = Llama(LlamaConfig(dim=16, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=24))
    inputs, targets = train.windows(train.to_ids(["and it came to pass"]), torch.tensor([0]), 16)
    optimizer = train.build_optimizer(model, CONFIG)
    for group in optimizer.param_groups:
        group["lr"] = CONFIG.peak_lr
    losses = []
    for _ in range(20):
        loss = train.loss_of(model, inputs, targets, bf16=False)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(256), rel=0.05)
    assert losses[-1] < losses[0] / 2


def test_a_missing_text_program_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="apt-get install bible-kjv bible-kjv-text"):
        train.read_text()
