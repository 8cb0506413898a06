"""Runner settings: frozen, checked once; what the scheduler, capacity and the runners all read.

One object describes one worker: the limits of its scheduler, its place among the ranks, its part in
speculative decoding, and how its graphs are captured. Every size follows from it, in
``registry/capacity.py``. The environment is not read.
"""

# ruff: noqa: RUF009  make_option() returns dataclasses.field(...)

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from compile_backend.config import (
    CompilerName,
    EngineName,
    GraphbufConfig,
    check_choice,
    check_count,
    check_flag,
    check_known,
    check_mapping,
    check_op_names,
    check_path,
    check_sizes,
    check_values,
    make_option,
)
from compile_backend.errors import ConfigError
from compile_backend.forward_batch import CaptureHiddenMode

__all__ = [
    "DeepGemmWarmup",
    "EmbedsSource",
    "PrefillBackend",
    "RunnerConfig",
    "SpeculativeAlgorithm",
    "SpeculativeRole",
    "WorkerRole",
]

SpeculativeAlgorithm = Literal["EAGLE", "DFLASH", "FROZEN_KV_MTP"]
SpeculativeRole = Literal["none", "target", "draft"]
PrefillBackend = Literal["piecewise", "breakable"]
WorkerRole = Literal["both", "prefill", "decode"]
EmbedsSource = Literal["in_graph", "from_batch"]
DeepGemmWarmup = Literal["auto", "always", "never"]


def _check_optional_count(minimum: int) -> Any:
    check_number = check_count(minimum)

    def check(name: str, value: Any) -> int | None:
        return None if value is None else check_number(name, value)

    return check


def _check_chunk(name: str, value: Any) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ConfigError(
        f"option {name!r} is {value!r} ({type(value).__name__}); pass a number of tokens, "
        "or None (or 0 or less) to leave prompts whole"
    )


def _check_algorithm(name: str, value: Any) -> str | None:
    return None if value is None else check_choice(*get_args(SpeculativeAlgorithm))(name, value)


