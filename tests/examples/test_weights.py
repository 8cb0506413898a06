"""The committed weights: their size, their record, and that they have learned to write words."""

import re

import pytest
import torch
from safetensors import safe_open

from examples.llama.generate import generate
from examples.llama.model import WEIGHTS, load_model
from examples.llama.scheduler import Request
from examples.llama.tokenizer import decode, encode

_COMMON = (
    "a all also am an and are as at be because been before behold brother brought but by came "
    "children city come cometh day days did do down earth even every father fathers fire five for "
    "forth forty four from gave give go god good great had hand hands hath have he hear heart "
    "heaven her him his holy house hundred i in into is israel it jesus judah king kings land let "
    "lord made man many may me men moses my name no not now of offering on one or our out over "
    "people place priest said saith saying sea sent servant seven shall she should sin son sons "
    "spake that the thee their them then there therefore they thine thing things this thou "
    "thousand three thy to took twenty two unto up upon was water waters we went were what when "
    "which who will with word words years ye you your "
)
COMMON_WORDS = frozenset(_COMMON.split())

VERSE = "And God said, Let there be light: and there was light."


@pytest.fixture(scope="module")
def trained():
    model = load_model()
    model.allocate_cache(num_pages=33)
    return model


def test_the_file_is_small_and_says_where_it_comes_from():
    assert WEIGHTS.stat().st_size <= 6_000_000
    with safe_open(WEIGHTS, framework="pt") as file:
        notes = file.metadata()
    assert "King James" in notes["data"]
    assert notes["license"] == "Apache-2.0"
    assert float(notes["val_loss_nats_per_byte"]) < 1.45


def test_text_of_its_kind_is_far_likelier_than_other_text(trained):
    def nats_per_byte(text: str) -> float:
        ids = torch.tensor([encode(text)])
        with torch.inference_mode():
            logits = trained.forward_dense(ids[:, :-1])
        return float(torch.nn.functional.cross_entropy(logits[0], ids[0, 1:]))

    assert nats_per_byte(VERSE) < 1.5
    assert nats_per_byte("Qx7#kd! zzvw 0x1f <br/> jjq;") > 3.0


@pytest.mark.parametrize("prompt", ["In the beginning", "And the LORD said unto"])
def test_greedy_continuations_consist_mostly_of_words(trained, prompt):
    (output,) = generate(
        trained, trained.cache, [Request(prompt=prompt, max_new_tokens=160)]
    ).outputs
    words = re.findall(r"[a-z]+", decode(output).lower())[:-1]  # the last may be cut off
    assert len(words) >= 20
    known = [word for word in words if word in COMMON_WORDS]
    assert len(known) / len(words) > 0.6, words
    assert len(set(words)) >= 6, words
