"""The description of one static input: :class:`GraphSlot`, its padding policy, the fill context.

A slot is a fact until a registry gives it a buffer; from then on the buffer's address is fixed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from compile_backend.errors import SlotDefinitionError, SlotNotAllocatedError
from compile_backend.registry.layout import NO_AXIS, Axis, SliceFn, SlotLayout

__all__ = ["ComputedNumber", "FillContext", "GraphSlot", "PaddingPolicy"]


class PaddingPolicy(Enum):
    """What becomes of the rows between the live size and the padded size (the tail).

    ``KEEP_PAD``: copy the head; the tail keeps what it holds, on purpose.
    ``FILL_SENTINEL``: copy the head; reset the tail to ``pad_value`` at every fill that leaves one.
    ``ZERO``: copy the head; reset the tail to 0 at every fill that leaves one.
    ``FOREACH_COPY``: copy the head; whoever declares the slot proves that nobody reads the tail.
    ``FILL_ONCE``: fill the whole buffer with ``pad_value`` at registration; then copy heads and
    never reset.
    """

    KEEP_PAD = "keep_pad"
    FILL_SENTINEL = "fill_sentinel"
    ZERO = "zero"
    FOREACH_COPY = "foreach_copy"
    FILL_ONCE = "fill_once"


@dataclass(frozen=True, slots=True)
class FillContext:
    """The sizes of one fill, and what the batch itself does not carry. Given to slot callbacks."""

    raw_bs: int
    padded_bs: int
    raw_num_tokens: int
    padded_num_tokens: int
    pp_proxy_tensors: Any = None  # the previous pipeline stage's output, when there is one


ShapeFn = Callable[[int, int], tuple[int, ...]]
PostFill = Callable[[Tensor, Any, FillContext], None]
SourceFn = Callable[[Any, FillContext], Tensor | None]


@dataclass(frozen=True, slots=True)
class ComputedNumber:
    """A ``post_fill`` that sets the whole buffer to one number, or leaves it alone for None.

    On a device such a number is written by the same launch as the heads and tails, where the slot
    has an integer dtype.
    """

    number: Callable[[Any, FillContext], int | None]

    def __call__(self, buffer: Tensor, batch: Any, context: FillContext) -> None:
        """Write the number, where there is one."""
        number = self.number(batch, context)
        if number is not None:
            buffer.fill_(number)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class GraphSlot:
    """One static input of a graph.

    ``shape_fn(max_bs, max_num_tokens)`` is the shape of the whole buffer.
    ``axis`` says which size a view follows: ``"bs"``, ``"tokens"`` or another axis of the registry
    (the leading dimension), ``"none"`` (the whole buffer), or a tuple with an axis name or None
    per dimension.
    ``device`` overrides the registry's device.
    ``pad_value`` is for FILL_SENTINEL and FILL_ONCE.
    ``enabled=False`` keeps the description and allocates nothing.
    ``copy_from_fb=False`` declares a *computed* slot: it is not read from the batch attribute of
    its name, and ``extract_buffer`` exposes it always.
    ``post_fill(buffer, batch, ctx)`` runs on the whole buffer after all heads were copied.
    ``slice_fn(buffer, padded_bs, padded_num_tokens)`` cuts the view, and must return a view that
    starts where the view of any other size starts.
    ``source_fn(batch, ctx)`` replaces the batch attribute as the source. Its result is copied at
    its own length; None skips the copy.

    A name with a dot (``"pp_proxy_tensors.hidden_states"``) is filled and never part of an
    extracted batch. A slot belongs to one registry.

    Raises SlotDefinitionError for a description that cannot work.
    """

    name: str
    shape_fn: ShapeFn
    dtype: torch.dtype
    axis: Axis = "tokens"
    device: torch.device | str | None = None
    padding_policy: PaddingPolicy = PaddingPolicy.FOREACH_COPY
    pad_value: float | None = None
    enabled: bool = True
    copy_from_fb: bool = True
    post_fill: PostFill | None = None
    slice_fn: SliceFn | None = None
    source_fn: SourceFn | None = None
    _layout: SlotLayout | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.name:
            raise SlotDefinitionError("a slot needs a name; it is the batch field that it copies")
        _check_policy(self)
        if isinstance(self.axis, tuple) and self.slice_fn is not None:
            others = {one for one in self.axis if one is not None} - {"bs", "tokens"}
            if others:
                raise SlotDefinitionError(
                    f"slot {self.name!r} has a slice_fn, which is given the bs and token sizes "
                    f"only, but follows {sorted(others)}; leave slice_fn out"
                )
        if self.is_dotted and self.copy_from_fb and self.source_fn is None:
            raise SlotDefinitionError(
                f"slot {self.name!r} has a dot in its name, so no batch field can fill it; give it "
                f"a source_fn, or copy_from_fb=False and a post_fill"
            )

    @property
    def is_dotted(self) -> bool:
        """Whether the slot stays out of the extracted batch."""
        return "." in self.name

    @property
    def is_computed(self) -> bool:
        """Whether the slot is exposed no matter what the batch holds under its name."""
        return not self.copy_from_fb

    @property
    def tail_value(self) -> float | None:
        """What the tail is reset to at every fill, or None where it is left alone."""
        if self.padding_policy is PaddingPolicy.ZERO:
            return 0
        if self.padding_policy is PaddingPolicy.FILL_SENTINEL:
            return self.pad_value
        return None

    @property
    def initial_value(self) -> float:
        """What a newly allocated buffer is filled with."""
        return 0 if self.pad_value is None else self.pad_value

    @property
    def buffer(self) -> Tensor | None:
        """The whole buffer at its fixed address; None before registration and when disabled."""
        return None if self._layout is None else self._layout.buffer

    @property
    def layout(self) -> SlotLayout:
        """The buffer and how it is cut. Raises SlotNotAllocatedError where there is none."""
        if self._layout is None:
            remedy = "register it first" if self.enabled else "declare it with enabled=True"
            raise SlotNotAllocatedError(
                f"slot {self.name!r} has no buffer (enabled={self.enabled}); {remedy}"
            )
        return self._layout

    def attach(self, layout: SlotLayout) -> None:
        """Give the slot its buffer, once and for good. Called by the registry."""
        if self._layout is not None:
            raise SlotDefinitionError(
                f"slot {self.name!r} already has a buffer at {self._layout.buffer.data_ptr():#x}; "
                f"a slot belongs to one registry, so give dataclasses.replace(slot) to another"
            )
        object.__setattr__(self, "_layout", layout)

    def slice_for(self, padded_bs: int, padded_num_tokens: int) -> Tensor:
        """The view of this slot that a graph of the given padded sizes reads.

        Returns [n, ...] where n is padded_bs, padded_num_tokens or the whole length, by ``axis``;
        a view of the buffer, so its address is the buffer's and it stays valid for the buffer's
        life. No allocation of storage, no synchronisation.
        Raises SlotOverflowError when n exceeds the buffer, SlotNotAllocatedError for a slot
        without a buffer, SlotMismatchError for a slot that follows other axes than these two.
        """
        return self.layout.view({"bs": padded_bs, "tokens": padded_num_tokens})


def _check_policy(slot: GraphSlot) -> None:
    policy, value = slot.padding_policy, slot.pad_value
    takes_value = policy in (PaddingPolicy.FILL_SENTINEL, PaddingPolicy.FILL_ONCE)
    if takes_value and value is None:
        raise SlotDefinitionError(
            f"slot {slot.name!r} has policy {policy.name}, which needs a pad_value; pass one, or "
            f"use ZERO"
        )
    if policy is PaddingPolicy.ZERO and value:
        raise SlotDefinitionError(
            f"slot {slot.name!r} has policy ZERO and pad_value={value!r}; use FILL_SENTINEL to "
            f"reset the tail to {value!r}"
        )
    if value is not None and not _can_hold(slot.dtype, value):
        raise SlotDefinitionError(
            f"slot {slot.name!r} of dtype {slot.dtype} cannot hold pad_value={value!r}; pick a "
            f"value of that dtype"
        )
    if isinstance(slot.axis, str) and not slot.axis:
        raise SlotDefinitionError(
            f"slot {slot.name!r} has an empty axis; use 'bs', 'tokens' or {NO_AXIS!r}"
        )


def _can_hold(dtype: torch.dtype, value: float) -> bool:
    if dtype.is_floating_point or dtype.is_complex:
        return True
    if dtype is torch.bool:
        return value in (0, 1)
    info = torch.iinfo(dtype)
    return value == value and float(value).is_integer() and info.min <= value <= info.max
