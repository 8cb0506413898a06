"""Engines: how a function is captured and replayed. The contract is in :mod:`.base`."""

from compile_backend.engines.base import Captured, Engine, NoEngine, Replay
from compile_backend.engines.breakable import is_in_segment, no_graph
from compile_backend.engines.collector import resting_collector
from compile_backend.engines.cuda import CudaEngine
from compile_backend.engines.host import HostEngine
from compile_backend.engines.inductor_policy import inductor_graphs, inductor_policy
from compile_backend.engines.lookup import engine_by_name
from compile_backend.engines.opaque import CompiledPiece, record_opaque
from compile_backend.engines.strict import StrictHostEngine
from compile_backend.engines.trees import TreesEngine

__all__ = [
    "Captured",
    "CompiledPiece",
    "CudaEngine",
    "Engine",
    "HostEngine",
    "NoEngine",
    "Replay",
    "StrictHostEngine",
    "TreesEngine",
    "engine_by_name",
    "inductor_graphs",
    "inductor_policy",
    "is_in_segment",
    "no_graph",
    "record_opaque",
    "resting_collector",
]
