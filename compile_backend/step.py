"""The step that is running, of the whole process.

Slots may be shared by everything in the process that replays graphs, so fill, replay and copy-out
of one call are never interleaved with another's: other threads wait, and a call that is made inside
a step (by an operator that runs a model) leaves the slots alone.
"""

from __future__ import annotations

import threading

__all__ = ["step"]


class _Step:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.depth = 0  # read and written under the lock

    def __enter__(self) -> _Step:
        self.lock.acquire()
        self.depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        self.lock.release()


step = _Step()
"""Entered around fill, replay and copy-out; ``depth`` above 1 means a call inside a call."""
