"""Look-ups and scattered writes.

A look-up along a clean dimension is harmless: every row brings its own index. Along a padded
dimension an index could reach any row, so the only one allowed is the row's own number
(``arange(n)``). A write is harmless where it cannot leave its row.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from compile_backend.passes.padding.layout import Dim, Dims, axes_of, broadcast, is_clean, joined
from compile_backend.passes.padding.values import Case, Range, Value, mixes_rows

__all__ = ["RULES"]


def embedding(case: Case) -> Value:
    table, indices = case.value("weight"), case.value("indices")
    case.clean(table, 0, f"{case.call.name} in a table of padded rows")
    return Value(dims=(*indices.dims, *table.dims[1:]), range=table.range)


def index_select(case: Case) -> Value:
    value, index = case.value("self"), case.value("index")
    if not value.dims:
        raise case.unsupported("it indexes a number")
    dim = case.dim(value)
    case.clean(value, dim, f"{case.call.name} along dimension {dim}")
    picked = index.dims or ((),)
    return Value(dims=(*value.dims[:dim], *picked, *value.dims[dim + 1 :]), range=value.range)


def gather(case: Case) -> Value:
    """``out[i, j] = self[index[i, j], j]`` for ``dim=0``: the other dimensions go in step."""
    value, index = case.value("self"), case.value("index")
    if not value.dims or not index.dims:
        raise case.unsupported("it indexes a number")
    dim = case.dim(value)
    case.clean(value, dim, f"{case.call.name} along dimension {dim}")
    _require_in_step(case, dim, value, index)
    return Value(dims=index.dims, range=value.range)


def _require_in_step(case: Case, dim: int, *values: Value) -> None:
    for i in range(len(values[0].dims)):
        dims = {value.dims[i] for value in values}
        if i != dim and len(dims) > 1 and not all(is_clean(d) for d in dims):
            raise case.unsupported("its index holds the padded rows in another order")


def scatter(case: Case) -> Value:
    """``self[index[i, j], j] = src[i, j]`` for ``dim=0``: every row writes to itself."""
    value, index, src = case.value("self"), case.value("index"), case.optional("src")
    if not value.dims or not index.dims:
        raise case.unsupported("it indexes a number")
    dim = case.dim(value)
    operands = [v for v in (value, index, src) if v is not None and v.dims]
    for operand in operands:
        case.clean(operand, dim, f"{case.call.name} along dimension {dim}")
    _require_in_step(case, dim, *operands)
    source = Range.of_number(case.arg("value", 0)) if src is None else src.range
    overwrites = case.call.op._overloadname in ("src", "value")
    return Value(dims=value.dims, range=min(value.range, source) if overwrites else Range.ANY)


def index(case: Case) -> Value:
    """``self[i, j, ...]`` with integer indices."""
    value = case.value("self")
    plan = _Indexing(case, value)
    return Value(dims=plan.picked_dims, range=value.range)


def index_put(case: Case) -> Value:
    """``self[i, j, ...] = values``: every written element must be in its value's own row."""
    value, values = case.value("self"), case.value("values")
    if _is_masked_fill(case):
        return _masked_fill(case, value, values)
    plan = _Indexing(case, value)
    written = broadcast([values.dims, plan.picked_dims])
    if written != plan.picked_dims:
        raise case.unsupported("its values hold the padded rows in another order")
    loose = axes_of(plan.index_dims) - plan.pinned
    if loose:
        raise mixes_rows(f"{case.call.name} at places chosen by each row", tuple(loose))
    return Value(dims=value.dims, range=min(value.range, values.range))


def _is_masked_fill(case: Case) -> bool:
    indices = [i for i in case.arg("indices") if i is not None]
    return (
        len(indices) == 1
        and case.arg("indices")[0] is not None
        and indices[0].dtype in (torch.bool, torch.uint8)
        and case.arg("values").dim() == 0
        and not case.arg("accumulate", False)
    )


def _masked_fill(case: Case, value: Value, values: Value) -> Value:
    """``self[mask] = number``: the mask covers the leading dimensions."""
    mask = case.of(case.arg("indices")[0])
    assert mask is not None
    if mask.dims != value.dims[: len(mask.dims)]:
        raise case.unsupported("its mask holds the padded rows in another order")
    return Value(dims=value.dims, range=min(value.range, values.range))


class _Indexing:
    """Where advanced indexing takes its elements from.

    ``index_dims`` are those of all index tensors together, ``picked_dims`` those of the indexed
    tensor, and ``pinned`` the axes along which each index names its own row.
    """

    def __init__(self, case: Case, value: Value) -> None:
        given: list[Tensor | None] = list(case.arg("indices"))
        if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in given):
            raise case.unsupported("a mask picks a number of elements that depends on values")
        found = [None if i is None else case.of(i) for i in given]
        indices = [i for i in found if i is not None]
        index_dims = broadcast([i.dims for i in indices])
        if index_dims is None:
            raise case.unsupported("its indices hold the padded rows in different orders")
        self.index_dims: Dims = index_dims
        self.pinned = axes_of(())
        for position, (dim, chosen) in enumerate(zip(value.dims, found, strict=False)):
            if chosen is not None and not is_clean(dim):
                self._pin(case, position, dim, chosen)
        self.picked_dims = self._picked(value, found)

    def _pin(self, case: Case, position: int, dim: Dim, chosen: Value) -> None:
        axis = dim[0]
        own_row = dim == (axis,) and chosen.iota == axis and self.index_dims.count(dim) == 1
        if not (own_row and axes_of(self.index_dims)[str(axis)] == 1):
            raise mixes_rows(f"{case.call.name} along dimension {position}", dim)
        self.pinned[str(axis)] += 1

    def _picked(self, value: Value, found: Sequence[Value | None]) -> Dims:
        positions = [i for i, chosen in enumerate(found) if chosen is not None]
        rest = [dim for i, dim in enumerate(value.dims) if i not in positions]
        adjacent = positions == list(range(positions[0], positions[-1] + 1))
        front = positions[0] if adjacent else 0
        return (*rest[:front], *self.index_dims, *rest[front:])


def bucketize(case: Case) -> Value:
    value, boundaries = case.value("self"), case.value("boundaries")
    if not boundaries.is_clean:
        raise case.unsupported("its boundaries differ from row to row")
    return Value(dims=value.dims, range=Range.FINITE)


def searchsorted(case: Case) -> Value:
    """In one sorted sequence for all rows."""
    value, sequence = case.value("self"), case.value("sorted_sequence")
    if not sequence.is_clean or case.arg("sorter") is not None or len(sequence.dims) != 1:
        raise case.unsupported("its sorted sequences differ from row to row")
    return Value(dims=value.dims, range=Range.FINITE)


def is_in(case: Case) -> Value:
    elements, wanted = case.value("elements"), case.value("test_elements")
    if not wanted.is_clean:
        raise mixes_rows(
            f"{case.call.name} of a padded set", joined(axes_of(wanted.dims).elements())
        )
    return Value(dims=elements.dims, range=Range.FINITE)


RULES: dict[str, Callable[[Case], Any]] = {
    "aten.embedding": embedding,
    "aten.index_select": index_select,
    "aten.gather": gather,
    "aten.scatter": scatter,
    "aten.scatter_add": scatter,
    "aten.scatter_reduce": scatter,
    "aten.index.Tensor": index,
    "aten._unsafe_index.Tensor": index,
    "aten.index_put": index_put,
    "aten._unsafe_index_put": index_put,
    "aten.bucketize.Tensor": bucketize,
    "aten.searchsorted.Tensor": searchsorted,
    "aten.isin.Tensor_Tensor": is_in,
}
