"""A tape as a function of its inputs: what the host engine replays."""

from collections import defaultdict

from compile_backend.engines.program import Names, Program, target_of
from compile_backend.engines.tape import Entry, EntryKind, Origin, Register, Tape, registers_in

__all__ = ["late_bound_program"]


def late_bound_program(tape: Tape) -> Program:
    """``replay(*inputs)``: inputs are parameters, results are locals, deleted after their last use.

    A constant is one object for all replays, so one that something may write is cloned from its
    pristine copy where it was made.
    """
    names = Names()
    renewed = tape.constants_to_renew(kept=tape.outputs)
    for register in tape.of_origin(Origin.EXTERNAL):
        names.objects[register.name] = tape.tensor(register)
    for register, pristine in tape.pristine.items():
        suffix = "_pristine" if register in renewed else ""
        names.objects[register.name + suffix] = pristine

    lines = [f"def replay({', '.join(_parameters(tape.inputs))}):"]
    last_reads = _last_reads(tape, renewed)
    defined = {reg for reg in tape.registers if reg.origin in (Origin.INPUT, Origin.EXTERNAL)}
    read = {reg for entry in tape.entries for reg in registers_in((entry.args, entry.kwargs))}
    read |= set(registers_in(tape.outputs))
    num_calls = 0
    for position, entry in enumerate(tape.entries):
        fresh = set(registers_in(entry.results)) - defined
        defined |= fresh
        if entry.kind is EntryKind.CONSTANT and entry.results not in renewed:
            continue
        num_calls += 1
        if entry.kind is EntryKind.CONSTANT:
            name = entry.results.name
            lines.append(f"{name} = {name}_pristine.clone()")
        else:
            lines += _statements(names, entry, fresh & read, last_reads[position])
    lines.append(f"return {names.expression(tape.outputs)}")
    return Program(lines, names.objects, num_calls=num_calls)


def _parameters(inputs: list[Register]) -> list[str]:
    """One name per input; a tensor given twice is read under the name of its first position."""
    return [
        f"{register.name}_again_{position}" if register in inputs[:position] else register.name
        for position, register in enumerate(inputs)
    ]


def _last_reads(tape: Tape, renewed: set[Register]) -> dict[int, list[Register]]:
    """For each entry, by position, the local registers that nothing reads after it."""
    last: dict[Register, int] = {}
    for position, entry in enumerate(tape.entries):
        for register in registers_in((entry.args, entry.kwargs)):
            if register.origin is Origin.RESULT or register in renewed:
                last[register] = position
    returned = set(registers_in(tape.outputs))
    dead: dict[int, list[Register]] = defaultdict(list)
    for register, position in last.items():
        if register not in returned:
            dead[position].append(register)
    return dead


def _statements(names: Names, entry: Entry, kept: set[Register], dead: list[Register]) -> list[str]:
    target = target_of(entry.results, lambda register: register.name if register in kept else "")
    assignment = f"{target} = " if target else ""
    delete = [f"del {', '.join(register.name for register in dead)}"] if dead else []
    if entry.boxed and dead:
        # The variables go first, so that the piece, which consumes its list, can free a tensor
        # as soon as it has read it.
        return [
            f"args = {names.expression(list(entry.args))}",
            *delete,
            f"{assignment}{names.callable(entry)}(args)",
        ]
    return [f"{assignment}{names.call(entry)}", *delete]
