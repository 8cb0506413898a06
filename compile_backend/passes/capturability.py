"""Which nodes a captured graph cannot hold, and why: read off the ATen trace.

No ATen operator says so by itself (none is tagged ``cudagraph_unsafe`` by default), so host reads,
shapes that depend on values and foreign devices are found by what the operators are and make.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_iter

from compile_backend.errors import FallbackReason
from compile_backend.passes.aten_trace import (
    AtenCall,
    AtenTrace,
    flat_calls,
    source_line,
    tensors_in,
)

__all__ = ["CaptureObstacle", "capturability"]

_HOST_READS = frozenset(
    {
        "aten._linalg_check_errors.default",
        "aten._local_scalar_dense.default",
        "aten.allclose.default",
        "aten.equal.default",
        "aten.is_nonzero.default",
        "aten.item.default",
    }
)

# Inductor's and eager's kernels of these read their predicate on the host.
_HOST_READING_HOPS = frozenset({"cond", "while_loop", "while_loop_stack_output"})

_MASKED_INDEXING = frozenset(
    {
        "aten._index_put_impl_.default",
        "aten._unsafe_index.Tensor",
        "aten._unsafe_index_put.default",
        "aten.index.Tensor",
        "aten.index_put.default",
        "aten.index_put_.default",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureObstacle:
    """Why a node cannot be held in a captured graph: the operator, and where it is written."""

    reason: FallbackReason
    op: str
    source: str

    @property
    def message(self) -> str:
        return f"{self.op} ({self.source}): {self.reason.value}"


def capturability(trace: AtenTrace) -> dict[fx.Node, CaptureObstacle]:
    """The nodes that a captured graph cannot hold, each with the first reason found."""
    device = _main_device(trace)
    obstacles: dict[fx.Node, CaptureObstacle] = {}
    for call in trace.calls:
        if call.node in obstacles:
            continue
        for inner in flat_calls(call):
            reason = _obstacle(inner, trace, device)
            if reason is not None:
                source = source_line(inner.node)
                obstacles[call.node] = CaptureObstacle(reason=reason, op=inner.name, source=source)
                break
    return obstacles


def _obstacle(call: AtenCall, trace: AtenTrace, device: torch.device) -> FallbackReason | None:
    if _reads_on_host(call, trace):
        return FallbackReason.HOST_READ
    if _has_data_dependent_shape(call):
        return FallbackReason.DATA_DEPENDENT_SHAPE
    if isinstance(call.op, OpOverload) and torch.Tag.cudagraph_unsafe in call.op.tags:
        return FallbackReason.CUDAGRAPH_UNSAFE
    if any(
        t.device != device
        for t in tensors_in((call.tensors, call.result))
        if id(t) not in trace.number_tensors
    ):
        return FallbackReason.OTHER_DEVICE
    return None


def _reads_on_host(call: AtenCall, trace: AtenTrace) -> bool:
    if isinstance(call.op, HigherOrderOperator):
        return call.op.name() in _HOST_READING_HOPS
    if call.name not in _HOST_READS:
        return False
    # A Python number that Dynamo wrapped in a tensor lives on the host already.
    return not call.tensors or any(id(t) not in trace.number_tensors for t in call.tensors)


def _has_data_dependent_shape(call: AtenCall) -> bool:
    if not isinstance(call.op, OpOverload):
        return False
    if call.name in _MASKED_INDEXING:
        indices = call.argument("indices") or ()
        masked = any(
            isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices
        )
        # ``x[mask] = number`` is a masked fill: no positions are computed
        values = call.argument("values")
        fills = isinstance(values, Tensor) and values.dim() == 0 and not call.argument("accumulate")
        return masked and not fills
    made = free_unbacked_symbols(_sizes(call.result)) - free_unbacked_symbols(_sizes(call.args))
    if made:
        return True
    if call.name == "aten.repeat_interleave.Tensor":
        return call.argument("output_size") is None
    return torch.Tag.dynamic_output_shape in call.op.tags


def _sizes(value: Any) -> list[Any]:
    tensors = tensors_in(value)
    numbers = [x for x in tree_iter(value) if isinstance(x, torch.SymInt)]
    return [size for t in tensors for size in t.shape] + numbers


def _main_device(trace: AtenTrace) -> torch.device:
    """The accelerator that the inputs live on, else the CPU."""
    values = [trace.values.get(node) for node in trace.gm.graph.nodes]
    devices = [t.device for t in tensors_in(values) if id(t) not in trace.number_tensors]
    others = [device for device in devices if device.type != "cpu"]
    return others[0] if others else torch.device("cpu")
