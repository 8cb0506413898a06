"""A compiled graph as files that a person can read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from torch import fx

from compile_backend.passes.pipeline import StageReport
from compile_backend.passes.split import Cut

__all__ = ["write_graph"]


def write_graph(
    directory: str,
    name: str,
    stages: Sequence[StageReport],
    pieces: Sequence[fx.GraphModule],
    cuts: Sequence[Cut],
) -> list[Path]:
    """Write a folder ``name`` with a numbered file per stage of the pipeline, one per piece, and
    the cuts; returns the files. Existing files of the same names are replaced."""
    folder = Path(directory) / re.sub(r"[^\w.-]+", "_", name)
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        f"{number:02d}_{stage.name.replace(' ', '_')}.py": stage.code
        for number, stage in enumerate(stages)
    }
    for number, piece in enumerate(pieces):
        files[f"piece_{number}.py"] = piece.print_readable(print_output=False)
    files["cuts.txt"] = "".join(f"{cut.op} ({cut.source}): {cut.why}\n" for cut in cuts)
    written = []
    for file_name, text in files.items():
        path = folder / file_name
        path.write_text(text + "\n")
        written.append(path)
    return written
