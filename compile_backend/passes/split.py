"""Which node is in which piece, which operators run between pieces, and why.

A *piece* ends wherever the compiler must not look across: an operator that is named in
``splitting_ops``, cannot be captured, or is a custom operator that mutates its arguments. Such a
*break op* runs as written. A few harmless nodes run between pieces too (*loose* nodes): views of
storages that are written in another piece, so that a view and its in-place write always act on
one real storage, parts of inputs that differ from piece to piece (``kv[layer]``), so that equal
layers make equal pieces, and runs that compute nothing. Order is kept; see :mod:`passes.partition`.
"""

from __future__ import annotations

import difflib
import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from compile_backend.errors import ConfigError, FallbackReason
from compile_backend.passes.aten_trace import (
    AtenCall,
    AtenTrace,
    source_line,
    storages_in,
)
from compile_backend.passes.capturability import CaptureObstacle
from compile_backend.passes.input_views import reshaped_storages, varying_views
from compile_backend.passes.partition import Group, may_cross, partition, value_of

__all__ = ["Cut", "SplitPlan", "check_op_names", "plan_split", "split"]

# Calls that open and close a region of changed global state. A region must not be cut in two.
_REGION_OPENERS = ("_enter_autocast", "_vmap_increment_nesting", "_jvp_increment_nesting",
                   "_grad_increment_nesting", "_enter_inference_mode")  # fmt: skip
