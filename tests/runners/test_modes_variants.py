"""What a model branches on: each kind of batch has a graph of its own, or a reason to have none."""

import pytest
import torch

from compile_backend import ForwardMode, ModelRunner, PPProxyTensors, RunnerConfig
from compile_backend.errors import ConfigError, FallbackReason, PassError
from compile_backend.forward_batch import CaptureHiddenMode
from tests.runners.mode_models import (
    SMALL_GRAPHS,
    Adapted,
    AdaptedByOperator,
    EncoderDecoder,
    ExtraHidden,
    MultiAxisRotary,
    ReadsEmbeddings,
    Recurrent,
    Stage,
    WritesEmbeddings,
    forward_eagerly,
    hits,
    proxy_example,
)
from tests.runners.models import HIDDEN, SMALL, Decoder, close, make_world

M = ForwardMode
DECODE_ALONE = {**SMALL_GRAPHS, "enable_prefill_graph": False}
PREFILL_ALONE = {**SMALL_GRAPHS, "enable_decode_graph": False}


# --- encoder-decoder ----------------------------------------------------------------------------


ENCODER = {"is_encoder_decoder": True, "encoder_len_fill_value": 5}


def encoder_fields(lengths: list[int], dtype=torch.int32) -> dict:
    return {"encoder_lens": torch.tensor(lengths, dtype=dtype), "encoder_lens_cpu": lengths}


def test_decode_reads_encoder_lengths_and_padded_ones_were_filled_once(engine):
    world = make_world(EncoderDecoder, 1)
    runner = world.runner(engine=engine, **ENCODER, **DECODE_ALONE)
    registry = runner.decode.registry
    slot = registry.get_slot("encoder_lens")
    assert (
        slot.buffer.data_ptr() == runner.eager.registry.get_slot("encoder_lens").buffer.data_ptr()
    )
    assert slot.buffer.tolist() == [5] * len(slot.buffer)  # warm-up left nothing
    requests = world.cached(4)
    for lengths in ([7, 2, 9], [1, 3, 4, 8], [6]):
        batch = world.decode(requests[: len(lengths)], **encoder_fields(lengths))
        assert forward_eagerly(world, batch, runner).path == "decode"
        assert slot.buffer[: len(lengths)].tolist() == lengths
    # Heads are copied, tails never reset: lengths of an earlier batch, or the fill value.
    assert slot.buffer.tolist() == [6, 3, 4, 8] + [5] * (len(slot.buffer) - 4)


def test_a_batch_in_which_some_have_no_encoder_output_runs_eagerly(engine):
    world = make_world(EncoderDecoder, 1)
    runner = world.runner(engine=engine, **ENCODER, **DECODE_ALONE)
    requests = world.cached(2)
    for fields in (
        encoder_fields([4, 0]),
        {"encoder_lens": encoder_fields([0, 4])["encoder_lens"]},
    ):
        batch = world.decode(requests, **fields)
        want = world.eagerly(batch)
        out = runner.forward(batch)
        assert (out.path, out.reason) == ("eager", FallbackReason.MIXED_ENCODER)
        close(out.hidden_states, want)
    assert "request 1 has no encoder output" in runner.counts.messages.popitem()[1]
    batch = world.decode(requests, **encoder_fields([4, 1]))
    assert forward_eagerly(world, batch, runner).path == "decode"


# --- images -------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [DECODE_ALONE, PREFILL_ALONE], ids=["decode", "prefill"])
def test_image_text_image_each_has_the_positions_that_it_came_with(engine, config):
    world = make_world(MultiAxisRotary, 1, max_requests=32)
    runner = world.runner(engine=engine, is_multimodal=True, **config)
    requests = world.cached(3)
    for count, image in ((3, True), (2, False), (3, True), (3, False), (1, True)):
        if config is DECODE_ALONE:
            batch = world.decode(requests[:count])
        else:
            _, batch = world.extend([2] * count + [1])
        if image:
            batch.mrope_positions = torch.randint(0, 50, (3, batch.num_tokens))
        out = forward_eagerly(world, batch, runner)
        assert out.reason is None


EMBEDS = {"is_multimodal": True, "hidden_size": HIDDEN, "embed_dtype": torch.float32}


def test_embeddings_are_written_inside_the_graph_and_their_tail_is_zero(engine):
    world = make_world(WritesEmbeddings, 1)
    runner = world.runner(engine=engine, **EMBEDS, **SMALL_GRAPHS)
    slot = runner.prefill.registry.get_slot("input_embeds")
    eager = runner.eager.registry.get_slot("input_embeds")
    assert eager.buffer.data_ptr() == slot.buffer.data_ptr()
    for lengths in ([4, 3], [2, 2], [8]):
        slot.buffer.fill_(7)
        pairs, batch = world.extend(lengths)
        want = world.model.embed(batch.input_ids).detach()
        out = runner.forward(batch)
        assert (out.path, batch.input_embeds) == ("prefill", None)
        world.check(out, pairs)
        close(slot.buffer[: sum(lengths)], want)
    assert hits(runner, "prefill") == 3
    batch = world.extend([3])[1]
    slot.buffer.fill_(7)
    runner.prefill.load_batch(world.extend([5])[1])
    assert not slot.buffer[5:8].any()
    pairs, batch = world.extend([1])
    world.check(runner.forward(batch), pairs)  # eagerly, written in the same slot
    close(slot.buffer[:1], world.model.embed(batch.input_ids).detach())
    out = world.serve(runner, [pairs[0][0]])
    assert out.path == "decode"


