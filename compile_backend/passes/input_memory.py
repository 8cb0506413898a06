"""Which inputs a graph writes, which it returns views of, and which share memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from compile_backend.passes.aten_trace import AtenTrace
from compile_backend.passes.classify import GraphInput, InputKind

__all__ = [
    "aliased_names",
    "annotate_storages",
    "distance",
    "mutated_names",
    "share_storage",
    "written_pairs",
]


def mutated_names(trace: AtenTrace) -> set[str]:
    return {node.name for node in trace.mutated}


def aliased_names(trace: AtenTrace) -> set[str]:
    """Inputs of which an output is a view; one that is returned as it is does not count."""
    return {
        placeholder.name
        for output, placeholders in zip(trace.outputs, trace.output_aliases, strict=True)
        for placeholder in placeholders
        if trace.values[placeholder] is not output
    }


def written_pairs(
    inputs: Sequence[GraphInput], trace: AtenTrace
) -> list[tuple[GraphInput, GraphInput]]:
    """A written input and another, each pair once.

    Parameters and buffers are not looked at again at each call: their memory is laid out once.
    """
    tensors = [i for i in inputs if isinstance(i.value, Tensor) and not i.is_wrapped_number]
    mutated = mutated_names(trace)
    return [
        (written, other)
        for written in tensors
        for other in tensors
        if written.name in mutated
        and other is not written
        and (written.kind is not InputKind.WEIGHT or other.kind is not InputKind.WEIGHT)
        and (other.name not in mutated or written.index < other.index)
    ]


def share_storage(pair: tuple[GraphInput, GraphInput], trace: AtenTrace) -> bool:
    return bool(trace.storages[pair[0].node] & trace.storages[pair[1].node])


def distance(a: Tensor, b: Tensor) -> int:
    """Bytes from ``b`` to ``a``."""
    return a.data_ptr() - b.data_ptr()


def annotate_storages(trace: AtenTrace) -> None:
    """Note on each node what it lies in and writes; segments need it after the split."""
    for node, storages in trace.storages.items():
        node.meta["storages"] = storages
        node.meta["writes"] = frozenset().union(*(c.writes for c in trace.calls_of(node)))
