"""Elementwise operators: each element of the result comes from the elements at its own place."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._ops import OpOverload

from compile_backend.errors import FallbackReason
from compile_backend.passes.padding.layout import broadcast
from compile_backend.passes.padding.values import Case, NotShown, Range, Value, aten

__all__ = ["RULES", "elementwise", "is_elementwise"]

# Elementwise, but not tagged so in every supported version. In-place forms are covered by the
# out-of-place name.
UNTAGGED = frozenset(
    aten(
        "__and__ __iand__ __ilshift__ __ior__ __irshift__ __ixor__ __or__ __xor__ _conj_physical "
        "_prelu_kernel _to_copy absolute celu complex copy elu fill floor_divide hardshrink "
        "hardsigmoid hardswish hardtanh leaky_relu log_sigmoid_forward masked_fill mish polar "
        "relu6 selu softplus softshrink special_expit threshold where zero"
    )
)

# Tagged elementwise, and is not: it compares whole tensors.
MISTAGGED = frozenset({"aten.equal"})


def is_elementwise(op: OpOverload, packet: str) -> bool:
    """Whether ``op`` (``packet`` is its name without overload and in-place mark) is elementwise."""
    if op.namespace not in ("aten", "prims") or packet in MISTAGGED:
        return False
    if packet == "aten.where" and str(op) == "aten.where.default":
        return False  # the positions, not a choice
    return torch.Tag.pointwise in op.tags or packet in UNTAGGED


def elementwise(case: Case) -> Value | tuple[Value, ...]:
    """Broadcast the operands; the range by operator name."""
    tensors = case.call.tensors
    written = case.arg("out")
    if isinstance(written, Tensor):
        tensors = [t for t in tensors if t is not written]
    dims = broadcast([case.values[id(t)].dims for t in tensors])
    if dims is None:
        raise case.unsupported("its operands hold the padded rows in different orders")
    _require_no_division_by_zero(case)
    value = Value(dims=dims, range=_range(case))
    result = case.call.result
    return value if isinstance(result, Tensor) else (value,) * len(result)


def _range(case: Case) -> Range:
    rule = _RANGES.get(_name(case))
    found = Range.ANY if rule is None else rule(case)
    return found if case.is_floating else max(found, Range.FINITE)


def _name(case: Case) -> str:
    return str(case.call.op._schema.name).removeprefix("aten::").rstrip("_")


def _require_no_division_by_zero(case: Case) -> None:
    """Integers are divided with an error, and a padded divisor is 0 by default."""
    divisor = case.arg("other")
    if (
        _name(case) in _DIVISIONS
        and isinstance(divisor, Tensor)
        and not case.is_floating
        and not case.values[id(divisor)].is_clean
        and case.values[id(divisor)].range is not Range.POSITIVE
    ):
        raise NotShown(
            f"{case.call.name} divides integers by a padded row, which may be 0 and raise",
            "clamp the divisor to at least 1",
            FallbackReason.PADDING_UNSAFE,
        )


def _operand(case: Case, name: str) -> Range:
    arg = case.arg(name)
    value = case.of(arg)
    return Range.of_number(arg) if value is None else value.range


def _sum(case: Case) -> Range:
    ranges = (_operand(case, "self"), _operand(case, "other"))
    plain = isinstance(case.arg("alpha", 1), int) and case.arg("alpha", 1) == 1
    if not plain or min(ranges) <= Range.FINITE:
        return min(*ranges, Range.FINITE)
    return max(ranges)


def _difference(case: Case) -> Range:
    return min(_operand(case, "self"), _operand(case, "other")).unsigned


def _product(case: Case) -> Range:
    left, right = _operand(case, "self"), _operand(case, "other")
    if case.arg("self") is case.arg("other") and left >= Range.FINITE:
        return Range.NONNEGATIVE
    return min(left, right).rounded


def _quotient(case: Case) -> Range:
    left, right = _operand(case, "self"), _operand(case, "other")
    divisor = case.arg("other")
    if right is Range.POSITIVE:
        return left.rounded
    if isinstance(divisor, int | float) and divisor != 0 and right >= Range.FINITE:
        return left.unsigned
    return Range.ANY


def _power(case: Case) -> Range:
    base, exponent = _operand(case, "self"), case.arg("exponent")
    if not isinstance(exponent, int | float):
        return Range.ANY
    if exponent < 0:
        return Range.NONNEGATIVE if base is Range.POSITIVE else Range.ANY
    if base >= Range.NONNEGATIVE:
        return Range.NONNEGATIVE
    if base is Range.FINITE and float(exponent).is_integer():
        return Range.NONNEGATIVE if exponent % 2 == 0 else Range.FINITE
    return Range.ANY


def _of_positive(then: Range) -> Callable[[Case], Range]:
    def rule(case: Case) -> Range:
        return then if _operand(case, "self") is Range.POSITIVE else Range.ANY

    return rule


def _square_root(case: Case) -> Range:
    found = _operand(case, "self")
    return found if found >= Range.NONNEGATIVE else Range.ANY


def _same(case: Case) -> Range:
    return _operand(case, "self")


def _finite(case: Case) -> Range:
    return _operand(case, "self").unsigned


def _unsigned_result(case: Case) -> Range:
    return Range.NONNEGATIVE if _operand(case, "self") >= Range.FINITE else Range.ANY


def _copied(case: Case) -> Range:
    """Another dtype can round to zero. Overflow is left out of account."""
    return _operand(case, "self").rounded


def _written(name: str) -> Callable[[Case], Range]:
    def rule(case: Case) -> Range:
        return _operand(case, name).rounded

    return rule


def _chosen(*names: str) -> Callable[[Case], Range]:
    def rule(case: Case) -> Range:
        return min(_operand(case, name) for name in names)

    return rule


def _at_least(case: Case) -> Range:
    bounded = case.arg("max") is None or _operand(case, "max") is Range.POSITIVE
    positive = bounded and _operand(case, "min") is Range.POSITIVE
    return Range.POSITIVE if positive and _same(case) >= Range.FINITE else _finite(case)


_DIVISIONS = frozenset(["div", "floor_divide", "fmod", "remainder"])

_FINITE = (
    "neg positive tanh silu gelu erf sin cos hardswish hardsigmoid hardtanh leaky_relu elu selu "
    "celu mish floor ceil round trunc sign clamp_max"
)

_RANGES: dict[str, Callable[[Case], Range]] = {
    "add": _sum,
    "sub": _difference,
    "rsub": _difference,
    "mul": _product,
    "div": _quotient,
    "true_divide": _quotient,
    "pow": _power,
    "reciprocal": _of_positive(Range.NONNEGATIVE),
    "rsqrt": _of_positive(Range.POSITIVE),
    "log": _of_positive(Range.FINITE),
    "sqrt": _square_root,
    "_to_copy": _copied,
    "convert_element_type": _copied,
    "copy": _written("src"),
    "fill": _written("value"),
    "zero": lambda case: Range.NONNEGATIVE,
    "masked_fill": _chosen("self", "value"),
    "where": _chosen("self", "other"),
    "maximum": _chosen("self", "other"),
    "minimum": _chosen("self", "other"),
    "clamp": _at_least,
    "clamp_min": _at_least,
    **dict.fromkeys(["square", "abs", "relu", "sigmoid", "softplus", "relu6"], _unsigned_result),
    **dict.fromkeys(
        _FINITE.split(),
        _finite,
    ),
}


def clone(case: Case) -> Value:
    """The same elements in other memory."""
    return case.value("self")


RULES = {"aten.clone": clone, "aten.lift": clone, "prims.clone": clone}
