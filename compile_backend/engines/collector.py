"""Python's garbage collector at rest while graphs are captured.

A collection in the middle of a capture may free device memory, run finalizers that call the
driver, and costs a walk over every object of a large process. So it runs once before, and not
inside.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["resting_collector"]

_lock = threading.Lock()
_depth = 0
_was_enabled = False
_froze = False


@contextmanager
def resting_collector() -> Iterator[None]:
    """Collect once, freeze what is left, and collect nothing inside; put back what was found.

    Nests, also across threads: only the outermost entry collects. Wrap the captures of many
    buckets in it, so that they share one collection. Objects that somebody froze before
    (``gc.freeze``) stay frozen, since ``gc.unfreeze`` could not tell theirs from ours.
    """
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _depth, _froze, _was_enabled
    with _lock:
        if _depth == 0:
            _was_enabled = gc.isenabled()
            gc.collect()
            _froze = gc.get_freeze_count() == 0
            if _froze:
                gc.freeze()
            gc.disable()
        _depth += 1


def _leave() -> None:
    global _depth
    with _lock:
        _depth -= 1
        if _depth > 0:
            return
        if _froze:
            gc.unfreeze()
        (gc.enable if _was_enabled else gc.disable)()
