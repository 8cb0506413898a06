"""What the tests about kinds of fault share: ways to capture, and a declared decode batch."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_backend import GraphSlot, PaddingPolicy, declare_batch

SIZES = [2, 4, 8]

PADDED: dict[str, dict[str, Any]] = {
    "host": {"engine": "host"},
    "strict": {"engine": "host_strict"},
    "strict piecewise": {"engine": "host_strict", "cudagraph_mode": "PIECEWISE"},
}


@pytest.fixture(params=list(PADDED))
def padding(request) -> dict[str, Any]:
    """Options of one way to capture, with padding to the sizes 2, 4 and 8."""
    return {"compiler": "aot_eager", "cudagraph_capture_sizes": SIZES, **PADDED[request.param]}


@pytest.fixture(params=["host exact", *PADDED])
def capturing(request) -> dict[str, Any]:
    """The same, and exact sizes on the host."""
    if request.param == "host exact":
        return {"compiler": "aot_eager", "engine": "host"}
    return {"compiler": "aot_eager", "cudagraph_capture_sizes": SIZES, **PADDED[request.param]}


@dataclass
class Pool:
    """A cache [rows, width] hung on the batch; its row 0 is scratch."""

    k: Tensor


@dataclass
class Step:
    """A declared batch on tokens."""

    ids: Tensor
    positions: Tensor
    loc: Tensor
    lens: Tensor
    num_live: Tensor | None = None
    mrope: Tensor | None = None  # [3, tokens]
    pool: Any = None


def token_slot(name: str, policy=PaddingPolicy.ZERO, pad_value=None, **options: Any) -> GraphSlot:
    return GraphSlot(
        name,
        lambda max_bs, max_num_tokens: (max_num_tokens,),
        torch.int64,
        padding_policy=policy,
        pad_value=pad_value,
        **options,
    )


def declare_step(*more: GraphSlot, len_fill: int = 1, **ids_options: Any) -> None:
    """Declare :class:`Step`: ids, positions and loc end in 0, lens in ``len_fill``."""
    declare_batch(
        Step,
        [
            token_slot("ids", **ids_options),
            token_slot("positions"),
            token_slot("loc"),
            token_slot("lens", PaddingPolicy.FILL_SENTINEL, len_fill),
            GraphSlot(
                "mrope",
                lambda max_bs, max_num_tokens: (3, max_num_tokens),
                torch.int64,
                axis=(None, "tokens"),
                padding_policy=PaddingPolicy.ZERO,
            ),
            *more,
        ],
    )


def make_step(tokens: int, pool: Pool | None = None, **fields: Any) -> Step:
    """Random live rows, written to distinct cache rows."""
    return Step(
        **{
            "ids": torch.randint(1, 32, (tokens,)),
            "positions": torch.randint(1, 8, (tokens,)),
            "loc": 1 + torch.randperm(15)[:tokens],
            "lens": torch.randint(1, 8, (tokens,)),
            "pool": pool,
            **fields,
        }
    )


def bucket_of(tokens: int) -> int:
    return next(size for size in SIZES if size >= tokens)
