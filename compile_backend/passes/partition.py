"""Turn runs of consecutive nodes into submodules, in program order.

The mechanical half of splitting: :mod:`passes.split` decides which nodes belong together, this
module builds the graphs. Used twice: for the pieces that are compiled, and for the segments that
are captured. Groups are runs of the program, so no node moves past another and no cycle can
appear (torch's ``split_module`` sorts partitions instead, and then needs hoisting and ordering
rules).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import SymBool, SymFloat, SymInt, Tensor, fx

__all__ = ["Group", "may_cross", "module_attribute", "partition", "value_of"]

_KEPT_META = ("example_value", "val", "stack_trace", "storages")  # of what a submodule reads


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive nodes of one graph: a submodule when ``name`` is given, else kept in place."""

    name: str | None
    nodes: tuple[fx.Node, ...]


def value_of(node: fx.Node) -> Any:
    """The fake value that tracing left on a node (tensor, SymInt, number or a tree of them)."""
    return node.meta.get("example_value", node.meta.get("val"))


def may_cross(value: Any) -> bool:
    """Whether a value can be an input or output of a submodule (None: nothing reads it)."""
    return value is None or isinstance(value, (Tensor, SymInt, SymFloat, SymBool, bool, int, float))


def partition(
    gm: fx.GraphModule, groups: Sequence[Group], *, copied_into_users: Collection[fx.Node] = ()
) -> fx.GraphModule:
    """The outer graph: placeholders as they are, a ``call_module`` for each named group.

    ``groups`` cover every node of ``gm`` but placeholders, ``get_attr`` nodes, the output and
    ``copied_into_users``, in program order. ``get_attr`` nodes and ``copied_into_users`` are
    copied into each graph that uses them. A submodule returns a tuple, also for one output. Node
    metadata is kept; of the keys ``storages`` and ``writes`` (what a node's value lies in, what
    the node writes) a call of a submodule has the union of its nodes' writes. Attributes are
    shared with ``gm``, not copied.
    """
    return _Partitioner(gm, groups, set(copied_into_users)).build()


class _Partitioner:
    def __init__(self, gm: fx.GraphModule, groups: Sequence[Group], copied: set[fx.Node]) -> None:
        self._gm = gm
        self._groups = groups
        self._copied = copied | set(gm.graph.find_nodes(op="get_attr"))
        self._outer = fx.Graph()
        self._root: dict[str, Any] = {}
        self._in_outer: dict[fx.Node, fx.Node] = {}  # node of gm -> node of the outer graph

    def build(self) -> fx.GraphModule:
        for node in self._gm.graph.find_nodes(op="placeholder"):
            self._in_outer[node] = self._outer.node_copy(node)
        for group in self._groups:
            if group.name is None:
                for node in group.nodes:
                    self._in_outer[node] = self._outer.node_copy(node, self._outer_node)
                    self._share_attribute(node, self._root)
            else:
                self._emit_submodule(group.name, group.nodes)
        (output,) = self._gm.graph.find_nodes(op="output")
        self._outer.node_copy(output, self._outer_node)
        outer = fx.GraphModule(self._root, self._outer, class_name=self._gm.__class__.__name__)
        outer.meta.update(self._gm.meta)
        return outer

    def _outer_node(self, node: fx.Node) -> fx.Node:
        if node not in self._in_outer:
            assert node in self._copied, f"{node} is used before the group that makes it"
            self._share_attribute(node, self._root)
            self._in_outer[node] = self._outer.node_copy(node, self._outer_node)
        return self._in_outer[node]

    def _share_attribute(self, node: fx.Node, root: dict[str, Any]) -> None:
        if node.op in ("get_attr", "call_module"):
            root[str(node.target)] = module_attribute(self._gm, str(node.target))

    def _emit_submodule(self, name: str, nodes: Sequence[fx.Node]) -> None:
        members = set(nodes)
        inner = fx.Graph()
        inner_root: dict[str, Any] = {}
        inside: dict[fx.Node, fx.Node] = {}
        inputs = self._inputs_of(nodes, members)
        for node in inputs:
            placeholder = inner.placeholder(node.name)
            placeholder.meta = _kept_meta(node)
            inside[node] = placeholder

        def inner_node(node: fx.Node) -> fx.Node:
            if node not in inside:
                self._share_attribute(node, inner_root)
                inside[node] = inner.node_copy(node, inner_node)
            return inside[node]

        for node in nodes:
            inner_node(node)
        outputs = [n for n in nodes if any(user not in members for user in n.users)]
        inner.output(tuple(inside[node] for node in outputs))
        submodule = fx.GraphModule(inner_root, inner, class_name=name)
        self._root[name] = submodule
        call = self._outer.call_module(name, tuple(self._outer_node(node) for node in inputs))
        call.meta["stack_trace"] = nodes[0].meta.get("stack_trace")
        call.meta["writes"] = frozenset().union(*(n.meta.get("writes", ()) for n in nodes))
        for position, node in enumerate(outputs):
            item = self._outer.create_node(
                "call_function", operator.getitem, (call, position), name=node.name
            )
            item.meta = dict(node.meta)
            self._in_outer[node] = item

    def _inputs_of(self, nodes: Sequence[fx.Node], members: set[fx.Node]) -> list[fx.Node]:
        """What a group reads from outside, by first use; copied nodes are looked through."""
        inputs: dict[fx.Node, None] = {}

        def visit(node: fx.Node) -> None:
            for argument in node.all_input_nodes:
                if argument in self._copied:
                    visit(argument)
                elif argument not in members:
                    inputs.setdefault(argument)

        for node in nodes:
            visit(node)
        return list(inputs)


def _kept_meta(node: fx.Node) -> dict[str, Any]:
    meta: Mapping[str, Any] = node.meta
    return {key: meta[key] for key in _KEPT_META if key in meta}


def module_attribute(gm: fx.GraphModule, target: str) -> Any:
    """What a ``get_attr`` or ``call_module`` target of a graph names."""
    value: Any = gm
    for part in target.split("."):
        value = getattr(value, part)
    return value
