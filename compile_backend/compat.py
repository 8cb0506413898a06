"""What differs between torch versions, or is torch-internal, in one place.

Everything here is read from torch 2.11 to 2.15; nothing outside this module reaches into
``torch._dynamo`` for more than a public decorator or a stock compiler. Place in the flow: below
every part that talks to Dynamo (``backend``, ``passes.classify``, ``runners.traced``, ``inspect``).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.fx.experimental._config
from torch import Tensor, fx
from torch._dynamo.exc import (
    RestartAnalysis,
    ShortenTraceback,
    SkipFrame,
    TensorifyScalarRestartAnalysis,
)
from torch._dynamo.source import (
    AttrSource,
    DictGetItemSource,
    GetItemSource,
    LocalSource,
    TensorPropertySource,
)
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting
from torch._guards import ChainedSource, CompileContext, Source, TracingContext, tracing
from torch.utils._sympy.symbol import SymT, symbol_is_type

__all__ = [
    "UNRESOLVED",
    "attribute_of",
    "belongs_to_dynamo",
    "changed_objects",
    "container_of",
    "describe",
    "frame_locals",
    "frame_name",
    "graph_break",
    "in_dynamo",
    "is_marked",
    "is_module_state",
    "is_recompile_error",
    "is_tensor_property",
    "owner_of_compiled",
    "owner_of_frame",
    "piece_tracing_context",
    "recompile_limit",
    "recompile_reason",
    "register_dynamo_backend",
    "resolve_source",
    "restart_with_dynamic_batch",
    "shape_guards_failing_at",
    "show_graph",
    "source_name",
    "tracing_by_kind",
]

UNRESOLVED = object()  # what resolve_source returns for a source it does not know how to walk


# -- sources ---------------------------------------------------------------------------------------


def source_name(source: Source) -> str:
    """The printed name of a Dynamo source, for messages only (``L['batch'].input_ids``)."""
    name = source.name  # a property since 2.12, a method before
    return str(name() if callable(name) else name)


def attribute_of(source: Source) -> tuple[Source, str] | None:
    """``(base, field)`` when the source reads one named field of an object, else None."""
    if isinstance(source, AttrSource):
        return source.base, str(source.member)
    if isinstance(source, DictGetItemSource) and isinstance(source.index, str):
        return source.base, source.index
    if isinstance(source, GetItemSource) and isinstance(source.index, str):
        return source.base, source.index
    return None


def resolve_source(source: Source, scope: Mapping[str, Any]) -> Any:
    """The object a source stands for in the frame being compiled, or ``UNRESOLVED``."""
    if isinstance(source, LocalSource):
        return scope.get(source.local_name, UNRESOLVED)
    if isinstance(source, AttrSource):
        base = resolve_source(source.base, scope)
        if base is UNRESOLVED:
            return UNRESOLVED
        return getattr(base, source.member, UNRESOLVED)
    if isinstance(source, (GetItemSource, DictGetItemSource)):
        base = resolve_source(source.base, scope)
        index = source.index
        if base is UNRESOLVED or not isinstance(index, (int, str)):
            return UNRESOLVED
        try:
            return base[index]
        except (KeyError, IndexError, TypeError):
            return UNRESOLVED
    return UNRESOLVED


def container_of(source: Source, scope: Mapping[str, Any]) -> tuple[Any, str | int] | None:
    """``(mapping or sequence, key)`` that a source reads its value from, so that whoever keeps it
    sees a value that is replaced later; None for a source that cannot be walked."""
    if not isinstance(source, (AttrSource, DictGetItemSource, GetItemSource)):
        return None
    base = resolve_source(source.base, scope)
    key = source.member if isinstance(source, AttrSource) else source.index
    if base is UNRESOLVED or not isinstance(key, (str, int)):
        return None
    if not isinstance(source, AttrSource):
        return base, key
    fields = getattr(base, "__dict__", {})
    return (fields, key) if key in fields else None


def is_tensor_property(source: Source) -> bool:
    """Whether a number's source is a size, stride or offset of some tensor."""
    return isinstance(source, TensorPropertySource)


def is_module_state(source: Source, graph_arg: Any, fake: Tensor) -> bool:
    """Whether a tensor is a parameter or buffer: a fixed address by PyTorch's own marks."""
    if getattr(fake, "_dynamo_static_input_type", None) is not None:
        return True
    example = getattr(graph_arg, "example", None)
    if isinstance(example, torch.nn.Parameter):
        return True
    while isinstance(source, ChainedSource):
        if isinstance(source, AttrSource) and source.member in ("_parameters", "_buffers"):
            return True
        source = source.base
    return False


# -- the frame being compiled ----------------------------------------------------------------------


