"""Custom operators that show a fault: they notice, or suffer from, what they are given."""

import torch
from torch import Tensor

row_counts: list[tuple[int, ...]] = []  # rows of each argument, per call of same_rows
plan: dict[str, Tensor] = {}  # what planned() worked out and keeps until it is cleared
tables: list[Tensor] = []  # memory that picked() owns


@torch.library.custom_op("graphbuf_pitfalls::same_rows", mutates_args=())
def same_rows(h: Tensor, positions: Tensor, loc: Tensor) -> Tensor:
    """``h`` again, if every argument has as many rows."""
    row_counts.append((len(h), len(positions), len(loc)))
    if len(set(row_counts[-1])) > 1:
        raise ValueError(f"rows differ: {row_counts[-1]}")
    return h.clone()


@same_rows.register_fake
def _(h: Tensor, positions: Tensor, loc: Tensor) -> Tensor:
    return torch.empty_like(h)


@torch.library.custom_op("graphbuf_pitfalls::centre_live", mutates_args=())
def centre_live(x: Tensor, num_live: Tensor) -> Tensor:
    """Rows less the mean of the first ``num_live`` rows."""
    live = torch.arange(x.shape[0]) < num_live
    return x - (x * live[:, None]).sum(0) / num_live


@centre_live.register_fake
def _(x: Tensor, num_live: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("graphbuf_pitfalls::add_rows", mutates_args={"cache"})
def add_rows(k: Tensor, cache: Tensor, loc: Tensor) -> None:
    """Add rows ``k`` to ``cache[loc]``: done twice, it shows."""
    cache.index_add_(0, loc, k)


@torch.library.custom_op("graphbuf_pitfalls::count", mutates_args={"counter"})
def count(x: Tensor, counter: Tensor) -> Tensor:
    """Add one to ``counter`` and read it on the host."""
    counter.add_(1)
    return x * int(counter)


@count.register_fake
def _(x: Tensor, counter: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("graphbuf_pitfalls::planned", mutates_args=())
def planned(x: Tensor, weights: Tensor) -> Tensor:
    """Rows times a plan, which is worked out from ``weights`` unless there is one."""
    if "scale" not in plan:
        plan["scale"] = weights.float() * 2
    return x * plan["scale"][:, None]


@planned.register_fake
def _(x: Tensor, weights: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("graphbuf_pitfalls::picked", mutates_args=())
def picked(x: Tensor, which: Tensor) -> Tensor:
    """One of the operator's own tables, as it is: no new memory."""
    return tables[int(which)]


@picked.register_fake
def _(x: Tensor, which: Tensor) -> Tensor:
    return x.new_empty(x.shape[1])


@torch.library.custom_op("graphbuf_pitfalls::quantised", mutates_args=())
def quantised(x: Tensor) -> Tensor:
    """Rows rounded with one scale for all of them."""
    scale = x.abs().amax() / 127
    return (x / scale).round() * scale


@quantised.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)
