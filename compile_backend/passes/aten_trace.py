"""What a Dynamo graph does, operator by operator.

The other passes ask questions about ATen operators (is this one a host read? does it write to an
argument? does it keep rows apart?), but a Dynamo graph holds Python callables. :func:`trace_aten`
runs the graph once on its own fake tensors, records every ATen operator after composite operators
were decomposed, and maps each back to the Dynamo node that was running. Nothing is computed, and
the graph and its fake values are left as they were found.

Read the result through :class:`AtenTrace`; :func:`source_line` names a node the way its author
would.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_iter, tree_map_only

__all__ = [
    "AtenCall",
    "AtenTrace",
    "flat_calls",
    "is_custom_op",
    "op_name",
    "source_line",
    "storage_of",
    "storages_in",
    "tensors_in",
    "trace_aten",
]

BUILTIN_NAMESPACES = frozenset({"aten", "prim", "prims", "profiler", "quantized", "mkldnn"})

# Queries about a tensor, not work: recorded they would only be noise.
_QUERY_NAMESPACES = frozenset({"prim", "profiler"})
_QUERIES = frozenset(
    f"aten::{prefix}{name}"
    for prefix in ("", "sym_")
    for name in ("dim", "is_contiguous", "numel", "size", "storage_offset", "stride")
)

# These change how later nodes are recorded, not what they compute. The trace always runs without
# autograd and outside inference mode: inference tensors reach a dispatch mode undecomposed.
_SKIPPED_TARGETS = frozenset(
    {
        torch._C._set_grad_enabled,
        torch.autograd.grad_mode._enter_inference_mode,
        torch.autograd.grad_mode._exit_inference_mode,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AtenCall:
    """One operator as it reached the dispatcher. Compared by identity.

    ``op`` is an ``OpOverload``, or, for work that was not looked into, the Dynamo target: a
    higher-order operator (its subgraphs are in ``subgraphs``) or a call that could not be run on
    fake tensors (``opaque``). ``writes`` are the storages (:func:`storage_of`) that it writes; an
    opaque call is taken to write to every tensor it is given.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    node: fx.Node
    writes: frozenset[int] = frozenset()
    opaque: bool = False
    subgraphs: tuple["AtenTrace", ...] = ()

    @property
    def name(self) -> str:
        """The operator as people write it: ``aten.amax.default``, ``mylib.attention.default``."""
        return op_name(self.op)

    def argument(self, name: str, default: Any = None) -> Any:
        """The argument called ``name`` in the schema, however it was passed, or its default."""
        if name in self.kwargs:
            return self.kwargs[name]
        if isinstance(self.op, OpOverload):
            for i, formal in enumerate(self.op._schema.arguments):
                if formal.name == name:
                    if i < len(self.args):
                        return self.args[i]
                    return formal.default_value if formal.has_default_value() else default
        return default

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor among the arguments, in order."""
        return [x for x in tree_iter((self.args, dict(self.kwargs))) if isinstance(x, Tensor)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AtenTrace:
    """A Dynamo graph as a list of ATen calls, with the facts that need the running trace.

    Tensors are fake, live as long as the trace, and are compared by identity; symbolic sizes
    belong to the graph's own ``shape_env``. A tensor's metadata are those after the last call.
    """

    gm: fx.GraphModule
    calls: list[AtenCall] = field(default_factory=list)
    calls_by_node: dict[fx.Node, list[AtenCall]] = field(default_factory=dict)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    # storages of each node's value when it was produced (``set_`` can change them later)
    storages: dict[fx.Node, frozenset[int]] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)  # flattened
    number_tensors: dict[int, Tensor] = field(default_factory=dict)  # by id: numbers as tensors
    shape_env: ShapeEnv | None = None

    @property
    def placeholders(self) -> list[fx.Node]:
        return [node for node in self.gm.graph.nodes if node.op == "placeholder"]

    def calls_of(self, node: fx.Node) -> list[AtenCall]:
        """The calls that ``node`` made, in order."""
        return self.calls_by_node.get(node, [])

    @property
    def writers(self) -> dict[int, list[fx.Node]]:
        """Storage to the nodes that write it, in execution order, each node once."""
        writers: dict[int, list[fx.Node]] = {}
        for call in self.calls:
            for storage in call.writes:
                nodes = writers.setdefault(storage, [])
                if call.node not in nodes:
                    nodes.append(call.node)
        return writers

    @property
    def mutated(self) -> dict[fx.Node, list[fx.Node]]:
        """Placeholder (or ``get_attr`` of a tensor) to the nodes that write its storage."""
        writers = self.writers
        mutated: dict[fx.Node, list[fx.Node]] = {}
        for node in self.gm.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                nodes = [w for s in self.storages.get(node, ()) for w in writers.get(s, ())]
                if nodes:
                    mutated[node] = nodes
        return mutated

    @property
    def output_aliases(self) -> list[list[fx.Node]]:
        """For each flattened output, the placeholders whose storage it shares."""
        return [
            [
                node
                for node in self.placeholders
                if storages_in(output) & self.storages.get(node, frozenset())
            ]
            for output in self.outputs
        ]

    def ops_of(self, node: fx.Node) -> list[str]:
        """Names of the operators that ``node`` ran, those in its subgraphs included."""
        return [name for call in self.calls_of(node) for name in _names(call)]

    def mutating_custom_ops(self, node: fx.Node) -> list[str]:
        """Names of the custom operators of ``node`` that write to their arguments.

        No compiler may look across one of these: their writes are known by name only.
        """
        return [
            inner.name
            for call in self.calls_of(node)
            for inner in flat_calls(call)
            if is_custom_op(inner.op) and (inner.opaque or inner.op._schema.is_mutable)
        ]

    def custom_ops(self, node: fx.Node) -> list[str]:
        """Names of the operators of ``node`` that PyTorch does not own or that stayed opaque."""
        return [
            inner.name
            for call in self.calls_of(node)
            for inner in flat_calls(call)
            if inner.opaque or is_custom_op(inner.op)
        ]

    def devices_of(self, node: fx.Node) -> set[torch.device]:
        """Devices of every tensor that ``node`` reads or makes."""
        calls = [inner for call in self.calls_of(node) for inner in flat_calls(call)]
        return {t.device for call in calls for t in tensors_in((call.tensors, call.result))}


def op_name(op: Any) -> str:
    """``aten.amax.default`` for an overload, ``higher_order.cond``, else the callable's name."""
    if isinstance(op, OpOverload):
        return str(op)
    if isinstance(op, HigherOrderOperator):
        return f"higher_order.{op.name()}"
    return str(getattr(op, "__name__", op))


