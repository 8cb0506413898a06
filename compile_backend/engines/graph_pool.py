"""The memory pool in which all graphs of a device are captured, and the stream they share.

Graphs that never run at once may lie in the same memory: a capture takes the blocks that earlier
captures have freed, so many buckets need little more than the largest alone. The price: a replay
overwrites what any other recording of the pool has left there. Replays that come on different
streams are therefore put in order here.

Facts of torch 2.11 to 2.13 that this file leans on (``CUDAGraph.cpp``,
``CUDACachingAllocator.cpp``, ``CachingHostAllocator.h``):

- A pool id whose last user is gone must not be used again. An empty graph, the *anchor*, keeps it.
- ``capture_end`` returns early where the driver refuses the capture (after a synchronisation
  inside it, say). Both allocators then stay routed to the pool, and the generators stay in capture
  state, in which every later random operator outside of a capture fails.
- cuBLAS keeps one workspace for each stream for good. One that was allocated outside of the
  capture could be freed under the graph; cleared before and after, it belongs to the graph.
- ``capture_end`` tells only by a warning that a graph has no nodes.
"""

import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from compile_backend.engines.pool_use import PoolUse, block_state, segments_of_pool
from compile_backend.errors import CaptureError

__all__ = [
    "CaptureErrorMode",
    "CapturedWork",
    "GraphPool",
    "capture_lock",
    "capture_stream",
    "finish_by_hand",
    "non_owning",
    "on_side_stream",
    "pool_segments",
    "shared_pool",
]

CaptureErrorMode = Literal["global", "thread_local", "relaxed"]

capture_lock = threading.RLock()
"""One capture at a time in the process: it empties caches and switches allocators."""

_EMPTY = "The CUDA Graph is empty"

_streams: dict[int, torch.cuda.Stream] = {}
_pools: WeakValueDictionary[int, "GraphPool"] = WeakValueDictionary()
# Graphs whose capture could not be ended. The host allocator goes on calling a filter that points
# into them, so they must never be destroyed.
_unfinished: list[torch.cuda.CUDAGraph] = []


def capture_stream(device: int) -> torch.cuda.Stream:
    """The stream of all captures and warm-ups of a device.

    One for all: the allocator reuses a block only on the stream that allocated it.
    """
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


def shared_pool(device: int, generators: Sequence[torch.Generator] = ()) -> "GraphPool":
    """The pool of a device; a new one where no recording holds one. Call it under the lock."""
    pool = _pools.get(device)
    if pool is None:
        pool = _pools[device] = GraphPool(device, generators)
    return pool


def pool_segments(handle: tuple[int, int], device: int) -> list[Any]:
    """The allocator's segments of a pool. Reads the allocator's own lists, not the device."""
    return segments_of_pool(torch.cuda.memory_snapshot(include_traces=False), handle, device)


@contextmanager
def on_side_stream(device: int) -> Iterator[None]:
    """Run a block on the capture stream, after what the current stream holds and before what
    comes next there."""
    current, side = torch.cuda.current_stream(device), capture_stream(device)
    side.wait_stream(current)
    try:
        with torch.cuda.stream(side):
            yield
    finally:
        current.wait_stream(side)


@dataclass(slots=True)
class CapturedWork:
    """What is known of a capture once it has ended."""

    is_empty: bool = False


