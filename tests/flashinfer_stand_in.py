"""FlashInfer for a machine without a GPU: the calls that we make, in plain PyTorch.

The wrappers keep FlashInfer's contract where graphs depend on it: in graph mode ``plan`` copies
into the buffers that the wrapper was made with and refuses another batch size, and ``run`` reads
those buffers on the device. Where the real package is installed, ``test_flashinfer_contract``
holds every call against its signatures.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []  # what was called, with what


def log_call(name: str, *args: Any, **kwargs: Any) -> None:
    CALLS.append((name, args, kwargs))


# --- the autotuner ----------------------------------------------------------------------------


class AutoTuner:
    """Measures nothing; remembers what is loaded and whether it is tuning."""

    instance: AutoTuner | None = None

    def __init__(self) -> None:
        self.configs: dict[str, Any] = {}
        self.is_tuning_mode = False
        self.buckets: list[tuple[int, ...]] = []
        self.measured: dict[str, Any] = {}

    @classmethod
    def get(cls) -> AutoTuner:
        if cls.instance is None:
            cls.instance = cls()
        return cls.instance

    def clear_cache(self) -> None:
        self.configs.clear()
        self.measured.clear()

    def load_configs(self, path: str) -> bool:
        self.configs.update(json.loads(Path(path).read_text()))
        return True

    def measure(self, name: str, value: Any) -> Any:
        """What a kernel that can be tuned does: measure while tuning, else look up."""
        if self.is_tuning_mode:
            self.measured.setdefault(name, value)
        return self.measured.get(name, self.configs.get(name))


@contextmanager
def autotune(
    tune_mode: bool = True,
    cache: str | None = None,
    tuning_buckets: tuple[int, ...] | None = None,
) -> Iterator[None]:
    log_call("autotune", tune_mode, cache=cache, tuning_buckets=tuning_buckets)
    tuner = AutoTuner.get()
    if cache is not None:
        tuner.configs.clear()
        if Path(cache).exists():
            tuner.load_configs(cache)
    tuner.is_tuning_mode = tune_mode
    tuner.buckets.append(tuple(tuning_buckets or ()))
    try:
        yield
    finally:
        tuner.is_tuning_mode = False
        tuner.buckets.pop()
        log_call("autotune ends", tune_mode)
        if tune_mode and cache is not None and tuner.measured:
            Path(cache).write_text(json.dumps({**tuner.configs, **tuner.measured}))


# --- attention --------------------------------------------------------------------------------


class _Wrapper:
    """What both wrappers do: the buffers in graph mode, and attention by CSR indices."""

    def __init__(
        self, workspace: Tensor, use_cuda_graph: bool, buffers: tuple[Tensor | None, ...]
    ) -> None:
        assert workspace.dtype == torch.uint8
        assert not workspace.any(), "the workspace must be zeros at first"
        self.device = workspace.device
        self.is_graph = use_cuda_graph
        self.buffers = list(buffers)
        self.causal = False
        self.mask: Tensor | None = None
        if use_cuda_graph:
            assert all(buffer is not None for buffer in buffers)

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor
    ) -> None:
        log_call("reset", float_workspace_buffer, int_workspace_buffer)

    def _keep(self, *planned: Tensor) -> None:
        if not self.is_graph:
            self.buffers = [each.to(self.device) for each in planned]
            return
        for buffer, each in zip(self.buffers, planned, strict=True):
            is_indices = buffer is self._indices_buffer
            assert buffer is not None
            if is_indices:
                assert len(each) <= len(buffer)
            elif len(each) != len(buffer):
                raise ValueError("the batch size is fixed in graph mode")
            buffer[: len(each)].copy_(each)

    @property
    def _indices_buffer(self) -> Tensor | None:
        return self.buffers[-2]

    def _attend(self, q: Tensor, kv: tuple[Tensor, Tensor], scale: float, qo: Tensor) -> Tensor:
        """Every row against every entry of the indices, most of them masked. Reads the buffers
        when it runs and nothing on the host, as a kernel does."""
        indptr, indices, last = self.buffers[-3:]
        assert indptr is not None
        assert indices is not None
        assert last is not None
        assert last.shape == (len(indptr) - 1,)
        row, entry = torch.arange(len(q)), torch.arange(len(indices))
        row_request = torch.searchsorted(qo[1:], row, right=True)
        entry_request = torch.searchsorted(indptr[1:], entry, right=True)
        num_keys = indptr.diff()
        key = entry - indptr[entry_request.clamp(max=len(num_keys) - 1)]
        new = row - qo[row_request]
        sees = row_request[:, None] == entry_request
        if self.mask is not None:
            starts = (qo.diff() * num_keys).cumsum(0) - qo.diff() * num_keys
            at = (starts[row_request] + new * num_keys[row_request])[:, None] + key
            sees &= self.mask[at.clamp(0, len(self.mask) - 1)]
        elif self.causal:
            sees &= key <= (num_keys - qo.diff())[row_request][:, None] + new[:, None]
        group = q.shape[1] // kv[0].shape[2]
        # A NaN that a row does not see must not reach it; one that it sees still costs its weight.
        k, v = (
            each.squeeze(1)[indices].double().nan_to_num(0, 0, 0).repeat_interleave(group, dim=1)
            for each in kv
        )
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
        weights = scores.masked_fill(~sees, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        buffers = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        super().__init__(float_workspace_buffer, use_cuda_graph, buffers)
        log_call("decode", float_workspace_buffer, kv_layout, use_cuda_graph=use_cuda_graph)

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: torch.dtype | None = None,
        kv_data_type: torch.dtype | None = None,
        non_blocking: bool = True,
    ) -> None:
        log_call("decode plan", indptr, indices, last_page_len, self=self)
        assert page_size == 1
        self._keep(indptr, indices, last_page_len)

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        q_scale: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        scale = q.shape[-1] ** -0.5 * (1.0 if q_scale is None else q_scale)
        result = self._attend(q, paged_kv_cache, scale, torch.arange(len(q) + 1))
        return result if out is None else out.copy_(result)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        buffers = (
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
        )
        super().__init__(float_workspace_buffer, use_cuda_graph, buffers)
        log_call("prefill", float_workspace_buffer, kv_layout, use_cuda_graph=use_cuda_graph)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        custom_mask: Tensor | None = None,
        causal: bool = False,
        q_data_type: torch.dtype | None = None,
        kv_data_type: torch.dtype | None = None,
        non_blocking: bool = True,
    ) -> None:
        log_call("prefill plan", qo_indptr, paged_kv_indptr, paged_kv_indices, self=self)
        assert page_size == 1
        self._keep(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self.causal, self.mask = causal, custom_mask
        self.num_tokens = int(qo_indptr[-1])

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        q_scale: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        if len(q) != self.num_tokens:
            raise ValueError(f"q has {len(q)} rows and {self.num_tokens} were planned")
        scale = q.shape[-1] ** -0.5 * (1.0 if q_scale is None else q_scale)
        assert self.buffers[0] is not None
        result = self._attend(q, paged_kv_cache, scale, self.buffers[0])
        return result if out is None else out.copy_(result)


# --- as the package ---------------------------------------------------------------------------


def modules() -> dict[str, types.ModuleType]:
    """The modules that we import, by name."""
    package = types.ModuleType("flashinfer")
    tuner = types.ModuleType("flashinfer.autotuner")
    vars(package).update(
        BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
        BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper,
        autotuner=tuner,
    )
    vars(tuner).update(autotune=autotune, AutoTuner=AutoTuner)
    return {"flashinfer": package, "flashinfer.autotuner": tuner}


@pytest.fixture
def stand_in(monkeypatch):
    """FlashInfer as imported from now on; the list of calls made to it."""
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    AutoTuner.instance = None
    CALLS.clear()
    yield CALLS
    CALLS.clear()
