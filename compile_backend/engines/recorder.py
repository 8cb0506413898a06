"""The recorder: runs a function once and writes what it calls on a tape.

A dispatch mode sees the operators, a function mode the Python calls that read a tensor without
one. A compiled piece, a break op or a Python custom operator is one entry with both modes off
inside it, and so is a function marked ``no_graph`` where the capture is breakable. A recorder that
acts *as a device* enters break ops and custom operators instead, so that whatever a device graph
could not hold inside them is refused.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload

from compile_backend.engines.autocast import in_present_autocast, in_present_inference_mode
from compile_backend.engines.bindings import quickest_callable
from compile_backend.engines.breakable import (
    breaking_at,
    call_marked,
    failure_of,
    name_of,
)
from compile_backend.engines.custom_ops import registered_kernel
from compile_backend.engines.held_tensors import held_tensors
from compile_backend.engines.host_reads import is_metadata_query
from compile_backend.engines.modes import SeeOperators, SeeReads
from compile_backend.engines.opaque import CompiledPiece, current_recorder, recording_to
from compile_backend.engines.process_state import GeneratorStates, modes_changed_to
from compile_backend.engines.refusals import Refusals
from compile_backend.engines.schemas import (
    changes_layout,
    is_composite,
    leaves,
    written_registers,
)
from compile_backend.engines.tape import (
    Entry,
    EntryKind,
    Origin,
    Register,
    Tape,
    map_tensors,
    registers_in,
    tensors_in,
)
from compile_backend.errors import CaptureError, FallbackReason

__all__ = ["TapeRecorder"]

aten = torch.ops.aten

# Higher-order operators that choose what runs by reading a predicate on the host.
_READING_HIGHER_ORDER = frozenset({"cond", "while_loop"})


class TapeRecorder:
    """Records the calls of one function of one thread. Used once."""

    def __init__(self, *, as_device: bool, breakable: bool, generators: GeneratorStates) -> None:
        self.tape = Tape()
        self.refusals = Refusals(self.tape, as_device=as_device)
        self._as_device = as_device
        self.breakable = breakable
        self._generators = generators
        self._dispatch_mode = SeeOperators()
        self._function_mode = SeeReads()
        self._num_open_composites = 0

    def run(self, fn: Callable[..., Sequence[Any]], static_inputs: Sequence[Tensor]) -> list[Any]:
        """Call ``fn`` on the inputs, record it, return its outputs. Raises what ``fn`` raises."""
        tape = self.tape
        tape.inputs = [
            tape.find(tensor) or tape.add(tensor, Origin.INPUT) for tensor in static_inputs
        ]
        breaking = breaking_at(self) if self.breakable else nullcontext()
        with recording_to(self), breaking, self._watching():
            outputs = fn(*static_inputs)
        self.refusals.check_outputs(outputs)
        tape.outputs = [map_tensors(tape.read, each) for each in outputs]
        return list(outputs)

    # --- what the modes see -------------------------------------------------------------------

    def call_operator(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator call and record it; called by the dispatch mode, which is off here."""
        if isinstance(op, HigherOrderOperator):
            return self._call_higher_order(op, args, kwargs)
        self.refusals.check_operator(op, args, kwargs)
        if self._num_open_composites:
            return self._call_inside_composite(op, args, kwargs)
        if is_metadata_query(op):
            return op(*args, **kwargs)
        if op is aten.lift_fresh.default and self.tape.find(args[0]) is None:
            return self._lift(args[0])
        if op is aten.detach_.default and args[0].requires_grad is False:
            return args[0]  # torch.tensor() under inference mode ends with it; it does nothing
        kernel = registered_kernel(op, args, kwargs)
        if kernel is not None and self._as_device:
            with self._watching():
                return kernel(*args, **kwargs)
        if is_composite(op, (args, kwargs)):
            return self._call_composite(op, args, kwargs)
        if self._as_device and changes_layout(op):
            return self._call_layout_change(op, args, kwargs)
        return self._call_and_record(op, args, kwargs, kernel)

    def call_function(self, function: Callable[..., Any]) -> None:
        """Judge one call of a Python function of torch; called by the function mode."""
        self.refusals.check_function(function)

    # --- what callers mark ----------------------------------------------------------------------

    def call_piece(self, piece: CompiledPiece, args: tuple[Any, ...]) -> Any:
        recorded_args = self._read(args)
        with self._hidden():
            result = piece.fn(list(args)) if piece.boxed else piece.fn(*args)
        self._append(
            EntryKind.PIECE,
            piece.name,
            in_present_autocast(piece.fn),
            recorded_args,
            {},
            results=self._define(result, piece.name, numbers=True),
            writes=tuple(registers_in(recorded_args)),
            boxed=piece.boxed,
        )
        return result

    def call_break_op(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._as_device:
            return fn(*args, **kwargs)
        name = getattr(fn, "__name__", type(fn).__name__)
        recorded = self._read((args, kwargs))
        with self._hidden():
            result = fn(*args, **kwargs)
        self._append(
            EntryKind.BREAK_OP,
            name,
            in_present_autocast(fn),
            *recorded,
            results=self._define(result, name, numbers=False),
            writes=tuple(registers_in(recorded)),
        )
        return result

    def is_in_segment(self) -> bool:
        return current_recorder() is self  # nobody is, inside what is kept whole

    def call_between_segments(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        stub: Callable[..., Any] | None,
    ) -> Any:
        """Call a function that is marked ``no_graph``, as one entry between the segments."""
        recorded = self._read((args, kwargs))
        if not self._as_device:
            self._refuse_held(fn, args, kwargs)
        written = tuple(registers_in(recorded))
        try:
            with self._hidden():
                result, call = call_marked(fn, args, kwargs, stub)
        except Exception as error:
            # Remembered: where the function swallows it here, a replay would not.
            self.refusals.remember(failure_of(fn, error))
            raise
        self._append(
            EntryKind.NO_GRAPH,
            call.name,
            in_present_autocast(in_present_inference_mode(call) if self._as_device else call),
            *recorded,
            results=None,
            writes=written,
        )
        return result

    def _refuse_held(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Refuse tensors of this capture that a marked function reaches other than as arguments.

        Each replay makes new ones, so it would read those of the capture.
        """
        given = {id(tensor) for tensor in tensors_in((args, kwargs))}
        for tensor in held_tensors(fn, args, kwargs):
            register = self.tape.find(tensor)
            if id(tensor) not in given and register and register.origin is not Origin.EXTERNAL:
                raise self.refusals.remember(
                    CaptureError(
                        f"{name_of(fn)}, which is marked no_graph, holds a tensor of shape "
                        f"{list(tensor.shape)} of the segments before it (in a closure, an object, "
                        "an attribute); a replay makes another one, so pass it as an argument"
                    )
                )

    # --- one kind of call each ------------------------------------------------------------------

    def _call_and_record(
        self,
        op: OpOverload[Any, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        kernel: Callable[..., Any] | None,
    ) -> Any:
        if kernel is None:
            kind = EntryKind.OPERATOR
            name, call = quickest_callable(op, args, kwargs)
        else:
            kind = EntryKind.CUSTOM_KERNEL
            name, call = f"{op.namespace}_{op._opname}", in_present_autocast(kernel)
        self._save_generators((args, kwargs))
        recorded = self._read((args, kwargs))
        written = tuple(written_registers(op, *recorded))
        layouts = self._layouts(written)
        with self._hidden():
            result = op(*args, **kwargs)
        if self._as_device and self._layouts(written) != layouts:
            raise self.refusals.error(
                FallbackReason.CAPTURE_FAILED,
                f"{op} resized the tensor it was given for its result; give one of the right shape",
            )
        self._append(
            kind,
            name,
            call,
            *recorded,
            results=self._define_operator_results(op, result),
            writes=written,
        )
        return result

    def _layouts(self, registers: tuple[Register, ...]) -> list[tuple[torch.Size, tuple[int, ...]]]:
        tensors = map(self.tape.tensor, registers)
        return [(each.shape, each.stride()) for each in tensors if each.layout is torch.strided]

    def _call_layout_change(
        self, op: OpOverload[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """``t_`` and the like, as a device: recorded as a view, since memory does not change.

        The entries so far go on using the tensor as it was, so their register gets an alias of it.
        """
        recorded_args, recorded_kwargs = self._read((args, kwargs))
        with self._hidden():
            as_it_was = args[0].detach()
            result = op(*args, **kwargs)
        self.tape.tensors[recorded_args[0].index] = as_it_was
        self._append(
            EntryKind.OPERATOR,
            str(op),
            op,
            recorded_args,
            recorded_kwargs,
            results=self.tape.add(args[0], Origin.RESULT),
        )
        return result

    def _call_composite(
        self, op: OpOverload[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """An operator made of others reaches the mode whole under inference mode.

        As a device its parts are recorded. Otherwise it stays one entry, which is quicker, and its
        parts are only checked: a host read inside it would hide a baked shape.
        """
        if self._as_device:
            return self._decompose(op, args, kwargs)
        name, call = quickest_callable(op, args, kwargs)
        self._save_generators((args, kwargs))
        recorded = self._read((args, kwargs))
        self._num_open_composites += 1
        try:
            result = self._decompose(op, args, kwargs)
        finally:
            self._num_open_composites -= 1
        self._append(
            EntryKind.OPERATOR,
            name,
            call,
            *recorded,
            results=self._define_operator_results(op, result),
            writes=tuple(written_registers(op, *recorded)),
        )
        return result

    def _call_inside_composite(
        self, op: OpOverload[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if is_composite(op, (args, kwargs)):
            return self._decompose(op, args, kwargs)
        with self._hidden():
            return op(*args, **kwargs)

    def _decompose(
        self, op: OpOverload[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # Function modes would be handed this very operator again, without end.
        with self._watching(), torch._C.DisableTorchFunction():
            return op.decompose(*args, **kwargs)

    def _call_higher_order(
        self, op: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        name = op.name()
        if self._as_device and name in _READING_HIGHER_ORDER:
            raise self.refusals.error(
                FallbackReason.HOST_READ, f"{name} reads its predicate on the host"
            )
        if self._num_open_composites:
            with self._hidden():
                return op(*args, **kwargs)
        recorded = self._read((args, kwargs))
        with self._hidden():
            result = op(*args, **kwargs)
        self._append(
            EntryKind.HIGHER_ORDER,
            name,
            op,
            *recorded,
            results=self._define(result, name, numbers=True),
            writes=tuple(registers_in(recorded)),
        )
        return result

    def _lift(self, fresh: Tensor) -> Tensor:
        """``torch.tensor(...)``: a value made by Python. It has no operator, so it is kept."""
        with torch.inference_mode(False):
            pristine = fresh.clone()
        register = self.tape.add(fresh, Origin.CONSTANT)
        self.tape.pristine[register] = pristine
        self._append(EntryKind.CONSTANT, "constant", torch.clone, (), {}, results=register)
        return fresh

    # --- bookkeeping ----------------------------------------------------------------------------

    def _append(
        self,
        kind: EntryKind,
        name: str,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        results: Any,
        writes: tuple[Register, ...] = (),
        boxed: bool = False,
    ) -> None:
        self.tape.entries.append(
            Entry(
                kind=kind,
                name=name,
                call=call,
                args=args,
                kwargs=kwargs,
                results=results,
                writes=writes,
                boxed=boxed,
            )
        )

    def _read(self, tree: Any) -> Any:
        """``tree`` with registers for tensors. Refuses what would tie a replay to this call."""
        for tensor in tensors_in(tree):
            self.refusals.check_tensor(tensor)
        return map_tensors(self.tape.read, tree)

    def _define_operator_results(self, op: OpOverload[Any, Any], result: Any) -> Any:
        """Registers for an operator's results; one that is a written argument keeps its own."""
        returns = op._schema.returns
        if not returns:
            return None
        if len(returns) == 1:
            return self._define_return(returns[0], result)
        return tuple(map(self._define_return, returns, result))

    def _define_return(self, returned: Any, result: Any) -> Any:
        if returned.alias_info is not None and returned.alias_info.is_write:
            return map_tensors(self._keep_register, result)
        # Even a result that is an argument (``contiguous`` of a contiguous tensor) is a new value:
        # on a replay the call may return another tensor.
        return map_tensors(lambda tensor: self.tape.add(tensor, Origin.RESULT), result)

    def _keep_register(self, tensor: Tensor) -> Register:
        return self.tape.find(tensor) or self.tape.add(tensor, Origin.RESULT)

    def _define(self, result: Any, name: str, *, numbers: bool) -> Any:
        """Registers for the results of an opaque call."""
        self.refusals.check_results(result, name, numbers=numbers)
        return map_tensors(lambda tensor: self.tape.add(tensor, Origin.RESULT), result)

    def _save_generators(self, tree: Any) -> None:
        for leaf in leaves(tree):
            if isinstance(leaf, torch.Generator):
                self._generators.save(leaf)

    # --- modes ----------------------------------------------------------------------------------

    @contextmanager
    def _hidden(self) -> Iterator[None]:
        """Both modes off, and no recorder: what runs in this block is somebody else's."""
        with recording_to(None), modes_changed_to(self._take_off):
            yield

    def _watching(self) -> AbstractContextManager[None]:
        """Both modes on, at the top; torch takes a mode off while it handles a call."""
        return modes_changed_to(self._put_on_top)

    def _put_on_top(self, dispatch_modes: list[Any], function_modes: list[Any]) -> None:
        self._take_off(dispatch_modes, function_modes)
        dispatch_modes.append(self._dispatch_mode)
        function_modes.append(self._function_mode)

    def _take_off(self, dispatch_modes: list[Any], function_modes: list[Any]) -> None:
        dispatch_modes[:] = [mode for mode in dispatch_modes if mode is not self._dispatch_mode]
        function_modes[:] = [mode for mode in function_modes if mode is not self._function_mode]
