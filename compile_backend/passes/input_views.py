"""Which views of inputs stand in the way of sharing compiled pieces.

``kv[layer]`` inside a piece builds the layer number into its code, so no two layers would share
it (:mod:`passes.dedupe`). :func:`varying_views` finds such views, and :mod:`passes.split` makes
them in front of all pieces, which then receive them as inputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from compile_backend.passes.aten_trace import AtenCall, AtenTrace, flat_calls
from compile_backend.passes.partition import value_of

__all__ = ["reshaped_storages", "varying_views"]

# Other views (``weight.t()``) are the compiler's to see: it chooses kernels by them.
_INDEXING = frozenset({"aten.alias.default", "aten.select.int", "aten.slice.Tensor"})


@dataclass(slots=True)
class _Uses:
    """The views of one input that select a part of it, and each piece's places in it, in order."""

    views: list[fx.Node] = field(default_factory=list)
    places: defaultdict[int, list[Hashable]] = field(default_factory=lambda: defaultdict(list))

    @property
    def vary(self) -> bool:
        first, *others = self.places.values()
        return any(place != first for place in others)


def varying_views(trace: AtenTrace, piece_of: Mapping[fx.Node, int]) -> set[fx.Node]:
    """Parts of inputs (``kv[2]``, ``kv[2, :8]``) where pieces take different parts of one input.

    ``piece_of`` numbers the nodes that lie in pieces. An input of which every piece takes the same
    part, or of which only one piece takes any, is left alone: a compiler does better with it.
    """
    uses: defaultdict[fx.Node, _Uses] = defaultdict(_Uses)
    input_of: dict[fx.Node, fx.Node] = {}
    for node in trace.gm.graph.nodes:
        if node not in piece_of or not _selects_a_part(trace, node):
            continue
        source, *indices = node.all_input_nodes
        root = source if source.op in ("placeholder", "get_attr") else input_of.get(source)
        if root is None or any(index.op != "placeholder" for index in indices):
            continue
        input_of[node] = root
        uses[root].views.append(node)
        uses[root].places[piece_of[node]].append(_place(trace, node))
    return {view for use in uses.values() if use.vary for view in use.views}


def reshaped_storages(trace: AtenTrace) -> frozenset[int]:
    """Storages of tensors whose shape is changed in place (``x.t_()``) or may be.

    The same view of such a tensor is another one before and after.
    """
    return frozenset().union(*(call.writes for call in trace.calls if _may_reshape(call)))


def _may_reshape(call: AtenCall) -> bool:
    return any(
        inner.opaque
        or (isinstance(inner.op, OpOverload) and torch.Tag.inplace_view in inner.op.tags)
        for inner in flat_calls(call)
    )


def _selects_a_part(trace: AtenTrace, node: fx.Node) -> bool:
    calls = trace.calls_of(node)
    is_indexing = bool(calls) and all(call.name in _INDEXING for call in calls)
    return is_indexing and isinstance(value_of(node), Tensor)


def _place(trace: AtenTrace, node: fx.Node) -> Hashable:
    """Where a view lies in what it is a view of. By text: comparing symbols would add guards."""
    return tuple(
        (call.name, repr(call.args[1:]), repr(dict(call.kwargs))) for call in trace.calls_of(node)
    )
