"""A symbolic batch size from the first trace on.

Dynamo fixes every size at the first call and learns at the second which ones vary, so the first
size would keep a graph of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from compile_backend import compat
from compile_backend.passes.classify import GraphInput, InputKind

__all__ = ["trace_with_dynamic_batch"]


def trace_with_dynamic_batch(inputs: Sequence[GraphInput], example_inputs: Sequence[Any]) -> None:
    """Ask Dynamo for a symbolic batch size where it traced a fixed one. Sizes 0 and 1 stay fixed.

    Without this the first size would get a graph of its own before Dynamo learns that it varies.
    Of plain arguments only those are marked that agree on the leading size of most of them, or
    of as many: a table or mask beside the batch keeps its fixed shape.
    """
    if not compat.in_dynamo():
        return
    declared: list[tuple[Tensor, int]] = []
    leading: dict[int, list[tuple[Tensor, int]]] = {}
    for graph_input in inputs:
        example = example_inputs[graph_input.index]
        if type(example) is not Tensor or not isinstance(graph_input.value, Tensor):
            continue
        dims = graph_input.declared_dims
        if graph_input.kind is InputKind.TENSOR:
            dims = [0] if graph_input.value.dim() else []
        for dim in dims:
            size = graph_input.value.shape[dim]
            if not isinstance(size, int) or size < 2 or compat.is_marked(example, dim):
                continue
            if graph_input.kind is InputKind.BATCH_FIELD:
                declared.append((example, dim))
            elif graph_input.kind is InputKind.TENSOR:
                leading.setdefault(size, []).append((example, dim))
    if any(i.kind is InputKind.BATCH_FIELD or _has_symbolic_batch(i) for i in inputs):
        leading = {}  # it is known what varies: a declared batch says it, or Dynamo has learnt it
    most = max(map(len, leading.values()), default=0)
    batch = [pair for pairs in leading.values() if len(pairs) == most for pair in pairs]
    marked = [*declared, *batch]
    # Torch cannot trace a storage that arguments of symbolic size share.
    storages = [tensor.untyped_storage().data_ptr() for tensor, _ in marked if tensor.numel()]
    if marked and len(set(storages)) == len(storages):
        compat.restart_with_dynamic_batch(marked)


def _has_symbolic_batch(graph_input: GraphInput) -> bool:
    is_tensor = graph_input.kind is InputKind.TENSOR and graph_input.value.dim() > 0
    return is_tensor and not isinstance(graph_input.value.shape[0], int)