def test_a_batch_with_embeddings_of_its_own_is_never_ignored():
    world = make_world(WritesEmbeddings, 1)
    with pytest.raises(ConfigError, match=r"'hidden_size' is 24 but 'embed_dtype' is None"):
        world.runner(engine="host_strict", **{**EMBEDS, "embed_dtype": None}, **SMALL_GRAPHS)
    runner = world.runner(engine="host_strict", **EMBEDS, **PREFILL_ALONE)
    for num_tokens in (8, 1):  # captured and not
        _, batch = world.extend([num_tokens], input_embeds=torch.ones(num_tokens, HIDDEN))
        with pytest.raises(ConfigError, match=r"brings input_embeds .* set it to 'from_batch'"):
            runner.forward(batch)
        assert (batch.input_embeds == 1).all()
    world = make_world(ReadsEmbeddings, 1)
    with pytest.raises(PassError, match=r"reads input_embeds .* set it to 'from_batch'"):
        world.runner(engine="host_strict", **EMBEDS, **SMALL_GRAPHS)
    # The advice of both is followed in test_tracing.py; without a width, such batches run eagerly.
    runner = world.runner(engine="host_strict", is_multimodal=True, **SMALL_GRAPHS)
    pairs, text = world.extend([8])
    out = runner.forward(text)
    assert out.path == "prefill"
    world.check(out, pairs)
    _, batch = world.extend([8], input_embeds=torch.randn(8, HIDDEN))
    want = world.eagerly(batch)
    out = runner.forward(batch)
    close(out.hidden_states, want)
    assert (out.path, out.reason) == ("eager", FallbackReason.VARIANT_NOT_TRACED)
    assert forward_eagerly(world, world.extend([8])[1], runner).path == "prefill"


# --- recurrent state ----------------------------------------------------------------------------


def track(rows: list[int], mask: list[bool], **more) -> dict:
    return {
        "mamba_track_indices": torch.tensor(rows, dtype=torch.int64),
        "mamba_track_mask": torch.tensor(mask),
        **more,
    }


def test_a_recurrent_state_is_kept_where_a_batch_says_so(engine):
    world = make_world(Recurrent, 1, max_requests=32)
    runner = world.runner(engine=engine, enable_mamba_track=True, **SMALL_GRAPHS)
    model = world.model
    assert not model.state[1:].any()
    assert not model.num_prefills[1:].any()
    requests = world.cached(4)
    steps = [([1, 2, 3, 4], [True] * 4), ([3, 1, 5], [True, False, True]), ([2], [True])]
    for rows, mask in steps * 2:
        batch = world.decode(requests[: len(rows)], **track(rows, mask))
        before = model.state.clone()
        want = world.eagerly(batch)
        want_state = model.state.clone()
        model.state.copy_(before)
        out = runner.forward(batch)
        assert (out.path, out.reason) == ("decode", None)
        close(out.hidden_states, want)
        close(model.state[1:], want_state[1:])
    assert hits(runner, "decode") == 6
    assert model.state[0].isfinite().all()


