"""A tape as a function without arguments on the captured memory: what the strict engine replays."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from compile_backend.engines.program import Names, Program, target_of
from compile_backend.engines.tape import (
    Entry,
    EntryKind,
    Origin,
    Register,
    Tape,
    registers_in,
    storage_of,
)
from compile_backend.errors import ReplayError

__all__ = ["fixed_program"]

_COLLECTIVES = "_c10d_functional"


def fixed_program(tape: Tape) -> Program:
    """``replay()``: every register is the captured tensor; fresh results are copied over theirs.

    An entry that only made views is left out, as a device graph holds no kernel for it.
    """
    names = Names()
    for register in tape.registers:
        names.objects[register.name] = tape.tensor(register)
    renewed = tape.constants_to_renew()

    lines = ["def replay():"]
    known_storages = {
        storage_of(tape.tensor(reg))
        for reg in tape.registers
        if reg.origin in (Origin.INPUT, Origin.EXTERNAL)
    }
    num_calls = 0
    for entry in tape.entries:
        results = list(registers_in(entry.results))
        fresh = {reg for reg in results if storage_of(tape.tensor(reg)) not in known_storages}
        known_storages |= {storage_of(tape.tensor(reg)) for reg in results}
        if entry.kind is EntryKind.CONSTANT and entry.results in renewed:
            name = entry.results.name
            names.objects[f"{name}_pristine"] = tape.pristine[entry.results]
            lines.append(f"{name}.copy_({name}_pristine)")
            num_calls += 1
        elif entry.kind is EntryKind.CONSTANT:
            continue
        elif fresh or entry.writes or entry.is_opaque or not results:
            lines += _statements(names, entry, fresh, tape)
            num_calls += 1
    lines.append(f"return {names.expression(tape.outputs)}")
    return Program(lines, names.objects, num_calls=num_calls)


def _statements(names: Names, entry: Entry, fresh: set[Register], tape: Tape) -> list[str]:
    call = names.call(entry)
    if fresh and entry.name.startswith(_COLLECTIVES):
        call = f"{names.bind('arrived', _arrived)}({call})"
    if not fresh:
        return [call]
    if isinstance(entry.results, Register):
        return [f"{_overwriter(names, entry.results, tape)}({entry.results.name}, {call})"]
    target = target_of(entry.results, lambda reg: f"new_{reg.index}" if reg in fresh else "")
    return [
        f"{target} = {call}",
        *(
            f"{_overwriter(names, register, tape)}({register.name}, new_{register.index})"
            for register in sorted(fresh, key=lambda register: register.index)
        ),
    ]


def _arrived(result: Any) -> Any:
    """The result of a collective once it is there: it is copied over the captured one at once,
    and waiting for that one, as the recording does later, would not wait for this."""
    return tree_map(torch.ops._c10d_functional.wait_tensor, result)


def _overwriter(names: Names, register: Register, tape: Tape) -> str:
    overlaps = torch._debug_has_internal_overlap(tape.tensor(register)) == 1
    overwrite = _overwrite_storage if overlaps else _overwrite
    return names.bind(overwrite.__name__.lstrip("_"), overwrite)


def _overwrite(captured: Tensor, result: Tensor) -> None:
    if captured.shape != result.shape:
        raise ReplayError(
            f"a recorded call returned shape {list(result.shape)} where the capture had "
            f"{list(captured.shape)}; a recording has fixed shapes"
        )
    if captured.data_ptr() != result.data_ptr():
        captured.copy_(result)


def _overwrite_storage(captured: Tensor, result: Tensor) -> None:
    """For a tensor with elements that share memory (``expand``), which ``copy_`` refuses."""
    if (captured.shape, captured.stride()) != (result.shape, result.stride()):
        raise ReplayError(
            f"a recorded call returned shape {list(result.shape)} and strides "
            f"{list(result.stride())} where the capture had {list(captured.shape)} and "
            f"{list(captured.stride())}; a recording has fixed layouts"
        )
    if captured.data_ptr() != result.data_ptr():
        captured.untyped_storage().copy_(result.untyped_storage())
