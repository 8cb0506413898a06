"""Host batches on their way to a device: pinned mirrors, and when each may be written again.

A copy from pinned memory runs after the call that issued it has returned. A mirror is therefore
owned, by the one who borrowed it and then by the copy, until the copy's event has passed.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from compile_backend.registry.arena import Arena
from compile_backend.registry.stream_order import Event

__all__ = ["Mirror", "StagingRing"]

MAX_MIRRORS = 4  # fills in flight before the host waits for the oldest of them


class Mirror:
    """Host memory that a device copies from, and the event of the last such copy."""

    def __init__(self, arena: Arena, event: Event) -> None:
        self.arena = arena
        self._event = event

    @property
    def is_in_flight(self) -> bool:
        """Whether the device may still read it."""
        return not self._event.query()

    def mark_in_flight(self, stream: Any) -> None:
        """Call right after a copy from this mirror was issued on ``stream``."""
        self._event.record(stream)

    def wait(self) -> None:
        """Block this thread until the device has read it."""
        self._event.synchronize()


class StagingRing:
    """Up to ``max_mirrors`` mirrors, handed out in turn. Safe to use from several threads."""

    def __init__(
        self,
        make_arena: Callable[[], Arena],
        make_event: Callable[[], Event],
        *,
        max_mirrors: int = MAX_MIRRORS,
    ) -> None:
        self.max_mirrors = max_mirrors
        self._make_arena, self._make_event = make_arena, make_event
        self._returned = threading.Condition()
        self._idle: list[Mirror] = []  # nobody's; the one given back longest ago comes first
        self._num_mirrors = 0

    def __len__(self) -> int:
        return self._num_mirrors

    @contextmanager
    def borrow(self) -> Iterator[Mirror]:
        """A mirror that no copy is reading and nobody else holds, until the block ends.

        A new one where all others are in use; where there may be no more, waits for the copy of
        the oldest, or for another thread to give one back. Whoever issues a copy from it calls
        :meth:`Mirror.mark_in_flight` before the block ends.
        """
        mirror, may_be_in_flight = self._take()
        try:
            if may_be_in_flight:
                mirror.wait()
            yield mirror
        finally:
            with self._returned:
                self._idle.append(mirror)
                self._returned.notify()

    def _take(self) -> tuple[Mirror, bool]:
        """A mirror, now taken, and whether a copy may still be reading it."""
        with self._returned:
            while True:
                if self._idle and not self._idle[0].is_in_flight:
                    return self._idle.pop(0), False
                if self._num_mirrors < self.max_mirrors:
                    mirror = Mirror(self._make_arena(), self._make_event())
                    self._num_mirrors += 1
                    return mirror, False
                if self._idle:
                    return self._idle.pop(0), True
                self._returned.wait()
