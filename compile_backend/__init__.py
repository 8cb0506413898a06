"""graphbuf: run PyTorch models whose batch changes at every step out of captured graphs."""

from compile_backend.config import GraphbufConfig
from compile_backend.forward_batch import ForwardBatch, ForwardMode, PPProxyTensors
from compile_backend.registry import (
    CudaGraphBufferRegistry,
    FillContext,
    GraphSlot,
    PaddingPolicy,
    share_input_buffer,
)

__all__ = [
    "CudaGraphBufferRegistry",
    "FillContext",
    "ForwardBatch",
    "ForwardMode",
    "GraphSlot",
    "GraphbufConfig",
    "PPProxyTensors",
    "PaddingPolicy",
    "share_input_buffer",
]
