"""``torch.compile(model, backend="graphbuf")``: one Dynamo graph in, one callable out.

Reads like a table of contents: classify the inputs, trace what the graph does, split it, compile
the pieces, prove the padding, lift the padded inputs into slots, hand the rest to
:class:`ServedGraph`, which runs it.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from compile_backend import compat
from compile_backend.call_plan import Decider
from compile_backend.compilers import compile_whole_graph
from compile_backend.config import GraphbufConfig
from compile_backend.declared import declaration_of
from compile_backend.dynamic_batch import trace_with_dynamic_batch
from compile_backend.engines import Engine, NoEngine, engine_by_name
from compile_backend.errors import (
    ConfigError,
    FallbackError,
    FallbackReason,
    GraphbufError,
    PassError,
)
from compile_backend.inspect.dump import dump_graph
from compile_backend.inspect.report import (
    BuildFacts,
    GraphReport,
    TrainingReport,
    recompile_warning,
)
from compile_backend.output_plan import plan_outputs
from compile_backend.owners import backend_for
from compile_backend.padding_plan import PaddingPlan, plan_padding
from compile_backend.passes.aten_trace import AtenTrace, trace_aten
from compile_backend.passes.axes import AxisPlan, Refusal, symbol_of
from compile_backend.passes.capturability import CaptureObstacle, capturability
from compile_backend.passes.classify import GraphInput, InputKind, classify_inputs
from compile_backend.passes.fold_numbers import fold_numbers
from compile_backend.passes.input_memory import (
    aliased_names,
    annotate_storages,
    distance,
    mutated_names,
    share_storage,
    written_pairs,
)
from compile_backend.passes.lift_inputs import lift_inputs
from compile_backend.passes.pipeline import Pipeline
from compile_backend.passes.split import SplitPlan, check_op_names, plan_split, split
from compile_backend.pieces import compile_pieces
from compile_backend.registry.buckets import Buckets, default_capture_sizes
from compile_backend.served_graph import GraphFacts, ServedGraph
from compile_backend.slots import GraphSlots

__all__ = ["GraphbufBackend", "graphbuf"]

log = logging.getLogger(__name__)

DEFAULT_LARGEST_SIZE = 256  # of the default capture sizes, where padding is on and none are given

# An obstacle of these kinds makes later values or shapes depend on data, so no part of the graph
# can be recorded; around the others, the graph is cut.
_WHOLE_GRAPH_OBSTACLES = (FallbackReason.HOST_READ, FallbackReason.DATA_DEPENDENT_SHAPE)


class GraphbufBackend:
    """A ``torch.compile`` backend with one configuration; may serve many graphs.

    Pass an instance as ``backend=`` to keep it in hand, or use the string ``"graphbuf"``.
    """

    def __init__(self, config: GraphbufConfig | Mapping[str, Any] | None = None) -> None:
        """``config`` or its options as a mapping; None takes the environment and the defaults."""
        self.config = config if isinstance(config, GraphbufConfig) else GraphbufConfig.check(config)
        # Held weakly: when Dynamo drops a graph, its slots and recordings go too.
        self._served: list[tuple[weakref.ref[Any], BuildFacts | None]] = []
        self._lock = threading.Lock()

    @property
    def reports(self) -> tuple[GraphReport | TrainingReport, ...]:
        """One report per graph that Dynamo still holds, oldest first. Live: counts go on."""
        reports: list[GraphReport | TrainingReport] = []
        with self._lock:
            self._served = [(ref, built) for ref, built in self._served if ref() is not None]
            known = [(ref(), built) for ref, built in self._served]
        for what, built in known:
            if isinstance(what, TrainingReport):
                reports.append(what)
            elif what is not None and built is not None:
                reports.append(GraphReport(served=what, built=built))
        return tuple(reports)

    def __call__(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
    ) -> Callable[..., Any]:
        """Compile one Dynamo graph.

        Raises ConfigError for an unknown operator name, and for the ``mode`` and ``options`` of
        ``torch.compile`` (the backend has its configuration already), PassError where a pass or
        the compiler fails. Dynamo would take some of torch's own exceptions for a reason to run
        the function eagerly from then on, so none of them leaves here as it is.
        """
        if kwargs:
            given = ", ".join(f"{name}={value!r}" for name, value in kwargs.items())
            raise ConfigError(
                f"a GraphbufBackend has its configuration; torch.compile also gave it {given}. "
                "Pass these to GraphbufConfig.check(), or use the string backend='graphbuf'"
            )
        check_op_names("splitting_ops", self.config.splitting_ops)
        check_op_names("rowwise_ops", self.config.rowwise_ops)
        if _needs_grad(gm, example_inputs):
            return self._ordinary_compile(gm, example_inputs)
        try:
            return self._compile(gm, example_inputs).run
        except GraphbufError:
            raise
        except Exception as error:
            if compat.belongs_to_dynamo(error):
                raise
            raise PassError(
                f"graph {_name_of(gm)} could not be compiled: {compat.describe(error)}"
            ) from error

    def _compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> ServedGraph:
        config = self.config
        started = time.perf_counter()
        inputs = classify_inputs(
            gm,
            examples=example_inputs,
            scope=compat.frame_locals(),
            declaration_of=declaration_of,
        )
        if config.dynamic_batch:
            trace_with_dynamic_batch(inputs, example_inputs)
        engine = _pick_engine(config, inputs)
        pipeline = Pipeline()
        wrapped = [i.node for i in inputs if i.is_wrapped_number]
        gm = pipeline.run(
            "fold_numbers",
            lambda g: fold_numbers(g, wrapped_numbers=wrapped),
            gm,
            show_as="before split",
        )
        trace = trace_aten(gm)
        obstacles = capturability(trace)
        plan = plan_split(
            gm,
            trace,
            obstacles,
            splitting_ops=config.splitting_ops,
            wrapped_numbers=wrapped,
        )
        padding = plan_padding(inputs, trace, plan, config, engine)
        axes = padding.axes
        outputs = plan_outputs(trace, {i.node: i.index for i in inputs})

        annotate_storages(trace)
        outer = pipeline.run("split", lambda g: split(g, plan), gm, show_as="after split")
        compile_started = time.perf_counter()
        pieces, num_compiled = compile_pieces(outer, plan, config)
        compile_seconds = time.perf_counter() - compile_started
        buckets = _buckets(config, axes)
        slots = lifted = None
        if padding.asked and padding.refusal is None:
            slots = GraphSlots(
                axes.inputs,
                axes.axes,
                largest={a.name: b.largest for a, b in zip(axes.axes, buckets, strict=True)},
                device=_device_of(inputs),
            )
            lifted = _lift(pipeline, outer, slots, axes, inputs)
        pairs = written_pairs(inputs, trace)
        facts = GraphFacts(
            name=_name_of(gm),
            inputs=tuple(inputs),
            outer=outer,
            lifted=lifted,
            segment_cuts=_segment_cuts(plan, config),
            slots=slots,
            outputs=outputs,
            mutated=frozenset(i.index for i in inputs if i.name in mutated_names(trace)),
            aliased=frozenset(i.index for i in inputs if i.name in aliased_names(trace)),
            written=gm,
            separate=tuple(
                (a.index, b.index) for a, b in pairs if not share_storage((a, b), trace)
            ),
            overlapping=tuple(
                (a.index, b.index, distance(example_inputs[a.index], example_inputs[b.index]))
                for a, b in pairs
                if share_storage((a, b), trace)
            ),
            decider=_decider(
                config=config,
                engine=engine,
                inputs=inputs,
                padding=padding,
                buckets=buckets,
                obstacles=obstacles,
                trace=trace,
            ),
        )
        served = ServedGraph(facts, config, engine)
        built = BuildFacts(
            stages=tuple(pipeline.stages),
            pieces=pieces,
            num_compiled=num_compiled,
            cuts=tuple(plan.cuts.values()),
            graph_break=compat.graph_break(),
            compile_seconds=compile_seconds,
            total_seconds=time.perf_counter() - started,
        )
        with self._lock:
            self._served.append((weakref.ref(served), built))
        if message := recompile_warning(self.reports):
            log.warning("graphbuf: %s", message)
        if config.debug_dump_path is not None:
            dump_graph(config.debug_dump_path, GraphReport(served=served, built=built))
        return served

    def _ordinary_compile(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """Gradients are needed: what ``torch.compile`` does without us, counted."""
        compiled = compile_whole_graph(
            gm,
            example_inputs,
            compiler=self.config.compiler,
            inductor_options=self.config.inductor_options,
        )
        report = TrainingReport(name=_name_of(gm))
        with self._lock:
            self._served.append((weakref.ref(report), None))
        advice = report.advice
        log.warning("graphbuf: %s", advice)

        def run(*args: Any) -> Any:
            if self.config.strict:
                raise FallbackError(advice, FallbackReason.GRAD_ENABLED)
            report.calls += 1
            return compiled(*args)

        return run


# -- the string backend ----------------------------------------------------------------------------


def graphbuf(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """What ``backend="graphbuf"`` names: one :class:`GraphbufBackend` per ``torch.compile`` call.

    ``options`` are :class:`GraphbufConfig`'s; for ``mode`` see :meth:`GraphbufConfig.for_mode`.
    """
    backend = backend_for(
        compat.owner_of_frame(), lambda: GraphbufBackend(GraphbufConfig.for_mode(mode, options))
    )
    return backend(gm, example_inputs)


# -- the steps -------------------------------------------------------------------------------------


def _needs_grad(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether a call records gradients, at its start or in an ``enable_grad`` block inside."""
    if not any(isinstance(value, Tensor) and value.requires_grad for value in example_inputs):
        return False
    switches = gm.graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled)
    return torch.is_grad_enabled() or any(node.args[0] is True for node in switches)


