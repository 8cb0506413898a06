"""Which graph serves which kind of batch, as far as that was asked already."""

from __future__ import annotations

from collections.abc import Hashable

from compile_backend.forward_batch import ForwardMode
from compile_backend.runners.contracts import Bucket, ServedGraph

__all__ = ["KnownGraphs"]

MAX_KINDS = 1024  # that are remembered


class KnownGraphs:
    """Remembers answers of :meth:`GraphSource.find`: a graph, or why there is none, as text.

    A kind is what a model may branch on besides sizes. Guards on that do not depend on the size, so
    once every bucket of a mode is captured from one graph, a kind that this graph serves at one
    size is served by it at all of them.
    """

    def __init__(self) -> None:
        self._at_all_sizes: dict[Hashable, ServedGraph] = {}
        self._by_size: dict[tuple[Hashable, Bucket], ServedGraph | str] = {}
        # The graph that all captured buckets of a mode have, or None where they differ
        self._only: dict[ForwardMode, ServedGraph | None] = {}

    def get(self, kind: Hashable, bucket: Bucket) -> ServedGraph | str | None:
        """What was found for this kind at this size; None where nobody has asked."""
        graph = self._at_all_sizes.get(kind)
        return self._by_size.get((kind, bucket)) if graph is None else graph

    def remember(
        self, kind: Hashable, bucket: Bucket, graph: ServedGraph | str, mode: ForwardMode | None
    ) -> None:
        """Keep an answer. ``mode`` None: buckets are still being captured.

        That there is no graph is forgotten when batches are served: guards are also about the state
        of the process (threads, modes, defaults), which is another one at the next call.
        """
        if isinstance(graph, str) and mode is not None:
            return
        if len(self._at_all_sizes) + len(self._by_size) >= MAX_KINDS:
            self.forget()
        only = None if mode is None else self._only.get(mode)
        if only is not None and graph is only:
            self._at_all_sizes[kind] = only
        else:
            self._by_size[kind, bucket] = graph

    def note_captured(self, mode: ForwardMode, graph: ServedGraph) -> None:
        """Note that a bucket of ``mode`` is captured from ``graph``."""
        if self._only.setdefault(mode, graph) is not graph:
            self._only[mode] = None

    def is_served_at_some_size(self, kind: Hashable) -> bool:
        """Whether a graph was found for this kind at any size."""
        return kind in self._at_all_sizes or any(
            other == kind and not isinstance(graph, str)
            for (other, _), graph in self._by_size.items()
        )

    def forget(self) -> None:
        """Drop every answer, as after more was traced."""
        self._at_all_sizes.clear()
        self._by_size.clear()
