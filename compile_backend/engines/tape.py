"""The tape: what a capture writes down, before it becomes a program.

Every tensor a capture meets has a *register*. An entry's arguments and results are the trees the
call had, with a :class:`Register` where a tensor was. The tape keeps every tensor alive, since it
tells tensors apart by identity, and an identity may be taken again once its tensor is gone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = [
    "Entry",
    "EntryKind",
    "Origin",
    "Register",
    "Tape",
    "map_tensors",
    "registers_in",
    "storage_of",
    "tensors_in",
]

Leaf = TypeVar("Leaf")


class Origin(Enum):
    """Where the tensor of a register comes from; the value is its letter in a program."""

    INPUT = "i"
    EXTERNAL = "x"
    CONSTANT = "c"
    RESULT = "r"


class EntryKind(Enum):
    """What an entry calls."""

    OPERATOR = "operator"
    CUSTOM_KERNEL = "custom kernel"
    HIGHER_ORDER = "higher-order operator"
    PIECE = "piece"
    BREAK_OP = "break op"
    NO_GRAPH = "no_graph function"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class Register:
    """One value of the program; ``index`` counts over the whole tape."""

    index: int
    origin: Origin

    @property
    def name(self) -> str:
        return f"{self.origin.value}{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One recorded call."""

    kind: EntryKind
    name: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Any  # the tree that the call returned; an argument it wrote keeps its register
    writes: tuple[Register, ...] = ()  # arguments that it writes, or may write
    boxed: bool = False  # the arguments go in one list, which the call may consume

    @property
    def is_opaque(self) -> bool:
        """Whether the call may do more than its arguments and results show."""
        return self.kind is not EntryKind.OPERATOR and self.kind is not EntryKind.CONSTANT


@dataclass(slots=True)
class Tape:
    """Entries in the order of the calls, and the tensor behind each register."""

    entries: list[Entry] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    registers: list[Register] = field(default_factory=list)
    pristine: dict[Register, Tensor] = field(default_factory=dict)  # of constants, as lifted
    inputs: list[Register] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)  # registers, None, numbers
    _by_identity: dict[int, Register] = field(default_factory=dict)
    _storage_origins: dict[int, Origin] = field(default_factory=dict)  # of who came first

    def add(self, tensor: Tensor, origin: Origin) -> Register:
        """A new register for ``tensor``; from here on its identity means this register."""
        register = Register(len(self.tensors), origin)
        self.tensors.append(tensor)
        self.registers.append(register)
        self._by_identity[id(tensor)] = register
        self._storage_origins.setdefault(storage_of(tensor), origin)
        return register

    def find(self, tensor: Tensor) -> Register | None:
        return self._by_identity.get(id(tensor))

    def read(self, tensor: Tensor) -> Register:
        """The register of ``tensor``; one never met before is an external."""
        return self.find(tensor) or self.add(tensor, Origin.EXTERNAL)

    def tensor(self, register: Register) -> Tensor:
        return self.tensors[register.index]

    def of_origin(self, origin: Origin) -> list[Register]:
        return [each for each in self.registers if each.origin is origin]

    def is_from_outside(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is an input, an external, or not met yet."""
        known = self.find(tensor)
        outside = [*self.of_origin(Origin.INPUT), *self.of_origin(Origin.EXTERNAL)]
        return known is None or any(self.tensor(register) is tensor for register in outside)

    @property
    def num_segments(self) -> int:
        """Stretches of entries between functions that are marked to be in none."""
        kinds = [entry.kind is EntryKind.NO_GRAPH for entry in self.entries]
        return sum(not ends and begins for ends, begins in zip(kinds, [True, *kinds], strict=False))

    @property
    def segment_under_way(self) -> int:
        """The number, from 1, of the segment that the next entry belongs to, or ends."""
        begins = not self.entries or self.entries[-1].kind is EntryKind.NO_GRAPH
        return self.num_segments + begins

    def made_storage(self, storage: int) -> bool:
        """Whether a call of this tape brought the storage into being."""
        return self._storage_origins.get(storage) in (Origin.CONSTANT, Origin.RESULT)

    def constants_to_renew(self, kept: Sequence[Any] = ()) -> set[Register]:
        """Constants that something may write: an entry, or whoever gets one of ``kept``.

        A constant is one object for all replays, so these must be set back by each of them.
        """
        written = {storage_of(self.tensor(reg)) for entry in self.entries for reg in entry.writes}
        written |= {storage_of(self.tensor(reg)) for reg in registers_in(kept)}
        return {reg for reg in self.pristine if storage_of(self.tensor(reg)) in written}


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """``tree`` with every tensor in its lists, tuples and dicts replaced by ``function`` of it."""
    if isinstance(tree, Tensor):
        return function(tree)
    if type(tree) is list:
        return [map_tensors(function, each) for each in tree]
    if isinstance(tree, torch.Size):
        return tree
    if isinstance(tree, tuple):
        mapped = [map_tensors(function, each) for each in tree]
        return type(tree)(*mapped) if hasattr(tree, "_fields") else tuple(mapped)
    if type(tree) is dict:
        return {key: map_tensors(function, each) for key, each in tree.items()}
    return tree


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors in the lists, tuples and dicts of ``tree``, in order."""
    return _leaves(tree, Tensor)


def registers_in(tree: Any) -> Iterator[Register]:
    """The registers in the lists, tuples and dicts of ``tree``, in order."""
    return _leaves(tree, Register)


def _leaves(tree: Any, kind: type[Leaf]) -> Iterator[Leaf]:
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, list | tuple):
        for each in tree:
            yield from _leaves(each, kind)
    elif isinstance(tree, dict):
        for each in tree.values():
            yield from _leaves(each, kind)


def storage_of(tensor: Tensor) -> int:
    """A number that tensors on the same storage share; ``-1`` less the identity without one."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse and wrapped tensors have none
        return -1 - id(tensor)