def _pick_engine(config: GraphbufConfig, inputs: Sequence[GraphInput]) -> Engine:
    if not config.captures:
        return engine_by_name("none")
    if config.engine != "auto":
        return engine_by_name(config.engine)
    return engine_by_name("host" if _device_of(inputs).type == "cpu" else "none")


def _device_of(inputs: Sequence[GraphInput]) -> torch.device:
    devices = [
        i.value.device for i in inputs if isinstance(i.value, Tensor) and not i.is_wrapped_number
    ]
    accelerators = [device for device in devices if device.type != "cpu"]
    return (accelerators or devices or [torch.device("cpu")])[0]


def _buckets(config: GraphbufConfig, axes: AxisPlan) -> list[Buckets]:
    first = config.cudagraph_capture_sizes or default_capture_sizes(DEFAULT_LARGEST_SIZE)
    second = config.second_axis_capture_sizes or first
    return [Buckets(first if number == 0 else second) for number in range(len(axes.axes))]


def _lift(
    pipeline: Pipeline,
    outer: fx.GraphModule,
    slots: GraphSlots,
    axes: AxisPlan,
    inputs: Sequence[GraphInput],
) -> fx.GraphModule:
    names = {axis.name: inputs[axis.size_inputs[0]].name for axis in axes.axes}
    return pipeline.run(
        "lift_inputs",
        lambda g: lift_inputs(g, slots.sources, size_placeholders=names, read_view=slots.view),
        outer,
        show_as="after lift_inputs",
    )


