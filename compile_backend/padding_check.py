"""The second net under the padding proof: run with different tails, compare live rows bit by bit.

It shows little by itself (sizes used as values pass it), but it tests what the proof takes on
trust: the word of whoever declared a batch or vouched for an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compile_backend.errors import PaddingError
from compile_backend.slots import GraphSlots

__all__ = ["check_padding", "restore", "saved"]


def check_padding(
    run: Callable[[], tuple[Any, ...]],
    slots: GraphSlots,
    args: Sequence[Any],
    *,
    raw: Mapping[str, int],
    padded: Mapping[str, int],
    written: Sequence[Tensor],
    where: str,
) -> None:
    """Run twice, with zeros and with stale rows in the tails; live rows must not differ.

    ``run`` returns the trimmed outputs of the graph on its slots. ``written`` tensors and the
    random generator are put back after each run, and the slots are left filled, with zeros in the
    tails that no policy resets. Raises PaddingError, naming ``where`` and the output.
    """
    seen: list[tuple[Any, ...]] = []
    for stale in (True, False):  # zeros last: no poison is left for others that share the slots
        state, generator = saved(written), torch.get_rng_state()
        slots.fill(args, raw=raw, padded=padded)
        slots.overwrite_tails(raw=raw, padded=padded, stale=stale)
        seen.append(run())
        torch.set_rng_state(generator)
        restore(state)
    for position, (poisoned, clean) in enumerate(zip(*seen, strict=True)):
        if isinstance(clean, Tensor) and not _same_bits(clean, poisoned):
            raise PaddingError(
                f"{where}: output {position} (shape {list(clean.shape)}) changes in its live rows "
                f"when padded rows hold stale values (sizes {dict(raw)} in bucket {dict(padded)}); "
                "mask the padded rows by lengths, or give their slots a policy that resets them"
            )


def saved(tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Tensors with copies of their values, for :func:`restore`."""
    return [(tensor, tensor.clone()) for tensor in tensors]


def restore(state: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Put saved values back."""
    for tensor, values in state:
        tensor.copy_(values)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype.is_floating_point or a.dtype.is_complex:
        numbers = torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
        return numbers and torch.equal(a.isnan(), b.isnan())
    return torch.equal(a, b)
