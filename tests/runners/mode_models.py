"""Models and attention backends of the forward modes: a small decoder with one thing more each."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from compile_backend import ForwardBatch, ForwardMode, ModelRunner, PPProxyTensors
from compile_backend.attention import (
    AttentionBackend,
    ForwardContext,
    TorchNativeBackend,
    get_forward_context,
)
from compile_backend.attention import attention as attend
from compile_backend.forward_batch import CaptureHiddenMode
from tests.runners.models import HIDDEN, Decoder, World, close

SMALL_GRAPHS: dict[str, Any] = {"cudagraph_capture_sizes": (2, 4), "prefill_capture_sizes": (8,)}


def hits(runner: ModelRunner, name: str) -> int:
    """How many forwards were replayed from the graphs of ``decode`` or ``prefill``."""
    return sum(use.hits for use in getattr(runner, name).graphs.uses)


def forward_eagerly(world: World, batch: ForwardBatch, runner: ModelRunner) -> Any:
    """A forward that must be replayed, checked against the model itself, which ran first."""
    want = world.eagerly(batch)
    before = sum(hits(runner, each.name) for each in runner.graph_runners)
    out = runner.forward(batch)
    assert sum(hits(runner, each.name) for each in runner.graph_runners) == before + 1, out.reason
    close(out.hidden_states, want)
    return out


# --- what a model may do ------------------------------------------------------------------------

PLANNED = -1
met: list[tuple[int, int]] = []  # the layer and the rows of every collective, in order
finite: list[Tensor] = []  # [] bool each, whether all of those rows were


@torch.library.custom_op("graphbuf_modes::meet", mutates_args=())
def meet(h: Tensor, layer_id: int) -> Tensor:
    """Stands for a collective: notes that it was entered."""
    met.append((layer_id, h.shape[0]))
    finite.append(h.isfinite().all())
    return h.clone()


@meet.register_fake
def _(h: Tensor, layer_id: int) -> Tensor:
    return torch.empty_like(h)


class Meeting(Decoder):
    """Enters a collective after each layer."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        h = self.embed(batch.input_ids)
        angles = self.angles(batch.positions)
        for layer in self.layers:
            h = torch.ops.graphbuf_modes.meet(layer(h, angles, attend), layer.layer_id)
        return self.norm(h)


class Split(Meeting):
    """Can be run layer by layer."""

    @property
    def num_split_layers(self) -> int:
        return len(self.layers)

    def forward_split(self, forward_batch: ForwardBatch, start: int, stop: int, state: Any) -> Any:
        h = self.embed(forward_batch.input_ids) if state is None else state
        angles = self.angles(forward_batch.positions)
        for layer in self.layers[start:stop]:
            h = torch.ops.graphbuf_modes.meet(layer(h, angles, attend), layer.layer_id)
        return self.norm(h) if stop == self.num_split_layers else h


class EncoderDecoder(Decoder):
    """A decode adds something of each request's encoder output, known by its length."""

    def before(self, h: Tensor, batch: ForwardBatch) -> Tensor:
        if batch.forward_mode.is_decode() and batch.encoder_lens is not None:
            h = h + 0.1 * batch.encoder_lens[:, None]
        return h


class MultiAxisRotary(Decoder):
    """Takes positions of three axes where there are images."""

    def before(self, h: Tensor, batch: ForwardBatch) -> Tensor:
        if batch.mrope_positions is None:
            return h
        return h + (batch.mrope_positions.float() / 50).sin().sum(0)[:, None]


class WritesEmbeddings(Decoder):
    """Puts its embeddings where the batch has room for them, and goes on from there."""

    def before(self, h: Tensor, batch: ForwardBatch) -> Tensor:
        if batch.input_embeds is None:
            return h
        batch.input_embeds.copy_(h)
        return batch.input_embeds * 1.0


class ReadsEmbeddings(Decoder):
    """Takes the embeddings that the batch brings, if it brings any."""

    def before(self, h: Tensor, batch: ForwardBatch) -> Tensor:
        return h if batch.input_embeds is None else batch.input_embeds * 1.0


