"""A callable of one batch, traced by Dynamo and compiled, apart from Dynamo at run time.

The runners enter Dynamo while they warm up only. What they keep of it is a :class:`TracedGraph`:
where each input of the graph comes from (a slot, a size, a weight), the compiled pieces, and how
the outputs make up what the callable returns. Which graph serves a kind of batch is asked of
Dynamo's own guards, without running anything.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from compile_backend import compat
from compile_backend.compiled_graph import (
    CompiledGraph,
    compile_graph,
    graph_name,
    never_captured,
)
from compile_backend.config import GraphbufConfig
from compile_backend.engines import Engine
from compile_backend.errors import GraphbufError, PassError
from compile_backend.graph_files import write_graph
from compile_backend.output_plan import BoundOutputs
from compile_backend.passes.axes import Refusal, symbol_of
from compile_backend.passes.classify import (
    Declaration,
    GraphInput,
    InputKind,
    classify_inputs,
    read_field,
    slot_axes,
)
from compile_backend.passes.input_memory import mutated_names
from compile_backend.runners.host_only import HostOnly, read_of_forbidden_field

__all__ = ["TracedCallable", "TracedGraph"]

MAX_TRACES = 4  # of one kind of batch, until Dynamo knows which numbers vary
MAX_SIZES = 4096  # live sizes of one graph that are remembered
_numbers = itertools.count()


@dataclass(slots=True, kw_only=True, eq=False)
class TracedGraph:
    """One graph of a traced callable. Settled, but for ``structure`` which its first use sets."""

    name: str
    compiled: CompiledGraph
    config: GraphbufConfig
    weights: tuple[_Weight, ...]
    slots: Mapping[int, str]  # index of an input -> the slot that it is read from
    axis_of: Mapping[Any, str]  # size symbol -> "bs" or "tokens"
    sizes: Mapping[int, str]  # index of a number input -> the axis whose size it is
    refusal: Refusal | None  # why it is never captured
    structure: _Structure | None = None
    # Inputs that are tensors, slots and weights, in the order of the graph's arguments
    tensor_positions: tuple[int, ...] = field(init=False)
    _tied: tuple[_Weight, ...] = field(init=False)
    _readers: tuple[tuple[Any, Any], ...] = field(init=False)  # (None, slot) or (container, key)
    _bound: dict[tuple[int, ...], BoundOutputs] = field(default_factory=dict)
    _guards: dict[tuple[int, ...], str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        readers: dict[int, tuple[Any, Any]] = {i: (None, name) for i, name in self.slots.items()}
        readers.update({weight.index: weight.places[0] for weight in self.weights})
        self.tensor_positions = tuple(sorted(readers))
        self._tied = tuple(weight for weight in self.weights if len(weight.places) > 1)
        self._readers = tuple(readers[position] for position in self.tensor_positions)

    @property
    def returns_inputs(self) -> bool:
        """Whether a result may lie in the memory of an input."""
        assert self.structure is not None
        return self.structure.takes_inputs or self.compiled.outputs.returns_inputs

    @property
    def unpadded(self) -> Refusal | None:
        """Why padded rows are not shown to stay away from live ones, or None."""
        return self.compiled.padding.refusal

    @property
    def min_rows(self) -> Mapping[str, int]:
        """Fewest live rows per axis for which the padding is proven."""
        named = {axis.name: axis.declared_as for axis in self.compiled.padding.axes.axes}
        return {
            declared: least
            for name, least in self.compiled.padding.min_rows.items()
            for declared in named.get(name, ())
        }

    @property
    def only_read(self) -> frozenset[str]:
        """The slots that it reads and does not write."""
        mutated = mutated_names(self.compiled.trace)
        inputs = self.compiled.inputs
        return frozenset(
            slot for index, slot in self.slots.items() if inputs[index].name not in mutated
        )

    def reads_axis(self, axis: str) -> bool:
        """Whether an input has this axis, or its size is an input."""
        return axis in self.axis_of.values() or axis in self.sizes.values()

    def torn_weight(self) -> str | None:
        """A weight that several modules shared when it was traced, and share no more."""
        return next((weight.source for weight in self._tied if weight.is_torn()), None)

    def template(self, sizes: Mapping[str, int]) -> tuple[Any, ...]:
        """The graph's arguments with the numbers of these sizes filled in, and no tensors."""
        return tuple(
            sizes[self.sizes[i.index]] if i.index in self.sizes else None
            for i in self.compiled.inputs
        )

    def tensors(self, views: Mapping[str, Tensor]) -> list[Tensor]:
        """The tensor inputs in order: slot views as given, weights as they are now."""
        return [
            views[key] if container is None else container[key] for container, key in self._readers
        ]

    def written_tensors(self, views: Mapping[str, Tensor]) -> list[Tensor]:
        """The tensor inputs that the graph writes to, slots and weights."""
        mutated = mutated_names(self.compiled.trace)
        pairs = zip(self.tensor_positions, self.tensors(views), strict=True)
        return [t for position, t in pairs if self.compiled.inputs[position].name in mutated]

    def failing_guard(self, sizes: Mapping[str, int]) -> str | None:
        """The first shape guard, the compiler's included, that does not hold at these sizes."""
        key = tuple(sizes.values())
        if key not in self._guards:
            if len(self._guards) >= MAX_SIZES:
                self._guards.clear()
            shape_env = self.compiled.trace.shape_env
            self._guards[key] = (
                None
                if shape_env is None
                else compat.shape_guards_failing_at(shape_env, self._symbols(sizes))
            )
        return self._guards[key]

    def finish(
        self,
        results: Sequence[Any],
        args: Callable[[], Sequence[Any]],
        raw: Mapping[str, int],
        *,
        copy: bool,
    ) -> Any:
        """What the callable returns, trimmed to the live sizes; with ``copy`` the caller's to keep.

        ``args`` gives the graph's arguments with inputs at their live sizes; only asked where an
        output is an input.
        """
        key = tuple(raw.values())
        bound = self._bound.get(key)
        if bound is None:
            if len(self._bound) >= MAX_SIZES:
                self._bound.clear()
            bound = self._bound[key] = self.compiled.outputs.bind(self._symbols(raw))
        needs_args = bound.returns_inputs
        flat = bound.finish(results, args() if needs_args else (), copy=copy)
        assert self.structure is not None
        return self.structure.rebuild(flat, args() if self.structure.takes_inputs else ())

    def _symbols(self, sizes: Mapping[str, int]) -> dict[Any, int]:
        return {symbol: sizes[axis] for symbol, axis in self.axis_of.items()}


