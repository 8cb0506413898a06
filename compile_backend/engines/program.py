"""Source text for a tape: the objects that a generated function names, and the function itself.

A program is straight-line Python, one statement per entry, with every argument in place. Its
source is registered with :mod:`linecache`, so a traceback through a replay shows the recorded
call. What shape the program has is for :mod:`.late_bound` and :mod:`.fixed` to say.
"""

import itertools
import keyword
import linecache
import math
import re
import weakref
from collections.abc import Callable
from typing import Any

import torch

from compile_backend.engines.tape import Entry, Register

__all__ = ["Names", "Program", "target_of"]

_counter = itertools.count()
# Names that the text of a program uses itself: registers, and what is around them.
_TAKEN = re.compile(r"[icrx]\d+(_\w+)?|new_\d+|args|replay|slice|_")


class Program:
    """A compiled function and its source, which makes ``num_calls`` recorded calls.

    ``lines`` define a function named ``replay``; ``objects`` are what they mention by name.
    """

    def __init__(self, lines: list[str], objects: dict[str, Any], *, num_calls: int) -> None:
        self.num_calls = num_calls
        head, *body = lines
        self.source = "\n".join([head, *(f"    {line}" for line in body), ""])
        filename = f"<graphbuf program {next(_counter)}>"
        exec(compile(self.source, filename, "exec"), objects)
        self.run: Callable[..., list[Any]] = objects.pop("replay")
        entry = (len(self.source), None, self.source.splitlines(True), filename)
        linecache.cache[filename] = entry
        weakref.finalize(self, linecache.cache.pop, filename, None)


class Names:
    """Gives every object that source text must mention a name, and writes expressions with them."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self._known: dict[object, str] = {}

    def bind(self, name: str, value: Any) -> str:
        """The name of ``value``: ``name``, or one like it if that is taken or is not a name."""
        # devices are made anew by each call, so they are told apart by value
        key = value if isinstance(value, torch.device) else id(value)
        if key not in self._known:
            name = re.sub(r"\W", "_", name)
            if not name.isidentifier() or keyword.iskeyword(name) or _TAKEN.fullmatch(name):
                name = f"_{name}"
            while name in self.objects:
                name = f"{name}_{len(self.objects)}"
            self.objects[name] = value
            self._known[key] = name
        return self._known[key]

    def callable(self, entry: Entry) -> str:
        return self.bind(entry.name, entry.call)

    def call(self, entry: Entry) -> str:
        """The expression that makes the entry's call."""
        if entry.boxed:
            return f"{self.callable(entry)}({self.expression(list(entry.args))})"
        arguments = [self.expression(each) for each in entry.args]
        arguments += [f"{key}={self.expression(each)}" for key, each in entry.kwargs.items()]
        return f"{self.callable(entry)}({', '.join(arguments)})"

    def expression(self, tree: Any) -> str:
        """Source that evaluates to ``tree``, registers being variables."""
        if isinstance(tree, Register):
            return tree.name
        if tree is None or type(tree) in (bool, int, str):
            return repr(tree)
        if type(tree) is float and math.isfinite(tree):
            return repr(tree)
        if type(tree) is list:
            return f"[{', '.join(map(self.expression, tree))}]"
        if type(tree) in (tuple, torch.Size):
            return "(" + " ".join(f"{self.expression(each)}," for each in tree) + ")"
        if type(tree) is dict:
            items = (f"{self.expression(k)}: {self.expression(v)}" for k, v in tree.items())
            return f"{{{', '.join(items)}}}"
        if type(tree) is slice:
            parts = map(self.expression, (tree.start, tree.stop, tree.step))
            return f"slice({', '.join(parts)})"
        if isinstance(tree, torch.dtype | torch.layout | torch.memory_format | torch.device):
            return self.bind(str(tree), tree)
        return self.bind(f"object_{type(tree).__name__}", tree)


def target_of(results: Any, name: Callable[[Register], str]) -> str:
    """The left side of an assignment that unpacks ``results``; empty if ``name`` gives none."""
    if isinstance(results, Register):
        return name(results)
    if not isinstance(results, list | tuple):
        return ""
    parts = [target_of(each, name) for each in results]
    if not any(parts):
        return ""
    return "(" + " ".join(f"{part or '_'}," for part in parts) + ")"
