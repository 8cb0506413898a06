"""What one call of a traced graph does, decided from its sizes and numbers alone.

The decision is a :class:`CallPlan`: run a padded bucket, an exact size, or uncaptured, and why.
It is made once per combination of sizes and numbers and remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from compile_backend.errors import FallbackReason
from compile_backend.output_plan import BoundOutputs
from compile_backend.passes.axes import Axis, Refusal
from compile_backend.registry.buckets import Buckets

__all__ = ["CallPlan", "Decider", "Decision", "ProgramKey"]


@dataclass(frozen=True, slots=True)
class ProgramKey:
    """What a captured program is looked up by; built in one place, for capture and look-up alike.

    ``sizes`` are what the program runs at: a bucket per axis where it is padded, every size of the
    call where it is exact. ``others`` are the other numbers of the call.
    """

    padded: bool
    sizes: tuple[int, ...]
    others: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """``key`` of the program to use, or None to run uncaptured; ``refusal`` says why not padded."""

    key: ProgramKey | None
    raw: Mapping[str, int]
    padded: Mapping[str, int]
    refusal: Refusal | None = None


@dataclass(slots=True, kw_only=True)
class CallPlan:
    """A decision with what running it needs, evaluated once: outputs and filled-in numbers."""

    decision: Decision
    outputs: BoundOutputs
    template: tuple[Any, ...]  # the arguments of the graph to run, numbers filled in

    @property
    def reason(self) -> FallbackReason | None:
        refusal = self.decision.refusal
        return None if refusal is None else refusal.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Decider:
    """The rules by which a call of one traced graph is matched to a program.

    ``axes`` are the padded axes with their buckets, in order. ``always`` is why nothing of this
    graph is captured; ``no_padding`` why it is never padded, although padding was asked for.
    ``failing_guard`` evaluates the graph's shape guards at padded sizes.
    """

    axes: Sequence[Axis]
    buckets: Sequence[Buckets]
    scalar_symbols: Sequence[sympy.Symbol | None]  # symbol of each number input
    axis_of_scalar: Sequence[int | None]  # which axis each number input carries
    is_number: Sequence[bool]  # a number of the model, rather than a size
    pads: bool
    always: Refusal | None
    no_padding: Refusal | None
    exact_if_unpadded: Refusal | None  # why exact sizes cannot be captured either
    min_rows: Mapping[str, int]  # per axis: fewer live rows than this are never padded
    max_exact_captures: int
    max_number_values: int
    failing_guard: Callable[[Mapping[sympy.Symbol, int]], str | None]

    def decide(self, scalars: Sequence[Any], known: Mapping[ProgramKey, Any]) -> Decision:
        """The decision for a call with these number inputs; ``known`` programs exist already."""
        others = tuple(
            value for value, axis in zip(scalars, self.axis_of_scalar, strict=True) if axis is None
        )
        live: list[set[int]] = [set() for _ in self.axes]
        for value, place in zip(scalars, self.axis_of_scalar, strict=True):
            if place is not None:
                live[place].add(int(value))
        raw = {axis.name: max(sizes) for axis, sizes in zip(self.axes, live, strict=True)}
        if self.always is not None:
            return Decision(key=None, raw=raw, padded=raw, refusal=self.always)
        if not self.pads:
            return self._exact(scalars, raw, known, None)
        if self.no_padding is not None:
            return self._exact(scalars, raw, known, self.no_padding)
        if any(len(sizes) > 1 for sizes in live):
            sizes = ", ".join(
                f"{a.name}: {sorted(s)}" for a, s in zip(self.axes, live, strict=True)
            )
            refusal = Refusal(
                FallbackReason.LIVE_SIZES_DIFFER,
                f"sizes that are padded together came apart ({sizes})",
            )
            return self._exact(scalars, raw, known, refusal)
        for name, least in self.min_rows.items():
            if raw.get(name, least) < least:
                refusal = Refusal(
                    FallbackReason.PADDING_UNSAFE,
                    f"{name} is {raw[name]} and the model reads row {least - 1} of it, which would "
                    "be a padded row",
                )
                return self._exact(scalars, raw, known, refusal)
        padded: dict[str, int] = {}
        for place, (axis, buckets) in enumerate(zip(self.axes, self.buckets, strict=True)):
            option = "cudagraph_capture_sizes" if place == 0 else "second_axis_capture_sizes"
            bucket = buckets.pad_to(raw[axis.name])
            if bucket is None:
                refusal = Refusal(
                    FallbackReason.ABOVE_LARGEST_BUCKET,
                    f"{axis.name} is {raw[axis.name]} and the largest captured size is "
                    f"{buckets.largest}; give {option} with a size of {raw[axis.name]} or more",
                )
                return Decision(key=None, raw=raw, padded=raw, refusal=refusal)
            padded[axis.name] = bucket
        failing = self.failing_guard(self._symbols_at(scalars, padded))
        if failing is not None:
            refusal = Refusal(
                FallbackReason.GUARD_FAILED,
                f"the graph was traced under a guard that a padded run would break: {failing}",
            )
            return self._exact(scalars, raw, known, refusal)
        key = ProgramKey(padded=True, sizes=tuple(padded.values()), others=others)
        if varies := self._too_many_numbers(key, known):
            return Decision(key=None, raw=raw, padded=raw, refusal=varies)
        return Decision(key=key, raw=raw, padded=padded)

    def symbols(self, scalars: Sequence[Any]) -> dict[sympy.Symbol, int]:
        """The live value of every size symbol."""
        pairs = zip(self.scalar_symbols, scalars, strict=True)
        return {symbol: int(value) for symbol, value in pairs if symbol is not None}

    def _symbols_at(
        self, scalars: Sequence[Any], padded: Mapping[str, int]
    ) -> dict[sympy.Symbol, int]:
        at = self.symbols(scalars)
        for axis in self.axes:
            at.update(dict.fromkeys(axis.symbols, padded[axis.name]))
        return at

    def _exact(
        self,
        scalars: Sequence[Any],
        raw: Mapping[str, int],
        known: Mapping[ProgramKey, Any],
        refusal: Refusal | None,
    ) -> Decision:
        if self.exact_if_unpadded is not None:
            return Decision(
                key=None, raw=raw, padded=raw, refusal=refusal or self.exact_if_unpadded
            )
        sizes = tuple(s for s, number in zip(scalars, self.is_number, strict=True) if not number)
        numbers = tuple(s for s, number in zip(scalars, self.is_number, strict=True) if number)
        key = ProgramKey(padded=False, sizes=sizes, others=numbers)
        if varies := self._too_many_numbers(key, known):
            return Decision(key=None, raw=raw, padded=raw, refusal=refusal or varies)
        exact = [other for other in known if not other.padded]
        if key not in known and len(exact) >= self.max_exact_captures:
            limit = Refusal(
                FallbackReason.TOO_MANY_SIZES,
                f"{len(exact)} exact sizes are captured already (max_exact_captures); give "
                "cudagraph_capture_sizes to pad to a few sizes instead",
            )
            if refusal is not None:
                also = f"{limit.message} (not padded, {refusal.reason.name}: {refusal.message})"
                limit = Refusal(limit.reason, also)
            return Decision(key=None, raw=raw, padded=raw, refusal=limit)
        return Decision(key=key, raw=raw, padded=raw, refusal=refusal)

    def _too_many_numbers(self, key: ProgramKey, known: Mapping[ProgramKey, Any]) -> Refusal | None:
        if key in known:
            return None
        same = [
            other.others
            for other in known
            if other.padded == key.padded and other.sizes == key.sizes
        ]
        if len(same) < self.max_number_values:
            return None
        return Refusal(
            FallbackReason.NUMBER_VARIES,
            f"number arguments took {len(same) + 1} values {[*same, key.others]} at bucket "
            f"{key.sizes}; pass a tensor, declare the number as a size field, or raise "
            "max_number_values",
        )