def is_custom_op(op: Any) -> bool:
    """Whether ``op`` is an operator that somebody other than PyTorch registered."""
    return isinstance(op, OpOverload) and op.namespace not in BUILTIN_NAMESPACES


def storage_of(tensor: Tensor) -> int:
    """A number that equal-storage tensors share, stable while one of them lives.

    Tensors without a storage (sparse ones) get one of their own.
    """
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return -id(tensor)


def storages_in(value: Any) -> frozenset[int]:
    """Storages of all tensors in a nested value."""
    return frozenset(storage_of(t) for t in tensors_in(value))


_FRAME = re.compile(
    r'File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n\s*(?P<code>.*)'
)
_LIBRARY_DIRS = tuple(
    os.path.dirname(path) + os.sep for path in (torch.__file__, os.path.dirname(__file__))
)


def source_line(node: fx.Node) -> str:
    """``file.py:123, in forward: code`` of the innermost frame of the user that made ``node``.

    Frames inside PyTorch and this package count only where there are no others; without any frame,
    the node's name.
    """
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    if not frames:
        return f"node {node.name}"
    users = [frame for frame in frames if not frame["path"].startswith(_LIBRARY_DIRS)]
    frame = (users or frames)[-1]
    code = frame["code"].strip()
    return f"{os.path.basename(frame['path'])}:{frame['line']}, in {frame['function']}: {code}"


