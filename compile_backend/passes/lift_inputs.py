"""A second outer graph over the same pieces, in which padded inputs are read from slots.

The lifted graph is called with padded sizes and without the padded tensors; each of those is read
by a ``slots.<name>`` module instead. Slot reads stand in the outer graph only: a piece receives
the view as an ordinary input, because Inductor would turn a small buffer inside a piece into a
constant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from compile_backend.passes.partition import module_attribute

__all__ = ["SlotRead", "SlotSource", "lift_inputs"]

ReadView = Callable[[str, Mapping[str, int]], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSource:
    """One placeholder that becomes a slot read: the slot's name and the axes its view follows."""

    placeholder: str
    slot: str
    axes: tuple[str, ...]


class SlotRead(torch.nn.Module):
    """The view of one slot at padded sizes; the same tensor object for the same sizes."""

    def __init__(self, slot: str, axes: Sequence[str], read_view: ReadView) -> None:
        super().__init__()
        self._slot = slot
        self._axes = tuple(axes)
        self._read_view = read_view

    def forward(self, *sizes: int) -> Tensor:
        return self._read_view(self._slot, dict(zip(self._axes, sizes, strict=True)))

    def extra_repr(self) -> str:
        return f"slot={self._slot!r}, axes={self._axes}"


def lift_inputs(
    outer: fx.GraphModule,
    sources: Sequence[SlotSource],
    *,
    size_placeholders: Mapping[str, str],
    read_view: ReadView,
) -> fx.GraphModule:
    """Replace the placeholders named by ``sources`` with slot reads.

    ``size_placeholders`` names, per axis, a placeholder that carries its size;
    ``read_view(slot, {axis: padded size})`` returns the view. The submodules of ``outer`` are
    shared. An output that was a lifted placeholder becomes the view: the caller returns its own
    tensor there.
    """
    lifted = fx.Graph()
    by_placeholder = {source.placeholder: source for source in sources}
    root: dict[str, object] = {}
    copied: dict[fx.Node, fx.Node] = {}
    by_name: dict[str, fx.Node] = {}
    placeholders = outer.graph.find_nodes(op="placeholder")
    for node in placeholders:
        if node.name not in by_placeholder:
            copied[node] = by_name[node.name] = lifted.node_copy(node)
    for node in placeholders:
        source = by_placeholder.get(node.name)
        if source is None:
            continue
        target = f"slots.{source.slot}"
        root[target] = SlotRead(source.slot, source.axes, read_view)
        sizes = tuple(by_name[size_placeholders[axis]] for axis in source.axes)
        read = lifted.call_module(target, sizes)
        read.meta = dict(node.meta)
        copied[node] = read
    for node in outer.graph.nodes:
        if node.op != "placeholder":
            copied[node] = lifted.node_copy(node, copied.__getitem__)
            if node.op in ("call_module", "get_attr"):
                root[str(node.target)] = module_attribute(outer, str(node.target))
    module = fx.GraphModule(root, lifted, class_name=f"Lifted{outer.__class__.__name__}")
    module.meta.update(outer.meta)
    return module