def _segment_cuts(plan: SplitPlan, config: GraphbufConfig) -> tuple[frozenset[str], ...]:
    """Which operators to leave out of the segments: the mode's choice first, then ever more."""
    always = frozenset(cut.node_name for cut in plan.cuts.values() if cut.ends_segment)
    named = always | {c.node_name for c in plan.cuts.values() if c.why == "named in splitting_ops"}
    every = frozenset(cut.node_name for cut in plan.cuts.values())
    levels: list[frozenset[str]] = []
    if config.cudagraph_mode != "PIECEWISE":
        levels.append(always)
    if config.cudagraph_mode != "FULL":
        levels += [named, every] if config.splitting_ops else [every]
    return tuple(dict.fromkeys(levels))


def _decider(
    *,
    config: GraphbufConfig,
    engine: Engine,
    inputs: Sequence[GraphInput],
    padding: PaddingPlan,
    buckets: Sequence[Buckets],
    obstacles: Mapping[fx.Node, CaptureObstacle],
    trace: AtenTrace,
) -> Decider:
    scalars = [i for i in inputs if not isinstance(i.value, Tensor) or i.is_wrapped_number]
    axes = padding.axes.axes
    place = {index: n for n, axis in enumerate(axes) for index in axis.size_inputs}
    shape_env = trace.shape_env

    def failing_guard(sizes: Mapping[Any, int]) -> str | None:
        return None if shape_env is None else compat.shape_guards_failing_at(shape_env, sizes)

    return Decider(
        axes=axes,
        buckets=buckets,
        scalar_symbols=[symbol_of(i.value) for i in scalars],
        axis_of_scalar=[place.get(i.index) for i in scalars],
        is_number=[i.kind is InputKind.NUMBER for i in scalars],
        pads=padding.asked,
        always=_never_captured(config, engine, inputs, obstacles, trace),
        no_padding=padding.refusal,
        min_rows=padding.min_rows,
        exact_if_unpadded=_no_exact(engine, trace),
        max_exact_captures=config.max_exact_captures,
        max_number_values=config.max_number_values,
        failing_guard=failing_guard,
    )


def _never_captured(
    config: GraphbufConfig,
    engine: Engine,
    inputs: Sequence[GraphInput],
    obstacles: Mapping[fx.Node, CaptureObstacle],
    trace: AtenTrace,
) -> Refusal | None:
    if not config.captures:
        return Refusal(FallbackReason.DISABLED, "capturing is switched off by the options")
    if engine.name == NoEngine.name:
        return Refusal(
            FallbackReason.NO_ENGINE,
            f"no engine captures on {_device_of(inputs)}; the pieces run uncaptured",
        )
    for obstacle in obstacles.values():
        if obstacle.reason in _WHOLE_GRAPH_OBSTACLES:
            return Refusal(obstacle.reason, obstacle.message)
    known = {symbol_of(i.value) for i in inputs if not isinstance(i.value, Tensor)}
    for graph_input in inputs:
        if isinstance(graph_input.value, Tensor):
            for size in (*graph_input.value.shape, *graph_input.value.stride()):
                free = size.node.expr.free_symbols if isinstance(size, torch.SymInt) else set()
                if free - known:
                    return Refusal(
                        FallbackReason.LAYOUT,
                        f"input {graph_input.source} has size {size}, which the graph does not "
                        "receive as a number, so calls cannot be told apart by it",
                    )
    return None


def _no_exact(engine: Engine, trace: AtenTrace) -> Refusal | None:
    """Why exact sizes cannot be captured on an engine that bakes addresses."""
    aliased = aliased_names(trace)
    if engine.late_binding or not aliased:
        return None
    return Refusal(
        FallbackReason.ALIASED_OUTPUT,
        f"an output is a view of {', '.join(sorted(aliased))}, which must be the caller's memory; "
        "return a copy to have the graph captured",
    )


def _name_of(gm: fx.GraphModule) -> str:
    frame = compat.frame_name()
    return frame or gm.__class__.__name__
