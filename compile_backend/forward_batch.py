"""What one forward pass is given: :class:`ForwardBatch`, its mode, and pipeline-stage tensors.

Plain data. Fields that a batch may lack default to None; the names are those that serving engines
use, so that a batch of theirs fits by attribute access.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["CaptureHiddenMode", "ForwardBatch", "ForwardMode", "PPProxyTensors"]


class ForwardMode(Enum):
    """What a forward pass does with its tokens."""

    EXTEND = auto()
    """Several new tokens per request, on top of a cached prefix (prefill)."""

    DECODE = auto()
    """One new token per request."""

    MIXED = auto()
    """Requests that extend and requests that decode in one batch."""

    IDLE = auto()
    """No live request; the rank takes part in collectives only."""

    TARGET_VERIFY = auto()
    """The target model checks the tokens that a draft model proposed."""

    DRAFT_EXTEND = auto()
    """The draft model takes in the tokens that were accepted."""

    DLLM_EXTEND = auto()
    """A diffusion language model denoises a block per request."""

    def is_decode(self) -> bool:
        """Whether every live request has one token."""
        return self is ForwardMode.DECODE

    def is_idle(self) -> bool:
        """Whether there is no live request."""
        return self is ForwardMode.IDLE

    def is_decode_or_idle(self) -> bool:
        """Whether a decode graph could serve it."""
        return self in (ForwardMode.DECODE, ForwardMode.IDLE)

    def is_extend(self) -> bool:
        """Whether requests may bring more than one token each."""
        return not self.is_decode_or_idle()

    def wants_last_tokens(self) -> bool:
        """Whether only the last token of each request has logits that anybody asks for."""
        return self in (ForwardMode.EXTEND, ForwardMode.MIXED)

    def is_mixed(self) -> bool:
        """Whether requests that extend and requests that decode share the batch."""
        return self is ForwardMode.MIXED


class CaptureHiddenMode(IntEnum):
    """Which hidden states a forward hands out. Each holds what the one before it does."""

    NULL = 0
    """None."""

    LAST = 1
    """Those of the rows whose logits are wanted."""

    FULL = 2
    """Those of every token."""


@dataclass(eq=False)
class PPProxyTensors:
    """Named tensors that one pipeline stage hands to the next (hidden states, residual)."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Tensor:
        return self.tensors[key]

    def __contains__(self, key: object) -> bool:
        return key in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Pairs of name and tensor."""
        return iter(self.tensors.items())


pytree.register_pytree_node(
    PPProxyTensors,
    lambda proxies: (list(proxies.tensors.values()), list(proxies.tensors)),
    lambda values, names: PPProxyTensors(dict(zip(names, values, strict=True))),
    serialized_type_name="compile_backend.PPProxyTensors",
)


@dataclass(eq=False, kw_only=True)
class ForwardBatch:
    """One batch. Shapes use bs (requests) and tokens; in DECODE the two are equal.

    A field that is None is absent: the model may branch on it, and no slot stands in for it.
    """

    forward_mode: ForwardMode = ForwardMode.DECODE
    batch_size: int = 0

    # On the token axis
    input_ids: Tensor | None = None  # [tokens] int64
    positions: Tensor | None = None  # [tokens] int64
    out_cache_loc: Tensor | None = None  # [tokens], where each token's keys and values are written
    mrope_positions: Tensor | None = None  # [3, tokens] int64: time, height, width
    input_embeds: Tensor | None = None  # [tokens, hidden]

    # On the request axis
    req_pool_indices: Tensor | None = None  # [bs] int64
    seq_lens: Tensor | None = None  # [bs] int64, cached prefix and new tokens together
    seq_lens_cpu: Tensor | None = None  # [bs] int64, the same on the host
    seq_lens_sum: int | None = None
    encoder_lens: Tensor | None = None  # [bs]
    encoder_lens_cpu: list[int] | None = None
    rids_int: Tensor | None = None  # [bs]
    bootstrap_room_ids_int: Tensor | None = None  # [bs]

    # Extend
    extend_num_tokens: int | None = None
    extend_seq_lens: Tensor | None = None  # [bs] new tokens per request
    extend_prefix_lens: Tensor | None = None  # [bs] cached tokens per request
    extend_start_loc: Tensor | None = None  # [bs] first token of each request
    extend_seq_lens_cpu: list[int] | None = None
    extend_prefix_lens_cpu: list[int] | None = None

    # Recurrent state
    mamba_track_indices: Tensor | None = None  # [bs] int64
    mamba_track_mask: Tensor | None = None  # [bs] bool
    mamba_track_seqlens: Tensor | None = None  # [bs] int64

    # Live rows, and sizes over the ranks that gather together
    num_token_non_padded: Tensor | None = None  # [] or [1] int32; may be this rank's share only
    num_token_non_padded_cpu: int | None = None  # always over the whole attention-TP group
    global_num_tokens_gpu: Tensor | None = None  # [1] or [dp_size] int64
    global_num_tokens_for_logprob_gpu: Tensor | None = None  # [1] or [dp_size] int64
    global_num_tokens_cpu: list[int] | None = None

    # What the model or the attention backend brings along
    pp_proxy_tensors: PPProxyTensors | Mapping[str, Tensor] | None = None
    ngram_embedding_info: Any = None
    spec_info: Any = None
    sampling_info: Any = None
    multimodal_inputs: list[Any] | None = None
    return_logprob: bool = False
    capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.FULL
    can_run_dp_cuda_graph: bool = False  # every data-parallel rank decodes or is idle
    has_lora: bool = False  # whether any request uses an adapter; part of the graph key
    stream_index: int | None = None  # of phase-multiplexed decode: graphs per stream; None is 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch, from the first token-axis field it has; 0 where it has none."""
        for tokens in (self.input_ids, self.positions, self.input_embeds):
            if tokens is not None:
                return tokens.shape[0]
        return 0
