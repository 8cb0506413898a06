"""Engines: how a function is captured and replayed. The contract is in :mod:`.base`."""

from compile_backend.engines.base import Captured, Engine, NoEngine, Replay
from compile_backend.engines.host import HostEngine
from compile_backend.engines.lookup import engine_by_name
from compile_backend.engines.opaque import CompiledPiece, record_opaque
from compile_backend.engines.strict import StrictHostEngine

__all__ = [
    "Captured",
    "CompiledPiece",
    "Engine",
    "HostEngine",
    "NoEngine",
    "Replay",
    "StrictHostEngine",
    "engine_by_name",
    "record_opaque",
]
