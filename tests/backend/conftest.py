"""Every behaviour test runs without an engine, on the host engine and on the strict one."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from compile_backend import explain

SIZES = [2, 4, 8]

SETTINGS: dict[str, dict[str, Any]] = {
    "none": {"engine": "none"},
    "host exact": {"engine": "host"},
    "host padded": {"engine": "host", "cudagraph_capture_sizes": SIZES},
    "strict padded": {"engine": "host_strict", "cudagraph_capture_sizes": SIZES},
    "strict piecewise": {
        "engine": "host_strict",
        "cudagraph_capture_sizes": SIZES,
        "cudagraph_mode": "PIECEWISE",
    },
}


@pytest.fixture(params=list(SETTINGS))
def setting(request) -> dict[str, Any]:
    """Options of one way to capture."""
    return {"compiler": "aot_eager", **SETTINGS[request.param]}


@pytest.fixture(params=[name for name in SETTINGS if name != "none"])
def capturing(request) -> dict[str, Any]:
    """The same, where something is captured."""
    return {"compiler": "aot_eager", **SETTINGS[request.param]}


@pytest.fixture(params=["host padded", "strict padded", "strict piecewise"])
def padding(request) -> dict[str, Any]:
    """The same, where sizes are padded."""
    return {"compiler": "aot_eager", **SETTINGS[request.param]}


def compiled(fn: Callable[..., Any], options: dict[str, Any], **kwargs: Any) -> Callable[..., Any]:
    return torch.compile(fn, backend="graphbuf", options=options, **kwargs)


def assert_equal_runs(
    fn: Callable[..., Any],
    options: dict[str, Any],
    calls: Sequence[tuple[Any, ...]],
    *,
    min_hits: int | None = None,
) -> Any:
    """Run ``calls`` through eager and through the backend, keep every output, compare at the end.

    Returns the explanation. ``min_hits`` asks for that many replays where the engine captures.
    """
    run = compiled(fn, options)
    with torch.inference_mode():
        wanted = [fn(*args) for args in calls]
        outputs = [run(*args) for args in calls]
    for want, got in zip(wanted, outputs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        leaves = zip(
            torch.utils._pytree.tree_leaves(want),
            torch.utils._pytree.tree_leaves(got),
            strict=True,
        )
        for w, g in leaves:
            if isinstance(w, torch.Tensor):
                assert (g.dtype, g.shape, g.stride()) == (w.dtype, w.shape, w.stride())
    explanation = explain(run)
    if min_hits is not None and options.get("engine") != "none":
        assert explanation.hits >= min_hits, str(explanation)
    return explanation
