"""Views, reshapes, joins: the elements stay what they are and get other places."""

from collections.abc import Callable
from typing import Any

import sympy

from compile_backend.passes.padding.layout import (
    Dim,
    axes_of,
    broadcast,
    is_clean,
    is_leading,
    joined,
)
from compile_backend.passes.padding.values import Case, Range, Value, moves_rows

__all__ = ["RULES"]


def same(case: Case) -> Value:
    return case.value("self")


def reshape(case: Case) -> Value:
    value = case.value("self")
    dims = case.sizes.regroup(value.dims, case.result_sizes())
    if dims is None:
        axes = joined(axes_of(value.dims).elements())
        raise moves_rows(f"{case.call.name} to {list(case.call.result.shape)}", axes)
    return value.with_dims(dims)


def view_dtype(case: Case) -> Value:
    """Reinterpreted bits: only the last dimension changes, and nothing is known of the numbers."""
    value = case.value("self")
    if not value.dims:
        return Value(dims=())
    case.clean(value, len(value.dims) - 1)
    last = case.result_sizes()[-1]
    return Value(dims=(*value.dims[:-1], joined([last])))


def permute(case: Case) -> Value:
    value = case.value("self")
    return value.with_dims([value.dims[int(d) % len(value.dims)] for d in case.arg("dims")])


def transpose(case: Case) -> Value:
    value = case.value("self")
    dims = list(value.dims)
    if dims:
        a, b = case.dim(value, "dim0"), case.dim(value, "dim1")
        dims[a], dims[b] = dims[b], dims[a]
    return value.with_dims(dims)


def t(case: Case) -> Value:
    value = case.value("self")
    return value.with_dims(value.dims[::-1])


def unsqueeze(case: Case) -> Value:
    value = case.value("self")
    dims = list(value.dims)
    dims.insert(int(case.arg("dim")) % (len(dims) + 1), ())
    return value.with_dims(dims)


def squeeze(case: Case) -> Value:
    """Dimensions of size 1 go. One that a padded axis runs along would go at size 1 only."""
    value = case.value("self")
    if case.arg("dim") is None:
        chosen = [i for i, dim in enumerate(value.dims) if is_clean(dim)]
    else:
        chosen = case.dims(value)
    for dim in chosen:
        if not is_clean(value.dims[dim]):
            raise case.unsupported("whether the dimension goes depends on the size of the axis")
    return value.with_dims(
        [dim for i, dim in enumerate(value.dims) if i not in chosen or dim != ()]
    )


def expand(case: Case) -> Value:
    value = case.value("self")
    sizes = case.result_sizes()
    given = [()] * (len(sizes) - len(value.dims)) + list(value.dims)
    dims = [dim or _constant(case, size) for dim, size in zip(given, sizes, strict=True)]
    return value.with_dims(dims)


def _constant(case: Case, size: sympy.Expr) -> Dim:
    dim = case.sizes.constant(size)
    if dim is None:
        raise case.unsupported(f"size {size} is no multiple of a padded axis")
    return dim


def select(case: Case) -> Value:
    """One index. Along a padded axis a constant row from the front: live if that many rows are."""
    value = case.value("self")
    dim, index = case.dim(value), case.arg("index")
    chosen = value.dims[dim]
    if not is_clean(chosen):
        if not (isinstance(index, int) and index >= 0 and len(chosen) == 1):
            raise moves_rows(f"{case.call.name} at {index}", chosen)
        axis = str(chosen[0])
        case.min_rows[axis] = max(case.min_rows.get(axis, 0), index + 1)
    elif case.sizes.axes_in(index):
        raise case.unsupported("the index is computed from the size of a padded axis")
    dims = [d for i, d in enumerate(value.dims) if i != dim]
    return Value(dims=tuple(dims), range=value.range, iota=_iota(value, dims))


def _iota(value: Value, dims: list[Dim]) -> str | None:
    return value.iota if value.iota in axes_of(tuple(dims)) else None


