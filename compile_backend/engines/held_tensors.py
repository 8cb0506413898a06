"""Tensors that a function can reach without being given them: what its closure and objects hold."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor

__all__ = ["held_tensors"]

MAX_DEPTH = 6  # steps from the function or an argument
MAX_OBJECTS = 20_000  # of a large object tree, such as a whole model
_NOT_ENTERED = (bool, int, float, complex, str, bytes, type, ModuleType)


def held_tensors(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[Tensor]:
    """Tensors in the closure of ``fn``, its defaults, the object it is bound to and its arguments.

    Through lists, tuples, sets, dicts and attributes, nearest first. Globals are not looked into.
    """
    level: list[Any] = [fn, args, kwargs]
    seen: set[int] = set()
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for each in level:
            if isinstance(each, _NOT_ENTERED) or id(each) in seen or len(seen) > MAX_OBJECTS:
                continue
            seen.add(id(each))
            if isinstance(each, Tensor):
                yield each
            else:
                below += _inside(each)
        level = below


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple | set | frozenset):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, MethodType):
        yield value.__self__
        yield value.__func__
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # an empty cell: the variable is not set yet
                yield cell.cell_contents
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
    else:
        yield from getattr(value, "__dict__", {}).values()
        for base in type(value).__mro__:
            for name in _slots_of(base):
                yield getattr(value, name, None)


def _slots_of(kind: type) -> tuple[str, ...]:
    slots: Any = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