class TracedCallable:
    """Traces ``fn(batch)`` through Dynamo, one graph for each kind of batch that needs its own.

    ``roots`` are the modules whose parameters ``fn`` reads. ``declaration_of`` finds the slots of a
    batch type. Nothing is run: neither by :meth:`trace` nor by :meth:`find`.
    """

    def __init__(
        self,
        fn: Callable[[Any], Any],
        *,
        name: str,
        roots: Iterable[torch.nn.Module],
        config: GraphbufConfig,
        engine: Engine,
        declaration_of: Callable[[type], Declaration | None],
    ) -> None:
        self.name = name
        self.graphs: list[TracedGraph] = []
        self._fn = fn
        self._roots = tuple(roots)
        self._config = config
        self._engine = engine
        self._declaration_of = declaration_of
        self._ran: tuple[TracedGraph, list[Tensor], Sequence[Any]] | None = None
        self._error: GraphbufError | None = None
        self._call = torch.compile(_own_code(name), backend=self._backend, fullgraph=True)

    def trace(self, batches: Sequence[Any]) -> None:
        """Compile what batches of this kind need, until there is nothing left to compile.

        ``batches`` are of one kind and differ in every size that varies; dimensions that follow an
        axis are marked dynamic here. A callable that branches on a size gets several graphs; which
        of them serves a batch is asked of :meth:`find`. Raises PassError where the callable
        cannot be traced as one graph, changes Python state, or needs a graph per size.
        """
        for batch in batches:
            self._mark_dynamic(batch)
        for _ in range(MAX_TRACES):
            known = len(self.graphs)
            for batch in batches:
                self._enter(batch)
            if len(self.graphs) == known:
                return
        raise PassError(
            f"{self.name} is traced anew for each size of the batch; find the number that it "
            f"depends on with TORCH_LOGS=recompiles, and pass it as a tensor"
        )

    def find(self, batch: Any) -> TracedGraph | str:
        """The graph whose guards hold for this batch, or why there is none. Never compiles."""
        with torch.compiler.set_stance("fail_on_recompile"):
            try:
                return self._enter(batch)
            except RuntimeError as error:
                if compat.is_recompile_error(error):
                    return compat.recompile_reason(error)
                raise

    # -- inside ----------------------------------------------------------------------------------

    def _enter(self, batch: Any) -> TracedGraph:
        """Go through Dynamo; the graph that its guards choose notes itself in ``_ran``."""
        self._ran, self._error = None, None
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            compat.tracing_by_kind(),
        ):
            try:
                result = self._call(self._fn, batch)
            except Exception as error:
                if isinstance(error, GraphbufError) and not isinstance(error, PassError):
                    raise
                if self._error is not None:
                    raise self._error from error
                if compat.is_recompile_error(error):
                    raise
                if named := read_of_forbidden_field(error):
                    raise named from error
                hidden = ", ".join(k for k, v in vars(batch).items() if isinstance(v, HostOnly))
                advice = f"; batch fields without a slot cannot be read ({hidden})"
                raise PassError(
                    f"{self.name} cannot be traced as one graph: {compat.describe(error)}"
                    f"{advice if hidden else ''}"
                ) from error
        if self._ran is None:
            raise PassError(
                f"{self.name} ran without its graph: torch.compile is switched off "
                f"(TORCHDYNAMO_DISABLE, or a stance of torch.compiler.set_stance), or the model "
                f"uses no operator"
            )
        graph, outputs, args = self._ran
        self._ran = None
        if graph.structure is None:
            graph.structure = _structure_of(self.name, result, outputs, args)
        return graph

    def _mark_dynamic(self, batch: Any) -> None:
        declaration = self._declaration_of(type(batch))
        assert declaration is not None
        for name, slot in declaration.slots.items():
            value = read_field(batch, name)
            if isinstance(value, Tensor):
                for dim, axis in enumerate(slot_axes(slot, value.dim())):
                    if axis is not None:
                        torch._dynamo.mark_dynamic(value, dim)

    def _backend(self, gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        try:
            graph = self._compile(gm, examples)
        except GraphbufError as error:
            self._error = error
            raise
        (output,) = gm.graph.find_nodes(op="output")
        num_outputs = len(output.args[0])

        def note(*args: Any) -> list[Tensor]:
            outputs = [torch.empty(0) for _ in range(num_outputs)]
            self._ran = (graph, outputs, args)
            return outputs

        self.graphs.append(graph)
        return note

    def _compile(self, gm: fx.GraphModule, examples: Sequence[Any]) -> TracedGraph:
        name = f"{self.name}#{len(self.graphs)}"
        if changed := compat.changed_objects():
            raise PassError(
                f"{self.name} changes {', '.join(changed)} while it runs; a replayed graph would "
                f"not, so return the value or write it into a tensor in place"
            )
        scope = compat.frame_locals()
        sources = [node.meta["grapharg"].source for node in gm.graph.find_nodes(op="placeholder")]
        inputs = classify_inputs(
            gm, examples=examples, scope=scope, declaration_of=self._declaration_of
        )
        weights = _bind_weights(inputs, examples, sources, scope, self._roots)
        compiled = compile_graph(gm, inputs, config=self._config, engine=self._engine)
        if self._config.debug_dump_path is not None:
            cuts = list(compiled.plan.cuts.values())
            stages = compiled.pipeline.stages
            write_graph(self._config.debug_dump_path, name, stages, compiled.pieces, cuts)
        axis_of = _axes_of(inputs)
        return TracedGraph(
            name=name,
            compiled=compiled,
            config=self._config,
            weights=weights,
            slots={i.index: str(i.field) for i in inputs if i.kind is InputKind.BATCH_FIELD},
            axis_of=axis_of,
            sizes=_size_inputs(graph_name(gm), inputs, axis_of),
            refusal=never_captured(self._config, self._engine, inputs, compiled.obstacles),
        )


def _own_code(name: str) -> Callable[..., Any]:
    """A function with a code object of its own: Dynamo keeps graphs, and limits them, per code."""

    def call(fn: Callable[[Any], Any], batch: Any) -> Any:
        return fn(batch)

    code = call.__code__.replace(co_name=f"{name}_{next(_numbers)}")
    return types.FunctionType(code, call.__globals__, code.co_name)


# -- inputs ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Weight:
    """A tensor that is neither a slot nor a result: read anew at each step, where it is held.

    ``places`` are all that held it when it was traced, as (mapping or sequence, key). Several hold
    a tied weight, which the graph has as one input.
    """

    index: int
    source: str
    places: tuple[tuple[Any, Any], ...]

    def now(self) -> Tensor:
        container, key = self.places[0]
        tensor: Tensor = container[key]
        return tensor

    def is_torn(self) -> bool:
        """Whether the places of a tied weight hold different tensors now."""
        first = self.now()
        return any(container[key] is not first for container, key in self.places[1:])


def _bind_weights(
    inputs: Sequence[GraphInput],
    examples: Sequence[Any],
    sources: Sequence[Any],
    scope: Mapping[str, Any],
    roots: Sequence[torch.nn.Module],
) -> tuple[_Weight, ...]:
    holders: dict[int, list[tuple[Any, Any]]] = {}
    for module in dict.fromkeys(module for root in roots for module in root.modules()):
        for fields in (module._parameters, module._buffers, vars(module)):
            for key, value in fields.items():
                if isinstance(value, Tensor):
                    holders.setdefault(id(value), []).append((fields, key))
    weights = []
    for graph_input in inputs:
        index = graph_input.index
        if graph_input.kind not in (InputKind.WEIGHT, InputKind.TENSOR):
            continue
        if graph_input.is_wrapped_number:
            continue
        places = list(holders.get(id(examples[index]), []))
        place = compat.container_of(sources[index], scope)
        if place is not None and _holds(place, examples[index]):
            known = any(place[0] is c and place[1] == key for c, key in places)
            places += [] if known else [place]
        if not places:
            raise PassError(
                f"the model reads the tensor {graph_input.source}, and nothing says where a "
                f"replacement of it would be found; make it a parameter, a buffer or an attribute "
                f"of a module of the model"
            )
        weights.append(_Weight(index, graph_input.source, tuple(places)))
    return tuple(weights)


def _holds(place: tuple[Any, Any], tensor: Any) -> bool:
    container, key = place
    try:
        return container[key] is tensor
    except (KeyError, IndexError, TypeError):
        return False


def _axes_of(inputs: Sequence[GraphInput]) -> dict[Any, str]:
    """Which axis each size symbol is, read off the fields whose slots declare it."""
    axes: dict[Any, str] = {}
    for graph_input in inputs:
        if graph_input.kind is InputKind.BATCH_FIELD:
            assert graph_input.declaration is not None
            slot = graph_input.declaration.slots[str(graph_input.field)]
            shape = graph_input.value.shape
            for size, axis in zip(shape, slot_axes(slot, len(shape)), strict=True):
                symbol = symbol_of(size)
                if axis is not None and symbol is not None:
                    axes[symbol] = axis
    return axes


def _size_inputs(
    name: str, inputs: Sequence[GraphInput], axis_of: dict[Any, str]
) -> dict[int, str]:
    """Which axis each number input is the size of. Raises PassError for any other number."""
    sizes: dict[int, str] = {}
    for graph_input in inputs:
        if graph_input.kind is InputKind.SIZE_FIELD:
            assert graph_input.declaration is not None
            axis = graph_input.declaration.size_fields[str(graph_input.field)]
            symbol = symbol_of(graph_input.value)
            if symbol is not None:
                axis_of[symbol] = axis
            sizes[graph_input.index] = axis
        elif graph_input.kind in (InputKind.SIZE, InputKind.NUMBER):
            symbol = symbol_of(graph_input.value)
            if symbol not in axis_of:
                raise PassError(
                    f"graph {name} depends on the number {graph_input.source}, which is no size of "
                    f"the batch; pass it as a tensor that has a slot"
                )
            sizes[graph_input.index] = axis_of[symbol]
    return sizes


# -- outputs ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Structure:
    """How the graph's flat outputs make up the callable's result."""

    spec: Any
    leaves: tuple[tuple[str, Any], ...]  # ("output", position), ("input", index), ("constant", v)
    takes_inputs: bool
    single: int | None  # the result is this output, and nothing else

    def rebuild(self, flat: Sequence[Any], args: Sequence[Any]) -> Any:
        if self.single is not None:
            return flat[self.single]
        places = {"output": flat, "input": args}
        leaves = [
            value if kind == "constant" else places[kind][value] for kind, value in self.leaves
        ]
        return pytree.tree_unflatten(leaves, self.spec)


def _structure_of(
    name: str, result: Any, outputs: Sequence[Tensor], args: Sequence[Any]
) -> _Structure:
    flat, spec = pytree.tree_flatten(result)
    made = {id(tensor): position for position, tensor in enumerate(outputs)}
    given = {id(value): index for index, value in enumerate(args) if isinstance(value, Tensor)}
    leaves: list[tuple[str, Any]] = []
    for leaf in flat:
        if id(leaf) in made:
            leaves.append(("output", made[id(leaf)]))
        elif id(leaf) in given:
            leaves.append(("input", given[id(leaf)]))
        elif leaf is None or isinstance(leaf, (str, bool)):
            leaves.append(("constant", leaf))
        else:
            raise PassError(
                f"{name} returns a {type(leaf).__name__} ({leaf!r:.80}); a graph returns tensors, "
                f"in tuples, lists or dicts"
            )
    single = leaves[0][1] if len(leaves) == 1 and result is flat[0] else None
    return _Structure(
        spec=spec,
        leaves=tuple(leaves),
        takes_inputs=any(kind == "input" for kind, _ in leaves),
        single=single if leaves and leaves[0][0] == "output" else None,
    )