class GraphPool:
    """One private pool of the caching allocator. Lives as long as a recording holds it."""

    def __init__(self, device: int, generators: Sequence[torch.Generator] = ()) -> None:
        self.device = device
        self.handle = torch.cuda.graph_pool_handle()
        self._last_stream: torch.cuda.Stream | None = None
        self._kept_for: str | None = None
        self._anchor = torch.cuda.CUDAGraph()
        for generator in generators:
            self._anchor.register_generator_state(generator)
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            with torch.cuda.stream(capture_stream(device)):
                self._anchor.capture_begin(pool=self.handle, capture_error_mode="thread_local")
                _capture_end(self._anchor)

    def segments(self) -> list[Any]:
        return pool_segments(self.handle, self.device)

    def use(self) -> PoolUse:
        return PoolUse.of(self.segments())

    @contextmanager
    def capturing(
        self,
        graph: torch.cuda.CUDAGraph,
        *,
        error_mode: CaptureErrorMode,
        generators: Sequence[torch.Generator] = (),
    ) -> Iterator[CapturedWork]:
        """Record into ``graph`` what the block launches on the current stream.

        Waits for the device and empties the caches first, since nothing can be freed while a
        capture is under way. Whatever fails, the current stream, the allocators and the
        generators' capture state are as before, and the error of the block is the one raised.
        """
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()
        torch._C._cuda_clearCublasWorkspaces()
        try:
            with torch.cuda.stream(capture_stream(self.device)):
                graph.capture_begin(pool=self.handle, capture_error_mode=error_mode)
                work = CapturedWork()
                yield work
                work.is_empty = self._end(graph)
        except BaseException:
            with torch.cuda.stream(capture_stream(self.device)):
                self._give_up(graph, generators)
            raise
        finally:
            torch._C._cuda_clearCublasWorkspaces()

    def _end(self, graph: torch.cuda.CUDAGraph) -> bool:
        torch.cuda.set_stream(capture_stream(self.device))  # where the block has left another one
        return _capture_end(graph)

    def _give_up(self, graph: torch.cuda.CUDAGraph, generators: Sequence[torch.Generator]) -> None:
        """End a capture that has failed, or that failed to end."""
        if not _has_ended(graph):
            with suppress(RuntimeError):
                _capture_end(graph)
        if _has_ended(graph):
            graph.reset()
            return
        if _pools.get(self.device) is self:
            del _pools[self.device]
        finish_by_hand(graph, self.handle, self.device)
        with suppress(RuntimeError):
            GraphPool(self.device, generators)  # a capture that ends takes the generators out of it

    def order(self) -> None:
        """Make the current stream wait for the last replay where that was on another stream."""
        stream = torch.cuda.current_stream(self.device)
        if stream != self._last_stream:
            if self._last_stream is not None:
                stream.wait_stream(self._last_stream)
            self._last_stream = stream

    @contextmanager
    def kept_for(self, name: str) -> Iterator[None]:
        """While the block runs, nothing else may use the pool: recording ``name`` has values there
        between its segments."""
        self._kept_for = name
        try:
            yield
        finally:
            self._kept_for = None

    def why_not_now(self) -> str | None:
        """Why nothing may be captured or replayed in the pool at this moment."""
        if self._kept_for is None:
            return None
        return (
            f"{self._kept_for} is between two of its segments, whose values in the graph pool this "
            "would overwrite; call it outside of functions marked no_graph, or uncaptured there"
        )

    def check_inputs(self, name: str, static_inputs: Sequence[Tensor]) -> None:
        """Raise CaptureError for an input in memory that the new capture could take for itself."""
        segments = self.segments()
        for position, tensor in enumerate(static_inputs):
            address = tensor.untyped_storage().data_ptr()
            if tensor.is_cuda and block_state(segments, address) == "free":
                raise CaptureError(
                    f"static input {position} of {name} lies in memory that the graph pool is "
                    "free to use again: it is an output that was released (release_outputs, "
                    "weak_outputs=True) or freed; capture its readers before it is released"
                )

    @contextmanager
    def measuring(self, measured: list[int]) -> Iterator[None]:
        """Append to ``measured`` the bytes of large segments that the block needs from empty."""
        handle = torch.cuda.graph_pool_handle()
        with _allocating_to(handle, self.device):
            yield
            measured.append(PoolUse.of(pool_segments(handle, self.device)).large_bytes)

    def carve(self, num_bytes: int) -> None:
        """Take ``num_bytes`` from the driver as one span, free in this pool for the next capture.

        Captures that grow the pool bit by bit leave spans that no later request fits. Does nothing
        where the pool already holds memory. Raises torch's out-of-memory error.
        """
        if not num_bytes or self.use().reserved_bytes:
            return
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        with (
            torch.cuda.stream(capture_stream(self.device)),
            _allocating_to(self.handle, self.device),
        ):
            torch.empty(num_bytes, dtype=torch.uint8, device=torch.device("cuda", self.device))


@contextmanager
def _allocating_to(handle: tuple[int, int], device: int) -> Iterator[None]:
    torch._C._cuda_beginAllocateCurrentThreadToPool(device, handle)
    try:
        yield
    finally:
        torch._C._cuda_endAllocateToPool(device, handle)
        torch._C._cuda_releasePool(device, handle)


def _capture_end(graph: torch.cuda.CUDAGraph) -> bool:
    """End a capture; whether nothing was launched in it."""
    is_empty = False
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", message=_EMPTY)
        graph.capture_end()
    for each in caught:
        if str(each.message).startswith(_EMPTY):
            is_empty = True
        else:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    return is_empty


def _has_ended(graph: torch.cuda.CUDAGraph) -> bool:
    try:
        graph.pool()
    except RuntimeError:  # "... without a preceding successful capture"
        return False
    return True


def finish_by_hand(graph: torch.cuda.CUDAGraph, handle: tuple[int, int], device: int) -> bool:
    """Do what ``capture_end`` left undone; True if it had. The pool takes no more captures then.

    The device allocator's route and its hold on the pool are given back; the host allocator's
    cannot be from Python, which is why the pool id is spent and the graph is kept for good.
    """
    try:
        torch._C._cuda_endAllocateToPool(device, handle)
    except RuntimeError:  # "not currently recording": capture_end got that far
        return False
    torch._C._cuda_releasePool(device, handle)
    _unfinished.append(graph)
    return True


def non_owning(
    values: Sequence[Any], segments: Sequence[Any], *, except_for: Sequence[Tensor] = ()
) -> list[Any]:
    """``values`` with each tensor inside ``segments`` replaced by one that does not own its memory.

    Tensors that share a storage share the new one. Other values, those of ``except_for``, and
    tensors whose kind a plain view of memory cannot express (subclasses, lazy conjugates), are
    returned as they are.
    """
    storages: dict[int, Any] = {}
    replaced: dict[int, Tensor] = {}
    kept = {id(tensor) for tensor in except_for}
    for value in values:
        if type(value) is not Tensor or id(value) in kept or value.is_conj() or value.is_neg():
            continue
        storage = value.untyped_storage()
        address = storage.data_ptr()
        if block_state(segments, address) is None:
            continue
        if address not in storages:
            storages[address] = torch._C._construct_storage_from_data_pointer(
                address, value.device, storage.nbytes()
            )
        replaced[id(value)] = _view_of(storages[address], value)
    return [replaced.get(id(value), value) for value in values]


def _view_of(storage: Any, like: Tensor) -> Tensor:
    with torch.inference_mode(mode=False), torch.no_grad():
        empty = torch.empty(0, dtype=like.dtype, device=like.device)
        return empty.set_(storage, like.storage_offset(), like.size(), like.stride())
