"""Autocast and recordings: casts are recorded, so a replay runs with autocast off.

A recorder sees operators below autocast, after their arguments were cast. Two things would go
wrong at a replay: operators would be cast again where the caller's autocast is on, and a cast
weight that autocast had cached before the capture would be baked. What is recorded whole (a
compiled piece, a kernel) did see autocast, and gets the same state again.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

__all__ = [
    "autocast_off",
    "in_present_autocast",
    "in_present_inference_mode",
    "no_autocast_cache",
]

_DEVICE_TYPES = ("cpu", "cuda")


@contextmanager
def no_autocast_cache() -> Iterator[None]:
    """Casts of weights are made anew inside, and so are recorded."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def autocast_off() -> AbstractContextManager[Any]:
    """Autocast off inside, for every device."""
    if torch._C._is_any_autocast_enabled():
        off: AbstractContextManager[Any] = torch._C._DisableAutocast()
        return off
    return nullcontext()


def in_present_inference_mode(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` under inference mode or not, as it is now, and without gradients."""
    enabled = torch.is_inference_mode_enabled()

    def call_in_mode(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(enabled), torch.no_grad():
            return call(*args, **kwargs)

    return call_in_mode


def in_present_autocast(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` in the autocast state of now, whatever it is later; itself where autocast is off."""
    states = [
        (device_type, torch.get_autocast_dtype(device_type))
        for device_type in _DEVICE_TYPES
        if torch.is_autocast_enabled(device_type)
    ]
    if not states:
        return call

    def call_in_autocast(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for device_type, dtype in states:
                stack.enter_context(torch.autocast(device_type, dtype=dtype, cache_enabled=False))
            return call(*args, **kwargs)

    return call_in_autocast
