"""Dimensions as products of padded axes and fixed sizes.

The proof follows every element of every tensor by its coordinates along the padded axes. A
dimension is a tuple of *atoms*, outermost first: the name of a padded axis, or a size in which no
padded axis occurs. ``("batch", 4)`` is a dimension of ``4 * n`` elements, four for each row of the
batch; ``(4, "batch")`` is as long, but holds the whole batch four times over. A dimension without
an axis name is *clean*; one of size 1 is the empty tuple. Adjacent sizes are merged, so equal
dimensions are equal tuples.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import sympy
import torch
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, statically_known_true
from torch.utils._pytree import tree_iter
from torch.utils._sympy.functions import Max, Min

__all__ = [
    "Atom",
    "Dim",
    "Dims",
    "Sizes",
    "axes_of",
    "broadcast",
    "is_clean",
    "is_leading",
    "joined",
]

Atom: TypeAlias = str | sympy.Expr
Dim: TypeAlias = tuple[Atom, ...]
Dims: TypeAlias = tuple[Dim, ...]


def joined(atoms: Iterable[Atom]) -> Dim:
    """The dimension of these atoms: ones dropped, adjacent sizes multiplied."""
    merged: list[Atom] = []
    for atom in atoms:
        if isinstance(atom, str):
            merged.append(atom)
        elif atom != 1:
            if merged and not isinstance(merged[-1], str):
                merged[-1] = merged[-1] * atom
            else:
                merged.append(atom)
    return tuple(merged)


def is_clean(dim: Dim) -> bool:
    """Whether no padded axis runs along ``dim``."""
    return not any(isinstance(atom, str) for atom in dim)


def is_leading(dim: Dim) -> bool:
    """Whether the live elements of ``dim`` are its first ones, whatever the padded size."""
    return not any(isinstance(atom, str) for atom in dim[1:])


def axes_of(dims: Dims) -> Counter[str]:
    """How often each axis occurs."""
    return Counter(atom for dim in dims for atom in dim if isinstance(atom, str))


def broadcast(operands: Sequence[Dims]) -> Dims | None:
    """The dimensions of an elementwise combination; None if different rows would meet."""
    rank = max((len(dims) for dims in operands), default=0)
    out: list[Dim] = []
    for i in range(-rank, 0):
        candidates = {dims[i] for dims in operands if -i <= len(dims)} - {()}
        if len(candidates) > 1:
            return None
        out.append(candidates.pop() if candidates else ())
    return tuple(out)


class Sizes:
    """Symbolic sizes read in terms of the padded axes.

    ``axes`` gives the symbols that measure each axis; after the guards of the trace every symbol
    must still be free and belong to one axis (``problem`` says what is wrong otherwise).
    """

    def __init__(
        self, axes: Mapping[str, Iterable[sympy.Symbol]], shape_env: ShapeEnv | None
    ) -> None:
        self.shape_env = shape_env
        self.problem: str | None = None
        self.axis_of: dict[sympy.Symbol, str] = {}
        self.symbol_of: dict[str, sympy.Symbol] = {}
        for axis, symbols in axes.items():
            for symbol in sorted(symbols, key=str):
                self._add(axis, symbol)

    def _add(self, axis: str, symbol: sympy.Symbol) -> None:
        found = symbol if self.shape_env is None else self.shape_env.replace(symbol)
        if not isinstance(found, sympy.Symbol):
            self.problem = f"the trace fixed the size of axis {axis!r} ({symbol} is {found})"
        elif self.axis_of.setdefault(found, axis) != axis:
            other = self.axis_of[found]
            self.problem = f"the trace made axes {axis!r} and {other!r} equally long"
        else:
            self.symbol_of.setdefault(axis, found)

    def expr(self, size: Any) -> sympy.Expr:
        """A size (or symbolic number) with one symbol for each axis."""
        node = getattr(size, "node", None)
        expr = node.expr if isinstance(node, SymNode) else sympy.sympify(size)
        if expr.is_Number:
            return expr
        if self.shape_env is not None:
            expr = self.shape_env.replace(expr)
        expr = expr.xreplace({s: self.symbol_of[axis] for s, axis in self.axis_of.items()})
        return self._without_min_max(expr)

    def _without_min_max(self, expr: sympy.Expr) -> sympy.Expr:
        """Resolve ``Min(64, s0)`` where a guard says which one it is."""
        if expr.is_Symbol:
            return expr
        for clamp in expr.atoms(Min, Max):
            for arg in clamp.args:
                if self._known(sympy.Eq(clamp, arg)):
                    expr = expr.xreplace({clamp: arg})
                    break
        return expr

    def _known(self, condition: Any) -> bool:
        if condition in (sympy.true, sympy.false):
            return condition is sympy.true
        if self.shape_env is None:
            return False
        return statically_known_true(torch.SymBool(SymNode(condition, self.shape_env, bool, None)))

    def axes_in(self, value: Any) -> frozenset[str]:
        """Axes whose size a (nested) number was computed from."""
        axes: set[str] = set()
        for leaf in tree_iter(value):
            if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
                axes |= self._axes(self.expr(leaf))
            elif isinstance(leaf, sympy.Basic):
                axes |= self._axes(leaf)
        return frozenset(axes)

    def _axes(self, expr: sympy.Basic) -> set[str]:
        return {self.axis_of[s] for s in expr.free_symbols if s in self.axis_of}

    def factors(self, size: sympy.Expr) -> tuple[sympy.Expr, Counter[str]] | None:
        """``size`` as a clean coefficient times axes; None for ``n - 1``, ``n // 2`` and so on."""
        coefficient: sympy.Expr = sympy.Integer(1)
        axes: Counter[str] = Counter()
        for factor in sympy.Mul.make_args(size):
            base, power = factor.as_base_exp()
            if base in self.axis_of:
                if not (power.is_Integer and power > 0):
                    return None
                axes[self.axis_of[base]] += int(power)
            elif self._axes(factor):
                return None
            else:
                coefficient = coefficient * factor
        return coefficient, axes

    def size(self, dim: Dim) -> sympy.Expr:
        """The number of elements along ``dim``."""
        factors = [self.symbol_of[a] if isinstance(a, str) else a for a in dim]
        return sympy.Mul(*factors)

    def same(self, left: sympy.Expr, right: sympy.Expr) -> bool:
        """Whether two sizes are equal for every size of the axes."""
        return bool(left == right) or self._known(sympy.Eq(left, right))

    def fits(self, dims: Dims, shape: Sequence[Any]) -> bool:
        """Whether ``dims`` describes a tensor of this shape."""
        return len(dims) == len(shape) and all(
            self.same(self.size(dim), self.expr(size))
            for dim, size in zip(dims, shape, strict=True)
        )

    def row_major(self, size: sympy.Expr) -> Dim | None:
        """``size`` read as rows of an axis with a clean block each: ``4 * n`` is ``("n", 4)``.

        Right wherever an element depends on its position alone, not on the size.
        None if ``size`` is no such product, or has several axes.
        """
        found = self.factors(size)
        if found is None or found[1].total() > 1:
            return None
        return joined([*found[1].elements(), found[0]])

    def constant(self, size: sympy.Expr) -> Dim | None:
        """A reading of ``size`` for a dimension along which all elements are equal."""
        found = self.factors(size)
        return None if found is None else joined([*sorted(found[1].elements()), found[0]])

    def regroup(self, dims: Dims, sizes: Sequence[sympy.Expr]) -> Dims | None:
        """The dimensions after a row-major reshape to ``sizes``; None if an axis would be cut."""
        atoms = [atom for dim in dims for atom in dim][::-1]
        out: list[Dim] = []
        for size in sizes:
            found = self.factors(size)
            dim = None if found is None else _take(atoms, *found)
            if dim is None:
                return None
            out.append(dim)
        return None if atoms else tuple(out)


def _take(atoms: list[Atom], coefficient: sympy.Expr, axes: Counter[str]) -> Dim | None:
    """Pop the atoms that make up ``coefficient * axes`` from the end of ``atoms``."""
    axes = Counter(axes)
    taken: list[Atom] = []
    while coefficient != 1 or axes.total():
        if not atoms or coefficient == 0:
            return None
        atom = atoms.pop()
        if isinstance(atom, str):
            if not axes[atom]:
                return None
            axes[atom] -= 1
            taken.append(atom)
        elif (rest := _quotient(coefficient, atom)) is not None:
            coefficient = rest
            taken.append(atom)
        elif (left := _quotient(atom, coefficient)) is not None and not axes.total():
            atoms.append(left)
            taken.append(coefficient)
            coefficient = sympy.Integer(1)
        else:
            return None
    return joined(taken)


def _quotient(dividend: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr | None:
    if divisor == 0:
        return None
    quotient = dividend / divisor
    return quotient if sympy.fraction(quotient)[1] == 1 else None