def _check_waste(name: str, value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or math.isnan(value) or value < 1:
        raise ConfigError(
            f"option {name!r} is {value!r} ({type(value).__name__}); pass a ratio of padded to "
            "live tokens of at least 1.0, such as 2.0"
        )
    return float(value)


def _check_hidden_mode(name: str, value: Any) -> CaptureHiddenMode:
    if not isinstance(value, CaptureHiddenMode):
        raise ConfigError(f"option {name!r} is {value!r}; pass a member of CaptureHiddenMode")
    return value


def _check_file(name: str, value: Any) -> str | None:
    if value is None or (isinstance(value, (str, os.PathLike)) and os.fspath(value)):
        return None if value is None else os.fspath(value)
    raise ConfigError(f"option {name!r} is {value!r}; pass the path of a file, or None")


def _check_dtype(name: str, value: Any) -> torch.dtype:
    if not isinstance(value, torch.dtype):
        raise ConfigError(
            f"option {name!r} is {value!r} ({type(value).__name__}); "
            "pass a torch.dtype, such as torch.int64"
        )
    return value


def _check_index_dtype(name: str, value: Any) -> torch.dtype:
    if value not in (torch.int32, torch.int64):
        raise ConfigError(f"option {name!r} is {value!r}; pass torch.int32 or torch.int64")
    return _check_dtype(name, value)


def _check_optional_dtype(name: str, value: Any) -> torch.dtype | None:
    return None if value is None else _check_dtype(name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """The settings of one worker's runners.

    Raises ConfigError, on construction, for a bad value and for values that contradict each other.
    """

    # Limits of the scheduler
    max_running_requests: int = make_option(64, "how many requests may run at once", check_count(1))
    chunked_prefill_size: int | None = make_option(
        2048,
        "most prompt tokens of one prefill batch; None, or 0 or less, leaves prompts whole",
        _check_chunk,
    )
    max_prefill_tokens: int = make_option(
        16384, "most tokens of a prefill batch that dynamic chunking may grow to", check_count(1)
    )
    max_total_num_tokens: int | None = make_option(
        None, "tokens that the KV pool holds", _check_optional_count(1)
    )
    enable_dynamic_chunking: bool = make_option(
        False,
        "let the scheduler choose each chunk's size by predicted latency (pipeline parallelism)",
        check_flag,
    )

    # Place among the ranks
    pp_size: int = make_option(1, "pipeline stages", check_count(1))
    pp_rank: int = make_option(0, "this worker's pipeline stage", check_count(0))
    attn_tp_size: int = make_option(
        1, "ranks that share the attention of one batch by heads", check_count(1)
    )
    attn_tp_rank: int = make_option(0, "this worker's rank among those", check_count(0))
    attn_cp_size: int = make_option(
        1, "ranks that share the attention of one batch by context (zig-zag)", check_count(1)
    )
    dp_size: int = make_option(
        1, "data-parallel ranks, each with a batch of its own", check_count(1)
    )
    dp_rank: int = make_option(0, "this worker's rank among those", check_count(0))
    enable_mlp_sync: bool = make_option(
        False, "ranks meet in the MLP's collectives, so their token counts are aligned", check_flag
    )
    require_mlp_tp_gather: bool = make_option(
        False, "the MLP gathers the tokens of every data-parallel rank", check_flag
    )

    role: WorkerRole = make_option(
        "both",
        "which batches arrive, where prefill and decode run on different workers",
        check_choice(*get_args(WorkerRole)),
    )

    # Speculative decoding and diffusion
    speculative_algorithm: SpeculativeAlgorithm | None = make_option(
        None, "how tokens are drafted: EAGLE, DFLASH, FROZEN_KV_MTP, or None", _check_algorithm
    )
    speculative_role: SpeculativeRole = make_option(
        "none",
        "whether this worker verifies (target) or proposes (draft)",
        check_choice(*get_args(SpeculativeRole)),
    )
    speculative_num_draft_tokens: int = make_option(
        0, "tokens per request that the target verifies at once", check_count(0)
    )
    speculative_num_steps: int = make_option(
        0, "forward passes of the draft model per round", check_count(0)
    )
    speculative_eagle_topk: int = make_option(
        1, "branches that a draft step keeps per request", check_count(1)
    )
    speculative_multi_layer_eagle: bool = make_option(
        False, "each EAGLE step has a draft layer of its own", check_flag
    )
    speculative_adaptive_max_draft_tokens: int | None = make_option(
        None,
        "the most speculative_num_draft_tokens can grow to while serving; None keeps it fixed",
        _check_optional_count(1),
    )
    dllm_block_size: int | None = make_option(
        None,
        "tokens per request that a diffusion language model denoises at once; None for others",
        _check_optional_count(1),
    )

    # Graphs
    enable_decode_graph: bool = make_option(True, "serve decode from graphs", check_flag)
    enable_prefill_graph: bool = make_option(True, "serve prefill from graphs", check_flag)
    cudagraph_capture_sizes: tuple[int, ...] | None = make_option(
        None, "batch sizes of the decode graphs; None chooses up to the capacity", check_sizes
    )
    prefill_capture_sizes: tuple[int, ...] | None = make_option(
        None, "token counts of the prefill graphs; None chooses up to the capacity", check_sizes
    )
    max_padding_waste: float = make_option(
        2.0, "ratio of padded to live tokens above which a prefill runs eagerly", _check_waste
    )
    prefill_backend: PrefillBackend = make_option(
        "piecewise",
        "how prefill graphs are made: piecewise traces and compiles the model and proves that it "
        "may be padded; breakable records it as written between functions marked no_graph, and "
        "the model's owner vouches for the padding",
        check_choice(*get_args(PrefillBackend)),
    )
    engine: EngineName = make_option(
        "auto",
        "how graphs are captured: auto picks by device; none captures nothing",
        check_choice(*get_args(EngineName)),
    )
    compiler: CompilerName = make_option(
        "inductor", "what compiles a piece", check_choice(*get_args(CompilerName))
    )
    inductor_options: Mapping[str, Any] = make_option(
        dict, "Inductor settings for the pieces", check_mapping, factory=True
    )
    splitting_ops: tuple[str, ...] = make_option(
        (),
        "operators of the model kept out of every piece, besides attention, and of every prefill "
        "graph; custom ones are vouched to be row-wise",
        check_op_names,
    )
    rowwise_ops: tuple[str, ...] = make_option(
        (), "custom operators vouched to compute each row from that row alone", check_op_names
    )
    copy_outputs: bool = make_option(
        False, "outputs are the caller's to keep; False hands out views of graph memory", check_flag
    )
    strict: bool = make_option(
        False, "raise FallbackError where a batch that graphs should serve has none", check_flag
    )
    debug_dump_path: str | None = make_option(
        None, "directory that receives the graphs and pieces as readable code", check_path
    )
    show_progress: bool = make_option(True, "show a progress bar while capturing", check_flag)

    num_streams: int = make_option(
        1, "streams of phase-multiplexed decode, each with graphs of its own", check_count(1)
    )
    enable_lora: bool = make_option(
        False, "capture each graph with and without adapters (ForwardBatch.has_lora)", check_flag
    )
    capture_hidden_mode: CaptureHiddenMode = make_option(
        CaptureHiddenMode.FULL,
        "which hidden states graphs hand out; a batch that wants more runs eagerly",
        _check_hidden_mode,
    )

    # Warm-up
    enable_flashinfer_autotune: bool = make_option(
        True, "have FlashInfer measure its kernels at the captured sizes", check_flag
    )
    flashinfer_autotune_cache: str | None = make_option(
        None, "file that keeps what was measured, for the next start; rank 0's is used", _check_file
    )
    deep_gemm_warmup: DeepGemmWarmup = make_option(
        "auto",
        "run the model at the sizes for which DeepGEMM compiles kernels: where it is installed and "
        "the model is on a GPU, always, or never",
        check_choice(*get_args(DeepGemmWarmup)),
    )

    # The model
    is_multimodal: bool = make_option(
        False, "the model embeds images or sound, so prefill takes input_embeds", check_flag
    )
    is_encoder_decoder: bool = make_option(
        False, "the model attends to an encoder, so batches bring encoder_lens", check_flag
    )
    enable_mamba_track: bool = make_option(
        False, "batches say which recurrent states to keep (mamba_track_*)", check_flag
    )
    hidden_size: int | None = make_option(
        None,
        "width of input_embeds, which then have a slot; None has batches that bring them run "
        "eagerly",
        _check_optional_count(1),
    )
    input_embeds: EmbedsSource = make_option(
        "in_graph",
        "who writes the slot of input_embeds: the model, inside the graph, or a batch that has any",
        check_choice(*get_args(EmbedsSource)),
    )
    embed_dtype: torch.dtype | None = make_option(
        None, "dtype of input_embeds", _check_optional_dtype
    )
    cache_loc_dtype: torch.dtype = make_option(
        torch.int64, "dtype of out_cache_loc", _check_index_dtype
    )
    encoder_len_fill_value: int = make_option(
        0, "encoder length of a padded request", check_count(0)
    )
    encoder_lens_dtype: torch.dtype = make_option(
        torch.int32, "dtype of encoder_lens", _check_index_dtype
    )

    def __post_init__(self) -> None:
        check_values(self)
        self._check_ranks()
        self._check_chunking()
        self._check_speculation()
        if self.require_mlp_tp_gather and not self.enable_mlp_sync:
            raise ConfigError(
                "option 'require_mlp_tp_gather' is True but 'enable_mlp_sync' is False, so ranks "
                "would gather at unequal sizes; set enable_mlp_sync=True"
            )

    @classmethod
    def check(cls, options: Mapping[str, Any] | None = None) -> RunnerConfig:
        """The settled config for ``options`` over the defaults.

        Raises ConfigError for an unknown option (listing the valid ones), a bad value, or values
        that contradict each other.
        """
        for name in options or {}:
            check_known(cls, name, f"option {name!r}")
        return cls(**(options or {}))

    def graphbuf_config(self, *, splitting_ops: Sequence[str]) -> GraphbufConfig:
        """The backend options with which the model's graphs are compiled.

        ``splitting_ops`` are kept out of every piece besides this config's own. The environment is
        not read.
        """
        return GraphbufConfig(
            engine=self.engine,
            compiler=self.compiler,
            inductor_options=self.inductor_options,
            splitting_ops=(*splitting_ops, *self.splitting_ops),
            rowwise_ops=self.rowwise_ops,
            copy_outputs=self.copy_outputs,
            debug_dump_path=self.debug_dump_path,
        )

    def _check_ranks(self) -> None:
        for axis in ("pp", "attn_tp", "dp"):
            rank, size = getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
            if rank >= size:
                raise ConfigError(
                    f"option '{axis}_rank' is {rank} but '{axis}_size' is {size}; ranks count from "
                    f"0, so pass a rank of at most {size - 1} or {axis}_size={rank + 1}"
                )

    def _check_chunking(self) -> None:
        if (self.chunked_prefill_size or 0) <= 0 and self.max_total_num_tokens is None:
            raise ConfigError(
                f"option 'chunked_prefill_size' is {self.chunked_prefill_size!r}, so a prompt is "
                "bounded by the KV pool alone; pass max_total_num_tokens, or a positive "
                "chunked_prefill_size"
            )

    def _check_speculation(self) -> None:
        algorithm, role = self.speculative_algorithm, self.speculative_role
        if algorithm is None:
            self._check_no_speculation()
            return
        if role == "none":
            raise ConfigError(
                f"option 'speculative_algorithm' is {algorithm!r} but 'speculative_role' is "
                "'none'; pass 'target' or 'draft', whichever this worker is"
            )
        if self.speculative_num_draft_tokens < 1:
            raise ConfigError(
                f"option 'speculative_num_draft_tokens' is {self.speculative_num_draft_tokens} but "
                f"'speculative_role' is {role!r}; pass how many tokens a request verifies at once"
            )
        if role == "draft" and algorithm != "DFLASH" and self.speculative_num_steps < 1:
            raise ConfigError(
                f"option 'speculative_num_steps' is {self.speculative_num_steps} but this worker "
                f"drafts with {algorithm}; pass how many draft passes a round makes, at least 1"
            )
        if algorithm == "DFLASH" and self.speculative_eagle_topk > 1:
            raise ConfigError(
                f"option 'speculative_eagle_topk' is {self.speculative_eagle_topk} but DFLASH "
                "drafts one block without branches; leave it at 1"
            )
        if self.speculative_multi_layer_eagle and algorithm != "EAGLE":
            raise ConfigError(
                f"option 'speculative_multi_layer_eagle' is True but 'speculative_algorithm' is "
                f"{algorithm!r}; pass speculative_algorithm='EAGLE' or leave it False"
            )
        largest = self.speculative_adaptive_max_draft_tokens
        if largest is not None and largest < self.speculative_num_draft_tokens:
            raise ConfigError(
                f"option 'speculative_adaptive_max_draft_tokens' is {largest}, below "
                f"'speculative_num_draft_tokens', {self.speculative_num_draft_tokens}; "
                f"pass at least that"
            )
        if largest is not None and self.enable_mlp_sync:
            raise ConfigError(
                f"option 'speculative_adaptive_max_draft_tokens' is {largest} but "
                "'enable_mlp_sync' is True, and a rank without requests cannot know how wide the "
                "others are; leave one of them out"
            )
        if self.dllm_block_size is not None:
            raise ConfigError(
                f"option 'dllm_block_size' is {self.dllm_block_size} but 'speculative_algorithm' "
                f"is {algorithm!r}; a diffusion model has no draft, so leave one of them None"
            )

    def _check_no_speculation(self) -> None:
        """Without an algorithm, nothing else may ask for speculation: it would be ignored."""
        asked = {
            "speculative_role": self.speculative_role != "none",
            "speculative_multi_layer_eagle": self.speculative_multi_layer_eagle,
            "speculative_adaptive_max_draft_tokens": (
                self.speculative_adaptive_max_draft_tokens is not None
            ),
        }
        for name, is_asked in asked.items():
            if is_asked:
                raise ConfigError(
                    f"option {name!r} is {getattr(self, name)!r} but 'speculative_algorithm' is "
                    f"None; pass one of {', '.join(get_args(SpeculativeAlgorithm))}"
                )
