"""Fixtures of the registry tests: one thread, an empty input pool, small slots."""

from collections.abc import Callable, Iterator

import pytest
import torch

from compile_backend.registry import CudaGraphBufferRegistry, GraphSlot, PaddingPolicy, input_pool


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _empty_input_pool() -> Iterator[None]:
    input_pool.clear()
    yield
    input_pool.clear()


@pytest.fixture
def registry() -> CudaGraphBufferRegistry:
    """Axes bs (at most 8), tokens (at most 16) and no slots."""
    return CudaGraphBufferRegistry(device="cpu", max_bs=8, max_num_tokens=16)


@pytest.fixture
def bs_slot() -> Callable[..., GraphSlot]:
    """Makes a one-dimensional int64 slot on the bs axis."""

    def make(name: str = "ids", policy: PaddingPolicy = PaddingPolicy.ZERO, **options) -> GraphSlot:
        options = {"axis": "bs", "dtype": torch.int64, **options}
        return GraphSlot(name, lambda bs, tokens: (bs,), padding_policy=policy, **options)

    return make
