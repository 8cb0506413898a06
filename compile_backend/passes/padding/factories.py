"""Tensors made from nothing. Their shape may follow a padded axis, their numbers may not."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from compile_backend.passes.padding.layout import Dim, Dims, axes_of, is_leading
from compile_backend.passes.padding.values import Case, Range, Value, aten, moves_rows, uses_size

__all__ = ["RULES", "contract"]


def _constant_dims(case: Case) -> Dims:
    """Equal elements throughout: any reading of the sizes as axes is right."""
    dims: list[Dim] = []
    for size in case.result_sizes():
        dim = case.sizes.constant(size)
        if dim is None:
            raise case.unsupported(f"size {size} is no multiple of a padded axis")
        dims.append(dim)
    return tuple(dims)


def _filled(range_: Range) -> Callable[[Case], Value]:
    def rule(case: Case) -> Value:
        like = case.optional("self")
        dims = _constant_dims(case)
        # the like of a tensor is read in its order, so that the two can be combined
        if like is not None and case.sizes.fits(like.dims, case.call.result.shape):
            dims = like.dims
        return Value(dims=dims, range=range_)

    return rule


def full(case: Case) -> Value:
    number = case.arg("fill_value")
    value = case.of(number)
    if value is not None and not value.is_clean:
        raise case.unsupported("its number differs from row to row")
    return _filled(Range.of_number(number))(case)


def arange(case: Case) -> Value:
    """Counts from a fixed start in fixed steps, so a longer one begins with a shorter one.

    The end may be a size and is judged by the length that it leads to.
    """
    start, step = case.arg("start", 0), case.arg("step", 1)
    size = case.result_sizes()[0]
    dim = case.sizes.row_major(size)
    if dim is None:
        raise uses_size(case.sizes.axes_in(size))
    counts = isinstance(start, int) and isinstance(step, int) and (start, step) == (0, 1)
    is_iota = counts and len(dim) == 1 and isinstance(dim[0], str)
    value_range = Range.FINITE if not isinstance(start, int) or start < 0 else Range.NONNEGATIVE
    return Value(dims=(dim,), range=value_range, iota=str(dim[0]) if is_iota else None)


def scalar_tensor(case: Case) -> Value:
    return Value(dims=(), range=Range.of_number(case.arg("s")))


def eye(case: Case) -> Value:
    """Ones where the position in the row equals the row: both count from the front."""
    dims = _constant_dims(case)
    for dim in dims:
        if not is_leading(dim):
            raise moves_rows(case.call.name, dim)
    return Value(dims=dims, range=Range.NONNEGATIVE)


def contract(case: Case, result: Tensor) -> Value:
    """One result of an operator that is row-wise by its owner's word.

    A dimension as long as an axis holds that axis; one that is a fixed multiple of it, and comes
    first, holds a block for each row. Any other use of an axis cannot be told.
    """
    dims: list[Dim] = []
    for position, size in enumerate(result.shape):
        dim = case.sizes.row_major(case.sizes.expr(size))
        if dim is None or (position > 0 and axes_of((dim,)) and len(dim) > 1):
            raise case.unsupported(
                f"which rows dimension {position} of its result holds cannot be told"
            )
        dims.append(dim)
    return Value(dims=tuple(dims))


RULES: dict[str, Callable[[Case], Any]] = {
    **dict.fromkeys(aten("zeros zeros_like new_zeros"), _filled(Range.NONNEGATIVE)),
    **dict.fromkeys(aten("ones ones_like new_ones"), _filled(Range.POSITIVE)),
    **dict.fromkeys(
        aten("empty empty_like new_empty empty_strided new_empty_strided empty_permuted"),
        _filled(Range.ANY),
    ),
    **dict.fromkeys(aten("full full_like new_full"), full),
    "aten.arange": arange,
    "aten.scalar_tensor": scalar_tensor,
    "aten.eye": eye,
}
