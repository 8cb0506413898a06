"""Engines by the name that an option or a command line gives."""

from compile_backend.engines.base import Engine, NoEngine
from compile_backend.engines.cuda import CudaEngine
from compile_backend.engines.host import HostEngine
from compile_backend.engines.strict import StrictHostEngine
from compile_backend.engines.trees import TreesEngine
from compile_backend.errors import ConfigError

__all__ = ["engine_by_name"]

_ENGINES: dict[str, type[Engine]] = {
    "none": NoEngine,
    "host": HostEngine,
    "host_strict": StrictHostEngine,
    "cuda": CudaEngine,
    "trees": TreesEngine,
}


def engine_by_name(name: str) -> Engine:
    """A new engine. Raises ConfigError for a name that is unknown, or a device that is missing."""
    if name in _ENGINES:
        return _ENGINES[name]()
    known = ", ".join(repr(each) for each in _ENGINES)
    raise ConfigError(f"unknown engine {name!r}; use one of {known}")