def trace_aten(gm: fx.GraphModule) -> AtenTrace:
    """Run ``gm`` on its placeholders' fake values and record what reaches the dispatcher.

    Neither the graph, its metadata nor its fake tensors change. Its ShapeEnv keeps the guards
    that the operators need (they hold for any run of the graph) and is otherwise as found.
    Where the graph changes an input's metadata (``x.t_()``), Dynamo's fake of that input has its
    final shape already, and so has the first call that reads it here.
    """
    fake_mode = _fake_mode_of(gm)
    trace = AtenTrace(gm=gm, shape_env=fake_mode.shape_env)
    converts = fake_mode.allow_non_fake_inputs
    fake_mode.allow_non_fake_inputs = True  # constants and parameters held by the module
    try:
        # Without the Python dispatcher the C++ code of some composites fixes symbolic sizes.
        with (
            torch.no_grad(),
            enable_python_dispatcher(),
            fake_mode,
            _unbacked_symbols_as_found(fake_mode.shape_env),
        ):
            _Runner(trace, fake_mode).run(enable_io_processing=False)
    finally:
        fake_mode.allow_non_fake_inputs = converts
    return trace


class _Recorder(TorchDispatchMode):
    """Sees each operator below autograd and hands it on, decomposed, to the fake mode."""

    def __init__(self, record: Callable[..., None]) -> None:
        super().__init__()
        self.record = record

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace in _QUERY_NAMESPACES or func._schema.name in _QUERIES:
            return func(*args, **kwargs)
        if _is_composite(func):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        writes = _writes(func, args, kwargs)
        result = func(*args, **kwargs)
        self.record(func, args, kwargs, result, writes=writes)
        return result


