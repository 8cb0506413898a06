"""Operators that combine the elements along some dimensions: allowed along clean ones."""

from collections.abc import Callable
from typing import Any

from compile_backend.passes.padding.layout import joined
from compile_backend.passes.padding.values import Case, Range, Value, aten

__all__ = ["RULES"]

# Results that stay finite, and do not change sign, when their operands do.
_KEEPS_SIGN = frozenset({"aten.amax", "aten.amin", "aten.mean", "aten.sum", "aten.max", "aten.min"})
_NONNEGATIVE = frozenset({"aten.linalg_vector_norm", "aten.norm"})


def reduce(case: Case) -> Value | tuple[Value, ...]:
    """Over ``dim`` (all, if absent). Every result has the reduced shape."""
    value = case.value("self")
    chosen = case.dims(value) if value.dims else []
    keep = bool(case.arg("keepdim", False))
    for dim in chosen:
        case.clean(value, dim)
    dims = [
        () if i in chosen else dim for i, dim in enumerate(value.dims) if keep or i not in chosen
    ]
    reduced = Value(dims=tuple(dims), range=_reduced_range(case, value))
    result = case.call.result
    return (reduced,) * len(result) if isinstance(result, tuple | list) else reduced


def _reduced_range(case: Case, value: Value) -> Range:
    packet = "aten." + case.call.op._schema.name.removeprefix("aten::")
    if not case.is_floating:
        return Range.FINITE
    if packet in _KEEPS_SIGN:
        return value.range.rounded
    if packet in _NONNEGATIVE and value.range >= Range.FINITE:
        return Range.NONNEGATIVE
    return Range.ANY


def reduce_all(case: Case) -> Value | tuple[Value, ...]:
    """Over every dimension, whatever the arguments are called."""
    value = case.value("self")
    for dim in range(len(value.dims)):
        case.clean(value, dim, f"{case.call.name} over all dimensions")
    reduced = Value(dims=(), range=_reduced_range(case, value))
    result = case.call.result
    return (reduced,) * len(result) if isinstance(result, tuple | list) else reduced


def along(case: Case) -> Value | tuple[Value, ...]:
    """Scans, sorts and softmaxes: the shape stays, rows along ``dim`` meet."""
    value = case.value("self")
    if value.dims:
        case.clean(value, case.dim(value))
    kept = Value(dims=value.dims, range=_along_range(case, value))
    result = case.call.result
    return (kept,) * len(result) if isinstance(result, tuple | list) else kept


def _along_range(case: Case, value: Value) -> Range:
    packet = case.call.op._schema.name.removeprefix("aten::")
    if not case.is_floating:
        return Range.FINITE
    if packet == "_safe_softmax":
        return Range.NONNEGATIVE if value.range >= Range.FINITE else Range.ANY
    if packet == "_softmax" and value.range >= Range.FINITE:
        return Range.NONNEGATIVE
    if packet in ("_log_softmax", "cumsum", "sort"):
        return value.range.unsigned
    return Range.ANY


def pick(case: Case) -> tuple[Value, ...]:
    """topk and the like: along ``dim`` the given number of elements is left."""
    value = case.value("self")
    if not value.dims:
        return (value, Value(dims=(), range=Range.FINITE))
    dim = case.dim(value)
    case.clean(value, dim)
    dims = (*value.dims[:dim], joined([case.result_sizes(0)[dim]]), *value.dims[dim + 1 :])
    return (Value(dims=dims, range=value.range), Value(dims=dims, range=Range.FINITE))


def gated(case: Case) -> Value:
    """glu: the halves of ``dim`` are combined."""
    value = case.value("self")
    dim = case.dim(value)
    case.clean(value, dim)
    dims = (*value.dims[:dim], joined([case.result_sizes()[dim]]), *value.dims[dim + 1 :])
    return Value(dims=dims, range=value.range.unsigned)


RULES: dict[str, Callable[[Case], Any]] = {
    **dict.fromkeys(
        aten(
            "all amax aminmax amin any argmax argmin count_nonzero linalg_vector_norm logsumexp "
            "max.dim mean median.dim min.dim mode nanmedian.dim nansum norm prod std std_mean sum "
            "var var_mean kthvalue"
        ),
        reduce,
    ),
    **dict.fromkeys(aten("max.default min.default median.default nanmedian.default"), reduce_all),
    **dict.fromkeys(
        aten(
            "_log_softmax _safe_softmax _softmax argsort cummax cummin cumprod cumsum log_softmax "
            "logcumsumexp softmax sort"
        ),
        along,
    ),
    **dict.fromkeys(aten("topk"), pick),
    **dict.fromkeys(aten("glu"), gated),
}
