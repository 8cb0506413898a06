"""Custom operators of the tests: what engines keep between compiled pieces."""

import torch
from torch import Tensor

calls: list[str] = []  # every kernel run, by name


@torch.library.custom_op("graphbuf_test::store", mutates_args={"cache"})
def store(k: Tensor, cache: Tensor, loc: Tensor) -> None:
    """Write rows ``k`` to ``cache[loc]``."""
    calls.append("store")
    cache.index_copy_(0, loc, k)


@torch.library.custom_op("graphbuf_test::attend", mutates_args=())
def attend(q: Tensor, cache: Tensor, lens: Tensor) -> Tensor:
    """Attention of each row over the first ``lens`` cache rows; no host read."""
    calls.append("attend")
    live = torch.arange(cache.shape[0])[None] < lens[:, None]
    scores = (q @ cache.t()).masked_fill(~live, float("-inf"))
    return scores.softmax(-1) @ cache


@attend.register_fake
def _(q: Tensor, cache: Tensor, lens: Tensor) -> Tensor:
    return torch.empty_like(q)


@torch.library.custom_op("graphbuf_test::attend_short", mutates_args=())
def attend_short(q: Tensor, cache: Tensor, lens: Tensor) -> Tensor:
    """The same over the longest live length only, which it reads on the host."""
    calls.append("attend_short")
    if not len(q):
        return torch.empty_like(q)
    longest = int(lens.max())
    live = torch.arange(longest)[None] < lens[:, None]
    scores = (q @ cache[:longest].t()).masked_fill(~live, float("-inf"))
    return scores.softmax(-1) @ cache[:longest]


@attend_short.register_fake
def _(q: Tensor, cache: Tensor, lens: Tensor) -> Tensor:
    return torch.empty_like(q)


@torch.library.custom_op("graphbuf_test::halves", mutates_args=())
def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """The two halves of each row."""
    calls.append("halves")
    half = x.shape[1] // 2
    return x[:, :half].clone(), x[:, half:].clone()


@halves.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    half = x.shape[1] // 2
    return torch.empty_like(x[:, :half]), torch.empty_like(x[:, half:])


@torch.library.custom_op("graphbuf_test::bump", mutates_args={"x"})
def bump(x: Tensor) -> None:
    """Add one in place."""
    calls.append("bump")
    x.add_(1)


@torch.library.custom_op("graphbuf_test::opaque", mutates_args=())
def opaque(x: Tensor) -> Tensor:
    """Twice the rows; the proof cannot look into it."""
    calls.append("opaque")
    return x * 2


@opaque.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("graphbuf_test::mix_rows", mutates_args=())
def mix_rows(x: Tensor) -> Tensor:
    """Centre each column over all rows: no row-wise operator."""
    calls.append("mix_rows")
    return x - x.mean(0)


@mix_rows.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("graphbuf_test::fragile", mutates_args=())
def fragile(x: Tensor) -> Tensor:
    """Raises for rows that sum to less than zero, after reading them by their storage."""
    calls.append("fragile")
    if any(value < 0 for value in _sums(x)):
        raise ValueError("negative sum")
    return x.clone()


@fragile.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _sums(x: Tensor) -> list[float]:
    with torch.utils._python_dispatch._disable_current_modes():
        return [float(x.detach().sum())]


hooks: dict[str, object] = {}  # what the operator below calls, by name


@torch.library.custom_op("graphbuf_test::calls_back", mutates_args=())
def calls_back(x: Tensor) -> Tensor:
    """A copy of ``x``, after calling ``hooks["call"]`` once, if there is one."""
    call = hooks.pop("call", None)
    if callable(call):
        call(x)
    return x.clone()


@calls_back.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)
