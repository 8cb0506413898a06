"""The slots of one consumer at its largest sizes: :class:`CudaGraphBufferRegistry`.

The registry gives every slot its buffer (its own, a pooled or a bound one), fills the buffers from
a batch or from named tensors, and hands out the views that a graph reads. What one fill writes is
decided in :mod:`.fill`, and on a device written by :mod:`.device_fill`; how a batch of views is put
together is in :mod:`.batch_view`.
"""

import difflib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeVar

import torch
from torch import Tensor

from compile_backend.errors import SlotDefinitionError, SlotMismatchError, SlotNotFoundError
from compile_backend.registry.batch_view import BatchViews, view_batch
from compile_backend.registry.device_fill import DeviceFill, DevicePlanner
from compile_backend.registry.fill import (
    BoundedCache,
    FillPlan,
    SlotSource,
    describe_sources,
    plan_fill,
)
from compile_backend.registry.fill_order import batch_entries, order_slots
from compile_backend.registry.layout import Axis, build_layout
from compile_backend.registry.pool import (
    allocate,
    check_bindable,
    check_sharing,
    input_pool,
    remember_slot,
)
from compile_backend.registry.slot import (
    FillContext,
    GraphSlot,
    PaddingPolicy,
)

__all__ = ["CudaGraphBufferRegistry", "SlotFact"]

MAX_PLANS = 512  # about 10 kB each: enough for every token count of a busy prefill range
MAX_VIEWS = 4096  # single views, one per slot and bucket

