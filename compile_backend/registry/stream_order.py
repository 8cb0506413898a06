"""In which order streams touch the slots of one device, and the events that say so.

Fill, replay and copy-out are ordered by the stream they are issued on. A fill issued on another
stream than the last user of the slots waits, on the device, until that user is done with them.
Staging a batch in host memory writes no slot, so it may run while a replay is in flight.
"""

from functools import cache
from typing import Any, Protocol

import torch

__all__ = ["Event", "HostEvent", "StreamOrder", "current_stream", "make_event", "stream_order"]


class Event(Protocol):
    """A point in the work of a stream, as ``torch.cuda.Event`` has it."""

    def record(self, stream: Any) -> None:
        """Be the point that ``stream`` has been given work up to now."""

    def query(self) -> bool:
        """Whether the device has reached the point; True where none was recorded."""

    def synchronize(self) -> None:
        """Block this thread until the device has reached the point."""


class HostEvent:
    """The event of the host, whose work is done when the call that issued it returns."""

    def record(self, stream: Any) -> None:
        """Nothing is in flight."""

    def query(self) -> bool:
        """Always: the work is done."""
        return True

    def synchronize(self) -> None:
        """Return at once."""


def make_event(device: torch.device) -> Event:
    """An event for streams of ``device``."""
    return torch.cuda.Event() if device.type == "cuda" else HostEvent()


def current_stream(device: torch.device) -> Any:
    """The caller's stream on ``device``; None on the host, which has none."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


class StreamOrder:
    """Who used the slots of one device last. Calls must not overlap: fills exclude each other.

    A stream is a ``torch.cuda.Stream`` or, on the host, None: then nothing is done.
    """

    def __init__(self, event: Event) -> None:
        self._event = event
        self._last_stream: Any = None
        self._is_recorded = False  # whether the event lies behind the last use

    def begin_fill(self, stream: Any) -> None:
        """Let ``stream`` wait until the slots may be written. Blocks no thread.

        Waits for the event of the last :meth:`after_copy_out`. Where the last user never called it,
        for everything its stream was given until now.
        """
        if stream is None:
            return
        last = self._last_stream
        if last is not None and last != stream:
            if not self._is_recorded:
                self._event.record(last)
            stream.wait_event(self._event)
        self._last_stream, self._is_recorded = stream, False

    def after_copy_out(self, stream: Any) -> None:
        """Note that what ``stream`` was given until now is all that uses the slots."""
        if stream is None:
            return
        self._event.record(stream)
        self._last_stream, self._is_recorded = stream, True


@cache
def stream_order(device: torch.device) -> StreamOrder:
    """The one order of ``device`` (with its index), since registries share buffers."""
    return StreamOrder(make_event(device))