class _Runner(fx.Interpreter):
    """Runs a Dynamo graph into an :class:`AtenTrace`."""

    def __init__(self, trace: AtenTrace, fake_mode: FakeTensorMode) -> None:
        super().__init__(trace.gm, garbage_collect_values=False)
        self.trace = trace
        self.fake_mode = fake_mode
        self.node: fx.Node | None = None
        self.recorder = _Recorder(self.record)

    def record(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, **facts: Any
    ) -> None:
        assert self.node is not None
        call = AtenCall(op=op, args=args, kwargs=kwargs, result=result, node=self.node, **facts)
        self.trace.calls.append(call)
        self.trace.calls_by_node.setdefault(self.node, []).append(call)

    def run_node(self, n: fx.Node) -> Any:
        self.node = n
        value = self._value(n)
        self.trace.values[n] = value
        self.trace.storages[n] = storages_in(value)
        return value

    def _value(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self._placeholder(node)
        if node.op == "get_attr":
            return self._attribute(node)
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        if node.op == "output":
            self.trace.outputs.extend(tree_flatten(args[0])[0])
            return args[0]
        if node.op == "call_function" and node.target in _SKIPPED_TARGETS:
            return None
        if isinstance(node.target, HigherOrderOperator):
            return self._higher_order(node, args, kwargs)
        if _is_item(node) and isinstance(
            _dynamo_value(node), torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool
        ):
            return self._item(node, args)
        num_calls = len(self.trace.calls)
        try:
            with self.recorder:
                return getattr(self, node.op)(node.target, args, kwargs)
        except Exception:  # whatever it was, Dynamo knows the value: the call is opaque
            if "example_value" not in node.meta and "val" not in node.meta:
                raise
            del self.trace.calls[num_calls:]
            self.trace.calls_by_node.pop(node, None)
            value = _detached(_dynamo_value(node))
            self.record(
                node.target, args, kwargs, value, writes=storages_in((args, kwargs)), opaque=True
            )
            return value

    def _placeholder(self, node: fx.Node) -> Any:
        value = _detached(_dynamo_value(node))
        arg = node.meta.get("grapharg")
        if isinstance(value, Tensor) and arg is not None and not arg.is_tensor:
            self.trace.number_tensors[id(value)] = value
        return value

    def _attribute(self, node: fx.Node) -> Any:
        value = self.fetch_attr(str(node.target))
        if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
            known = _dynamo_value(node)
            if isinstance(known, FakeTensor):
                return _detached(known)
            return self.fake_mode.from_tensor(value, static_shapes=True)
        return value

    def _item(self, node: fx.Node, args: tuple[Any, ...]) -> Any:
        """Dynamo's own symbol for the number, so that later uses of it agree."""
        value = _dynamo_value(node)
        self.record(torch.ops.aten._local_scalar_dense.default, args[:1], {}, value)
        return value

    def _higher_order(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = _detached(_dynamo_value(node))
        modules = [m for m in tree_iter((args, kwargs)) if isinstance(m, fx.GraphModule)]
        subgraphs = tuple(self._subgraph(module) for module in modules)
        writes = any(sub.mutated for sub in subgraphs) or "mutation" in node.target.name()  # type: ignore[union-attr]
        self.record(
            node.target,
            args,
            kwargs,
            value,
            writes=storages_in((args, kwargs)) if writes else frozenset(),
            subgraphs=subgraphs,
        )
        return value

    def _subgraph(self, gm: fx.GraphModule) -> AtenTrace:
        trace = AtenTrace(gm=gm, shape_env=self.fake_mode.shape_env)
        _Runner(trace, self.fake_mode).run(enable_io_processing=False)
        return trace


def _is_composite(op: OpOverload) -> bool:
    """Whether ``op`` still has to be decomposed here (autograd does it for ordinary tensors)."""
    return bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(
            op.name(), torch._C.DispatchKey.CompositeImplicitAutograd
        )
    )


def _is_item(node: fx.Node) -> bool:
    return (node.op == "call_method" and node.target == "item") or node.target in (
        torch.Tensor.item,
        torch.ops.aten.item.default,
        torch.ops.aten._local_scalar_dense.default,
    )


def _writes(op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> frozenset[int]:
    if not op._schema.is_mutable:
        return frozenset()
    written: list[Any] = []
    for i, formal in enumerate(op._schema.arguments):
        if formal.alias_info is not None and formal.alias_info.is_write:
            written.append(kwargs.get(formal.name, args[i] if i < len(args) else None))
    return storages_in(written)


def _dynamo_value(node: fx.Node) -> Any:
    """What Dynamo (``example_value``) or an exporter (``val``) says that ``node`` is."""
    return node.meta.get("example_value", node.meta.get("val"))


def _detached(value: Any) -> Any:
    """``value`` with new tensor objects on the same storages.

    A metadata mutation (``t_``) in the graph then changes our object, not Dynamo's.
    """
    return tree_map_only(Tensor, torch.ops.aten.alias.default, value)


def _fake_mode_of(gm: fx.GraphModule) -> FakeTensorMode:
    """The mode of the graph's own fake values. A tracing context may hold another one."""
    for node in gm.graph.nodes:
        for value in tree_iter(_dynamo_value(node)):
            if isinstance(value, FakeTensor):
                return value.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def _unbacked_symbols_as_found(shape_env: ShapeEnv | None) -> Iterator[None]:
    """Forget the symbols that data-dependent operators made here, and checks about them."""
    if shape_env is None:
        yield
        return
    asserts = {symbol: list(found) for symbol, found in shape_env.deferred_runtime_asserts.items()}
    num_asserts = shape_env.num_deferred_runtime_asserts
    try:
        with shape_env.ignore_fresh_unbacked_symbols():
            yield
    finally:
        shape_env.deferred_runtime_asserts.clear()
        shape_env.deferred_runtime_asserts.update(asserts)
        shape_env.num_deferred_runtime_asserts = num_asserts


def tensors_in(value: Any) -> list[Tensor]:
    return [x for x in tree_iter(value) if isinstance(x, Tensor)]


def flat_calls(call: AtenCall) -> list[AtenCall]:
    """``call`` and the calls of its subgraphs, at every depth."""
    inner = [c for sub in call.subgraphs for made in sub.calls for c in flat_calls(made)]
    return [call, *inner]


def _names(call: AtenCall) -> list[str]:
    return [inner.name for inner in flat_calls(call)]
