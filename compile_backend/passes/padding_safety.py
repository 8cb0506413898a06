"""The proof that padding cannot be seen: no padded row reaches a live one.

A batch of ``raw`` rows is run at a larger ``padded`` size, with anything finite in the rows behind
the live ones. :func:`prove_padding` decides, on the ATen trace of a graph, whether the first
``raw`` rows of every output are then those of a run at the raw size, for every such pair of sizes.

It follows each element by its coordinates along the padded axes (:mod:`.padding.layout`) and keeps
one invariant: *an element whose coordinates are all live depends on live elements of the inputs
only, and not on how long the axes are*. Each operator of the whitelist (:mod:`.padding_rules`)
says how it carries coordinates along, or that it cannot. Whatever is not shown is refused; running
twice and comparing would prove nothing.

Taken for granted: weights, and all other tensors that no padded row reaches, are finite, indices
in padded rows are in range (a tail of zeros is), and numbers do not overflow.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_flatten

from compile_backend.errors import FallbackReason
from compile_backend.passes.aten_trace import (
    AtenCall,
    AtenTrace,
    is_custom_op,
    source_line,
    storage_of,
)
from compile_backend.passes.padding.factories import contract
from compile_backend.passes.padding.layout import Dim, Sizes, axes_of, is_clean, is_leading
from compile_backend.passes.padding.values import (
    Case,
    NotShown,
    Range,
    Value,
    range_of_tensor,
    uses_size,
)
from compile_backend.passes.padding_rules import (
    ASSERTIONS,
    CHECKS,
    FORBIDDEN,
    SEEDED,
    packet_name,
    rule_for,
    size_arguments,
)

__all__ = ["OutputLayout", "PaddingVerdict", "prove_padding"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLayout:
    """Which rows of one output are live.

    For each dimension None (as long as ever), or ``(axis, block)``: the first ``raw * block``
    elements are live, of ``padded * block``. Empty for an output that is not a tensor.
    """

    dims: tuple[tuple[str, int | sympy.Expr] | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingVerdict:
    """What the proof found. Not safe: ``reason``, and the operator and source line that it is at.

    ``op`` and ``source`` are None where no operator is to blame (an input, or a returned size).
    ``mutates`` names the placeholders that the graph writes to; whether that is acceptable is the
    caller's decision. ``min_rows`` gives the axes that need some live rows (``x[0]`` needs one).
    """

    safe: bool
    reason: FallbackReason | None = None
    op: str | None = None
    source: str | None = None
    why: str | None = None
    advice: str | None = None
    outputs: tuple[OutputLayout, ...] = ()
    mutates: tuple[str, ...] = ()
    min_rows: Mapping[str, int] = field(default_factory=dict)

    @property
    def message(self) -> str:
        if self.safe:
            return "padded rows are shown to stay away from live rows"
        what = self.why or ""
        if self.op is not None and self.op not in what:
            what = f"{self.op}: {what}"
        where = f" ({self.source})" if self.source else ""
        return f"{what}{where}; {self.advice}"


def prove_padding(
    trace: AtenTrace,
    inputs: Mapping[str, Mapping[int, str]],
    axes: Mapping[str, frozenset[sympy.Symbol]],
    *,
    trusted: Collection[fx.Node] = (),
    rowwise_ops: Collection[str] = (),
) -> PaddingVerdict:
    """Decide whether the graph of ``trace`` may be run at padded sizes.

    ``inputs`` gives, by placeholder name, the dimensions that are padded and their axes; ``axes``
    the size symbols that measure each axis (a live call has one value for all of them).
    ``trusted`` nodes, and operators named in ``rowwise_ops`` (``"ns::op"``), are row-wise by their
    owner's word: only the shapes of their results are looked at, and what they write in place is
    not to be read by other operators.
    """
    unknown = set(inputs) - {node.name for node in trace.placeholders}
    if unknown:
        raise ValueError(f"no placeholder is called {', '.join(sorted(unknown))}")
    sizes = Sizes(axes, trace.shape_env)
    proof = _Proof(trace, sizes, frozenset(trusted), frozenset(rowwise_ops))
    mutates = tuple(node.name for node in trace.mutated if node.op == "placeholder")
    return replace(proof.verdict(inputs), mutates=mutates)


@dataclass(slots=True)
class _Proof:
    """The state of one run over the calls of a trace."""

    trace: AtenTrace
    sizes: Sizes
    trusted: frozenset[fx.Node]
    rowwise_ops: frozenset[str]
    values: dict[int, Value] = field(default_factory=dict)  # by id of the tensor
    aliases: dict[int, list[int]] = field(default_factory=dict)  # storage to ids on it
    untracked: dict[int, NotShown] = field(default_factory=dict)  # harmless until somebody asks
    written_blindly: set[int] = field(default_factory=set)  # storages, by trusted operators
    min_rows: dict[str, int] = field(default_factory=dict)

    def verdict(self, inputs: Mapping[str, Mapping[int, str]]) -> PaddingVerdict:
        call: AtenCall | None = None
        try:
            self._read_inputs(inputs)
            for call in self.trace.calls:
                self._step(call)
        except NotShown as found:
            return _refused(found, call)
        return self._read_outputs()

    # --- inputs and outputs ---------------------------------------------------------------------

    def _read_inputs(self, inputs: Mapping[str, Mapping[int, str]]) -> None:
        if self.sizes.problem is not None:
            raise _bad_input(self.sizes.problem, "give every padded axis a free size of its own")
        for node in self.trace.gm.graph.nodes:
            value = self.trace.values.get(node)
            if node.op in ("placeholder", "get_attr") and isinstance(value, Tensor):
                self._add(value, self._input(node.name, value, inputs.get(node.name, {})))

    def _input(self, name: str, tensor: Tensor, padded: Mapping[int, str]) -> Value:
        dims = [
            self._input_dim(name, i, size, padded.get(i)) for i, size in enumerate(tensor.shape)
        ]
        if max(axes_of(tuple(dims)).values(), default=0) > 1:
            raise _bad_input(
                f"input {name!r} has two dimensions of one padded axis",
                "give the two dimensions sizes that differ when it is traced",
            )
        return Value(dims=tuple(dims), range=Range.FINITE)

    def _input_dim(self, name: str, position: int, size: Any, axis: str | None) -> Dim:
        expr = self.sizes.expr(size)
        found = self.sizes.axes_in(size)
        if axis is None and not found:
            return () if expr == 1 else (expr,)
        if axis is not None and self.sizes.axis_of.get(expr) == axis:
            return (axis,)
        padded = f"padded along axis {axis!r}" if axis is not None else "not padded"
        raise _bad_input(
            f"dimension {position} of input {name!r} is {padded}, but its size is {expr}",
            "give every padded axis a free size of its own, and pad all inputs that have it",
        )

    def _read_outputs(self) -> PaddingVerdict:
        (output,) = (node for node in self.trace.gm.graph.nodes if node.op == "output")
        nodes = tree_flatten(output.args[0])[0]
        layouts = []
        for node, value in zip(nodes, self.trace.outputs, strict=True):
            call = None
            try:
                if isinstance(value, Tensor):
                    call = self._value(value).made_by
                    layouts.append(self._layout(value))
                elif self.sizes.axes_in(value):
                    raise uses_size(self.sizes.axes_in(value))
                else:
                    layouts.append(OutputLayout())
            except NotShown as found:
                refused = _refused(found, call)
                if call is None and isinstance(node, fx.Node):
                    refused = replace(refused, source=source_line(node))
                return refused
        return PaddingVerdict(safe=True, outputs=tuple(layouts), min_rows=dict(self.min_rows))

    def _layout(self, tensor: Tensor) -> OutputLayout:
        dims: list[tuple[str, int | sympy.Expr] | None] = []
        for position, dim in enumerate(self._value(tensor).dims):
            if is_clean(dim):
                dims.append(None)
                continue
            if not is_leading(dim):
                raise NotShown(
                    f"the live rows of dimension {position} of an output are not its first ones",
                    "return the rows in a dimension of their own, and reshape or join the live "
                    "ones outside the compiled function",
                    FallbackReason.OUTPUT_NOT_PREFIX,
                )
            block = dim[1] if len(dim) > 1 else 1
            assert not isinstance(block, str)
            dims.append((str(dim[0]), int(block) if sympy.sympify(block).is_Integer else block))
        return OutputLayout(dims=tuple(dims))

    # --- one operator ---------------------------------------------------------------------------

    def _step(self, call: AtenCall) -> None:
        if self._is_vouched_for(call):
            self._by_contract(call)
            return
        op = call.op
        if call.opaque or not isinstance(op, OpOverload):
            raise _not_listed(call, "it is not looked into")
        packet = packet_name(op)
        if packet in CHECKS:
            return
        if packet in FORBIDDEN or torch.Tag.inplace_view in op.tags:
            raise _not_listed(call, "it changes what its argument is, or reads past its bounds")
        if is_custom_op(op):
            raise _not_listed(call, "it is not PyTorch's own")
        if packet in ASSERTIONS and "assert" not in str(call.node.target):
            return  # an operator checks its indices: 0, the default in padded rows, is one
        try:
            results = self._results(call)
        except NotShown as found:
            # The result is out of reach of the proof. That matters only where it is used, unless
            # it leaves as a number, or its length does.
            has_result = bool(_tensors(call.result)) and _is_only_tensors(call.result)
            if op._schema.is_mutable or not has_result:
                raise
            found.call = found.call or call
            self.untracked |= {id(tensor): found for tensor in _tensors(call.result)}
        else:
            self._store(call, results)

    def _results(self, call: AtenCall) -> list[Value | None]:
        op = call.op
        if torch.Tag.nondeterministic_seeded in op.tags and not _is_undropped(call):
            raise _not_listed(call, "random numbers differ with the number of rows")
        operands = [self._value(tensor) for tensor in call.tensors]
        self._require_tracked_storage(call)
        tainted = self._sizes_used(call)
        if any(name not in size_arguments(op) for name in tainted):
            raise uses_size(frozenset().union(*tainted.values()))
        if not tainted and all(operand.is_clean for operand in operands):
            return self._clean_results(call)
        return self._rule_results(call)

    def _is_vouched_for(self, call: AtenCall) -> bool:
        if call.node in self.trusted:
            return True
        return isinstance(call.op, OpOverload) and call.op._schema.name in self.rowwise_ops

    def _sizes_used(self, call: AtenCall) -> dict[str, frozenset[str]]:
        """Arguments computed from the size of a padded axis, by name, with the axes."""
        formals = call.op._schema.arguments
        named = {formal.name: arg for formal, arg in zip(formals, call.args, strict=False)}
        named |= call.kwargs
        used = {name: self.sizes.axes_in(arg) for name, arg in named.items()}
        return {name: axes for name, axes in used.items() if axes}

    def _require_tracked_storage(self, call: AtenCall) -> None:
        if call.op.is_view:
            return
        for tensor in call.tensors:
            if storage_of(tensor) in self.written_blindly:
                raise _not_listed(call, "it reads what a row-wise operator wrote into its argument")

    def _case(self, call: AtenCall) -> Case:
        return Case(call, self.values, self.sizes, self.min_rows)

    def _rule_results(self, call: AtenCall) -> list[Value | None]:
        rule = rule_for(call.op)
        if rule is None:
            raise _not_listed(call, "it is not known to keep rows apart")
        found = rule(self._case(call))
        return list(found) if isinstance(found, tuple) else [found]

    def _clean_results(self, call: AtenCall) -> list[Value | None]:
        """No padded row goes in and none comes out, whatever the operator does."""
        ranges: list[Range] = []
        with suppress(NotShown, IndexError):  # rules need not bear numbers (0-d) where rows go
            ranges = [v.range if v is not None else Range.ANY for v in self._rule_results(call)]
        results: list[Value | None] = []
        for i, tensor in enumerate(_tensors(call.result)):
            dims = tuple(self._clean_dim(size) for size in tensor.shape)
            found = ranges[i] if i < len(ranges) else Range.ANY
            results.append(Value(dims=dims, range=max(found, Range.FINITE)))
        return results

    def _clean_dim(self, size: Any) -> Dim:
        expr = self.sizes.expr(size)
        return () if expr == 1 else (expr,)

    def _store(self, call: AtenCall, results: list[Value | None]) -> None:
        """Bind the results, and carry out the write of an in-place operator."""
        written = list(_written(call))
        if len(written) > 1 or (written and len(results) != 1):
            raise _not_listed(call, "it writes to several tensors")
        for tensor in written:
            (result,) = results
            assert result is not None
            self._write(call, tensor, result)
            results = [self._value(tensor)]
        tensors = _tensors(call.result)
        if written and not tensors:
            return
        for tensor, value in zip(tensors, results, strict=True):
            if value is None:
                found = _not_listed(call, "a side result of it is used")
                found.call = call
                self.untracked[id(tensor)] = found
            elif not self._describes(value, tensor):
                raise _not_listed(call, "the rows of its result cannot be told from its shape")
            else:
                self._add(tensor, replace(value, made_by=call))

    def _describes(self, value: Value, tensor: Tensor) -> bool:
        atoms = [atom for dim in value.dims for atom in dim if not isinstance(atom, str)]
        return not self.sizes.axes_in(atoms) and self.sizes.fits(value.dims, tensor.shape)

    def _write(self, call: AtenCall, tensor: Tensor, new: Value) -> None:
        old = self._value(tensor)
        if new.dims != old.dims:
            raise _not_listed(call, "it writes padded rows into a tensor that is not padded so")
        for alias in self.aliases[storage_of(tensor)]:
            value = self.values[alias]
            if axes_of(value.dims) != axes_of(old.dims):
                raise _not_listed(call, "it writes to a view that drops or repeats padded rows")
            # every element of the tensor itself is new; another view keeps some of its old ones
            found = new.range if alias == id(tensor) else min(value.range, new.range)
            self.values[alias] = replace(value, range=found, iota=None)

    def _by_contract(self, call: AtenCall) -> None:
        for tensor in call.tensors:
            for dim in self._value(tensor).dims:
                if not is_leading(dim):
                    raise _not_listed(call, "the rows of an argument are not its first ones")
        for storage in call.writes:
            ids = self.aliases.get(storage, [])
            axes = [axes_of(self.values[alias].dims) for alias in ids]
            if not axes or not axes[0] or any(other != axes[0] for other in axes):
                self.written_blindly.add(storage)
            for alias in ids:
                self.values[alias] = replace(self.values[alias], range=Range.ANY, iota=None)
        all_clean = all(self._value(tensor).is_clean for tensor in call.tensors)
        if not all_clean and not _is_only_tensors(call.result):
            raise _not_listed(call, "a number or a length that it returns depends on all rows")
        for tensor in _tensors(call.result):
            self._add(tensor, replace(contract(self._case(call), tensor), made_by=call))

    # --- tensors --------------------------------------------------------------------------------

    def _add(self, tensor: Tensor, value: Value) -> None:
        self.values[id(tensor)] = value
        ids = self.aliases.setdefault(storage_of(tensor), [])
        if id(tensor) not in ids:
            ids.append(id(tensor))

    def _value(self, tensor: Tensor) -> Value:
        if id(tensor) in self.untracked:
            raise self.untracked[id(tensor)]
        if id(tensor) not in self.values:
            if isinstance(tensor, FakeTensor):
                raise _bad_input("a tensor of unknown origin is used", "leave this to exact sizes")
            dims = tuple(self._clean_dim(size) for size in tensor.shape)
            self._add(tensor, Value(dims=dims, range=range_of_tensor(tensor)))
        return self.values[id(tensor)]


def _refused(found: NotShown, call: AtenCall | None) -> PaddingVerdict:
    call = found.call or call
    return PaddingVerdict(
        safe=False,
        reason=found.reason,
        op=None if call is None else call.name,
        source=None if call is None else source_line(call.node),
        why=found.why,
        advice=found.advice,
    )


def _bad_input(why: str, advice: str) -> NotShown:
    return NotShown(why, advice, FallbackReason.PADDING_UNSAFE)


def _not_listed(call: AtenCall, why: str) -> NotShown:
    advice = "run it outside the compiled function, or leave this graph to exact sizes"
    if isinstance(call.op, OpOverload) and is_custom_op(call.op):
        advice = (
            "if every row of its results depends on the same row of its arguments only, list "
            f"{call.op._schema.name!r} in the option rowwise_ops"
        )
    return NotShown(f"{call.name} is not shown safe: {why}", advice, FallbackReason.PADDING_UNSAFE)


def _is_undropped(call: AtenCall) -> bool:
    return call.name in SEEDED and call.argument("dropout_p") == 0


def _written(call: AtenCall) -> Iterator[Tensor]:
    """Tensors that the call writes to, by its schema."""
    for formal in call.op._schema.arguments:
        if formal.alias_info is not None and formal.alias_info.is_write:
            yield from _tensors(call.argument(formal.name))


def _is_only_tensors(value: Any) -> bool:
    """Tensors (or nothing) of lengths that do not depend on values."""
    leaves = [leaf for leaf in tree_flatten(value)[0] if leaf is not None]
    sizes = [size for tensor in _tensors(value) for size in tensor.shape]
    return all(isinstance(leaf, Tensor) for leaf in leaves) and not free_unbacked_symbols(sizes)


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_flatten(value)[0] if isinstance(x, Tensor)]
