"""Proves small programs and checks a proof by running: not a test module itself.

A program is a function of tensors. :func:`prove` sends it through Dynamo, :func:`prove_traced`
through ``fx.symbolic_trace`` (faster, for random programs); both return a :class:`Proved`, whose
``check`` runs the graph at raw and at padded sizes and compares live rows.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from compile_backend.passes.aten_trace import AtenTrace, trace_aten
from compile_backend.passes.padding_safety import PaddingVerdict, prove_padding

Padded = Mapping[int, str]  # dimension to axis

ALL_BATCH: Padded = {0: "B"}


@dataclass
class Proved:
    verdict: PaddingVerdict
    trace: AtenTrace
    gm: fx.GraphModule
    args: Sequence[Any]  # of the graph, in placeholder order
    padded: Sequence[Padded]  # for each of args
    axes: Mapping[str, frozenset[Any]]

    def check(
        self,
        sizes: Sequence[tuple[Mapping[str, int], Mapping[str, int]]],
        *,
        skip_bad_indices: bool = False,
    ) -> int:
        """Run at each (raw, padded) pair with several tails; returns the number of comparisons.

        A random program may compute an index that is out of range; ``skip_bad_indices`` of those.
        """
        compared = 0
        for raw, padded in sizes:
            if any(raw.get(axis, 0) < rows for axis, rows in self.verdict.min_rows.items()):
                continue
            if not (self._guards_hold(raw) and self._guards_hold(padded)):
                continue
            live = [
                self._resized(arg, dims, raw)
                for arg, dims in zip(self.args, self.padded, strict=True)
            ]
            try:
                want, want_args = self._run(live, raw)
            except (IndexError, RuntimeError) as error:
                if skip_bad_indices and "out of" in str(error):
                    continue
                raise
            for tail in ("zeros", "stale", "large"):
                given = [
                    _pad(arg, dims, padded, tail) if dims else arg
                    for arg, dims in zip(live, self.padded, strict=True)
                ]
                try:
                    got, got_args = self._run(given, padded)
                except (IndexError, RuntimeError) as error:
                    if skip_bad_indices and "out of" in str(error):
                        continue
                    raise
                for layout, a, b in zip(self.verdict.outputs, want, got, strict=True):
                    if isinstance(a, Tensor):
                        _assert_live_equal(a, b, layout.dims, raw, f"output, {tail}, {raw}")
                        compared += 1
                    else:
                        assert a == b
                for dims, a, b in zip(self.padded, want_args, got_args, strict=True):
                    if isinstance(a, Tensor):
                        layout = [(dims[d], 1) if d in dims else None for d in range(a.dim())]
                        _assert_live_equal(a, b, layout, raw, f"argument, {tail}, {raw}")
        return compared

    def _guards_hold(self, sizes: Mapping[str, int]) -> bool:
        """Whether the graph is one for these sizes. A backend asks before it runs one."""
        shape_env = self.trace.shape_env
        assert shape_env is not None
        known = {s: sizes[axis] for axis, symbols in self.axes.items() for s in symbols}
        exprs = [shape_env.replace(guard.expr) for guard in shape_env.guards]
        known |= {shape_env.replace(symbol): size for symbol, size in known.items()}
        return all(expr.xreplace(known) != sympy.false for expr in exprs)

    def _resized(self, arg: Any, dims: Padded, sizes: Mapping[str, int]) -> Any:
        """Another argument like ``arg``, at these sizes, of the numbers that it holds."""
        for dim, axis in dims.items():
            arg = arg.index_select(dim, torch.randint(arg.shape[dim], (sizes[axis],)))
        return arg * (1 + torch.rand_like(arg)) if dims and arg.is_floating_point() else arg

    def _run(self, args: Sequence[Any], sizes: Mapping[str, int]) -> tuple[list[Any], list[Any]]:
        symbols = {symbol: axis for axis, found in self.axes.items() for symbol in found}
        given = []
        for node, arg in zip(self.trace.placeholders, args, strict=True):
            value = self.trace.values[node]
            if isinstance(value, torch.SymInt):
                axis = symbols.get(value.node.expr) or symbols.get(value.node._expr)
                given.append(value.node.hint if axis is None else sizes[axis])
            else:
                given.append(arg.clone() if isinstance(arg, Tensor) else arg)
        with torch.no_grad():
            out = self.gm(*given)
        outputs = list(out) if isinstance(out, tuple | list) else [out]
        return torch.utils._pytree.tree_leaves(outputs), given


def _pad(arg: Tensor, dims: Padded, sizes: Mapping[str, int], tail: str) -> Tensor:
    shape = [sizes[dims[d]] if d in dims else size for d, size in enumerate(arg.shape)]
    if tail == "zeros":
        out = torch.zeros(shape, dtype=arg.dtype)
    elif arg.is_floating_point():
        out = torch.randn(shape, dtype=arg.dtype) * (1e4 if tail == "large" else 2)
    elif arg.dtype == torch.bool:
        out = torch.rand(shape) > 0.5
    else:  # valid indices: those of the live rows
        high = int(arg.max()) + 1 if arg.numel() else 1
        out = torch.full(shape, high - 1) if tail == "large" else torch.randint(high, shape)
    live = out
    for dim in dims:
        live = live.narrow(dim, 0, arg.shape[dim])
    live.copy_(arg)
    return out


def _assert_live_equal(
    want: Tensor, got: Tensor, layout: Sequence[Any], raw: Mapping[str, int], what: str
) -> None:
    for dim, live in enumerate(layout):
        if live is not None:
            got = got.narrow(dim, 0, raw[live[0]] * live[1])
    torch.testing.assert_close(
        got, want, rtol=1e-4, atol=1e-4, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )


def prove(
    fn: Callable[..., Any],
    *args: Any,
    padded: Sequence[Padded] | None = None,
    oblivious: bool = True,
    dynamic: bool | None = None,
    trusted: Callable[[fx.Node], bool] = lambda node: False,
    rowwise_ops: Sequence[str] = (),
) -> Proved:
    """Dynamo's graph of ``fn``, proved inside the backend call. By default dimension 0 is padded.

    Sizes of padded dimensions must differ from one another and from other sizes, so that a size
    placeholder can be told by its example.
    """
    torch._dynamo.reset()
    if padded is None:
        padded = [ALL_BATCH if isinstance(arg, Tensor) else {} for arg in args]
    sizes = {
        arg.shape[d]: axis
        for arg, dims in zip(args, padded, strict=True)
        for d, axis in dims.items()
    }
    found: list[Proved] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        trace = trace_aten(gm)
        axes: dict[str, set[Any]] = {axis: set() for axis in sizes.values()}
        dims_of: list[Padded] = []
        for node, example in zip(trace.placeholders, example_inputs, strict=True):
            value = node.meta["example_value"]
            matches = [
                dims for arg, dims in zip(args, padded, strict=True) if arg is example and dims
            ]
            dims_of.append(matches[0] if matches else {})
            for dim, axis in dims_of[-1].items():
                size = value.shape[dim]
                axes[axis] |= set() if isinstance(size, int) else {size.node.expr}
            if isinstance(value, torch.SymInt) and value.node.hint in sizes:
                axes[sizes[value.node.hint]].add(value.node.expr)
        frozen = {axis: frozenset(symbols) for axis, symbols in axes.items()}
        names = [node.name for node in trace.placeholders]
        verdict = prove_padding(
            trace,
            {name: dims for name, dims in zip(names, dims_of, strict=True) if dims},
            frozen,
            trusted=[node for node in gm.graph.nodes if trusted(node)],
            rowwise_ops=rowwise_ops,
        )
        # a weight may be written; the proof's own runs must not do it for the caller
        examples = [e.clone() if isinstance(e, Tensor) else e for e in example_inputs]
        found.append(Proved(verdict, trace, gm, examples, dims_of, frozen))
        return gm.forward

    patch = (
        torch.fx.experimental._config.patch(backed_size_oblivious=True)
        if oblivious
        else contextlib.nullcontext()
    )
    for arg, dims in zip(args, padded, strict=True):
        for dim in dims:
            torch._dynamo.mark_dynamic(arg, dim)
    with torch.no_grad(), patch:
        torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)(*args)
    (proved,) = found
    return proved


def prove_traced(
    fn: Callable[..., Any], args: Sequence[Tensor], padded: Sequence[Padded]
) -> Proved:
    """The same for a function that ``fx.symbolic_trace`` can trace, a symbol for each axis."""
    gm = fx.symbolic_trace(fn)
    shape_env = ShapeEnv()
    fake_mode = FakeTensorMode(shape_env=shape_env)
    axes: dict[str, set[Any]] = {}
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for node, arg, dims in zip(placeholders, args, padded, strict=True):
        context = StatelessSymbolicContext(
            dynamic_sizes=[
                DimDynamic.DUCK if d in dims else DimDynamic.STATIC for d in range(arg.dim())
            ],
            constraint_sizes=[None] * arg.dim(),
        )
        source = torch._dynamo.source.ConstantSource(node.name)
        fake = fake_mode.from_tensor(arg, source=source, symbolic_context=context)
        node.meta["example_value"] = fake
        for dim, axis in dims.items():
            axes.setdefault(axis, set()).add(fake.shape[dim].node.expr)
    trace = trace_aten(gm)
    frozen = {axis: frozenset(symbols) for axis, symbols in axes.items()}
    inputs = {node.name: dims for node, dims in zip(placeholders, padded, strict=True) if dims}
    verdict = prove_padding(trace, inputs, frozen)
    return Proved(verdict, trace, gm, args, padded, frozen)
