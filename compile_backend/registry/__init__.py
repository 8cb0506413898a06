"""Slots, their buffers and the registries that keep them current."""

from compile_backend.registry import capacity
from compile_backend.registry.buckets import (
    Buckets,
    default_capture_sizes,
    pad_to,
    plan_capture_sizes,
)
from compile_backend.registry.builders import (
    build_decode_registry,
    build_eager_registry,
    build_prefill_registry,
)
from compile_backend.registry.capacity import check_capacity
from compile_backend.registry.layout import Axis
from compile_backend.registry.mlp_sync import prepare_mlp_sync_batch
from compile_backend.registry.pool import InputPool, input_pool, share_input_buffer
from compile_backend.registry.registry import CudaGraphBufferRegistry, SlotFact
from compile_backend.registry.slot import FillContext, GraphSlot, PaddingPolicy

__all__ = [
    "Axis",
    "Buckets",
    "CudaGraphBufferRegistry",
    "FillContext",
    "GraphSlot",
    "InputPool",
    "PaddingPolicy",
    "SlotFact",
    "build_decode_registry",
    "build_eager_registry",
    "build_prefill_registry",
    "capacity",
    "check_capacity",
    "default_capture_sizes",
    "input_pool",
    "pad_to",
    "plan_capture_sizes",
    "prepare_mlp_sync_batch",
    "share_input_buffer",
]
