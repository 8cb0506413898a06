"""The two modes that watch a capture. Both hand what they see to the recorder of their thread."""

from types import FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from compile_backend.engines.opaque import current_recorder

__all__ = ["SeeOperators", "SeeReads"]

# torch 2.11 has no way to call a Python function past one mode and watch inside it; there the
# few functions of torch itself that are written in Python are not looked into.
_past_one_mode = getattr(torch._C, "_skip_one_hop_torch_function", None)


# These ask for modes themselves, so a skip that is meant for them would be left over.
_UNWATCHED = (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)


class SeeOperators(TorchDispatchMode):
    """Hands every operator call to the recorder. Pushed by hand, see ``process_state``."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        recorder = current_recorder()
        if recorder is None:
            return op(*args, **(kwargs or {}))
        return recorder.call_operator(op, args, kwargs or {})


class SeeReads(TorchFunctionMode):
    """Shows the recorder every Python call, so that it can refuse one; lets the rest pass."""

    def __init__(self) -> None:
        super().__init__()
        self._inside: list[Any] = []  # Python functions of torch that are being looked into

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        recorder = current_recorder()
        if recorder is not None:
            recorder.call_function(func)
        is_python = isinstance(func, FunctionType) and func not in _UNWATCHED
        # A method that Tensor overrides in Python calls the one of its base class, and that call
        # comes here as the override again.
        if _past_one_mode is None or not is_python or func in self._inside:
            return func(*args, **(kwargs or {}))
        self._inside.append(func)
        try:
            with self:
                return _past_one_mode(func, types, args, kwargs or {})
        finally:
            self._inside.pop()
