"""Write the graphs of a compiled function as readable code, with or without depyf."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compile_backend.graph_files import write_graph
from compile_backend.inspect.explain import explain
from compile_backend.inspect.report import GraphReport
from compile_backend.owners import backends_of

__all__ = ["dump", "dump_graph"]


def dump(compiled: Any, directory: str) -> list[Path]:
    """Write every graph of ``compiled`` below ``directory``; returns the files.

    Per graph a folder with the Dynamo graph, the split graph, the graph with slot reads and each
    piece; beside them ``explain.txt``. Existing files of the same names are replaced.
    """
    explanation = explain(compiled)  # raises before anything is written
    written: list[Path] = []
    for backend in backends_of(compiled):
        for report in backend.reports:
            if isinstance(report, GraphReport):
                written += dump_graph(directory, report)
    summary = Path(directory) / "explain.txt"
    summary.parent.mkdir(parents=True, exist_ok=True)
    summary.write_text(str(explanation) + "\n")
    return [*written, summary]


def dump_graph(directory: str, report: GraphReport) -> list[Path]:
    """Write one graph: a numbered file per stage of the pipeline and one per piece."""
    built = report.built
    return write_graph(directory, report.name, built.stages, built.pieces, built.cuts)
