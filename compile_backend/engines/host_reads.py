"""Which operators and Python functions read a tensor's values on the host.

A recording holds no such read: the number would be baked into it, and a device graph cannot
contain one. Operators are judged by what they return and by the tags that torch gives them; what
never reaches an operator (``numpy``, ``tolist``) by the Python function.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from compile_backend.errors import FallbackReason

__all__ = ["READING_FUNCTIONS", "is_metadata_query", "reason_to_refuse"]

aten = torch.ops.aten

READING_FUNCTIONS: dict[Callable[..., Any], str] = {
    getattr(Tensor, name): name
    for name in (
        "__array__",
        "__bool__",
        "__complex__",
        "__deepcopy__",  # copies through the storage, which no operator shows
        "__dlpack__",
        "__float__",
        "__format__",
        "__index__",
        "__int__",
        "__reduce_ex__",
        "__repr__",
        "item",
        "numpy",
        "storage",
        "tolist",
    )
}
"""Functions of a tensor that hand its values, or memory that operators cannot follow, to Python."""

_METADATA_QUERIES = frozenset(
    f"aten::{name}"
    for name in (
        "_debug_has_internal_overlap",
        "_fused_sdp_choice",
        "_has_compatible_shallow_copy_type",
        "_has_same_storage_numel",
        "_is_zerotensor",
        "_version",
        "can_cast",
        "cudnn_is_acceptable",
        "dim",
        "get_device",
        "is_complex",
        "is_conj",
        "is_contiguous",
        "is_floating_point",
        "is_inference",
        "is_leaf",
        "is_neg",
        "is_pinned",
        "is_same_size",
        "is_set_to",
        "is_signed",
        "numel",
        "output_nr",
        "promote_types",
        "result_type",
        "retains_grad",
        "size",
        "storage_offset",
        "stride",
        "sym_is_contiguous",
        "sym_numel",
        "sym_size",
        "sym_storage_offset",
        "sym_stride",
    )
)

_MASKED_INDEXING = (aten.index.Tensor, aten._unsafe_index.Tensor)
_MASKED_WRITES = (
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index_put.default,
)


def is_metadata_query(op: OpOverload[Any, Any]) -> bool:
    """Whether ``op`` answers from shapes, dtypes and flags alone, so that nothing is recorded."""
    return op._schema.name in _METADATA_QUERIES


def reason_to_refuse(
    op: OpOverload[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, as_device: bool
) -> FallbackReason | None:
    """Why ``op`` cannot be recorded with these arguments; None where it can.

    ``as_device`` adds what a device graph cannot hold although a host recording can: a masked
    write, for which a device counts the mask on the host.
    """
    if torch.Tag.dynamic_output_shape in op.tags and _shape_depends_on_values(op, args, kwargs):
        return FallbackReason.DATA_DEPENDENT_SHAPE
    if as_device and op in _MASKED_WRITES and _has_mask(args[1]) and args[2].numel() != 1:
        return FallbackReason.DATA_DEPENDENT_SHAPE
    if torch.Tag.data_dependent_output in op.tags or (
        _returns_numbers_only(op) and not is_metadata_query(op)
    ):
        return FallbackReason.HOST_READ
    return None


def _shape_depends_on_values(
    op: OpOverload[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    if op in _MASKED_INDEXING:
        return _has_mask(args[1])
    if op is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    return not (op is aten.one_hot.default and len(args) > 1 and args[1] != -1)


def _has_mask(indices: Any) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _returns_numbers_only(op: OpOverload[Any, Any]) -> bool:
    """Whether every result is a number and some argument is a tensor it may have come from."""
    returns = op._schema.returns
    return (
        bool(returns)
        and not any("Tensor" in str(each.type) for each in returns)
        and any("Tensor" in str(each.type) for each in op._schema.arguments)
    )
