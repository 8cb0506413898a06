"""Cut an outer graph for capture: a segment is a run of pieces and break ops in one graph.

Compiling and capturing are cut differently. Pieces end wherever the compiler must not look across;
a segment ends only at the operators that it is told to leave out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import fx

from compile_backend.passes.partition import Group, may_cross, partition, value_of

__all__ = ["Segmented", "segment"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segmented:
    """An outer graph cut for capture: ``segment_<k>`` submodules, other operators in between."""

    gm: fx.GraphModule
    mutated_inputs: Mapping[str, frozenset[int]]  # segment -> positions of inputs that it writes

    @property
    def segments(self) -> list[str]:
        return list(self.mutated_inputs)


def segment(outer: fx.GraphModule, left_out: Collection[str]) -> Segmented:
    """Cut ``outer`` at the break ops named ``left_out``; runs without a piece stay uncaptured.

    What a left-out operator returns is copied to a segment that reads it, tensor by tensor, so
    views and writes of such a storage stay outside, on the real one. A region of changed global
    state that was found to hold a break op is left out as a whole. Slot reads are copied into each
    segment that uses them: their views are fixed.
    """
    slot_reads = [
        node
        for node in outer.graph.find_nodes(op="call_module")
        if str(node.target).startswith("slots.")
    ]
    written = frozenset().union(*(node.meta.get("writes", ()) for node in outer.graph.nodes))
    foreign: set[int] = set()  # written storages that an operator between segments made
    runs: list[tuple[bool, list[fx.Node]]] = []
    outside: set[fx.Node] = set()
    for node in outer.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr") or node in slot_reads:
            continue
        unpacks = node.op == "call_function" and any(n in outside for n in node.all_input_nodes[:1])
        is_outside = (
            node.meta.get("cut") in left_out
            or node.meta.get("in_cut_region", False)
            or (unpacks and node.target.__name__ == "getitem")
            or (node.op != "call_module" and _touches(node, foreign))
            or not may_cross(value_of(node))
        )
        if is_outside:
            outside.add(node)
            foreign |= set(node.meta.get("storages", ())) & written
        if runs and runs[-1][0] == (not is_outside):
            runs[-1][1].append(node)
        else:
            runs.append((not is_outside, [node]))
    groups: list[Group] = []
    for inside, nodes in runs:
        captured = inside and any(node.op == "call_module" for node in nodes)
        name = f"segment_{len(groups)}" if captured else None
        groups.append(Group(name, tuple(nodes)))
    gm = partition(outer, groups, copied_into_users=slot_reads)
    return Segmented(gm=gm, mutated_inputs=_mutated_inputs(gm))


def _touches(node: fx.Node, storages: set[int]) -> bool:
    """Whether an argument lies in one of these storages, so that a copy of it would not do."""
    return any(
        argument.op != "placeholder" and not storages.isdisjoint(argument.meta.get("storages", ()))
        for argument in node.all_input_nodes
    )


def _mutated_inputs(gm: fx.GraphModule) -> dict[str, frozenset[int]]:
    mutated: dict[str, frozenset[int]] = {}
    for node in gm.graph.find_nodes(op="call_module"):
        if str(node.target).startswith("segment_"):
            writes = node.meta.get("writes", frozenset())
            mutated[str(node.target)] = frozenset(
                position
                for position, argument in enumerate(node.args)
                if isinstance(argument, fx.Node) and argument.meta.get("storages", set()) & writes
            )
    return mutated
