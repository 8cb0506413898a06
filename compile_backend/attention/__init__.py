"""Attention over a paged KV cache: the call in the model, the context it reads, the backends."""

from compile_backend.attention.base import AttentionBackend
from compile_backend.attention.context import ForwardContext, forward_context, get_forward_context
from compile_backend.attention.kv_cache import (
    SCRATCH_REQUEST,
    SCRATCH_SLOT,
    KVCache,
    RequestTable,
    TokenSlotAllocator,
)
from compile_backend.attention.layer import attention
from compile_backend.attention.torch_native import TorchNativeBackend

__all__ = [
    "SCRATCH_REQUEST",
    "SCRATCH_SLOT",
    "AttentionBackend",
    "ForwardContext",
    "KVCache",
    "RequestTable",
    "TokenSlotAllocator",
    "TorchNativeBackend",
    "attention",
    "forward_context",
    "get_forward_context",
]