def _current_translator() -> Any | None:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx()
    except (AttributeError, AssertionError):
        return None  # called by hand, outside Dynamo


def in_dynamo() -> bool:
    """Whether a Dynamo frame is being compiled on this thread."""
    return _current_translator() is not None


def frame_locals() -> Mapping[str, Any]:
    """The live local variables of the frame being compiled; empty outside Dynamo."""
    tx = _current_translator()
    return {} if tx is None else dict(tx.output.local_scope)


def graph_break() -> tuple[str, str] | None:
    """``(reason, "file:line in function")`` when a graph break ended the graph being compiled."""
    tx = _current_translator()
    reason = None if tx is None else getattr(tx.output, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    frame = reason.user_stack[-1] if reason.user_stack else None
    where = f"{frame.filename}:{frame.lineno} in {frame.name}" if frame else "unknown line"
    return str(reason.reason).strip().splitlines()[0], where


def changed_objects() -> list[str]:
    """Objects from outside the frame being compiled that its Python code changes, by source.

    Dynamo repeats such changes after each call of the graph; whoever runs the graph without Dynamo
    does not. Tensors that operators write are not among them.
    """
    tx = _current_translator()
    if tx is None:
        return []
    effects = tx.output.side_effects
    existing = (AttributeMutationExisting, ValueMutationExisting)
    return [
        source_name(variable.source) if variable.source is not None else str(variable)
        for variable in effects.id_to_variable.values()
        if isinstance(variable.mutation_type, existing) and effects.is_modified(variable)
    ]


@contextmanager
def tracing_by_kind() -> Iterator[None]:
    """While tracing for a runner: dimensions marked dynamic hold for sizes 0 and 1 too, one trace
    for all, and every kind of batch may have a trace of its own."""
    shapes: Any = torch.fx.experimental._config
    limits: dict[str, Any] = {"recompile_limit": 64, "accumulated_recompile_limit": 4096}
    with shapes.patch(backed_size_oblivious=True), torch._dynamo.config.patch(limits):
        yield


def is_recompile_error(error: BaseException) -> bool:
    """Whether the stance ``fail_on_recompile`` raised this."""
    return isinstance(error, RuntimeError) and "fail_on_recompile" in str(error)


def recompile_reason(error: BaseException) -> str:
    """The guards that failed, of an error for which :func:`is_recompile_error` holds."""
    lines = [line.strip(" -") for line in str(error).splitlines()]
    return "; ".join(line for line in lines[1:] if line and "guard failure(s)" not in line) or str(
        error
    )


def recompile_limit() -> int:
    """How many graphs Dynamo traces of one function before it runs that function eagerly."""
    return int(torch._dynamo.config.recompile_limit)


def _innermost(backend: Any) -> Any:
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    return backend


def owner_of_frame() -> Any | None:
    """The object that ``torch.compile`` made for this call of it, or None outside Dynamo.

    One object per ``torch.compile`` call, so it tells two compiled models with the same options
    apart.
    """
    tx = _current_translator()
    return None if tx is None else _innermost(tx.output.compiler_fn)


def owner_of_compiled(compiled: Any) -> Any | None:
    """The same object, found from what ``torch.compile`` returned; None for anything else."""
    context = getattr(compiled, "dynamo_ctx", None)
    if context is None:
        cells = getattr(compiled, "__closure__", None) or ()
        contexts = (cell.cell_contents for cell in cells if _is_filled(cell))
        context = next((c for c in contexts if hasattr(c, "callback")), None)
    callback = getattr(context, "callback", None)
    return None if callback is None else _innermost(callback)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - reading an empty cell raises
    except ValueError:
        return False
    return True


def restart_with_dynamic_batch(dims: Sequence[tuple[Tensor, int]]) -> NoReturn:
    """Make Dynamo trace this frame again with these dimensions symbolic.

    Dynamo lets one exception restart the analysis from inside a backend, the one that
    AOTAutograd's scalar pass raises; weak dynamic marks are read again at the restart. A
    dimension that the model fixes is then specialised without an error.
    """
    for tensor, dim in dims:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)
    tx = _current_translator()
    if tx is not None:
        tx.speculation_log.clear()  # other sizes take other turns than the log remembers
    raise TensorifyScalarRestartAnalysis(restart_reason="graphbuf: trace with a dynamic batch size")


def belongs_to_dynamo(error: Exception) -> bool:
    """Whether an exception is Dynamo talking to itself through the backend: let it pass."""
    return isinstance(error, (RestartAnalysis, ShortenTraceback, SkipFrame))


