"""``attention()``: what a model calls, and the custom operator that a traced graph holds instead.

The operator hides everything that depends on the batch from the compiler. It declares no mutated
argument, since the KV cache is no argument of it; what keeps it alive and in its place is the mark
as a side effect below.
"""

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from compile_backend.attention.context import get_forward_context
from compile_backend.engines import is_in_segment, no_graph, record_opaque

__all__ = ["attention"]


def attention(q: Tensor, k: Tensor, v: Tensor, layer_id: int, scale: float | None = None) -> Tensor:
    """Attend over the KV cache of layer ``layer_id``, after writing k and v to it.

    q is [tokens, num_heads, head_dim]; k and v are [tokens, num_kv_heads, head_dim]. ``scale`` None
    means ``head_dim ** -0.5``. Returns a new contiguous tensor shaped like q, without gradients.
    Where tokens are written and what they see says the ForwardContext; raises ContextError without.
    In a breakable capture the call ends the segment.
    """
    if torch.compiler.is_compiling():
        result: Tensor = torch.ops.graphbuf.attention.default(q, k, v, layer_id, scale)
        return result
    if is_in_segment():  # later segments read memory that an earlier one made
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        _attend_to(out, q, k, v, layer_id, scale)
        return out
    # Past the dispatcher, which adds 5 to 10 us per layer, and as one entry of a capture.
    recorded: Tensor = record_opaque(_attend, q, k, v, layer_id, scale)
    return recorded


@torch.no_grad()  # the cache is written in place: with gradients on it would join the graph
def _attend(q: Tensor, k: Tensor, v: Tensor, layer_id: int, scale: float | None = None) -> Tensor:
    context = get_forward_context()
    return context.attn_backend.forward(q, k, v, layer_id=layer_id, scale=scale, context=context)


@no_graph
def _attend_to(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, layer_id: int, scale: float | None
) -> None:
    out.copy_(_attend(q, k, v, layer_id, scale))


@torch.library.custom_op("graphbuf::attention", mutates_args=())
def _operator(q: Tensor, k: Tensor, v: Tensor, layer_id: int, scale: float | None = None) -> Tensor:
    return _attend(q, k, v, layer_id, scale)


@_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, layer_id: int, scale: float | None = None) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


# Dead code elimination of FX keeps the call even if nobody reads its result, also in what
# AOTAutograd and Inductor make of the graph.
has_side_effect(torch.ops.graphbuf.attention.default)
