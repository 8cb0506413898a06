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
from compile_backend.compiled_graph import (
    compile_graph,
    device_of,
    graph_name,
    never_captured,
    pick_engine,
    segment_cuts,
)
from compile_backend.compilers import compile_whole_graph
from compile_backend.config import GraphbufConfig
from compile_backend.declared import declaration_of
from compile_backend.dynamic_batch import trace_with_dynamic_batch
from compile_backend.engines import Engine
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
from compile_backend.owners import backend_for
from compile_backend.padding_plan import PaddingPlan
from compile_backend.passes.aten_trace import AtenTrace
from compile_backend.passes.axes import AxisPlan, Refusal, symbol_of
from compile_backend.passes.capturability import CaptureObstacle
from compile_backend.passes.classify import GraphInput, InputKind, classify_inputs
from compile_backend.passes.input_memory import (
    aliased_names,
    distance,
    mutated_names,
    share_storage,
    written_pairs,
)
from compile_backend.passes.lift_inputs import lift_inputs
from compile_backend.passes.pipeline import Pipeline
from compile_backend.passes.split import check_op_names
from compile_backend.registry.buckets import Buckets, default_capture_sizes
from compile_backend.served_graph import GraphFacts, ServedGraph
from compile_backend.slots import GraphSlots

__all__ = ["GraphbufBackend", "graphbuf"]

log = logging.getLogger(__name__)

DEFAULT_LARGEST_SIZE = 256  # of the default capture sizes, where padding is on and none are given


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
                f"graph {graph_name(gm)} could not be compiled: {compat.describe(error)}"
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
        engine = pick_engine(config, device_of(inputs))
        graph = compile_graph(gm, inputs, config=config, engine=engine)
        trace, padding, pipeline = graph.trace, graph.padding, graph.pipeline
        axes = padding.axes
        buckets = _buckets(config, axes)
        slots = lifted = None
        if padding.asked and padding.refusal is None:
            slots = GraphSlots(
                axes.inputs,
                axes.axes,
                largest={a.name: b.largest for a, b in zip(axes.axes, buckets, strict=True)},
                device=device_of(inputs),
            )
            lifted = _lift(pipeline, graph.outer, slots, axes, inputs)
        pairs = written_pairs(inputs, trace)
        facts = GraphFacts(
            name=graph_name(gm),
            inputs=tuple(inputs),
            outer=graph.outer,
            lifted=lifted,
            segment_cuts=segment_cuts(graph.plan, config),
            slots=slots,
            outputs=graph.outputs,
            mutated=frozenset(i.index for i in inputs if i.name in mutated_names(trace)),
            aliased=frozenset(i.index for i in inputs if i.name in aliased_names(trace)),
            written=graph.written,
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
                obstacles=graph.obstacles,
                trace=trace,
            ),
        )
        served = ServedGraph(facts, config, engine)
        built = BuildFacts(
            stages=tuple(pipeline.stages),
            pieces=graph.pieces,
            num_compiled=graph.num_compiled,
            cuts=tuple(graph.plan.cuts.values()),
            graph_break=compat.graph_break(),
            compile_seconds=graph.compile_seconds,
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
        report = TrainingReport(name=graph_name(gm))
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
        always=never_captured(config, engine, inputs, obstacles),
        no_padding=padding.refusal,
        min_rows=padding.min_rows,
        exact_if_unpadded=_no_exact(engine, trace),
        max_exact_captures=config.max_exact_captures,
        max_number_values=config.max_number_values,
        failing_guard=failing_guard,
    )


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
