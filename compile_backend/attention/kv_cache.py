"""The KV cache of a token-slot engine, who owns which slot, and which slots are whose tokens.

A *token slot* holds one token's keys and values in every layer. Slot 0 and row 0 of the request
table belong to nobody: padded rows read row 0 and write slot 0. The three parts know nothing of
each other; a scheduler allocates slots, writes them to a request's row, and frees both.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from compile_backend.errors import ConfigError, ContextError, KVCacheError

__all__ = ["SCRATCH_REQUEST", "SCRATCH_SLOT", "KVCache", "RequestTable", "TokenSlotAllocator"]

SCRATCH_SLOT = 0
SCRATCH_REQUEST = 0


class KVCache:
    """Keys and values, ``k`` and ``v``, each [num_layers, num_slots, num_kv_heads, head_dim].

    ``num_slots`` counts the scratch slot. Both start as zeros and keep their address.
    """

    def __init__(
        self,
        num_slots: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (num_layers, num_slots, num_kv_heads, head_dim)
        if min(shape) < 1:
            raise ConfigError(
                f"a KV cache of [layers, slots, kv heads, head dim] {list(shape)} has an empty "
                "dimension; each must be at least 1"
            )
        with torch.inference_mode(False):  # such tensors may be written in any mode
            self.k = torch.zeros(shape, dtype=dtype, device=device)
            self.v = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def num_layers(self) -> int:
        return self.k.shape[0]

    @property
    def num_slots(self) -> int:
        return self.k.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.k.shape[3]

    def layer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """Views of one layer's keys and values, each [num_slots, num_kv_heads, head_dim].

        Raises ContextError for a layer the cache does not have.
        """
        if not 0 <= layer_id < self.num_layers:
            raise ContextError(
                f"layer_id {layer_id} is outside the KV cache of {self.num_layers} layers; number "
                f"attention layers from 0, or make the cache with num_layers={layer_id + 1}"
            )
        return self.k[layer_id], self.v[layer_id]


class TokenSlotAllocator:
    """Which token slots are free. Host only; the scratch slot is never handed out."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ConfigError(
                f"num_slots is {num_slots}; it counts the scratch slot, so at least 1"
            )
        self._is_used = bytearray(num_slots)
        self._is_used[SCRATCH_SLOT] = True
        self._free = list(range(num_slots - 1, SCRATCH_SLOT, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        """``n`` distinct free slots. Raises KVCacheError, and takes none, where fewer are free."""
        if not 0 <= n <= self.num_free:
            raise KVCacheError(
                f"{n} token slots were asked for and {self.num_free} of {len(self._is_used) - 1} "
                "are free; free those of finished requests first, or make the KV cache larger"
            )
        kept = self.num_free - n
        slots = self._free[kept:][::-1]
        del self._free[kept:]
        for slot in slots:
            self._is_used[slot] = True
        return slots

    def free(self, slots: Sequence[int]) -> None:
        """Give slots back. Raises KVCacheError, and frees none, if one is not in use, or twice."""
        for slot in slots:
            if not SCRATCH_SLOT < slot < len(self._is_used) or not self._is_used[slot]:
                raise KVCacheError(
                    f"token slot {slot} was freed but is not allocated (slots are 1 to "
                    f"{len(self._is_used) - 1}); free every slot once"
                )
        if len(set(slots)) != len(slots):
            raise KVCacheError(f"a token slot stands twice in {list(slots)}; free every slot once")
        for slot in slots:
            self._is_used[slot] = False
        self._free.extend(slots)


class RequestTable:
    """Which token slots hold the tokens of which request, in order.

    ``req_to_token`` is [max_requests + 1, max_context_len] int32; a batch's ``req_pool_indices``
    are its rows. Row 0 is the scratch request's and stays all zeros, the scratch slot, as does
    every entry past what was written.
    """

    def __init__(self, max_requests: int, max_context_len: int, device: torch.device | str) -> None:
        if max_requests < 1 or max_context_len < 1:
            raise ConfigError(
                f"a request table of max_requests={max_requests} and "
                f"max_context_len={max_context_len} holds nothing; each must be at least 1"
            )
        with torch.inference_mode(False):
            self.req_to_token = torch.full(
                (max_requests + 1, max_context_len), SCRATCH_SLOT, dtype=torch.int32, device=device
            )
        self._used: set[int] = set()
        self._free = list(range(max_requests, SCRATCH_REQUEST, -1))

    @property
    def max_context_len(self) -> int:
        return self.req_to_token.shape[1]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """A free row. Raises KVCacheError where there is none."""
        if not self._free:
            raise KVCacheError(
                f"all {len(self._used)} rows of the request table are in use; free a finished "
                "request's first, or raise max_requests"
            )
        row = self._free.pop()
        self._used.add(row)
        return row

    def write(self, row: int, start: int, slots: Sequence[int] | Tensor) -> None:
        """Say that tokens ``start, start + 1, ...`` of the request of ``row`` are in ``slots``.

        Raises KVCacheError, and writes nothing, for a row not in use or past its end.
        """
        self._check_used(row)
        stop = start + len(slots)
        if start < 0 or stop > self.max_context_len:
            raise KVCacheError(
                f"tokens {start} to {stop} of request row {row} do not fit its "
                f"{self.max_context_len} entries; end the request, or raise max_context_len"
            )
        table = self.req_to_token
        values = torch.as_tensor(slots, dtype=table.dtype, device=table.device)
        table[row].narrow(0, start, len(slots)).copy_(values)

    def free(self, row: int) -> None:
        """Give a row back and point all of it at the scratch slot. Frees no token slot."""
        self._check_used(row)
        self.req_to_token[row].fill_(SCRATCH_SLOT)
        self._used.remove(row)
        self._free.append(row)

    def _check_used(self, row: int) -> None:
        if row not in self._used:
            raise KVCacheError(
                f"request row {row} is not allocated (rows are 1 to "
                f"{self.req_to_token.shape[0] - 1}); use what allocate() returned"
            )
