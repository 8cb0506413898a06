"""From a piece to a callable: ``eager``, ``aot_eager`` (functorch's AOTAutograd) or ``inductor``.

A piece is a small FX graph with symbolic sizes that mutates nothing behind the compiler's back.
Every compiler gets fake inputs with the strides that the piece meets at run time, on the graph's
own fake mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx

from compile_backend import compat
from compile_backend.config import CompilerName

__all__ = ["compile_piece", "compile_whole_graph"]


def compile_piece(
    piece: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    compiler: CompilerName,
    inductor_options: Mapping[str, Any] | None = None,
) -> Callable[..., Sequence[Any]]:
    """Compile one piece for inference; called with its inputs, it returns a list or tuple.

    ``example_inputs`` are fake tensors, SymInts and numbers, one per placeholder. Shape guards
    that compiling adds land on their ShapeEnv.
    """
    if compiler == "eager":
        forward: Callable[..., Sequence[Any]] = piece.forward
        return forward
    fake_mode = torch._guards.detect_fake_mode(list(example_inputs))
    with compat.piece_tracing_context(fake_mode), torch.no_grad():
        if compiler == "aot_eager":
            return _aot_eager(piece, example_inputs)
        return _inductor(piece, example_inputs, inductor_options)


def compile_whole_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    compiler: CompilerName,
    inductor_options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph as stock ``torch.compile`` does, gradients included."""
    if compiler == "eager":
        forward: Callable[..., Any] = gm.forward
        return forward
    if compiler == "aot_eager":
        from torch._dynamo.backends.debugging import aot_eager

        compiled: Callable[..., Any] = aot_eager(gm, list(example_inputs))
        return compiled
    from torch._inductor.compile_fx import compile_fx

    return cast(
        "Callable[..., Any]",
        compile_fx(gm, list(example_inputs), config_patches=dict(inductor_options or {}) or None),
    )


def _aot_eager(
    piece: fx.GraphModule, example_inputs: Sequence[Any]
) -> Callable[..., Sequence[Any]]:
    from functorch.compile import make_boxed_func
    from torch._functorch.aot_autograd import aot_module_simplified

    def run_aten_graph(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        boxed: Callable[..., Any] = make_boxed_func(gm.forward)
        return boxed

    compiled: Callable[..., Sequence[Any]] = aot_module_simplified(
        piece, list(example_inputs), fw_compiler=run_aten_graph
    )
    return compiled


def _inductor(
    piece: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any] | None
) -> Callable[..., Sequence[Any]]:
    from torch._inductor.compile_fx import compile_fx

    # The engines capture; Inductor's own cudagraphs inside a piece would nest.
    patches = {"triton.cudagraphs": False, **(options or {})}
    compiled = compile_fx(piece, list(example_inputs), config_patches=patches)
    return cast("Callable[..., Sequence[Any]]", compiled)
