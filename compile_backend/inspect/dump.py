"""Write the graphs of a compiled function as readable code, with or without depyf."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

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
    folder = Path(directory) / re.sub(r"[^\w.-]+", "_", report.name)
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        f"{number:02d}_{stage.name.replace(' ', '_')}.py": stage.code
        for number, stage in enumerate(report.built.stages)
    }
    for number, piece in enumerate(report.built.pieces):
        files[f"piece_{number}.py"] = piece.print_readable(print_output=False)
    files["cuts.txt"] = "".join(
        f"{cut.op} ({cut.source}): {cut.why}\n" for cut in report.built.cuts
    )
    written = []
    for name, text in files.items():
        path = folder / name
        path.write_text(text + "\n")
        written.append(path)
    return written
