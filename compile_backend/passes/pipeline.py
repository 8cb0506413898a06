"""The ordered list of rewrites of one graph: names, times and dumps each, and checks the result.

A pass is a plain function from GraphModule to GraphModule. The pipeline lints and recompiles what
it returns, offers it to ``TORCH_LOGS`` and depyf, and names the pass in any error.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import fx

from compile_backend import compat
from compile_backend.errors import GraphbufError, PassError

__all__ = ["Pipeline", "StageReport"]

GraphPass = Callable[[fx.GraphModule], fx.GraphModule]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """What one pass left behind."""

    name: str
    seconds: float
    code: str


@dataclass(slots=True)
class Pipeline:
    """Runs passes over one graph and remembers the graph after each."""

    stages: list[StageReport] = field(default_factory=list)

    def run(
        self, name: str, rewrite: GraphPass, gm: fx.GraphModule, *, show_as: str
    ) -> fx.GraphModule:
        """Apply one pass and record its result as ``show_as``.

        Raises PassError, naming the pass, unless the error is already ours.
        """
        started = time.perf_counter()
        try:
            result = rewrite(gm)
            result.graph.lint()
            result.recompile()
        except GraphbufError:
            raise
        except Exception as error:
            raise PassError(
                f"pass {name!r} failed on graph {gm.__class__.__name__}: {compat.describe(error)}"
            ) from error
        self._record(show_as, result, seconds=time.perf_counter() - started)
        return result

    def _record(self, name: str, gm: fx.GraphModule, *, seconds: float) -> None:
        """Remember a graph under ``name`` and offer it to whoever listens."""
        code = gm.print_readable(print_output=False)
        self.stages.append(StageReport(name=name, seconds=seconds, code=code))
        compat.show_graph(name, gm)
