"""Seeded traffic for the demo and the benchmark: who asks for what, when, and who falls behind."""

import random

from examples.llama.scheduler import Chunk, Request

# Openings in the manner of the training text, of 3 to 120 bytes.
PROMPTS = [
    "In the beginning",
    "And the LORD said unto Moses, Speak unto the children of Israel, and say unto them,",
    "Blessed are",
    "The wise man",
    "And it came to pass in those days, that there went out a man of Judah,",
    "Hear",
    "Thou shalt not",
    "And Jesus answered and said unto him,",
    "The king went up to the house of the LORD, and all the people of the land, both small and "
    "great, went with him;",
    "My son,",
    "Then spake David unto the men that stood by him, saying,",
    "Woe unto",
    "Now the servant of the man of God rose early, and went forth, and, behold,",
    "Praise ye the LORD.",
    "And the waters",
    "Therefore, brethren, let us not be weary; for",
]


def seeded_requests(
    count: int, seed: int, *, new_tokens: tuple[int, int] = (64, 112), gap: tuple[int, int] = (0, 7)
) -> list[Request]:
    """Return ``count`` requests over the prompts; ranges are inclusive, ``gap`` is in steps.

    The first four arrive together, each later one a gap after the one before it.
    """
    rng = random.Random(seed)
    requests: list[Request] = []
    step = 0
    for i in range(count):
        step += rng.randint(*gap) if i >= 4 else 0
        requests.append(
            Request(
                prompt=PROMPTS[i % len(PROMPTS)],
                max_new_tokens=rng.randint(*new_tokens),
                arrival_step=step,
            )
        )
    return requests


class SlowReaders:
    """Clients that fall behind: their requests sit out a step, so the batch changes size each time.

    The request with the most left to do always stays, every other with probability ``keep``. Where
    that leaves as many rows as the step before had, one more request leaves or comes back. Only
    a step with a single request can be the size that the one before it was.
    """

    def __init__(self, seed: int, keep: float = 0.8) -> None:
        self._rng = random.Random(seed)
        self._keep = keep
        self._last_num_rows = 0

    def __call__(self, chunks: list[Chunk]) -> list[Chunk]:
        longest = max(chunks, key=lambda c: c.sequence.num_left)
        kept = [c for c in chunks if c is longest or self._rng.random() < self._keep]
        if sum(c.num_rows for c in kept) == self._last_num_rows:
            absent = [c for c in chunks if c not in kept]
            if absent:
                kept = [c for c in chunks if c in kept or c is absent[0]]
            elif len(kept) > 1:
                shortest = min(kept, key=lambda c: c.sequence.num_left)
                kept = [c for c in kept if c is not shortest]
        self._last_num_rows = sum(c.num_rows for c in kept)
        return kept
