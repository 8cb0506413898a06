"""What the schema of an operator says about one call of it."""

from collections.abc import Iterator
from typing import Any

import torch
from torch._ops import OpOverload

from compile_backend.engines.tape import Register, registers_in, tensors_in

__all__ = ["changes_layout", "is_composite", "leaves", "written_registers"]


def is_composite(op: OpOverload[Any, Any], arguments: Any) -> bool:
    """Whether ``op`` runs as a composition of other operators for these arguments.

    Composites are resolved above the dispatch modes except under inference mode, where a mode
    meets ``linear`` or ``item`` itself.
    """
    if not op._can_decompose():
        return False
    devices = set()
    for tensor in tensors_in(arguments):
        if tensor.layout is not torch.strided or tensor.is_nested:
            return False
        devices.add(tensor.device.type)
    return not any(
        torch._C._dispatch_has_kernel_for_dispatch_key(
            op.name(), torch._C._dispatch_key_for_device(device)
        )
        for device in devices
    )


def changes_layout(op: OpOverload[Any, Any]) -> bool:
    """Whether ``op`` changes the shape or strides of its first argument in place (``t_``)."""
    return torch.Tag.inplace_view in op.tags and op is not torch.ops.aten.detach_.default


def written_registers(
    op: OpOverload[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[Register]:
    """Registers among the recorded arguments that ``op`` writes, by its schema."""
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            if position < len(args) and not argument.kwarg_only:
                yield from registers_in(args[position])
            else:
                yield from registers_in(kwargs.get(argument.name))


def leaves(tree: Any) -> Iterator[Any]:
    """What the lists, tuples and dicts of ``tree`` hold, in order."""
    if isinstance(tree, list | tuple):
        for each in tree:
            yield from leaves(each)
    elif isinstance(tree, dict):
        for each in tree.values():
            yield from leaves(each)
    else:
        yield tree