def slice_(case: Case) -> Value:
    """All of a dimension, any part of a clean one, or as many of its elements as there are rows."""
    value = case.value("self")
    if not value.dims:
        return value
    dim = case.dim(value, default=0)
    chosen, size = value.dims[dim], case.result_sizes()[dim]
    start, step = case.arg("start"), case.arg("step", 1)
    from_front = start is None or (isinstance(start, int) and start >= 0)
    if case.sizes.same(size, case.sizes.size(chosen)):
        kept = chosen
    elif not is_clean(chosen):
        raise moves_rows(f"{case.call.name} of a part of dimension {dim}", chosen)
    elif case.sizes.axes_in((start, step)):
        raise case.unsupported("it starts at a place computed from the size of a padded axis")
    else:
        row_major = case.sizes.row_major(size)
        if row_major is None or not (is_clean(row_major) or from_front):
            raise case.unsupported(f"size {size} of the part is no multiple of a padded axis")
        kept = row_major
    return value.with_dims([*value.dims[:dim], kept, *value.dims[dim + 1 :]])


def split(case: Case) -> tuple[Value, ...]:
    """Parts of a clean dimension."""
    value = case.value("self")
    dim = case.dim(value, default=0)
    if len(case.call.result) == 1:
        return (value,)
    if not is_clean(value.dims[dim]):
        raise moves_rows(f"{case.call.name} of dimension {dim}", value.dims[dim])
    return tuple(
        value.with_dims(
            [*value.dims[:dim], joined([case.result_sizes(i)[dim]]), *value.dims[dim + 1 :]]
        )
        for i in range(len(case.call.result))
    )


def unbind(case: Case) -> tuple[Value, ...]:
    value = case.value("self")
    dim = case.dim(value, default=0)
    if not is_clean(value.dims[dim]):
        raise moves_rows(f"{case.call.name} of dimension {dim}", value.dims[dim])
    dims = [d for i, d in enumerate(value.dims) if i != dim]
    return (value.with_dims(dims),) * len(case.call.result)


def diagonal(case: Case) -> Value:
    value = case.value("self")
    dims = {case.dim(value, "dim1", 0), case.dim(value, "dim2", 1)}
    for dim in dims:
        case.clean(value, dim)
    kept = [d for i, d in enumerate(value.dims) if i not in dims]
    return Value(dims=(*kept, joined([case.result_sizes()[-1]])), range=value.range)


def unfold(case: Case) -> Value:
    value = case.value("self")
    dim = case.dim(value, "dimension")
    case.clean(value, dim)
    sizes = case.result_sizes()
    dims = [*value.dims[:dim], joined([sizes[dim]]), *value.dims[dim + 1 :], joined([sizes[-1]])]
    return Value(dims=tuple(dims), range=value.range)


def as_real(case: Case) -> Value:
    value = case.value("self")
    return Value(dims=(*value.dims, (sympy.Integer(2),)), range=value.range.unsigned)


def as_complex(case: Case) -> Value:
    value = case.value("self")
    return Value(dims=value.dims[:-1], range=value.range.unsigned)


def cat(case: Case) -> Value:
    """Along a clean dimension. Of n equal-length padded parts, the parts in turn: ``(n, axis)``."""
    values = [v for tensor in case.arg("tensors") if (v := case.of(tensor)) is not None]
    # a legacy empty 1-d tensor joins anything
    values = [v for v in values if v.dims != ((sympy.Integer(0),),)] or values
    dim = case.dim(values[0], default=0)
    others = broadcast([(*v.dims[:dim], (), *v.dims[dim + 1 :]) for v in values])
    along = [v.dims[dim] for v in values]
    if others is None:
        raise case.unsupported("its operands hold the padded rows in different orders")
    if len(values) == 1:
        kept = along[0]
    elif all(is_clean(d) for d in along):
        kept = joined([case.result_sizes()[dim]])
    elif len(set(along)) == 1:
        kept = joined([sympy.Integer(len(values)), *along[0]])
    else:
        raise moves_rows(f"{case.call.name} along dimension {dim}", _first_padded(along))
    return Value(dims=(*others[:dim], kept, *others[dim + 1 :]), range=min(v.range for v in values))


