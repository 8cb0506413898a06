"""The Python function behind a custom operator, where it may be called directly.

Dispatching a ``torch.library.custom_op`` costs more than many of its kernels take: defaults, the
aliasing check and Dynamo's guard run on every call. A recorded call has passed them once, so its
replays call the registered function. Anything unusual keeps the operator.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload

__all__ = ["registered_kernel"]

_TORCH_NAMESPACES = frozenset({"aten", "prim", "prims", "quantized"})


def registered_kernel(
    op: OpOverload[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., Any] | None:
    """The function that ``op`` runs for these arguments without gradients; None if in doubt.

    In doubt means: not defined by ``custom_op``, tensor subclasses, tensors on several devices or
    on none, a kernel that is disabled, or one registered by other means.
    """
    if op.namespace in _TORCH_NAMESPACES:
        return None
    opdef = OPDEFS.get(op._schema.name)
    if opdef is None or opdef._opoverload is not op or opdef._disabled_kernel:
        return None
    tensors = list(_tensors((args, kwargs)))
    if any(type(each) not in (Tensor, torch.nn.Parameter) for each in tensors):
        return None
    devices = {each.device.type for each in tensors}
    if len(devices) != 1:
        return None
    (device,) = devices
    if device in opdef._backend_fns:
        return _unwrapped(opdef._backend_fns[device])
    key = torch._C._dispatch_key_for_device(device)
    if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key):
        return None  # registered through torch.library.impl: it wins over the default kernel
    return _unwrapped(opdef._backend_fns.get(None))


def _unwrapped(registered: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """The function given to ``register_kernel``, out of the wrapper that torch put around it."""
    if registered is None:
        return None
    wrapper = inspect.unwrap(registered)
    if not wrapper.__qualname__.endswith("register_kernel.<locals>.inner.<locals>.wrapped_fn"):
        return None  # another torch, or somebody else's wrapper
    function = inspect.getclosurevars(wrapper).nonlocals.get("fn")
    return function if callable(function) else None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
