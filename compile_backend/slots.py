"""The slots of one traced graph: declared fields in shared buffers, plain arguments in its own.

Joins a graph's padded inputs to the registries that own their buffers. Declared fields keep the
policies, hooks and names their owner gave them and share the process's input pool; a derived slot
belongs to its graph alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from compile_backend.passes.axes import Axis, PaddedInput
from compile_backend.passes.classify import InputKind, slot_axes
from compile_backend.passes.lift_inputs import SlotSource
from compile_backend.registry.registry import CudaGraphBufferRegistry, SlotFact
from compile_backend.registry.slot import GraphSlot, PaddingPolicy

__all__ = ["GraphSlots"]


class GraphSlots:
    """Slots for the padded inputs of one graph, at its largest buckets.

    ``axes`` with their largest sizes; ``inputs`` that live in slots. Buffers are allocated here.
    """

    def __init__(
        self,
        inputs: Sequence[PaddedInput],
        axes: Sequence[Axis],
        *,
        largest: Mapping[str, int],
        device: torch.device,
    ) -> None:
        self._inputs = tuple(inputs)
        self._axes = tuple(axes)
        self._declared = [i for i in inputs if i.input.kind is InputKind.BATCH_FIELD]
        self._derived = [i for i in inputs if i.input.kind is not InputKind.BATCH_FIELD]
        self._fixed = self._fixed_sizes()
        biggest = self._registry_sizes(largest)
        self.declared = CudaGraphBufferRegistry(
            device=device,
            max_bs=biggest["bs"],
            max_num_tokens=biggest["tokens"],
            share_pool=True,
        )
        self.derived = CudaGraphBufferRegistry(
            device=device, max_bs=0, max_num_tokens=0, max_sizes=dict(largest)
        )
        for padded in self._declared:
            self.declared.register_slot(_declared_slot(padded))
        for padded in self._derived:
            self.derived.register_slot(_derived_slot(padded, largest))

    @property
    def input_indices(self) -> frozenset[int]:
        """Indices of the graph inputs that are read from slots."""
        return frozenset(padded.input.index for padded in self._inputs)

    @property
    def sources(self) -> list[SlotSource]:
        """What the lifting pass needs: which placeholder is read from which slot."""
        return [
            SlotSource(
                placeholder=padded.input.name,
                slot=_slot_name(padded),
                axes=tuple(dict.fromkeys(a for a in padded.axes if a is not None)),
            )
            for padded in self._inputs
        ]

    @property
    def facts(self) -> tuple[SlotFact, ...]:
        return (*self.declared.slot_facts(), *self.derived.slot_facts())

    def view(self, slot: str, sizes: Mapping[str, int]) -> Tensor:
        """The view of a slot at padded axis sizes; the same tensor for the same sizes."""
        if self.derived.has_slot(slot):
            return self.derived.view(slot, sizes)
        return self.declared.view(slot, self._registry_sizes(sizes))

    def fill(
        self, args: Sequence[Any], *, raw: Mapping[str, int], padded: Mapping[str, int]
    ) -> None:
        """Copy the live rows of the call's arguments and restore every tail."""
        if self._declared:
            batch = SimpleNamespace(
                **{str(i.input.field): args[i.input.index] for i in self._declared}
            )
            live, full = self._registry_sizes(raw), self._registry_sizes(padded)
            self.declared.fill_from(
                batch,
                raw_bs=live["bs"],
                padded_bs=full["bs"],
                raw_num_tokens=live["tokens"],
                padded_num_tokens=full["tokens"],
            )
        if self._derived:
            values = {_slot_name(i): args[i.input.index] for i in self._derived}
            self.derived.fill_tensors(values, raw=raw, padded=padded)

    def overwrite_tails(
        self, *, raw: Mapping[str, int], padded: Mapping[str, int], stale: bool
    ) -> None:
        """Write zeros, or what stale rows would leave, to the tails that no policy resets.

        Derived slots count too, although theirs are reset: the proof must not rely on it. Stale
        integers are taken from live rows, so that the model accepts them (they may be indices);
        stale floating-point rows are larger than any live one, so that they show in a maximum.
        """
        for slotted in self._inputs:
            name = _slot_name(slotted)
            if slotted in self._declared:
                policy = self.declared.get_slot(name).padding_policy
                if policy in (PaddingPolicy.ZERO, PaddingPolicy.FILL_SENTINEL):
                    continue
            view = self.view(name, padded)
            for dim, axis in slotted.dims.items():
                live, full = raw[axis], padded[axis]
                if live < full:
                    tail = view.narrow(dim, live, full - live)
                    tail.copy_(
                        _stale_rows(view, dim, live, full)
                    ) if stale and live else tail.zero_()

    def after_copy_out(self) -> None:
        """The step that these slots were filled for is over, as far as its stream was told."""
        self.declared.after_copy_out()

    def mark_captured(self) -> None:
        """A graph has taken these addresses: the pool must keep the storages."""
        self.declared.mark_captured()

    def _fixed_sizes(self) -> dict[str, int]:
        """Sizes of the axes ``bs`` and ``tokens`` that this graph has at a fixed size."""
        fixed = {"bs": 0, "tokens": 0}
        for padded in self._declared:
            declared = slot_axes(_slot_of(padded), len(padded.axes))
            sizes = zip(declared, padded.axes, padded.input.value.shape, strict=True)
            for name, axis, size in sizes:
                if axis is None and name in fixed:
                    fixed[name] = max(fixed[name], int(size))  # tracing has fixed it
        return fixed

    def _registry_sizes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Axis sizes under the registry's names, ``bs`` and ``tokens``."""
        named = dict(self._fixed)
        for axis in self._axes:
            for name in axis.declared_as:
                named[name] = sizes.get(axis.name, 0)
        return named


def _stale_rows(view: Tensor, dim: int, live: int, full: int) -> Tensor:
    places = torch.arange(full - live, device=view.device) % live
    rows = view.index_select(dim, places.flip(0))
    return rows * -4 - 8 if rows.is_floating_point() else rows


def _slot_name(padded: PaddedInput) -> str:
    if padded.input.kind is InputKind.BATCH_FIELD:
        return str(padded.input.field)
    return padded.input.name


def _declared_slot(padded: PaddedInput) -> GraphSlot:
    """The owner's slot for this graph: the traced dtype, and views that are contiguous.

    The pieces were compiled for the strides of the traced, contiguous argument, so a view that
    follows an inner dimension is a reshape of the flat buffer here.
    """
    slot = _slot_of(padded)
    return dataclasses.replace(
        slot,
        dtype=padded.input.value.dtype,
        axis=tuple(slot_axes(slot, len(padded.axes))),
        slice_fn=None,
    )


def _slot_of(padded: PaddedInput) -> GraphSlot:
    declaration, field = padded.input.declaration, padded.input.field
    assert declaration is not None
    assert field is not None
    slot: GraphSlot = declaration.slots[field]
    return slot


def _derived_slot(padded: PaddedInput, largest: Mapping[str, int]) -> GraphSlot:
    fake = padded.input.value
    shape = tuple(
        largest[axis] if axis is not None else int(size)
        for axis, size in zip(padded.axes, fake.shape, strict=True)
    )
    return GraphSlot(
        _slot_name(padded),
        lambda max_bs, max_num_tokens: shape,
        fake.dtype,
        axis=padded.axes,
        padding_policy=PaddingPolicy.ZERO,
    )
