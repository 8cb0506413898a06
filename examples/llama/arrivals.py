"""When requests arrive: at the steps of a seeded trace, or as lines of standard input."""

import os
import select
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from examples.llama.token_scheduler import ServedRequest

POLL_SECONDS = 0.05  # how long an idle server waits for a line before it looks for Ctrl-C


class Arrivals(Protocol):
    """Where requests come from."""

    @property
    def is_exhausted(self) -> bool:
        """Whether no request will ever come."""

    def take(self, step: int, *, is_idle: bool) -> list[ServedRequest]:
        """Return what has arrived by ``step``. Where ``is_idle``, it may wait a little."""


class Trace:
    """Requests that arrive at the steps they name, in that order; an idle server skips ahead."""

    def __init__(self, requests: Iterable[ServedRequest]) -> None:
        self._waiting = deque(requests)

    @property
    def is_exhausted(self) -> bool:
        return not self._waiting

    def take(self, step: int, *, is_idle: bool) -> list[ServedRequest]:
        if is_idle and self._waiting:
            step = max(step, self._waiting[0].arrival_step)
        due = []
        while self._waiting and self._waiting[0].arrival_step <= step:
            due.append(self._waiting.popleft())
        return due


class Lines:
    """One request for each line that comes from a file descriptor, until its end.

    Lines are read between steps, without a thread: a line is taken up at the step after it came.
    Blank lines are skipped, and bytes that are not UTF-8 read as U+FFFD.
    """

    def __init__(self, fd: int, to_request: Callable[[str], ServedRequest]) -> None:
        self._fd = fd
        self._to_request = to_request
        self._rest = b""
        self._is_closed = False

    @property
    def is_exhausted(self) -> bool:
        return self._is_closed

    def take(self, step: int, *, is_idle: bool) -> list[ServedRequest]:
        timeout = POLL_SECONDS if is_idle else 0.0
        if self._is_closed or not select.select([self._fd], [], [], timeout)[0]:
            return []
        data = os.read(self._fd, 1 << 16)
        self._is_closed = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._is_closed:  # the last line may lack its end
            lines, self._rest = [*lines, self._rest], b""
        texts = [line.decode("utf-8", errors="replace").strip("\r") for line in lines]
        return [self._to_request(text) for text in texts if text.strip()]