def is_marked(tensor: Tensor, dim: int) -> bool:
    """Whether a dimension was marked dynamic, weakly dynamic or static before."""
    marks = ("_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices", "_dynamo_static_indices")
    return any(dim in getattr(tensor, mark, ()) for mark in marks)


def frame_name() -> str | None:
    """Name of the function being compiled, with the number of its compilation (``forward#0/1``)."""
    tx = _current_translator()
    if tx is None:
        return None
    compile_id = CompileContext.current_compile_id()
    return f"{tx.f_code.co_name}#{compile_id}" if compile_id else str(tx.f_code.co_name)


# -- compiling pieces ------------------------------------------------------------------------------


@contextmanager
def piece_tracing_context(fake_mode: Any) -> Iterator[None]:
    """A fresh tracing context on the graph's own fake mode.

    The context Dynamo leaves open belongs to another fake mode than the graph's values, which
    AOTAutograd refuses to mix. A piece may read a Python float that Dynamo passes as a 0-d tensor:
    to the compiler that is a number that depends on data, which it must be allowed to carry. The
    floats Dynamo knows are hidden meanwhile: AOTAutograd fixes every one that the graph at hand
    does not use, and a piece uses few.
    """
    if fake_mode is None or fake_mode.shape_env is None:
        with tracing(TracingContext(fake_mode)):
            yield
        return
    shape_env = fake_mode.shape_env
    known = getattr(shape_env, "backed_var_to_val", None)  # named so since 2.12
    if known is None:
        known = shape_env.var_to_val
    floats = {
        symbol: value for symbol, value in known.items() if symbol_is_type(symbol, SymT.FLOAT)
    }
    allowed = fake_mode.allow_scalar_outputs
    try:
        fake_mode.allow_scalar_outputs = True
        for symbol in floats:
            del known[symbol]
        with tracing(TracingContext(fake_mode)):
            yield
    finally:
        known.update(floats)
        fake_mode.allow_scalar_outputs = allowed


def show_graph(name: str, gm: fx.GraphModule) -> None:
    """Offer a graph to whoever listens: ``TORCH_LOGS=graph_code`` and depyf's ``prepare_debug``."""
    import torch._dynamo.utils
    from torch._logging._internal import getArtifactLogger

    # Looked up on the module at each call: depyf replaces this function while it listens.
    code = vars(torch._dynamo.utils)["lazy_format_graph_code"](name, gm)
    getArtifactLogger(__name__, "graph_code").debug("%s", code)


def shape_guards_failing_at(shape_env: Any, sizes: Mapping[Any, int]) -> str | None:
    """The first shape guard that does not hold when the symbols take ``sizes``, as text.

    Covers every guard on the ShapeEnv, those that AOTAutograd and Inductor added included, and
    the value range of each symbol. Dynamo checks guards at the caller's sizes only.
    """
    for symbol, size in sizes.items():
        value_range = shape_env.var_to_range.get(symbol)
        if value_range is not None and not (value_range.lower <= size <= value_range.upper):
            return f"{value_range.lower} <= {symbol} <= {value_range.upper} at {symbol} = {size}"
        replaced = shape_env.replace(symbol)
        if replaced != symbol and not _holds(replaced, sizes, equal_to=size):
            return f"{symbol} == {replaced} at {symbol} = {size}"
    for guard in shape_env.guards:
        expr = shape_env.replace(guard.expr)
        if not _holds(expr, sizes):
            values = ", ".join(f"{symbol} = {size}" for symbol, size in sizes.items())
            return f"{guard.expr} at {values}"
    return None


def _holds(expr: Any, sizes: Mapping[Any, int], *, equal_to: int | None = None) -> bool:
    value = expr.xreplace(dict(sizes)) if hasattr(expr, "xreplace") else expr
    if equal_to is not None:
        return bool(getattr(value, "free_symbols", None)) or int(value) == equal_to
    if getattr(value, "free_symbols", None):
        return True  # about symbols that are not sizes of this call: Dynamo's to check
    return bool(value)


# -- registration ----------------------------------------------------------------------------------


def register_dynamo_backend(name: str, compiler_fn: Callable[..., Any]) -> None:
    """Make ``torch.compile(backend=name)`` find ``compiler_fn`` with no entry point installed."""
    from torch._dynamo.backends import registry

    # Where an entry point of that name was discovered, Dynamo registers what it loads itself,
    # and may be importing us to do so.
    if name not in registry._COMPILER_FNS and registry._BACKENDS.get(name) is None:
        registry.register_backend(compiler_fn=compiler_fn, name=name)


def describe(error: BaseException) -> str:
    """One line saying what an exception is and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    where = f"{last.filename}:{last.lineno}" if last else "unknown line"
    return f"{type(error).__name__}: {error} ({where})"
