"""Where a model keeps its tensors, and how a run that nobody asked for leaves them as they were."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["ModuleTree", "modules_of", "unchanged_state"]


def modules_of(fn: Callable[..., Any] | None) -> list[nn.Module]:
    """The modules that a callable is, is bound to, or closes over."""
    found: list[nn.Module] = []
    pending: list[Any] = [fn]
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if value is None or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            found.append(value)
        elif isinstance(value, functools.partial):
            pending += [value.func, *value.args, *value.keywords.values()]
        elif callable(value):
            pending.append(getattr(value, "__self__", None))
            code = getattr(value, "__code__", None)
            if code is not None:
                pending += [cell.cell_contents for cell in value.__closure__ or ()]
                pending += [value.__globals__.get(name) for name in code.co_names]
    return list(dict.fromkeys(found))


class ModuleTree:
    """The modules below some roots, and their mode, as they were: a graph keeps what they do."""

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        places = [
            (module._modules, name, child)
            for root in roots
            for module in root.modules()
            for name, child in module._modules.items()
        ]
        self._places = [(holder, name) for holder, name, _ in places]
        self._children = [child for _, _, child in places]
        self._modules = list(dict.fromkeys(m for root in roots for m in root.modules()))
        self._modes = [module.training for module in self._modules]

    def change(self) -> str | None:
        """What is different now, or None."""
        if [holder.get(name) for holder, name in self._places] != self._children:
            return next(
                f"the module {name!r} was replaced"
                for (holder, name), child in zip(self._places, self._children, strict=True)
                if holder.get(name) is not child
            )
        if [module.training for module in self._modules] != self._modes:
            return "train() or eval() was called"
        return None


class _KeepWritten(TorchDispatchMode):
    """Copies each tensor of a model just before an operator first writes it."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._by_storage: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            self._by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        self.kept: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for position, argument in enumerate(op._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                for tensor in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(tensor, Tensor):
                        self._keep(tensor)
        return op(*args, **kwargs)

    def _keep(self, written: Tensor) -> None:
        for tensor in self._by_storage.pop(written.untyped_storage().data_ptr(), ()):
            self.kept.append((tensor, tensor.clone()))


@contextmanager
def unchanged_state(roots: Sequence[nn.Module]) -> Iterator[None]:
    """What is written to parameters and buffers of ``roots`` inside is taken back at the end.

    Only tensors that an operator writes are copied, when it first does. A cache that is a module's
    buffer is one of them; one that belongs to the attention backend is not.
    """
    tensors = [t for root in roots for t in (*root.parameters(), *root.buffers())]
    mode = _KeepWritten([t for t in tensors if t.numel()])
    try:
        with mode:
            yield
    finally:
        with torch.no_grad():
            for tensor, value in mode.kept:
                tensor.copy_(value)
