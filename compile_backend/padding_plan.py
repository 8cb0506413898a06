"""Whether a graph is padded, along which axes, and why not.

Proposes axes (:mod:`passes.axes`) and has them proven (:mod:`passes.padding_safety`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from compile_backend.config import GraphbufConfig
from compile_backend.engines import Engine, NoEngine
from compile_backend.errors import FallbackReason
from compile_backend.passes.aten_trace import AtenTrace
from compile_backend.passes.axes import AxisPlan, Refusal, num_choices, plan_axes
from compile_backend.passes.classify import GraphInput
from compile_backend.passes.input_memory import aliased_names, mutated_names
from compile_backend.passes.padding_safety import prove_padding
from compile_backend.passes.split import SplitPlan

__all__ = ["PaddingPlan", "plan_padding"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingPlan:
    """What is padded: the axes, whether padding is asked for, and what the proof said."""

    axes: AxisPlan
    asked: bool
    refusal: Refusal | None = None
    min_rows: Mapping[str, int] = field(default_factory=dict)


def plan_padding(
    inputs: Sequence[GraphInput],
    trace: AtenTrace,
    plan: SplitPlan,
    config: GraphbufConfig,
    engine: Engine,
) -> PaddingPlan:
    """Propose axes and prove them. Where two cannot be padded together, the first may be alone;
    where several sizes could be the batch size, the first that is proven is."""
    mutated, aliased = mutated_names(trace), aliased_names(trace)
    first: PaddingPlan | None = None
    for choice in range(num_choices(inputs)):
        for max_axes in (2, 1):
            axes = plan_axes(
                inputs, mutated=mutated, aliased=aliased, max_axes=max_axes, choice=choice
            )
            if first is None and not _wants_padding(config, engine, axes):
                return PaddingPlan(axes=axes, asked=False)
            padding = _proven(axes, inputs, trace, plan, config)
            if axes.axes and padding.refusal is None:
                return padding
            first = first or padding
    assert first is not None
    return first


def _wants_padding(config: GraphbufConfig, engine: Engine, axes: AxisPlan) -> bool:
    """Pad where sizes are declared or given, and on a device. On the host a padded row costs real
    compute, so plain arguments are captured at their exact sizes there."""
    if engine.name == NoEngine.name or (not axes.axes and axes.refusal is None):
        return False
    asked = axes.is_declared or config.cudagraph_capture_sizes is not None
    return asked or not engine.late_binding


def _proven(
    axes: AxisPlan,
    inputs: Sequence[GraphInput],
    trace: AtenTrace,
    plan: SplitPlan,
    config: GraphbufConfig,
) -> PaddingPlan:
    """The axes with the proof's verdict on them."""
    if axes.refusal is not None:
        return PaddingPlan(axes=axes, asked=True, refusal=axes.refusal)
    if trace.mutated and not axes.is_declared:
        written = ", ".join(sorted(i.source for i in inputs if i.node in trace.mutated))
        refusal = Refusal(
            FallbackReason.MUTATED_INPUT,
            f"the graph writes {written}, and padded rows would be written too; call .eval() if "
            "that is a training statistic, or declare the batch (declare_batch) with slots whose "
            "padded rows write to a scratch row",
        )
        return PaddingPlan(axes=axes, asked=True, refusal=refusal)
    verdict = prove_padding(
        trace,
        {padded.input.name: padded.dims for padded in axes.inputs},
        axes.symbols_by_axis,
        trusted=[n for n in plan.cuts if trace.custom_ops(n)] if axes.is_declared else [],
        rowwise_ops=config.rowwise_ops,
    )
    if verdict.safe:
        return PaddingPlan(axes=axes, asked=True, min_rows=verdict.min_rows)
    assert verdict.reason is not None
    return PaddingPlan(axes=axes, asked=True, refusal=Refusal(verdict.reason, verdict.message))
