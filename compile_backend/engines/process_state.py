"""Leaving the process as it was found: mode stacks, grad mode, collector, random generators."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

__all__ = ["GeneratorStates", "modes_changed_to", "unchanged_process_state"]

# Modes are pushed on torch's stacks directly. ``with mode:`` would also set flags that are global
# to the process, not to the thread: two captures that overlap in time would leave them set, and
# Dynamo would then skip everything.
_push_dispatch_mode = torch._C._push_on_torch_dispatch_stack
_push_function_mode = torch._C._push_on_torch_function_stack


class GeneratorStates:
    """States of random generators, to go back to."""

    def __init__(self) -> None:
        self._states: list[tuple[torch.Generator, torch.Tensor]] = []
        self.save(torch.default_generator)
        if torch.cuda.is_initialized():
            for generator in torch.cuda.default_generators:
                self.save(generator)

    def save(self, generator: torch.Generator) -> None:
        """Note the state of one more generator, unless it is noted already."""
        if not any(known is generator for known, _ in self._states):
            self._states.append((generator, generator.get_state()))

    def restore(self) -> None:
        for generator, state in self._states:
            generator.set_state(state)


@contextmanager
def unchanged_process_state(generators: GeneratorStates) -> Iterator[None]:
    """Put back mode stacks, grad mode and the collector; on an exception the generators too."""
    grad_enabled = torch.is_grad_enabled()
    gc_enabled = gc.isenabled()
    dispatch_modes = _get_current_dispatch_mode_stack()
    function_modes = _get_current_function_mode_stack()
    completed = False
    try:
        yield
        completed = True
    finally:
        _set_modes(dispatch_modes, function_modes)
        torch._C._set_grad_enabled(grad_enabled)
        (gc.enable if gc_enabled else gc.disable)()
        if not completed:
            generators.restore()


@contextmanager
def modes_changed_to(change: Callable[[list[Any], list[Any]], None]) -> Iterator[None]:
    """Run a block under other mode stacks, and put back those of before.

    ``change`` edits a copy of the dispatch stack and of the function stack; the last is the top.
    """
    dispatch_modes = _get_current_dispatch_mode_stack()
    function_modes = _get_current_function_mode_stack()
    inside = list(dispatch_modes), list(function_modes)
    change(*inside)
    _set_modes(*inside)
    try:
        yield
    finally:
        _set_modes(dispatch_modes, function_modes)


def _set_modes(dispatch_modes: list[Any], function_modes: list[Any]) -> None:
    _replace(
        _get_current_dispatch_mode_stack(),
        dispatch_modes,
        pop=lambda: torch._C._pop_torch_dispatch_stack(None),
        push=_push_dispatch_mode,
    )
    _replace(
        _get_current_function_mode_stack(),
        function_modes,
        pop=torch._C._pop_torch_function_stack,
        push=_push_function_mode,
    )


def _replace(
    current: list[Any], wanted: list[Any], *, pop: Callable[[], Any], push: Callable[[Any], Any]
) -> None:
    num_kept = 0
    for have, want in zip(current, wanted, strict=False):
        if have is not want:
            break
        num_kept += 1
    for _ in current[num_kept:]:
        pop()
    for mode in wanted[num_kept:]:
        push(mode)
