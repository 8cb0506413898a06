"""Text to token ids and back: a token is a byte, so the vocabulary is 256 and nothing is unknown.

Byte 0 never occurs in text. It marks the start of a document, in training and before every prompt.
"""

VOCAB_SIZE = 256
BOS = 0


def encode(text: str) -> list[int]:
    """Return the ids of ``text``, opened by ``BOS``: one id per UTF-8 byte and one more."""
    ids = list(text.encode("utf-8"))
    if BOS in ids:
        raise ValueError(
            f"the text holds a NUL at byte {ids.index(BOS)}, which marks the start of a document; "
            f"remove it before encoding"
        )
    return [BOS, *ids]


def decode(ids: list[int]) -> str:
    """Return the text of ``ids`` without ``BOS``; a torn multi-byte character reads as U+FFFD."""
    return bytes(i for i in ids if i != BOS).decode("utf-8", errors="replace")
