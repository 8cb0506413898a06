"""One Dynamo graph, classified, split, compiled and proven: what every way to run it starts from.

The string backend serves a graph call by call (:mod:`served_graph`); the runners capture it for
their buckets. Both begin with :func:`compile_graph`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from compile_backend import compat
from compile_backend.config import GraphbufConfig
from compile_backend.engines import Engine, NoEngine, engine_by_name
from compile_backend.errors import FallbackReason
from compile_backend.output_plan import OutputPlan, plan_outputs
from compile_backend.padding_plan import PaddingPlan, plan_padding
from compile_backend.passes.aten_trace import AtenTrace, trace_aten
from compile_backend.passes.axes import Refusal, symbol_of
from compile_backend.passes.capturability import CaptureObstacle, capturability
from compile_backend.passes.classify import GraphInput
from compile_backend.passes.fold_numbers import fold_numbers
from compile_backend.passes.input_memory import annotate_storages
from compile_backend.passes.pipeline import Pipeline
from compile_backend.passes.split import SplitPlan, plan_split, split
from compile_backend.pieces import compile_pieces

__all__ = [
    "CompiledGraph",
    "compile_graph",
    "device_of",
    "graph_name",
    "never_captured",
    "pick_engine",
    "segment_cuts",
]

# An obstacle of these kinds makes later values or shapes depend on data, so no part of the graph
# can be recorded; around the others, the graph is cut.
_WHOLE_GRAPH_OBSTACLES = (FallbackReason.HOST_READ, FallbackReason.DATA_DEPENDENT_SHAPE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledGraph:
    """A traced graph whose pieces are compiled. All of it is settled."""

    inputs: tuple[GraphInput, ...]
    written: fx.GraphModule  # the graph as it was traced, one operator after the other
    outer: fx.GraphModule  # compiled pieces and break ops; called with the graph's own arguments
    trace: AtenTrace
    obstacles: Mapping[fx.Node, CaptureObstacle]
    plan: SplitPlan
    padding: PaddingPlan
    outputs: OutputPlan
    pieces: tuple[fx.GraphModule, ...]  # as they were given to the compiler
    num_compiled: int
    compile_seconds: float
    pipeline: Pipeline


def compile_graph(
    gm: fx.GraphModule, inputs: Sequence[GraphInput], *, config: GraphbufConfig, engine: Engine
) -> CompiledGraph:
    """Trace what a classified graph does, split it, prove its padding and compile the pieces.

    Raises PassError where a pass or the compiler fails.
    """
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
        gm, trace, obstacles, splitting_ops=config.splitting_ops, wrapped_numbers=wrapped
    )
    padding = plan_padding(inputs, trace, plan, config, engine)
    outputs = plan_outputs(trace, {i.node: i.index for i in inputs})
    annotate_storages(trace)
    outer = pipeline.run("split", lambda g: split(g, plan), gm, show_as="after split")
    started = time.perf_counter()
    pieces, num_compiled = compile_pieces(outer, plan, config)
    return CompiledGraph(
        inputs=tuple(inputs),
        written=gm,
        outer=outer,
        trace=trace,
        obstacles=obstacles,
        plan=plan,
        padding=padding,
        outputs=outputs,
        pieces=pieces,
        num_compiled=num_compiled,
        compile_seconds=time.perf_counter() - started,
        pipeline=pipeline,
    )


def segment_cuts(plan: SplitPlan, config: GraphbufConfig) -> tuple[frozenset[str], ...]:
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


def pick_engine(config: GraphbufConfig, device: torch.device) -> Engine:
    """The engine that the options name, or the one for the device."""
    if not config.captures:
        return engine_by_name("none")
    if config.engine != "auto":
        return engine_by_name(config.engine)
    return engine_by_name({"cpu": "host", "cuda": "cuda"}.get(device.type, "none"))


def device_of(inputs: Sequence[GraphInput]) -> torch.device:
    """The accelerator that an input lies on, or the CPU."""
    devices = [
        i.value.device for i in inputs if isinstance(i.value, Tensor) and not i.is_wrapped_number
    ]
    accelerators = [device for device in devices if device.type != "cpu"]
    return (accelerators or devices or [torch.device("cpu")])[0]


def never_captured(
    config: GraphbufConfig,
    engine: Engine,
    inputs: Sequence[GraphInput],
    obstacles: Mapping[fx.Node, CaptureObstacle],
) -> Refusal | None:
    """Why nothing of this graph is captured, whatever its sizes."""
    if not config.captures:
        return Refusal(FallbackReason.DISABLED, "capturing is switched off by the options")
    if engine.name == NoEngine.name:
        return Refusal(
            FallbackReason.NO_ENGINE,
            f"no engine captures on {device_of(inputs)}; the pieces run uncaptured",
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


def graph_name(gm: fx.GraphModule) -> str:
    """What Dynamo calls the frame being compiled, or the graph's own name."""
    frame = compat.frame_name()
    return frame or gm.__class__.__name__
