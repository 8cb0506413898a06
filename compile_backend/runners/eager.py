"""The runner without graphs: every forward that no graph takes, on the same slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.utils import _pytree as pytree

from compile_backend.attention import ForwardContext, forward_context
from compile_backend.errors import ConfigError, FallbackReason
from compile_backend.forward_batch import ForwardBatch
from compile_backend.passes.axes import Refusal
from compile_backend.registry.builders import build_eager_registry
from compile_backend.registry.capacity import max_bs
from compile_backend.registry.slot import GraphSlot, PaddingPolicy
from compile_backend.runner_config import RunnerConfig
from compile_backend.runners.base import BaseRunner, ServedModel
from compile_backend.runners.dummy_buffers import DummyBuffers
from compile_backend.runners.output import copied_from

__all__ = ["EagerRunner", "SplitModel", "SplitPrefill"]


@runtime_checkable
class SplitModel(Protocol):
    """What a model offers to have a prefill run layer by layer, with other batches in between."""

    num_split_layers: int

    def forward_split(self, forward_batch: ForwardBatch, start: int, stop: int, state: Any) -> Any:
        """Run layers ``[start, stop)``. ``state`` is what the call before returned, None at first;
        the call with ``stop == num_split_layers`` returns what the model's forward returns."""


class EagerRunner(BaseRunner):
    """Runs the model as written, at the exact sizes of the batch.

    Built first, at the largest sizes that any mode needs, so that its buffers are the ones that
    the graph runners share. It captures nothing and takes every mode through one preparation, so
    that ranks enter collectives in the same order whatever each of them runs. MIXED runs as EXTEND
    does. Under MLP sync tokens are padded to the size that the ranks agreed on; IDLE runs the model
    on those, or on 0 rows.
    """

    name = "eager"

    def __init__(self, served: ServedModel) -> None:
        super().__init__(
            served, build_eager_registry(**served.registry_options, **served.encoder_options)
        )
        if served.config.is_multimodal and served.config.hidden_size is not None:
            self.registry.register_slot(embeddings_slot(served.config))

    def _autotune_buffers(self, *, vocab_size: int | None = None) -> tuple[DummyBuffers, int]:
        """Its slots at the largest batch size, completed with what only a live batch brings."""
        size = max_bs(self.config)
        return self._alloc_dummy_decode_buffers(size, vocab_size=vocab_size), size

    def refuse(self, batch: ForwardBatch) -> Refusal | None:
        return None

    def load_batch(self, batch: ForwardBatch) -> ForwardBatch:
        if (refusal := refuse_embeddings(batch, self.config)) is not None:
            raise ConfigError(refusal.message)
        bs, tokens = batch.batch_size, batch.num_tokens
        padded_bs, padded_tokens = self._padded(batch)
        self.registry.fill_from(
            batch,
            raw_bs=bs,
            padded_bs=padded_bs,
            raw_num_tokens=tokens,
            padded_num_tokens=padded_tokens,
            pp_proxy_tensors=batch.pp_proxy_tensors,
        )
        view = self._extract(batch, padded_bs, padded_tokens)
        if writes_embeddings(self.config) and not batch.forward_mode.is_extend():
            view.input_embeds = None  # as in a decode graph
        return view

    def execute(self, batch: ForwardBatch) -> Any:
        return self._run(batch, self.load_batch(batch), self.served.model)

    def execute_on_own_tensors(self, batch: ForwardBatch) -> Any:
        """As :meth:`execute`, without the slots, which somebody else is using."""
        return self._run(batch, batch, self.served.model)

    def split_prefill(self, batch: ForwardBatch) -> SplitPrefill:
        """Prepare ``batch``, then run its layers a few at a time. Raises ConfigError for a model
        that cannot be split."""
        model = self.served.model
        if not isinstance(model, SplitModel):
            raise ConfigError(
                f"{type(model).__name__} cannot be run layer by layer; give it num_split_layers "
                f"and forward_split(forward_batch, start, stop, state)"
            )
        return SplitPrefill(self, model, batch)

    def _run(
        self, batch: ForwardBatch, view: ForwardBatch, model: Callable[[ForwardBatch], Any]
    ) -> Any:
        backend = self.served.attn_backend
        metadata = backend.init_forward_metadata(view)
        with forward_context(ForwardContext(backend, view, metadata)):
            result = model(view)
        return self._kept(trimmed(result, padded=view.num_tokens, live=batch.num_tokens))

    def _kept(self, result: Any) -> Any:
        """The result, with copies of the slots that it may hold where outputs are to be kept."""
        keeps = self.config.copy_outputs
        return copied_from(self.registry.buffers(), result) if keeps else result

    def _padded(self, batch: ForwardBatch) -> tuple[int, int]:
        """Requests and tokens that run: more than the batch's under MLP sync only."""
        bs, tokens = batch.batch_size, batch.num_tokens
        counts = batch.global_num_tokens_cpu
        if not self.config.enable_mlp_sync or counts is None:
            return bs, tokens
        agreed = counts[self.config.dp_rank if self.config.require_mlp_tp_gather else 0]
        if batch.forward_mode.is_decode() and bs:
            return max(bs, agreed // (tokens // bs)), max(tokens, agreed)
        return bs, max(tokens, agreed)


class SplitPrefill:
    """One prefill that is run in several calls. The slots are filled anew at each, since other
    batches may have run in between; what the layers hand on is the model's own."""

    def __init__(self, runner: EagerRunner, model: SplitModel, batch: ForwardBatch) -> None:
        self.batch = batch
        self.next_layer = 0
        self._runner = runner
        self._model = model
        self._state: Any = None
        runner.load_batch(batch)  # whatever does not fit is refused before a layer has run

    @property
    def is_finished(self) -> bool:
        return self.next_layer == self._model.num_split_layers

    @property
    def result(self) -> Any:
        """What the model's forward returns, once it is finished."""
        assert self.is_finished
        return self._state

    def run(self, num_layers: int) -> bool:
        """Run the next ``num_layers`` layers, or those that are left; whether that finished it."""
        if num_layers < 1 or self.is_finished:
            raise ConfigError(
                f"{num_layers} layers were asked for at layer {self.next_layer} of "
                f"{self._model.num_split_layers}; ask for at least one, until is_finished"
            )
        start, batch = self.next_layer, self.batch
        stop = min(start + num_layers, self._model.num_split_layers)
        state = self._state
        view = self._runner.load_batch(batch)
        backend = self._runner.served.attn_backend
        metadata = backend.init_forward_metadata(view)
        with forward_context(ForwardContext(backend, view, metadata)):
            state = self._model.forward_split(view, start, stop, state)
        if stop == self._model.num_split_layers:
            state = self._runner._kept(
                trimmed(state, padded=view.num_tokens, live=batch.num_tokens)
            )
        self._state, self.next_layer = state, stop
        return self.is_finished


def trimmed(result: Any, *, padded: int, live: int) -> Any:
    """The first ``live`` rows of every tensor that has ``padded`` rows."""
    if padded == live:
        return result

    def cut(value: Any) -> Any:
        has_rows = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == padded
        return value.narrow(0, 0, live) if has_rows else value

    return pytree.tree_map(cut, result)


def writes_embeddings(config: RunnerConfig) -> bool:
    """Whether the model writes ``input_embeds`` itself, in modes that extend."""
    has_slot = config.is_multimodal and config.hidden_size is not None
    return has_slot and config.input_embeds == "in_graph"


def takes_embeddings(config: RunnerConfig) -> bool:
    """Whether a batch's own ``input_embeds`` are copied into a slot, where it has any."""
    has_slot = config.is_multimodal and config.hidden_size is not None
    return has_slot and config.input_embeds == "from_batch"


def refuse_embeddings(batch: ForwardBatch, config: RunnerConfig) -> Refusal | None:
    """Why a batch whose embeddings the model would overwrite is not run, or None."""
    if batch.input_embeds is None or not writes_embeddings(config):
        return None
    return Refusal(
        FallbackReason.VARIANT_NOT_TRACED,
        f"the batch brings input_embeds {list(batch.input_embeds.shape)} but the model is to write "
        f"them (input_embeds is 'in_graph' in the config); set it to 'from_batch', or leave the "
        f"batch's out",
    )


def embeddings_slot(config: RunnerConfig) -> GraphSlot:
    """The slot of ``input_embeds`` [max_num_tokens, hidden_size]."""
    hidden_size, dtype = config.hidden_size, config.embed_dtype
    assert hidden_size is not None
    if dtype is None:
        raise ConfigError(
            f"option 'hidden_size' is {hidden_size} but 'embed_dtype' is None; pass the dtype of "
            f"input_embeds, such as torch.bfloat16"
        )
    return GraphSlot(
        "input_embeds",
        lambda max_bs, max_num_tokens: (max_num_tokens, hidden_size),
        dtype,
        axis="tokens",
        padding_policy=PaddingPolicy.ZERO,
        copy_from_fb=takes_embeddings(config),
    )
