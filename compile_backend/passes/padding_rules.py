"""The whitelist of the padding proof: which operators keep padded rows apart, and how.

The rules live in :mod:`compile_backend.passes.padding`, by kind of operator; here they form one
table. An operator that is not found here is not shown safe. To add one, write a rule that returns
a :class:`~compile_backend.passes.padding.values.Value` for each result, or raises
:class:`~compile_backend.passes.padding.values.NotShown`. A rule is given the out-of-place meaning
of an operator: ``aten.add_`` finds ``aten.add``, and the proof sees to the write.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch._ops import OpOverload

from compile_backend.passes.padding import (
    contractions,
    elementwise,
    factories,
    indexing,
    reductions,
    views,
)
from compile_backend.passes.padding.values import Case, aten

__all__ = [
    "ASSERTIONS",
    "CHECKS",
    "FORBIDDEN",
    "SEEDED",
    "Rule",
    "packet_name",
    "rule_for",
    "size_arguments",
]

Rule = Callable[[Case], Any]

RULES: Mapping[str, Rule] = {
    **contractions.RULES,
    **elementwise.RULES,
    **factories.RULES,
    **indexing.RULES,
    **reductions.RULES,
    **views.RULES,
}

# Tagged as random for the sake of a dropout that is 0 at inference.
SEEDED = contractions.SEEDED

# They look at a storage past the bounds of their argument, or change what an argument is.
FORBIDDEN = frozenset(
    aten(
        "as_strided as_strided_copy as_strided_scatter resize resize_as resize_output set set_data"
    )
)

# They look at values and return nothing.
ASSERTIONS = frozenset(aten("_assert_async _functional_assert_async"))

# They look at sizes and return no tensor. Sizes are checked where they are used.
CHECKS = frozenset(
    aten(
        "_assert_scalar _assert_tensor_metadata _fused_sdp_choice is_same_size sym_constrain_range "
        "sym_constrain_range_for_size sym_is_contiguous sym_numel sym_size sym_storage_offset "
        "sym_stride"
    )
)

# Arguments that give a shape, not a number: the one place where the size of an axis may appear.
_SHAPES: Mapping[str, frozenset[str]] = {
    name: frozenset(arguments)
    for names, arguments in (
        ("view _unsafe_view expand _reshape_copy", ("size",)),
        ("_reshape_alias empty_strided new_empty_strided", ("size", "stride")),
        ("reshape", ("shape",)),
        ("repeat", ("repeats",)),
        ("slice", ("start", "end")),
        ("select", ("index",)),
        ("split unsafe_split", ("split_size",)),
        ("split_with_sizes unsafe_split_with_sizes", ("split_sizes",)),
        ("empty empty_permuted full new_empty new_full new_ones new_zeros ones zeros", ("size",)),
        ("eye", ("n", "m")),
        ("arange", ("end",)),
        ("native_group_norm", ("N",)),
    )
    for name in aten(names)
}


def packet_name(op: OpOverload) -> str:
    """``aten.add`` of ``aten.add_.Tensor``: without overload and in-place mark."""
    namespace, _, name = op._schema.name.partition("::")
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return f"{namespace}.{name}"


def rule_for(op: OpOverload) -> Rule | None:
    """The rule of ``op``: by overload, then by name, then because it is elementwise."""
    packet = packet_name(op)
    for name in (f"{packet}.{op._overloadname}", packet):
        if name in RULES:
            return RULES[name]
    return elementwise.elementwise if elementwise.is_elementwise(op, packet) else None


def size_arguments(op: OpOverload) -> frozenset[str]:
    """Names of the arguments of ``op`` that may be computed from the size of a padded axis."""
    return _SHAPES.get(packet_name(op), frozenset())
