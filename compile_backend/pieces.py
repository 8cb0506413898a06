"""The pieces of an outer graph, compiled and put in their places; equal ones are compiled once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from compile_backend import compat
from compile_backend.compilers import compile_piece
from compile_backend.config import GraphbufConfig
from compile_backend.engines import CompiledPiece
from compile_backend.errors import PassError
from compile_backend.passes.dedupe import share_pieces
from compile_backend.passes.partition import value_of
from compile_backend.passes.split import SplitPlan

__all__ = ["compile_pieces"]


def compile_pieces(
    outer: fx.GraphModule, plan: SplitPlan, config: GraphbufConfig
) -> tuple[tuple[fx.GraphModule, ...], int]:
    """Put a compiled piece in the place of every piece; equal ones are compiled once.

    Returns the pieces as they were and the number of those that were compiled.
    """
    pieces: dict[str, fx.GraphModule] = {}
    for group in plan.groups:
        if group.name is not None:
            piece = outer.get_submodule(group.name)
            assert isinstance(piece, fx.GraphModule)
            pieces[group.name] = piece
    sharing = share_pieces(pieces)
    compiled: dict[str, Callable[..., Any]] = {}
    for name, piece in pieces.items():
        representative = sharing.representatives[name]
        if representative not in compiled:
            compiled[representative] = _compile_piece(name, piece, config)
        setattr(outer, name, PieceModule(CompiledPiece(compiled[representative], name)))
    return tuple(pieces.values()), sharing.num_compiled


def _compile_piece(name: str, piece: fx.GraphModule, config: GraphbufConfig) -> Callable[..., Any]:
    examples = [value_of(node) for node in piece.graph.find_nodes(op="placeholder")]
    try:
        return compile_piece(
            piece, examples, compiler=config.compiler, inductor_options=config.inductor_options
        )
    except Exception as error:
        if compat.belongs_to_dynamo(error):
            raise
        raise PassError(
            f"{config.compiler} could not compile {name}: {compat.describe(error)}; "
            "options={'debug_dump_path': ...} shows the piece, {'compiler': 'eager'} does without"
        ) from error


class PieceModule(torch.nn.Module):
    """A compiled piece in its place in the outer graph."""

    def __init__(self, piece: CompiledPiece) -> None:
        super().__init__()
        self._piece = piece

    def forward(self, *args: Any) -> Any:
        return self._piece(*args)
