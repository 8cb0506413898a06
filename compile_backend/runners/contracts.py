"""What the graph runners ask of a graph, of what makes graphs, and of what keeps recordings.

Two families fill these roles: traced and compiled (``traced``, ``bucket_graphs``), and recorded as
written (``breakable_model``, ``breakable_graphs``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from compile_backend.passes.axes import Refusal
from compile_backend.runners.bucket_graphs import BucketUse, GraphKey

__all__ = ["Bucket", "GraphSource", "GraphStore", "Match", "ServedGraph"]


@dataclass(frozen=True, slots=True)
class Bucket:
    """A size that is captured: rows on each axis. ``bs`` is 0 where graphs do not depend on it."""

    bs: int
    tokens: int


class ServedGraph(Protocol):
    """One way through the model, whatever made it: see TracedGraph, whose part this is."""

    @property
    def name(self) -> str: ...
    @property
    def slots(self) -> Mapping[int, str]: ...
    @property
    def unpadded(self) -> Refusal | None: ...
    @property
    def min_rows(self) -> Mapping[str, int]: ...
    def reads_axis(self, axis: str) -> bool: ...
    def torn_weight(self) -> str | None: ...
    def failing_guard(self, sizes: Mapping[str, int]) -> str | None: ...


class GraphSource(Protocol):
    """What makes graphs of the model, and says which of them serves a batch."""

    @property
    def name(self) -> str: ...
    @property
    def graphs(self) -> Sequence[ServedGraph]: ...
    def trace(self, batches: Sequence[Any]) -> None: ...
    def find(self, batch: Any) -> ServedGraph | str: ...


class GraphStore(Protocol):
    """The captured buckets, by key: see BucketGraphs. It is given graphs of its own source."""

    num_recaptures: int

    @property
    def mode(self) -> str: ...
    @property
    def engine_name(self) -> str: ...
    @property
    def keys(self) -> Sequence[GraphKey]: ...
    @property
    def uses(self) -> tuple[BucketUse, ...]: ...
    @property
    def pool_bytes(self) -> int: ...
    def __contains__(self, key: GraphKey) -> bool: ...
    def __len__(self) -> int: ...
    def capture(self, graph: Any, key: GraphKey) -> Refusal | None: ...
    def replay(self, graph: Any, key: GraphKey, raw: Mapping[str, int]) -> Any: ...
    def reset(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Match:
    """The captured graph that serves a batch."""

    graph: ServedGraph
    key: GraphKey
    raw_bs: int
    raw_tokens: int