def _first_padded(dims: list[Dim]) -> Dim:
    return next(dim for dim in dims if not is_clean(dim))


def stack(case: Case) -> Value:
    values = [v for tensor in case.arg("tensors") if (v := case.of(tensor)) is not None]
    dims = broadcast([v.dims for v in values])
    if dims is None:
        raise case.unsupported("its operands hold the padded rows in different orders")
    dim = int(case.arg("dim", 0)) % (len(dims) + 1)
    count = joined([sympy.Integer(len(values))])
    return Value(dims=(*dims[:dim], count, *dims[dim:]), range=min(v.range for v in values))


def repeat(case: Case) -> Value:
    """Tiles: the repetition is the outer part of each dimension."""
    value = case.value("self")
    repeats: list[Any] = list(case.arg("repeats"))
    given = [()] * (len(repeats) - len(value.dims)) + list(value.dims)
    dims = [
        joined([*_constant(case, case.sizes.expr(count)), *dim])
        for count, dim in zip(repeats, given, strict=True)
    ]
    return Value(dims=tuple(dims), range=value.range)


def constant_pad(case: Case) -> Value:
    value = case.value("self")
    pad = list(case.arg("pad"))
    dims, sizes = list(value.dims), case.result_sizes()
    for i in range(len(pad) // 2):
        dim = len(dims) - 1 - i
        if any(n != 0 for n in pad[2 * i : 2 * i + 2]):
            case.clean(value, dim, f"{case.call.name} of dimension {dim}")
            dims[dim] = joined([sizes[dim]])
    return Value(dims=tuple(dims), range=min(value.range, Range.of_number(case.arg("value", 0))))


def flip(case: Case) -> Value:
    value = case.value("self")
    for dim in case.dims(value, "dims"):
        if not is_clean(value.dims[dim]):
            raise moves_rows(f"{case.call.name} of dimension {dim}", value.dims[dim])
    return Value(dims=value.dims, range=value.range)


def roll(case: Case) -> Value:
    value = case.value("self")
    if not case.arg("dims") and not value.is_clean:
        raise moves_rows(case.call.name, joined(axes_of(value.dims).elements()))
    return flip(case)


def triangle(case: Case) -> Value:
    """Kept by position in the last two dimensions, counted from the front."""
    value = case.value("self")
    for dim in value.dims[-2:]:
        if not is_leading(dim):
            raise moves_rows(case.call.name, dim)
    return Value(dims=value.dims, range=value.range)


RULES: dict[str, Callable[[Case], Any]] = {
    "aten.alias": same,
    "aten.detach": same,
    "aten.lift_fresh": same,
    "aten.conj": lambda case: Value(dims=case.value("self").dims, range=case.value("self").range),
    "aten._conj": lambda case: Value(dims=case.value("self").dims, range=case.value("self").range),
    "aten.view": reshape,
    "aten.view.dtype": view_dtype,
    "aten._unsafe_view": reshape,
    "aten.reshape": reshape,
    "aten._reshape_alias": reshape,
    "aten._reshape_copy": reshape,
    "aten.permute": permute,
    "aten.transpose": transpose,
    "aten.t": t,
    "aten.unsqueeze": unsqueeze,
    "aten.squeeze": squeeze,
    "aten.expand": expand,
    "aten.select": select,
    "aten.slice": slice_,
    "aten.split": split,
    "aten.split_with_sizes": split,
    "aten.unsafe_split": split,
    "aten.unsafe_split_with_sizes": split,
    "aten.unsafe_chunk": split,
    "aten.unbind": unbind,
    "aten.diagonal": diagonal,
    "aten.unfold": unfold,
    "aten.view_as_real": as_real,
    "aten.view_as_complex": as_complex,
    "aten.cat": cat,
    "aten.stack": stack,
    "aten.repeat": repeat,
    "aten.constant_pad_nd": constant_pad,
    "aten.flip": flip,
    "aten.roll": roll,
    "aten.tril": triangle,
    "aten.triu": triangle,
}