Batch = TypeVar("Batch")
Owner = Literal["registry", "pool", "bound"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFact:
    """What :meth:`CudaGraphBufferRegistry.slot_facts` says about one slot with a buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    axis: Axis
    policy: PaddingPolicy
    num_bytes: int
    owner: Owner
    address: int

    @property
    def is_shared(self) -> bool:
        """Whether other registries may hold the same buffer."""
        return self.owner != "registry"


class CudaGraphBufferRegistry:
    """Slots by name, their buffers, and the fills that keep them current.

    ``max_bs`` and ``max_num_tokens`` are the largest sizes of the axes ``"bs"`` and ``"tokens"``;
    ``max_sizes`` names further axes. With ``share_pool`` the buffers come from the process's input
    pool, so that registries whose slots agree in name, size, dtype and device use one storage.

    A buffer keeps its address for the life of the registry. Every fill restores this registry's own
    tails, so sharing a buffer with a registry that wants other tails is fine as long as the two
    never run at once. Fills are not safe to call from several threads at once.
    """

    def __init__(
        self,
        *,
        device: torch.device | str,
        max_bs: int,
        max_num_tokens: int,
        share_pool: bool = False,
        max_sizes: Mapping[str, int] | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.share_pool = share_pool
        self.max_sizes: dict[str, int] = {
            "bs": max_bs,
            "tokens": max_num_tokens,
            **(max_sizes or {}),
        }
        for axis, size in self.max_sizes.items():
            if size < 0 or axis in ("none", ""):
                raise SlotDefinitionError(
                    f"axis {axis!r} has maximum size {size}; use a size of 0 or more and a name "
                    f"other than 'none'"
                )
        self._slots: dict[str, GraphSlot] = {}
        self._owners: dict[str, Owner] = {}
        self._device_planner = DevicePlanner(self.device) if self.device.type == "cuda" else None
        self._order = order_slots(())
        self._plans: BoundedCache[Hashable, FillPlan | DeviceFill] = BoundedCache(MAX_PLANS)
        self._views: BoundedCache[Hashable, Tensor] = BoundedCache(MAX_VIEWS)
        self._batch_views: BoundedCache[Hashable, BatchViews] = BoundedCache(MAX_PLANS)
        self._skipped: frozenset[str] = frozenset()  # source_fn slots that the last fill skipped

    @property
    def max_bs(self) -> int:
        """The largest padded batch size."""
        return self.max_sizes["bs"]

    @property
    def max_num_tokens(self) -> int:
        """The largest padded number of tokens."""
        return self.max_sizes["tokens"]

    # --- slots -------------------------------------------------------------------------------

    def register_slot(self, slot: GraphSlot, bind: Tensor | None = None) -> GraphSlot:
        """Add ``slot`` and give it its buffer; returns the slot.

        ``bind`` adopts an existing tensor as the buffer: same storage, values kept, never pooled.
        A FILL_ONCE buffer is filled here. A new buffer starts as ``pad_value`` or 0; a buffer found
        in the pool keeps its values, since this registry restores its tails at each fill.

        Raises SlotDefinitionError for a name that is taken, an unfit shape or axis, a bound tensor
        that cannot serve, and FILL_ONCE values that disagree on one buffer; SlotMismatchError for a
        bound tensor of another dtype or device.
        """
        if slot.name in self._slots:
            raise SlotDefinitionError(
                f"slot {slot.name!r} is registered already; give the second one another name"
            )
        if slot.enabled:
            self._attach_buffer(slot, bind)
        self._slots[slot.name] = slot
        planner = self._device_planner
        self._order = order_slots(
            self._slots.values(), launch_device=None if planner is None else planner.device
        )
        self._plans.clear()
        self._batch_views.clear()
        return slot

    def get_slot(self, name: str) -> GraphSlot:
        """The slot of that name, enabled or not. Raises SlotNotFoundError."""
        slot = self._slots.get(name)
        if slot is None:
            raise SlotNotFoundError(
                f"no slot {name!r} is registered{_suggest(name, self._slots)}; the registry has "
                f"{sorted(self._slots)}"
            )
        return slot

    def has_slot(self, name: str) -> bool:
        """Whether a slot of that name is registered, enabled or not."""
        return name in self._slots

    @property
    def slot_names(self) -> tuple[str, ...]:
        """Every registered name, in the order of registration."""
        return tuple(self._slots)

    def view(self, name: str, padded: Mapping[str, int]) -> Tensor:
        """The view of slot ``name`` at the given size of each of its axes.

        The same tensor object for the same sizes, as long as it is cached; its address is the
        buffer's. Raises SlotNotFoundError, SlotNotAllocatedError, SlotOverflowError, and
        SlotMismatchError where ``padded`` lacks an axis of the slot.
        """
        layout = self.get_slot(name).layout
        key = (name, *map(padded.get, layout.axes))
        found = self._views.get(key)
        if found is None:
            with torch.inference_mode(False), torch.no_grad():
                found = self._views.put(key, layout.view(padded))
        return found

    def slot_facts(self) -> tuple[SlotFact, ...]:
        """Name, shape, dtype, axis, policy, bytes and owner of every slot that has a buffer."""
        return tuple(
            SlotFact(
                name=name,
                shape=tuple(buffer.shape),
                dtype=slot.dtype,
                device=buffer.device,
                axis=slot.axis,
                policy=slot.padding_policy,
                num_bytes=buffer.nbytes,
                owner=self._owners[name],
                address=buffer.data_ptr(),
            )
            for name, slot in self._slots.items()
            if (buffer := slot.buffer) is not None
        )

    def buffers(self) -> tuple[Tensor, ...]:
        """Every slot's buffer, in the order of registration."""
        buffers = (slot.buffer for slot in self._slots.values())
        return tuple(buffer for buffer in buffers if buffer is not None)

    def slot_bytes(self) -> dict[str, int]:
        """Bytes of the buffer of every slot that has one."""
        return {fact.name: fact.num_bytes for fact in self.slot_facts()}

    def mark_captured(self) -> None:
        """Tell the input pool that a graph has recorded the addresses of this registry's slots."""
        for name, owner in self._owners.items():
            if owner == "pool":
                input_pool.mark_captured(name, self._slots[name].layout.buffer)

    # --- fills -------------------------------------------------------------------------------

    def fill_from(
        self,
        forward_batch: Any,
        *,
        raw_bs: int,
        padded_bs: int,
        raw_num_tokens: int,
        padded_num_tokens: int,
        pp_proxy_tensors: Any = None,
    ) -> None:
        """Copy a batch into the slots and restore the tails.

        Resets tails, copies heads, runs ``post_fill`` hooks. Everything about the batch is checked
        first: a batch that is refused leaves every byte as it was. A field that is None is not
        copied (its tail is reset all the same). A field may have more rows than raw; the first raw
        rows are copied. Allocates no storage and does not synchronise.

        On a CUDA device this is one kernel launch on the caller's stream, after one copy where
        fields are on the host; such fields may be overwritten as soon as this returns.

        Raises SlotNotFoundError where the batch has no attribute for a slot that copies one,
        SlotMismatchError and SlotOverflowError where a field or a size does not fit.
        """
        order = self._order
        sources = self._read_fields(forward_batch)
        context = None
        numbers: tuple[int | None, ...] = ()
        if order.sourced or order.hooks or order.numbers:
            context = FillContext(
                raw_bs, padded_bs, raw_num_tokens, padded_num_tokens, pp_proxy_tensors
            )
            if order.sourced:
                found = tuple(source_fn(forward_batch, context) for _, source_fn in order.sourced)
                sources = (*sources, *found)

        key: list[Hashable] = [raw_bs, padded_bs, raw_num_tokens, padded_num_tokens]
        if context is not None and order.numbers:
            numbers = tuple(number_fn(forward_batch, context) for number_fn, _ in order.numbers)
            key.append(tuple(number is None for number in numbers))
        occupied = (order.starts, order.ends)
        plan = self._find_plan(key, order.filled, sources, order.address_ranges, occupied)
        if plan is None:
            raw = {"bs": raw_bs, "tokens": raw_num_tokens}
            padded = {"bs": padded_bs, "tokens": padded_num_tokens}
            plan = self._add_plan(key, batch_entries(order, sources), raw, padded, numbers)

        if torch.is_grad_enabled():
            with torch.no_grad():
                self._write(plan, sources, numbers, forward_batch, context)
        else:
            self._write(plan, sources, numbers, forward_batch, context)

    def fill_tensors(
        self,
        values: Mapping[str, Tensor | None],
        *,
        raw: Mapping[str, int],
        padded: Mapping[str, int],
    ) -> None:
        """Copy named tensors into the slots of those names and restore those slots' tails.

        ``raw`` and ``padded`` give the size of each axis that the named slots follow. Slots that
        are not named are left alone, and no ``source_fn`` or ``post_fill`` runs. A tensor that
        already is the slot's view is not copied. Checked first, like :meth:`fill_from`, and raises
        the same errors; SlotNotFoundError for a name that no slot has.
        """
        key: list[Hashable] = [*values, *raw.items(), *padded.items()]
        slots = [self.get_slot(name) for name in values]
        ranges = [slot.layout.address_range for slot in slots]
        sources = tuple(values.values())
        plan = self._find_plan(key, slots, sources, ranges)
        if plan is None:
            entries = [SlotSource(*pair) for pair in zip(slots, sources, strict=True)]
            plan = self._add_plan(key, entries, raw, padded)
        with torch.no_grad():
            plan.run(sources)

    def reset_padding(
        self, *, padded_bs: int, padded_num_tokens: int, raw_bs: int = 0, raw_num_tokens: int = 0
    ) -> None:
        """Restore this registry's tails without a batch, as before a capture on a shared buffer."""
        entries = [
            SlotSource(slot, None)
            for slot in self._slots.values()
            if slot.enabled and slot.tail_value is not None and set(slot.layout.axes) <= _BATCH_AXES
        ]
        key: list[Hashable] = ["reset", raw_bs, padded_bs, raw_num_tokens, padded_num_tokens]
        plan = self._plans.get(tuple(key))
        if plan is None:
            raw = {"bs": raw_bs, "tokens": raw_num_tokens}
            padded = {"bs": padded_bs, "tokens": padded_num_tokens}
            plan = self._add_plan(key, entries, raw, padded)
        with torch.no_grad():
            plan.run((None,) * len(entries))

    def reset_slots(self) -> None:
        """Give every buffer that is not bound the values it was made with, after a warm-up."""
        with torch.no_grad():
            for name, slot in self._slots.items():
                if slot.enabled and self._owners[name] != "bound":
                    slot.layout.buffer.fill_(slot.initial_value or 0)

    def after_copy_out(self) -> None:
        """Note that what the caller's stream was given until now is all that uses the slots.

        A fill on another stream, of any registry on this device, waits for that and no more.
        Without this call it waits for all that the stream was given. Does nothing on the host.
        """
        if self._device_planner is not None:
            self._device_planner.after_copy_out()

    def extract_buffer(
        self, *, padded_bs: int, padded_num_tokens: int, forward_batch_template: Batch
    ) -> Batch:
        """A batch like the template whose fields are the slots' views at the padded sizes.

        A new object at each call; the template is not changed, and what has no slot is carried over
        from it. The views are the same tensor objects from call to call, on the buffers' memory.
        A field that is None in the template stays None, as does a slot whose ``source_fn`` returned
        None in the last fill; computed slots are always set; dotted slots never. The integer fields
        ``batch_size`` and ``num_tokens``, where the template has them, hold the padded sizes.

        Raises SlotNotFoundError as :meth:`fill_from`, SlotOverflowError for sizes above a buffer's.
        """
        views = self._batch_views.get((padded_bs, padded_num_tokens))
        if views is None:
            views = self._cut_batch(padded_bs, padded_num_tokens)
        try:
            return view_batch(forward_batch_template, views, self._skipped)
        except AttributeError as error:
            self._refuse_missing_field(forward_batch_template, error)

    # --- inside ------------------------------------------------------------------------------

    def _attach_buffer(self, slot: GraphSlot, bind: Tensor | None) -> None:
        shape = tuple(slot.shape_fn(self.max_bs, self.max_num_tokens))
        device = self.device if slot.device is None else torch.device(slot.device)
        is_new = bind is None
        owner: Owner
        if bind is not None:
            _check_bound(slot, bind, shape, device)
            buffer, owner = bind, "bound"
        elif self.share_pool:
            buffer, is_new = input_pool.get_or_allocate(slot.name, shape, slot.dtype, device)
            owner = "pool"
        else:
            buffer, owner = allocate(shape, slot.dtype, device), "registry"
        with torch.inference_mode(False), torch.no_grad():
            layout = build_layout(slot.name, buffer, slot.axis, slot.slice_fn, self.max_sizes)
            check_sharing(slot, buffer)
            slot.attach(layout)
            remember_slot(slot)
            if slot.padding_policy is PaddingPolicy.FILL_ONCE or (is_new and slot.initial_value):
                buffer.fill_(slot.initial_value)
        self._owners[slot.name] = owner

    def _read_fields(self, forward_batch: Any) -> tuple[Any, ...]:
        try:
            return self._order.read(forward_batch)
        except AttributeError as error:
            self._refuse_missing_field(forward_batch, error)

    def _refuse_missing_field(self, forward_batch: Any, error: AttributeError) -> NoReturn:
        for slot in self._order.copied:
            if not hasattr(forward_batch, slot.name):
                kind = type(forward_batch).__name__
                raise SlotNotFoundError(
                    f"slot {slot.name!r} copies the batch field of its name but {kind} has no "
                    f"such field{_suggest(slot.name, dir(forward_batch))}; rename the slot, add "
                    f"the field (None is fine), or declare it with copy_from_fb=False or a "
                    f"source_fn"
                ) from error
        raise error

    def _find_plan(
        self,
        key: list[Hashable],
        slots: Sequence[GraphSlot],
        sources: Sequence[Tensor | None],
        address_ranges: Sequence[tuple[int, int]],
        occupied: tuple[Sequence[int], Sequence[int]] = ((), ()),
    ) -> FillPlan | DeviceFill | None:
        """The plan made for sources just like these; completes ``key``."""
        describe_sources(key, slots, sources, address_ranges, occupied)
        return self._plans.get(tuple(key))

    def _add_plan(
        self,
        key: list[Hashable],
        entries: Sequence[SlotSource],
        raw: Mapping[str, int],
        padded: Mapping[str, int],
        numbers: Sequence[int | None] = (),
    ) -> FillPlan | DeviceFill:
        planner = self._device_planner
        if planner is None:
            return self._plans.put(tuple(key), plan_fill(entries, raw, padded))
        places = zip(numbers, self._order.numbers, strict=False)  # by name there are none
        written = [(i, buffer) for i, (n, (_, buffer)) in enumerate(places) if n is not None]
        return self._plans.put(tuple(key), planner.plan(entries, raw, padded, written))

    def _write(
        self,
        plan: FillPlan | DeviceFill,
        sources: Sequence[Tensor | None],
        numbers: Sequence[int | None],
        forward_batch: Any,
        context: FillContext | None,
    ) -> None:
        plan.run(sources, numbers)
        if context is None:
            return
        order = self._order
        if order.sourced:
            found = zip(order.sourced, sources[len(order.copied) :], strict=True)
            self._skipped = frozenset(slot.name for (slot, _), source in found if source is None)
        for post_fill, buffer in order.hooks:
            post_fill(buffer, forward_batch, context)

    def _cut_batch(self, padded_bs: int, padded_num_tokens: int) -> BatchViews:
        order = self._order
        padded = {"bs": padded_bs, "tokens": padded_num_tokens}

        def cut(slots: Sequence[GraphSlot]) -> dict[str, Tensor]:
            return {slot.name: self.view(slot.name, padded) for slot in slots if not slot.is_dotted}

        copied, computed = cut(order.copied), cut(order.computed)
        sourced = cut([slot for slot, _ in order.sourced if not slot.is_computed])
        views = BatchViews(
            copied=tuple(copied.items()),
            sourced=tuple(sourced.items()),
            computed=computed,
            sizes=(("batch_size", padded_bs), ("num_tokens", padded_num_tokens)),
            names=frozenset([*copied, *sourced, *computed]),
        )
        return self._batch_views.put((padded_bs, padded_num_tokens), views)


_BATCH_AXES = frozenset({"bs", "tokens"})


def _check_bound(
    slot: GraphSlot, bind: Tensor, shape: tuple[int, ...], device: torch.device
) -> None:
    check_bindable(slot.name, bind)
    wanted = torch.empty(0, device=device).device
    if bind.dtype != slot.dtype or bind.device != wanted:
        raise SlotMismatchError(
            f"slot {slot.name!r} is {slot.dtype} on {wanted} but the tensor to bind is "
            f"{bind.dtype} on {bind.device}; declare the slot like the tensor or bind another"
        )
    if bind.dim() != len(shape) or any(
        mine < needed for mine, needed in zip(bind.shape, shape, strict=True)
    ):
        raise SlotDefinitionError(
            f"slot {slot.name!r} needs a buffer of at least {list(shape)} but the tensor to bind "
            f"has shape {list(bind.shape)}; bind a larger one or lower the registry's maxima"
        )


def _suggest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