_REGION_CLOSERS = ("_exit_autocast", "_vmap_decrement_nesting", "_jvp_decrement_nesting",
                   "_grad_decrement_nesting", "_exit_inference_mode")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One break op: the operator, why it is kept out of every piece, and where it is written."""

    node_name: str
    op: str
    why: str
    source: str
    ends_segment: bool  # always, whatever the cudagraph mode
    obstacle: FallbackReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """Where a graph is split. A decision; :func:`split` acts on it."""

    groups: tuple[Group, ...]
    cuts: Mapping[fx.Node, Cut]
    copied: tuple[fx.Node, ...]
    cut_regions: tuple[fx.Node, ...]  # nodes of regions that hold a break op and run as a whole

    @property
    def num_pieces(self) -> int:
        return sum(group.name is not None for group in self.groups)


def split(gm: fx.GraphModule, plan: SplitPlan) -> fx.GraphModule:
    """The outer graph, with a submodule ``piece_<k>`` for each piece.

    Nodes of a region that cannot be cut in two are marked ``in_cut_region`` for the segments.
    """
    for node in plan.cut_regions:
        node.meta["in_cut_region"] = True
    for node, cut in plan.cuts.items():
        node.meta["cut"] = cut.node_name  # nodes may be renamed, their metadata is kept
    return partition(gm, plan.groups, copied_into_users=plan.copied)


def check_op_names(option: str, names: Iterable[str]) -> None:
    """Raise ConfigError for an operator that no library has registered: it would never match."""
    for name in names:
        base = name.split(".")[0]
        if base.startswith("higher_order::") or torch._C._jit_get_schemas_for_operator(base):
            continue
        known = {schema.name for schema in torch._C._jit_get_all_schemas()}
        near = difflib.get_close_matches(base, known, n=3, cutoff=0.6)
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        raise ConfigError(
            f"{option} names {name!r}, which is not a registered operator.{hint} Import the "
            "library that registers it before the first call."
        )


def plan_split(
    gm: fx.GraphModule,
    trace: AtenTrace,
    obstacles: Mapping[fx.Node, CaptureObstacle],
    *,
    splitting_ops: Collection[str] = (),
    wrapped_numbers: Collection[fx.Node] = (),
) -> SplitPlan:
    """Decide the pieces of a Dynamo graph.

    ``obstacles`` are the nodes that cannot be captured. ``wrapped_numbers`` are the placeholders
    that hold a Python float as a 0-d tensor: reading one is copied into each graph that does.
    """
    cuts = _find_cuts(gm, trace, obstacles, splitting_ops)
    copied = tuple(
        node
        for node in gm.graph.nodes
        if node.op == "call_method" and node.target == "item" and node.args[0] in wrapped_numbers
    )
    planner = _Planner(gm, trace, set(cuts), set(copied))
    return SplitPlan(
        groups=planner.groups(), cuts=cuts, copied=copied, cut_regions=tuple(planner.cut_regions)
    )


def _find_cuts(
    gm: fx.GraphModule,
    trace: AtenTrace,
    obstacles: Mapping[fx.Node, CaptureObstacle],
    splitting_ops: Collection[str],
) -> dict[fx.Node, Cut]:
    cuts: dict[fx.Node, Cut] = {}
    for node in gm.graph.nodes:
        if node.op not in ("call_function", "call_method", "call_module"):
            continue
        source = source_line(node)
        if node in obstacles:
            obstacle = obstacles[node]
            cuts[node] = Cut(
                node_name=node.name,
                op=obstacle.op,
                why=obstacle.reason.value,
                source=source,
                ends_segment=True,
                obstacle=obstacle.reason,
            )
        elif named := next(
            (op for op in splitting_ops if _is_named(op, node, trace.ops_of(node))), None
        ):
            cuts[node] = Cut(
                node_name=node.name,
                op=named,
                why="named in splitting_ops",
                source=source,
                ends_segment=False,
            )
        elif mutating := trace.mutating_custom_ops(node):
            cuts[node] = Cut(
                node_name=node.name,
                op=mutating[0],
                why="a custom operator that mutates its arguments",
                source=source,
                ends_segment=False,
            )
    return cuts


def _is_named(op: str, node: fx.Node, traced: Collection[str]) -> bool:
    """Whether ``namespace::name[.overload]`` is what a node calls, traced or as written.

    Composite operators vanish from the trace, so a node is also known by its function's name.
    """
    namespace, _, rest = op.partition("::")
    name, _, overload = rest.partition(".")
    for seen in traced:
        seen_namespace, seen_name, seen_overload = (*seen.split("."), "", "")[:3]
        if (seen_namespace, seen_name) == (namespace, name) and overload in ("", seen_overload):
            return True
    if namespace != "aten" or overload:
        return False
    written = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return written == name and node.op != "call_module"


class _Planner:
    """Assigns nodes to runs; loosens nodes until no piece depends on aliasing across a cut."""

    def __init__(
        self, gm: fx.GraphModule, trace: AtenTrace, breaks: set[fx.Node], copied: set[fx.Node]
    ) -> None:
        self._trace = trace
        self._breaks = breaks
        skip = ("placeholder", "output", "get_attr")
        self._nodes = [n for n in gm.graph.nodes if n.op not in skip and n not in copied]
        self._copied = copied
        self._writers = trace.writers
        self._aliases = _aliases_by_storage(trace)
        self._loose: set[fx.Node] = set()
        self._hoisted: list[fx.Node] = []
        self.cut_regions: list[fx.Node] = []

    def groups(self) -> tuple[Group, ...]:
        self._loosen_unpacking()
        self._loosen_cut_regions()
        while self._loosen_aliases() or self._loosen_trees():
            pass
        self._loosen_varying_views()
        self._hoist_input_views()
        groups: list[Group] = []
        if self._hoisted:
            groups.append(Group(None, tuple(self._hoisted)))
        num_pieces = 0
        for is_piece, run in self._runs():
            if is_piece and not self._computes(run):
                is_piece = False
            groups.append(Group(f"piece_{num_pieces}" if is_piece else None, tuple(run)))
            num_pieces += is_piece
        return tuple(groups)

    # -- runs ----------------------------------------------------------------------------------

    def _runs(self) -> list[tuple[bool, list[fx.Node]]]:
        """Maximal runs of nodes, as (may be a piece, nodes), in program order."""
        runs: list[tuple[bool, list[fx.Node]]] = []
        run_of: dict[fx.Node, list[fx.Node]] = {}
        hoisted = set(self._hoisted)
        for node in self._nodes:
            if node in hoisted:
                continue
            inside = node not in self._breaks and node not in self._loose
            producer = _unpacked(node)
            if inside and producer in run_of and producer not in self._loose:
                run = run_of[producer]  # an unpacking node stays with its producer
                run.append(node)
            elif runs and runs[-1][0] == inside:
                run = runs[-1][1]
                run.append(node)
            else:
                run = [node]
                runs.append((inside, run))
            if inside:
                run_of[node] = run
        return runs

    def _run_ids(self) -> dict[fx.Node, int]:
        return {node: k for k, (_, run) in enumerate(self._runs()) for node in run}

    def _computes(self, run: Sequence[fx.Node]) -> bool:
        """Whether a run is worth compiling: it holds more than views and size arithmetic."""
        return any(self._computes_node(node) for node in run)

    def _computes_node(self, node: fx.Node) -> bool:
        return not all(_is_view(call) for call in self._trace.calls_of(node))

    # -- loosening -----------------------------------------------------------------------------

    def _loosen_unpacking(self) -> None:
        for node in self._nodes:
            producer = _unpacked(node)
            if producer is not None and (producer in self._breaks or producer in self._loose):
                self._loose.add(node)

    def _loosen_cut_regions(self) -> None:
        """A region of changed global state that holds a break op runs as written as a whole."""
        open_regions: list[list[fx.Node]] = []
        for node in self._nodes:
            for region in open_regions:
                region.append(node)
            name = getattr(node.target, "__name__", str(node.target))
            if name in _REGION_OPENERS:
                open_regions.append([node])
            elif name in _REGION_CLOSERS and open_regions:
                region = open_regions.pop()
                if any(member in self._breaks for member in region):
                    self._loose.update(m for m in region if m not in self._breaks)
                    self.cut_regions += region

    def _loosen_aliases(self) -> bool:
        """Views and in-place writes of one storage run outside the pieces unless all in one."""
        run_ids = self._run_ids()
        changed = False
        for storage, writers in self._writers.items():
            touching = [n for n in (*writers, *self._aliases[storage]) if n in run_ids]
            if len({run_ids[node] for node in touching}) <= 1:
                continue
            fresh = {n for n in touching if n not in self._breaks} - self._loose
            self._loose |= fresh
            changed = changed or bool(fresh)
        return changed

    def _loosen_trees(self) -> bool:
        """A tuple or Size cannot cross the edge of a piece: what makes it stays outside, and so
        does what reads one that was made outside."""
        run_ids = self._run_ids()
        fresh: set[fx.Node] = set()
        for node in self._nodes:
            if node in self._loose or node in self._breaks:
                continue
            makes_one = not may_cross(value_of(node)) and any(
                run_ids.get(user, -1) != run_ids[node] for user in node.users
            )
            reads_one = any(
                argument in self._loose | self._breaks and not may_cross(value_of(argument))
                for argument in node.all_input_nodes
            )
            if makes_one or reads_one:
                fresh.add(node)
        self._loose |= fresh
        return bool(fresh)

    def _loosen_varying_views(self) -> None:
        piece_of = {n: k for n, k in self._run_ids().items() if n not in self._loose | self._breaks}
        self._loose |= varying_views(self._trace, piece_of)

    def _hoist_input_views(self) -> None:
        """Loose views of inputs move to the front, so that they cut no run in two.

        A view reads no values, so no write can come between; writers stay where they are, and so
        do views of what is reshaped in place.
        """
        reshaped = reshaped_storages(self._trace)
        hoisted: set[fx.Node] = set()
        for node in self._nodes:
            if node not in self._loose or node in self._breaks or self._computes_node(node):
                continue
            if not isinstance(value_of(node), Tensor) or self._trace.storages[node] & reshaped:
                continue
            if all(
                n.op in ("placeholder", "get_attr") or n in hoisted for n in node.all_input_nodes
            ):
                hoisted.add(node)
                self._hoisted.append(node)


def _unpacked(node: fx.Node) -> fx.Node | None:
    """The producer whose tuple, list or Size a node takes apart, else None."""
    if node.target is operator.getitem and isinstance(producer := node.args[0], fx.Node):
        return None if isinstance(value_of(producer), Tensor) else producer
    return None


def _is_view(call: AtenCall) -> bool:
    """Whether a call only looks at its arguments' memory in another shape."""
    if call.writes or call.opaque or call.subgraphs:
        return False
    return storages_in(call.result) <= storages_in((call.args, dict(call.kwargs)))


def _aliases_by_storage(trace: AtenTrace) -> Mapping[int, list[fx.Node]]:
    """For each storage the nodes that made another tensor of it, its first maker left out."""
    aliases: dict[int, list[fx.Node]] = defaultdict(list)
    made: set[int] = set()
    for node, storages in trace.storages.items():
        for storage in storages:
            if storage in made:
                aliases[storage].append(node)
            made.add(storage)
    return aliases