def test_a_prefill_does_not_track_the_requests_of_a_larger_one_before_it(engine):
    world = make_world(Recurrent, 1, max_requests=32)
    runner = world.runner(engine=engine, enable_mamba_track=True, **PREFILL_ALONE)
    counts = world.model.num_prefills
    want = torch.zeros(9)
    for rows, mask in (([1, 2, 3, 4], [True] * 4), ([5], [True]), ([6, 7], [False, True])):
        lengths = [8 // len(rows)] * len(rows)
        fields = track(rows, mask, mamba_track_seqlens=torch.tensor(lengths))
        batch = world.extend(lengths, **fields)[1]
        out = runner.forward(batch)
        assert (out.path, out.reason) == ("prefill", None)
        want[[row for row, kept in zip(rows, mask, strict=True) if kept]] += 1
        close(counts[1:], want[1:])
    assert hits(runner, "prefill") == 3


# --- pipeline stages ----------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1, 2], ids=["first", "middle", "last"])
def test_a_pipeline_stage_decodes_and_prefills_from_graphs(engine, rank):
    torch.manual_seed(1)
    whole = Decoder(3)
    world = make_world(Decoder, 3)
    world.model = Stage(whole, rank, 3)
    config = RunnerConfig(
        **{**SMALL, **SMALL_GRAPHS, "engine": engine, "pp_size": 3, "pp_rank": rank}
    )
    example = proxy_example() if rank else None
    runner = ModelRunner(world.model, world.backend, config, pp_proxy_example=example)
    runner.warmup()

    def check(batch, path: str) -> None:
        if rank:
            keys = proxy_example().tensors
            batch.pp_proxy_tensors = PPProxyTensors(
                {key: torch.randn(batch.num_tokens, HIDDEN) for key in keys}
            )
        want = world.eagerly(batch)
        out = runner.forward(batch)
        assert (out.path, out.reason) == (path, None)
        if rank == 2:
            close(out.hidden_states, want)
            assert out.logits is not None
            return
        assert isinstance(out.hidden_states, PPProxyTensors)
        for key, tensor in want.items():
            assert out.hidden_states[key].shape == (batch.num_tokens, HIDDEN)
            close(out.hidden_states[key], tensor)

    requests = [world.request(1) for _ in range(4)]
    for count in (4, 1, 3):
        check(world.decode(requests[:count]), "decode")
        check(world.extend([4, count])[1], "prefill")
    assert (hits(runner, "decode"), hits(runner, "prefill")) == (3, 3)


# --- hidden states ------------------------------------------------------------------------------


def test_a_capture_made_for_fewer_hidden_states_refuses_more():
    world = make_world(ExtraHidden, 1, max_requests=32)
    for captured in CaptureHiddenMode:
        torch._dynamo.reset()
        runner = world.runner(engine="host_strict", capture_hidden_mode=captured, **SMALL_GRAPHS)
        for wanted in CaptureHiddenMode:
            pairs, batch = world.extend([5, 3], capture_hidden_mode=wanted)
            out = runner.forward(batch)
            fits = wanted <= captured
            assert out.path == ("prefill" if fits else "eager"), (captured, wanted)
            assert out.reason is (None if fits else FallbackReason.HIDDEN_STATES)
            dense = world.dense(pairs)
            if wanted is CaptureHiddenMode.NULL:
                assert out.hidden_states is None
            elif wanted is CaptureHiddenMode.LAST:
                close(out.hidden_states, dense[[4, 7]])
            else:
                close(out.hidden_states[0], dense)
                close(out.hidden_states[1], 3 * dense, 1e-3)
            close(out.logits, world.model.lm_head(dense[[4, 7]]).detach())
        assert hits(runner, "prefill") == captured + 1


# --- adapters -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "config"),
    [(Adapted, DECODE_ALONE), (Adapted, PREFILL_ALONE), (AdaptedByOperator, DECODE_ALONE)],
    ids=["decode", "prefill", "operator"],
)
def test_none_a_none_b_each_has_its_own_adapter(engine, model, config):
    world = make_world(model, 1)
    splitting_ops = ("graphbuf_modes::adapt",)
    runner = world.runner(engine=engine, enable_lora=True, splitting_ops=splitting_ops, **config)
    graphs = (runner.decode or runner.prefill).graphs
    assert {key.lora for key in graphs.keys} == {False, True}
    requests = world.cached(3)
    for adapter in (None, 1, None, 2):
        if adapter is not None:
            world.model.load_adapter(adapter)
        has_lora = adapter is not None
        if config is DECODE_ALONE:
            batch = world.decode(requests, has_lora=has_lora)
        else:
            batch = world.batch([(world.request(5), 5)], has_lora=has_lora)
        out = forward_eagerly(world, batch, runner)
        assert out.reason is None
    hit = {key.lora: 0 for key in graphs.keys}
    for use in graphs.uses:
        hit[use.key.lora] += use.hits
    assert hit == {False: 2, True: 2}


def test_an_adapter_without_graphs_for_it_runs_eagerly(engine):
    world = make_world(AdaptedByOperator, 1)
    runner = world.runner(engine=engine, **DECODE_ALONE)
    world.model.load_adapter(3)
    batch = world.decode(world.cached(2), has_lora=True)
    want = world.eagerly(batch)
    out = runner.forward(batch)
    assert (out.path, out.reason) == ("eager", FallbackReason.VARIANT_NOT_TRACED)
    close(out.hidden_states, want)
    assert "set enable_lora=True" in next(iter(runner.counts.messages.values()))


# --- streams ------------------------------------------------------------------------------------


def test_two_streams_do_not_overwrite_each_others_outputs(engine):
    world = make_world(Decoder, 1)
    runner = world.runner(engine=engine, num_streams=2, copy_outputs=False, **DECODE_ALONE)
    assert {key.stream for key in runner.decode.graphs.keys} == {0, 1}
    first, second = world.cached(3), world.cached(3)
    kept = []
    for stream, requests in ((0, first), (1, second)):
        out = runner.forward(world.decode(requests, stream_index=stream))
        assert out.path == "decode"
        kept.append((out, [(request, 1) for request in requests]))
    for out, pairs in kept:  # only now, when both have run
        world.check(out, pairs)
    assert [use.hits for use in runner.decode.graphs.uses if use.key.bs == 4] == [0, 0, 1, 1]
    out = runner.forward(world.decode(first, stream_index=2))
    assert (out.path, out.reason) == ("eager", FallbackReason.STREAM_NOT_CAPTURED)
