"""Numbers that tracing has fixed become constants.

With dynamic shapes Dynamo passes a Python float as a 0-d tensor and reads it in the graph. Where
an operator needed its value (``layer_norm``'s ``eps``), the value is guarded and as good as
written in the source; left as a read, it would look like a host read to everything later.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import SymFloat, SymInt, fx

from compile_backend.passes.partition import value_of

__all__ = ["fold_numbers"]


def fold_numbers(gm: fx.GraphModule, *, wrapped_numbers: Collection[fx.Node]) -> fx.GraphModule:
    """Replace ``.item()`` of the placeholders ``wrapped_numbers`` where the value is fixed."""
    for holder in wrapped_numbers:
        for node in list(holder.users):
            if node.op != "call_method" or node.target != "item":
                continue
            number = value_of(node)
            if isinstance(number, (SymFloat, SymInt)) and number.node.expr.is_number:
                kind = float if isinstance(number, SymFloat) else int
                node.replace_all_uses_with(kind(number.node.expr))  # type: ignore[arg-type]
                gm.graph.erase_node(node)
    return gm
