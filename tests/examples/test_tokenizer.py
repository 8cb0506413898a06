import pytest

from examples.llama.tokenizer import BOS, VOCAB_SIZE, decode, encode


@pytest.mark.parametrize("text", ["", "In the beginning", "naïve — ☃\n", "\x01\x7f"])
def test_text_survives_a_round_trip(text):
    ids = encode(text)
    assert ids[0] == BOS
    assert len(ids) == len(text.encode()) + 1
    assert all(0 <= i < VOCAB_SIZE for i in ids)
    assert decode(ids) == text


def test_a_torn_character_is_shown_not_raised():
    assert decode(encode("☃")[:-1]) == "\ufffd"


def test_text_with_the_start_marker_is_refused():
    with pytest.raises(ValueError, match="NUL at byte 2"):
        encode("ab\x00")