@torch.library.custom_op("graphbuf_modes::advance", mutates_args={"state"})
def advance(h: Tensor, state: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    """Mix row b of ``h`` with the state of request b, which is kept where ``mask`` says so."""
    old = state[rows]
    new = torch.where(mask[:, None], 0.5 * old + h, old)
    state.index_copy_(0, rows, new)
    return h + new


@advance.register_fake
def _(h: Tensor, state: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    return torch.empty_like(h)


@torch.library.custom_op("graphbuf_modes::count", mutates_args={"counts"})
def count(counts: Tensor, rows: Tensor, mask: Tensor) -> None:
    """Add one for every row of the batch that ``mask`` keeps."""
    counts.index_add_(0, rows, mask.to(counts.dtype))


class Recurrent(Decoder):
    """Keeps a state per tracked request in decode, and counts the prefills of each.

    Row 0 of both is the scratch row.
    """

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__(num_layers)
        self.register_buffer("state", torch.zeros(9, HIDDEN))
        self.register_buffer("num_prefills", torch.zeros(9))

    def before(self, h: Tensor, batch: ForwardBatch) -> Tensor:
        rows, mask = batch.mamba_track_indices, batch.mamba_track_mask
        if rows is None:
            return h
        if batch.forward_mode.is_decode():
            return torch.ops.graphbuf_modes.advance(h, self.state, rows, mask)
        torch.ops.graphbuf_modes.count(self.num_prefills, rows, mask)
        return h


class CountsSteps(Recurrent):
    """Also counts its forwards, in a buffer that every run writes."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__(num_layers)
        self.register_buffer("num_steps", torch.zeros(1))

    def after(self, h: Tensor, batch: ForwardBatch) -> Tensor:
        self.num_steps.add_(1)
        return h


class Stage(nn.Module):
    """One stage of a pipeline over the layers of a decoder: hidden states in, hidden states out."""

    def __init__(self, whole: Decoder, rank: int, size: int) -> None:
        super().__init__()
        self.is_first, self.is_last = rank == 0, rank == size - 1
        self.whole = whole
        per_stage = len(whole.layers) // size
        self.layers = whole.layers[rank * per_stage : (rank + 1) * per_stage]
        if self.is_last:
            self.lm_head = whole.lm_head

    def forward(self, batch: ForwardBatch) -> Any:
        if self.is_first:
            h = self.whole.embed(batch.input_ids)
        else:
            h = batch.pp_proxy_tensors["hidden_states"] + batch.pp_proxy_tensors["residual"]
        angles = self.whole.angles(batch.positions)
        for layer in self.layers:
            h = layer(h, angles, attend)
        if self.is_last:
            return self.whole.norm(h)
        return PPProxyTensors({"hidden_states": 0.25 * h, "residual": 0.75 * h})


def proxy_example() -> PPProxyTensors:
    """What such a stage is handed, by shape."""
    return PPProxyTensors(
        {"hidden_states": torch.zeros(1, HIDDEN), "residual": torch.zeros(1, HIDDEN)}
    )


class ExtraHidden(Decoder):
    """Hands out what a draft model wants, where everything is wanted."""

    def after(self, h: Tensor, batch: ForwardBatch) -> Any:
        return (h, 3 * h) if batch.capture_hidden_mode == CaptureHiddenMode.FULL else h


class Adapted(Decoder):
    """Applies the adapter that its buffers hold, where the batch has one."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__(num_layers)
        self.register_buffer("lora_a", torch.zeros(HIDDEN, 2))
        self.register_buffer("lora_b", torch.zeros(2, HIDDEN))

    def load_adapter(self, seed: int) -> None:
        """In place: the buffers stay where they are."""
        generator = torch.Generator().manual_seed(seed)
        for buffer in (self.lora_a, self.lora_b):
            buffer.copy_(torch.randn(buffer.shape, generator=generator))

    def after(self, h: Tensor, batch: ForwardBatch) -> Tensor:
        return h + h @ self.lora_a @ self.lora_b if batch.has_lora else h


@torch.library.custom_op("graphbuf_modes::adapt", mutates_args=())
def adapt(h: Tensor, lora_a: Tensor, lora_b: Tensor) -> Tensor:
    """Asks the batch of the forward pass whether there is an adapter."""
    has_lora = get_forward_context().forward_batch.has_lora
    return h + h @ lora_a @ lora_b if has_lora else h.clone()


@adapt.register_fake
def _(h: Tensor, lora_a: Tensor, lora_b: Tensor) -> Tensor:
    return torch.empty_like(h)


class AdaptedByOperator(Adapted):
    """The same from inside an operator: one traced graph, whose recordings differ."""

    def after(self, h: Tensor, batch: ForwardBatch) -> Tensor:
        return torch.ops.graphbuf_modes.adapt(h, self.lora_a, self.lora_b)


# --- what a backend may do ----------------------------------------------------------------------


class NotesPlans(TorchNativeBackend):
    """Notes when it plans, among the collectives, and what was in the batch by then."""

    def init_forward_metadata(
        self, forward_batch: ForwardBatch, *, graph_key: tuple[int, ...] | None = None
    ) -> Any:
        met.append((PLANNED, forward_batch.num_tokens))
        self.ids_when_planned = forward_batch.input_ids
        return super().init_forward_metadata(forward_batch, graph_key=graph_key)


class FillsThree(TorchNativeBackend):
    """Padded requests have three tokens; notes the lengths that it is asked to plan for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.planned: list[tuple[Any, list[int], list[int]]] = []  # graph key, seq_lens, on host

    @property
    def seq_len_fill_value(self) -> int:
        return 3

    def init_forward_metadata(
        self, forward_batch: ForwardBatch, *, graph_key: tuple[int, ...] | None = None
    ) -> Any:
        lengths = forward_batch.seq_lens.tolist(), forward_batch.seq_lens_cpu.tolist()
        self.planned.append((graph_key, *lengths))
        return super().init_forward_metadata(forward_batch, graph_key=graph_key)


@dataclass(slots=True)
class Plan:
    """What a graph is captured with."""

    inner: Any
    factor: Tensor  # []


@dataclass(slots=True)
class RicherPlan(Plan):
    """What a replay has: the same, and the live lengths."""

    longest: int


class Scales(TorchNativeBackend):
    """Multiplies what is attended by the longest live length, which only a RicherPlan knows."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_planned: list[Any] = []  # graph keys
        self.used: list[type] = []  # plans that forward() read

    def init_forward_metadata(
        self, forward_batch: ForwardBatch, *, graph_key: tuple[int, ...] | None = None
    ) -> Plan:
        inner = super().init_forward_metadata(forward_batch, graph_key=graph_key)
        longest = int(forward_batch.seq_lens_cpu.max())
        is_capture = graph_key is not None and graph_key not in self.num_planned
        self.num_planned.append(graph_key)
        factor = torch.tensor(longest / 4)
        return Plan(inner, factor) if is_capture else RicherPlan(inner, factor, longest)

    def upgrade_metadata(self, captured: Plan, fresh: RicherPlan) -> RicherPlan:
        """The captured memory, with the fresh values."""
        captured.factor.copy_(fresh.factor)
        return RicherPlan(fresh.inner, captured.factor, fresh.longest)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, context: Any, **options: Any) -> Tensor:
        plan = context.metadata
        self.used.append(type(plan))
        inner = dataclasses.replace(context, metadata=plan.inner)
        return super().forward(q, k, v, context=inner, **options) * plan.factor


class ScalesBetweenSegments(Scales):
    """The same, outside every graph."""

    full_graph_modes: ClassVar[frozenset[ForwardMode]] = frozenset()


class Stateless(AttentionBackend):
    """Every token sees itself alone; any number of tokens per request, whole graphs in any mode."""

    name: ClassVar[str] = "stateless"
    full_graph_modes: ClassVar[frozenset[ForwardMode]] = frozenset(ForwardMode)

    def __init__(self, *_: Any) -> None:
        self.planned: list[tuple[int, int]] = []  # requests and tokens

    @property
    def seq_len_fill_value(self) -> int:
        return 1

    def init_graph_state(self, *, max_bs: int, max_num_tokens: int) -> None:
        pass

    def init_forward_metadata(
        self, forward_batch: ForwardBatch, *, graph_key: tuple[int, ...] | None = None
    ) -> None:
        self.planned.append((forward_batch.batch_size, forward_batch.num_tokens))

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        layer_id: int,
        scale: float | None,
        context: ForwardContext,
    ) -> Tensor:
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)

    forward_extend = forward_decode

    def reset_scratch(self) -> None:
        pass


def fields_of(batch: ForwardBatch) -> dict[str, Any]:
    """Every field of a batch: tensors by identity and value, to see whether they were touched."""
    return {
        name: (id(value), value.clone()) if isinstance(value, Tensor) else value
        for name, value in vars(batch).items()
    }


def same_fields(one: dict[str, Any], other: dict[str, Any], ignore: Collection[str] = ()) -> bool:
    """Whether nothing was replaced and nothing was written."""
    for name, value in one.items():
        if name in ignore:
            continue
        now = other[name]
        if isinstance(value, tuple) and isinstance(value[1], Tensor):
            if value[0] != now[0] or not torch.equal(value[1], now[1]):
                return False
        elif value != now:
            return False
    return True
