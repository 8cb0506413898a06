"""graphbuf: run PyTorch models whose batch changes at every step out of captured graphs."""

from compile_backend.backend import GraphbufBackend, graphbuf
from compile_backend.compat import register_dynamo_backend
from compile_backend.config import GraphbufConfig
from compile_backend.declared import BatchDeclaration, declaration_of, declare_batch
from compile_backend.engines import no_graph
from compile_backend.errors import (
    CaptureError,
    ConfigError,
    ContextError,
    FallbackError,
    FallbackReason,
    GraphbufError,
    KVCacheError,
    PaddingError,
    PassError,
    RegistryError,
    ReplayError,
    SlotDefinitionError,
    SlotMismatchError,
    SlotNotAllocatedError,
    SlotNotFoundError,
    SlotOverflowError,
)
from compile_backend.forward_batch import ForwardBatch, ForwardMode, PPProxyTensors
from compile_backend.inspect import Explanation, dump, explain
from compile_backend.registry import (
    CudaGraphBufferRegistry,
    FillContext,
    GraphSlot,
    PaddingPolicy,
    share_input_buffer,
)
from compile_backend.runner_config import RunnerConfig
from compile_backend.runners import ForwardOutput, ModelRunner

__all__ = [
    "BatchDeclaration",
    "CaptureError",
    "ConfigError",
    "ContextError",
    "CudaGraphBufferRegistry",
    "Explanation",
    "FallbackError",
    "FallbackReason",
    "FillContext",
    "ForwardBatch",
    "ForwardMode",
    "ForwardOutput",
    "GraphSlot",
    "GraphbufBackend",
    "GraphbufConfig",
    "GraphbufError",
    "KVCacheError",
    "ModelRunner",
    "PPProxyTensors",
    "PaddingError",
    "PaddingPolicy",
    "PassError",
    "RegistryError",
    "ReplayError",
    "RunnerConfig",
    "SlotDefinitionError",
    "SlotMismatchError",
    "SlotNotAllocatedError",
    "SlotNotFoundError",
    "SlotOverflowError",
    "declaration_of",
    "declare_batch",
    "dump",
    "explain",
    "graphbuf",
    "no_graph",
    "share_input_buffer",
]

register_dynamo_backend("graphbuf", graphbuf)
