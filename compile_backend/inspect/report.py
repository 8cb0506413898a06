"""The facts that a traced graph leaves for people: the backend writes, ``explain`` reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from compile_backend import compat
from compile_backend.passes.pipeline import StageReport
from compile_backend.passes.split import Cut
from compile_backend.served_graph import ServedGraph

__all__ = ["BuildFacts", "GraphReport", "TrainingReport", "recompile_warning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildFacts:
    """How one graph was compiled. Settled, and without the graph itself."""

    stages: tuple[StageReport, ...]
    pieces: tuple[fx.GraphModule, ...]  # as they were given to the compiler
    num_compiled: int  # pieces that were compiled; the others run the code of an equal one
    cuts: tuple[Cut, ...]
    graph_break: tuple[str, str] | None  # reason and source line, where one ended this graph
    compile_seconds: float  # in the piece compiler
    total_seconds: float  # in the backend, compiling included


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphReport:
    """One graph compiled for inference. Counts are read live from ``served``."""

    served: ServedGraph
    built: BuildFacts

    @property
    def name(self) -> str:
        return self.served.facts.name


@dataclass(slots=True, kw_only=True, weakref_slot=True)
class TrainingReport:
    """One graph that needs gradients and runs the ordinary compile path."""

    name: str
    calls: int = 0

    @property
    def advice(self) -> str:
        return (
            f"graph {self.name} needs gradients, so it runs the ordinary compile path; call the "
            "model under torch.inference_mode() to replay captured graphs"
        )


def recompile_warning(reports: Sequence[GraphReport | TrainingReport]) -> str | None:
    """What to say once Dynamo will trace a function no more: from then on it runs new kinds of
    calls eagerly, without asking the backend, so they appear in no count."""
    per_function = Counter(report.name.partition("/")[0] for report in reports)
    limit = compat.recompile_limit()
    for function, count in per_function.items():
        if count >= limit:
            return (
                f"{count} graphs of {function.partition('#')[0]} were traced, torch's "
                "recompile_limit: calls that fit none of them run eagerly and are not counted; "
                "find what varies with TORCH_LOGS=recompiles"
            )
    return None
