"""Prefill recorded as written: what it computes, what it declines, and what its owner is told."""

import copy

import pytest
import torch
from torch import nn

from compile_backend import (
    CaptureError,
    ConfigError,
    FallbackReason,
    ForwardBatch,
    ForwardMode,
    PassError,
    RunnerConfig,
    SlotNotFoundError,
    no_graph,
)
from compile_backend.attention import get_forward_context
from tests.runners.models import HIDDEN, Decoder, close, make_world

EDGES = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16]


def make_runner(world, engine, *, head=False, **config):
    """Without ``head`` there are no logits, whose graph is compiled, which takes a second."""
    if not head:
        world.model.lm_head = None
    return world.runner(engine=engine, prefill_backend="breakable", **config)


def prefill_use(runner):
    (use,) = [use for use in runner.explain().runners if use.name == "prefill"]
    return use


def refused(runner):
    """The reasons and messages of the buckets that were not captured."""
    return [(r.reason, r.message) for r in runner.prefill.refusals.values()]


# --- the same as the others -------------------------------------------------------------------


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.MIXED])
def test_each_size_is_eager_and_bit_for_bit_the_piecewise_graph(engine, mode):
    world = make_world()
    breakable = make_runner(world, engine, enable_decode_graph=False)
    piecewise = world.runner(engine=engine, enable_decode_graph=False)
    for num_tokens in EDGES:
        pairs, batch = world.extend([num_tokens], mode)
        eager = world.eagerly(batch)
        hidden = piecewise.forward(batch).hidden_states.clone()
        out = breakable.forward(batch)
        assert (out.path, out.reason, out.bucket) == (
            "prefill", None, next(b for b in (4, 8, 16) if b >= num_tokens)
        )  # fmt: skip
        world.check(out, pairs)
        close(out.hidden_states, eager)
        assert torch.equal(out.hidden_states, hidden)
    use = prefill_use(breakable)
    assert use.mode == "BREAKABLE"
    assert use.hits == len(EDGES)
    assert use.num_rows == sum(EDGES)
    assert sorted((b.key.tokens, b.hits) for b in use.buckets) == [(4, 4), (8, 3), (16, 3)]
    assert {bucket.num_segments for bucket in use.buckets} == {len(world.model.layers) + 1}


def test_prefixes_several_requests_and_decodes_in_between(engine):
    world = make_world()
    runner = make_runner(world, engine, strict=True, head=True)
    requests = [world.request(n) for n in (14, 9, 20)]
    for steps in ([3, 4, 5], [1, 2, 6], [7, 3, 2]):
        pairs = list(zip(requests, steps, strict=True))
        out = runner.forward(world.batch(pairs))
        assert (out.path, out.bucket) == ("prefill", 16)
        world.check(out, pairs)
        world.serve(runner, world.cached(2))
    assert prefill_use(runner).hits == 3


def test_the_kinds_of_batches_share_a_recording_unless_the_model_tells_them_apart(engine):
    class ByMode(Decoder):
        def before(self, h, batch):
            return h * 2 if batch.forward_mode is ForwardMode.MIXED else h

    for model_type, num_graphs in ((Decoder, 1), (ByMode, 2)):
        world = make_world(model_type)
        runner = make_runner(world, engine, enable_decode_graph=False)
        assert len(runner.prefill.traced.graphs) == num_graphs
        for mode in (ForwardMode.MIXED, ForwardMode.EXTEND, ForwardMode.MIXED):
            _, batch = world.extend([5, 2], mode)
            eager = world.eagerly(batch)
            out = runner.forward(batch)
            assert out.path == "prefill"
            close(out.hidden_states, eager)


def test_it_declines_what_the_piecewise_runner_declines(engine):
    world = make_world()
    config = {"max_padding_waste": 2.0, "chunked_prefill_size": 24}
    runners = [make_runner(world, engine, **config), world.runner(engine=engine, **config)]
    batches = [world.extend([n])[1] for n in (1, 2, 5, 16, 17)]
    batches += [world.extend([5], ForwardMode.DRAFT_EXTEND)[1], world.extend([])[1]]
    batches += [world.decode(world.cached(1)), world.extend([4], has_lora=True)[1]]
    reasons = [[runner.prefill.decline(batch) for batch in batches] for runner in runners]
    assert reasons[0] == reasons[1]
    assert reasons[0][:5] == [
        FallbackReason.PADDING_WASTE, None, None, None, FallbackReason.ABOVE_LARGEST_BUCKET
    ]  # fmt: skip
    assert None not in reasons[0][5:]


def test_nothing_is_compiled_for_it(engine):
    class Uncompilable(Decoder):
        def forward(self, batch):
            torch._dynamo.graph_break()
            return super().forward(batch)

    world = make_world(Uncompilable)
    torch._dynamo.utils.counters.clear()
    runner = make_runner(world, engine, enable_decode_graph=False)
    pairs, batch = world.extend([6])
    out = runner.forward(batch)
    assert out.path == "prefill"
    world.check(out, pairs)
    assert not torch._dynamo.utils.counters["frames"]


def test_engine_none_and_a_cold_runner_say_why(engine):
    world = make_world()
    batch = world.extend([4])[1]
    assert make_runner(world, "none").forward(batch).reason is FallbackReason.DISABLED
    cold = make_runner(world, engine, warm=False)
    assert cold.prefill.decline(batch) is FallbackReason.NOT_CAPTURED


def test_the_option_is_checked():
    with pytest.raises(ConfigError, match="piecewise, breakable"):
        RunnerConfig(prefill_backend="eager")


# --- marked functions ---------------------------------------------------------------------------


class Marked(Decoder):
    """Calls ``self.mark(h, out)`` on the embeddings."""

    mark = None

    def before(self, h, batch):
        out = torch.empty_like(h)
        self.mark(h, out)
        return out


def test_marked_functions_run_on_the_values_of_each_forward(engine):
    scales, sums = [], []

    class Scaled(Marked):
        @no_graph()
        def mark(self, h, out):
            sums.append(h.sum().item())
            out.copy_(h * scales[-1])

    world = make_world(Scaled)
    scales.append(1.0)
    runner = make_runner(world, engine, enable_decode_graph=False)
    assert {b.num_segments for b in prefill_use(runner).buckets} == {4}
    for scale in (1.0, 0.5, -2.0):
        scales.append(scale)
        _, batch = world.extend([4, 4])
        eager = world.eagerly(batch)
        out = runner.forward(batch)
        assert out.path == "prefill"
        close(out.hidden_states, eager)
        assert sums[-1] == sums[-2]
    assert len(set(sums[-6:])) == 3


def test_a_marked_function_sees_the_live_batch_through_the_context(engine):
    lengths = []

    class Looks(Marked):
        @no_graph()
        def mark(self, h, out):
            batch = get_forward_context().forward_batch
            lengths.append(batch.extend_seq_lens_cpu or [1] * batch.batch_size)
            out.zero_()
            num_live = sum(lengths[-1])
            out[:num_live] = h[:num_live] - h[:num_live].mean(0)  # mixes rows, live ones only

    world = make_world(Looks)
    runner = make_runner(world, engine, enable_decode_graph=False)
    for new in ([3], [2, 3, 4], [1, 1]):
        _, batch = world.extend(new)
        eager = world.eagerly(batch)
        out = runner.forward(batch)
        assert out.path == "prefill"
        close(out.hidden_states, eager)
        assert lengths[-1] == new


def test_a_stub_stands_in_at_captures_only(engine):
    calls = []

    def stub(h, out):
        calls.append("stub")

    @no_graph(capture_stub=stub)
    def copy_over(h, out):
        calls.append("real")
        out.copy_(h)

    class Stubbed(Marked):
        mark = staticmethod(copy_over)

    world = make_world(Stubbed)
    runner = make_runner(world, engine, enable_decode_graph=False)
    assert calls.count("stub") == 3
    for num_tokens in (4, 5):
        pairs, batch = world.extend([num_tokens])
        before = len(calls)
        out = runner.forward(batch)
        assert out.path == "prefill"
        world.check(out, pairs)
        assert calls[before:] == ["real"]


def test_toggling_a_function_takes_effect_at_the_next_capture(engine):
    enabled = [True]

    @no_graph(enable=lambda: enabled[0])
    def copy_over(h, out):
        out.copy_(h)

    class Toggled(Marked):
        mark = staticmethod(copy_over)

    world = make_world(Toggled)
    runner = make_runner(world, engine, enable_decode_graph=False)
    for enabled[0], num_segments in ((True, 4), (False, 3), (True, 4)):
        runner.invalidate()
        runner.capture()
        assert {b.num_segments for b in prefill_use(runner).buckets} == {num_segments}
        pairs, batch = world.extend([7])
        world.check(runner.forward(batch), pairs)
    assert prefill_use(runner).hits == 3


def test_a_function_that_fails_fails_that_forward_only(engine):
    fails = [False]

    @no_graph()
    def flaky(h, out):
        if fails[0]:
            raise ZeroDivisionError("by hand")
        out.copy_(h)

    class Flaky(Marked):
        mark = staticmethod(flaky)

    world = make_world(Flaky)
    runner = make_runner(world, engine, enable_decode_graph=False)
    for fails[0] in (True, False, True, False):
        pairs, batch = world.extend([6])
        if fails[0]:
            with pytest.raises(ZeroDivisionError, match="by hand"):
                runner.forward(batch)
            with pytest.raises(Exception, match="outside a forward pass"):
                get_forward_context()
        else:
            world.check(runner.forward(batch), pairs)
    assert prefill_use(runner).hits == 2


def test_a_function_that_fails_at_the_capture_refuses_the_bucket_and_a_retry_works(engine):
    @no_graph()
    def fails_at(h, out):
        if broken and h.shape[0] == 8 and is_warming:
            raise ZeroDivisionError("by hand")
        out.copy_(h)

    class Fails(Marked):
        mark = staticmethod(fails_at)

    broken, is_warming = True, True
    world = make_world(Fails)
    runner = make_runner(world, engine, enable_decode_graph=False)
    is_warming = False
    ((reason, message),) = refused(runner)
    assert reason is FallbackReason.CAPTURE_FAILED
    assert "fails_at" in message
    assert "by hand" in message
    pairs, batch = world.extend([8])
    out = runner.forward(batch)
    assert (out.path, out.reason) == ("eager", FallbackReason.CAPTURE_FAILED)
    world.check(out, pairs)
    for num_tokens in (4, 12):
        assert runner.prefill.decline(world.extend([num_tokens])[1]) is None
    broken, is_warming = False, True
    runner.capture()
    assert not runner.prefill.refusals
    pairs, batch = world.extend([7])
    out = runner.forward(batch)
    assert (out.path, out.bucket) == ("prefill", 8)
    world.check(out, pairs)


def test_a_returned_tensor_is_refused_and_the_advice_works(engine):
    @no_graph()
    def returns(h):
        return h * 1

    @no_graph()
    def writes(h, out):
        out.copy_(h * 1)

    class Returns(Decoder):
        def before(self, h, batch):
            return returns(h)

    class Writes(Decoder):
        def before(self, h, batch):
            writes(h, out := torch.empty_like(h))
            return out

    runner = make_runner(make_world(Returns), engine, enable_decode_graph=False)
    assert {reason for reason, _ in refused(runner)} == {FallbackReason.CAPTURE_FAILED}
    assert "pass it as an argument `out`" in refused(runner)[0][1]
    world = make_world(Writes)
    pairs, batch = world.extend([7])
    runner = make_runner(world, engine, strict=True, enable_decode_graph=False)
    world.check(runner.forward(batch), pairs)


# --- what is vouched for, and what is checked -----------------------------------------------------


class Mixes(Decoder):
    """Subtracts the mean of all rows, padded ones included."""

    def after(self, h, batch):
        return h - h.mean(0)


def test_rows_that_are_mixed_with_padding_are_refused(engine):
    world = make_world(Mixes)
    runner = make_runner(world, engine, enable_decode_graph=False)
    assert {reason for reason, _ in refused(runner)} == {FallbackReason.PADDING_UNSAFE}
    for num_tokens in (3, 4):
        _, batch = world.extend([num_tokens])
        eager = world.eagerly(batch)
        out = runner.forward(batch)
        assert (out.path, out.reason) == ("eager", FallbackReason.PADDING_UNSAFE)
        close(out.hidden_states, eager)


def test_sizes_that_are_never_padded_are_not_checked_as_the_advice_says(engine):
    world = make_world(Mixes)
    sizes = (1, 2, 3, 4)
    runner = make_runner(world, engine, enable_decode_graph=False, prefill_capture_sizes=sizes)
    assert not runner.prefill.refusals
    for num_tokens in sizes:
        _, batch = world.extend([num_tokens])
        eager = world.eagerly(batch)
        out = runner.forward(batch)
        assert (out.path, out.bucket) == ("prefill", num_tokens)
        close(out.hidden_states, eager)


def test_warming_up_writes_scratch_only_and_leaves_slots_and_scratch_as_they_were(engine):
    locations = set()

    class Looks(Marked):
        @no_graph()
        def mark(self, h, out):
            locations.update(get_forward_context().forward_batch.out_cache_loc.tolist())
            out.copy_(h)

    world = make_world(Looks)
    runner = make_runner(world, engine, enable_decode_graph=False)
    assert locations == {0}
    for name in ("input_ids", "positions", "out_cache_loc"):
        assert not runner.prefill.registry.get_slot(name).layout.buffer.any()
    assert not world.kv.k.any()
    assert not world.kv.v.any()


def test_a_host_field_of_the_batch_may_not_be_read_by_the_model(engine):
    class Reads(Decoder):
        def before(self, h, batch):
            lengths = batch.extend_seq_lens_cpu
            return h if lengths is None else h * sum(lengths)

    class Counts(Decoder):
        def before(self, h, batch):
            return h * batch.batch_size

    for model_type, name in ((Reads, "extend_seq_lens_cpu"), (Counts, "batch_size")):
        with pytest.raises(PassError, match=f"reads the batch field '{name}'"):
            make_runner(make_world(model_type), engine, enable_decode_graph=False)


def test_the_context_may_not_be_read_in_a_segment(engine):
    class Reads(Decoder):
        def before(self, h, batch):
            return h * get_forward_context().forward_batch.batch_size

    world = make_world(Reads)
    runner = make_runner(world, engine, enable_decode_graph=False)
    assert len(refused(runner)) == 3
    assert "read it in a function marked no_graph" in refused(runner)[0][1]
    _, batch = world.extend([2, 2])
    eager = world.eagerly(batch)
    close(runner.forward(batch).hidden_states, eager)


def test_a_host_read_in_a_segment_is_refused_and_fine_in_a_marked_function(engine):
    class Reads(Decoder):
        def before(self, h, batch):
            return h * (1 + 0 * h.sum().item())

    world = make_world(Reads)
    runner = make_runner(world, engine, enable_decode_graph=False)
    assert {reason for reason, _ in refused(runner)} == {FallbackReason.HOST_READ}
    pairs, batch = world.extend([5])
    world.check(runner.forward(batch), pairs)


def test_a_field_that_the_model_asks_for_makes_a_kind_of_its_own(engine):
    class Asks(Decoder):
        def before(self, h, batch):
            return h if batch.spec_info is None else h * 3

    world = make_world(Asks)
    runner = make_runner(world, engine, enable_decode_graph=False)
    plain, special = world.extend([5])[1], world.extend([5], spec_info=object())[1]
    unseen = world.extend([5], sampling_info=object())[1]
    assert [runner.prefill.decline(b) for b in (plain, special, unseen)] == [
        None, FallbackReason.VARIANT_NOT_TRACED, None
    ]  # fmt: skip
    runner = make_runner(world, engine, enable_decode_graph=False, warm=False)
    runner.warmup(examples=[world.extend([2], spec_info=object())[1]])
    for batch in (plain, special, unseen, special):
        eager = world.eagerly(batch)
        out = runner.forward(batch)
        assert out.path == "prefill"
        close(out.hidden_states, eager)


def test_a_field_that_every_recording_reads_must_be_there(engine):
    world = make_world()
    runner = make_runner(world, engine, enable_decode_graph=False)
    batch = world.extend([4])[1]
    batch.positions = None
    with pytest.raises(SlotNotFoundError, match="positions"):
        runner.forward(batch)


# --- weights ------------------------------------------------------------------------------------


class Gained(Decoder):
    def __init__(self):
        super().__init__()
        self.gain = torch.ones(HIDDEN)  # neither a parameter nor a buffer

    def after(self, h, batch):
        return h * self.gain


def change(model, how):
    if how == "parameter":
        model.layers[0].up.weight = nn.Parameter(torch.randn_like(model.layers[0].up.weight))
    elif how == "data":
        model.embed.weight.data = torch.randn_like(model.embed.weight)
    elif how == "in place":
        with torch.no_grad():
            model.embed.weight.mul_(-1)
    elif how == "buffer":
        model.frequencies = model.frequencies * 2
    else:
        model.gain = torch.randn(HIDDEN)


@pytest.mark.parametrize("how", ["parameter", "data", "in place", "buffer", "attribute"])
def test_a_weight_that_changes_is_noticed(engine, how):
    world = make_world(Gained)
    runner = make_runner(world, engine, enable_decode_graph=False)
    for _ in range(3):
        _, batch = world.extend([3, 4])
        eager = world.eagerly(batch)
        out = runner.forward(batch)
        assert out.path == "prefill"
        close(out.hidden_states, eager)
        change(world.model, how)
    use = prefill_use(runner)
    assert use.recaptures == (0 if how == "in place" else 2)
    assert use.hits == 3


def test_a_recapture_writes_nothing_but_scratch(engine):
    world = make_world()
    runner = make_runner(world, engine, enable_decode_graph=False)
    pairs, batch = world.extend([3, 4])
    runner.forward(batch)
    cached = world.kv.k.clone()
    change(world.model, "parameter")
    again = copy.copy(batch)
    runner.forward(again)
    same = [s for r, _ in pairs for s in r.slots]
    others = [s for s in range(world.kv.k.shape[1]) if s not in same]
    assert torch.equal(world.kv.k[:, others], cached[:, others])
    assert torch.equal(world.kv.k[0, same], cached[0, same])  # before the weight that changed


def test_a_weight_for_which_the_model_cannot_be_recorded_refuses_the_bucket(engine):
    class Branches(Decoder):
        def after(self, h, batch):
            return h * self.norm.weight.sum().item() if self.norm.weight.dim() == 2 else h

    world = make_world(Branches)
    runner = make_runner(world, engine, enable_decode_graph=False)
    world.model.norm.weight = nn.Parameter(torch.ones(1, HIDDEN))
    world.model.norm.normalized_shape = (1, HIDDEN)
    batch = world.extend([7])[1]
    with pytest.raises(CaptureError, match="cannot be captured again"):
        runner.forward(batch)
    assert runner.prefill.decline(batch) is not None


# --- outputs ------------------------------------------------------------------------------------


def test_structures_constants_views_and_inputs_are_returned_trimmed(engine):
    class Rich(Decoder):
        def after(self, h, batch):
            return {
                "hidden_states": h,
                "again": h,
                "pair": (h.t(), [h[:, :3], None]),
                "ids": batch.input_ids,
                "name": "rich",
                "weight": self.norm.weight * 2,
            }

    world = make_world(Rich)
    for copy_outputs in (False, True):
        runner = make_runner(world, engine, enable_decode_graph=False, copy_outputs=copy_outputs)
        _, batch = world.extend([3, 4])
        eager = world.eagerly(batch)
        got = runner.forward(batch).hidden_states
        assert got["again"] is got["hidden_states"]
        assert got["name"] == "rich"
        assert eager.pop("name") == "rich"
        close({name: got[name] for name in eager}, eager)
        kept = {name: value for name, value in got.items() if name != "name"}
        kept = copy.deepcopy(kept)
        runner.forward(world.extend([8])[1])
        if copy_outputs:
            close({name: got[name] for name in kept}, kept, 0)
        else:
            assert not torch.equal(got["ids"], kept["ids"])


def test_an_output_whose_live_rows_are_no_prefix_runs_at_exact_sizes_only(engine):
    class Doubles(Decoder):
        def after(self, h, batch):
            return h, torch.cat([h, h])

    world = make_world(Doubles)
    runner = make_runner(world, engine, enable_decode_graph=False)
    for num_tokens, path in ((7, "eager"), (8, "prefill")):
        _, batch = world.extend([num_tokens])
        eager = world.eagerly(batch)
        out = runner.forward(batch)
        assert out.path == path
        assert out.reason is (None if path == "prefill" else FallbackReason.OUTPUT_NOT_PREFIX)
        close(out.hidden_states, eager)


def test_a_number_among_the_results_is_an_error_at_warm_up(engine):
    class Numbers(Decoder):
        def after(self, h, batch):
            return h, h.shape[0]

    with pytest.raises(PassError, match="returns a int"):
        make_runner(make_world(Numbers), engine, enable_decode_graph=False)


def test_what_a_model_keeps_in_an_attribute_is_not_taken_for_a_weight(engine):
    class Keeps(Decoder):
        def after(self, h, batch):
            self.last = h
            return h

    world = make_world(Keeps)
    runner = make_runner(world, engine, enable_decode_graph=False)
    for num_tokens in (5, 17, 6):  # the second runs eagerly
        _, batch = world.extend([num_tokens])
        runner.forward(batch) if num_tokens < 17 else world.eagerly(batch)
    assert prefill_use(runner).recaptures == 0


def test_a_batch_type_of_the_users_own_is_served_once_it_was_shown(engine):
    class OwnBatch(ForwardBatch):
        """A subclass without fields."""

    world = make_world()
    runner = make_runner(world, engine, enable_decode_graph=False)
    pairs, batch = world.extend([6])
    own = OwnBatch(**vars(batch))
    assert runner.prefill.decline(own) is FallbackReason.VARIANT_NOT_TRACED
    runner.warmup(examples=[own])
    out = runner.forward(own)
    assert out.path == "prefill"
    world.check(out, pairs)
    assert runner.forward(batch).path == "prefill"


@pytest.mark.parametrize("num_tokens", [16, 4])
def test_a_field_that_is_asked_for_at_one_size_only_still_counts(engine, num_tokens):
    class Asks(Decoder):
        def before(self, h, batch):
            return h if len(h) != num_tokens or batch.spec_info is None else h * 3

    world = make_world(Asks)
    runner = make_runner(world, engine, enable_decode_graph=False, warm=False)
    runner.warmup(examples=[world.extend([2], spec_info=object())[1]])
    for fields in ({}, {"spec_info": object()}, {"sampling_info": object()}):
        for size in (num_tokens, num_tokens, 8):
            _, batch = world.extend([size], **fields)
            eager = world.eagerly(batch)
            out = runner.forward(batch)
            assert out.path == "prefill"
            close(out.hidden_states, eager)


def test_a_field_without_a_slot_may_be_asked_for(engine):
    class Asks(Decoder):
        def before(self, h, batch):
            return h if batch.extend_seq_lens is not None else h * 3

    world = make_world(Asks)
    runner = make_runner(world, engine, enable_decode_graph=False)
    pairs, batch = world.extend([6])
    out = runner.forward(batch)
    assert out.path == "prefill"
    world.check(out, pairs)
    batch.extend_seq_lens = None
    assert runner.forward(batch).reason is FallbackReason.VARIANT_NOT_TRACED


@pytest.mark.parametrize("warm", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("serve", [torch.no_grad, torch.inference_mode])
def test_warm_up_and_forwards_may_be_in_different_modes(engine, warm, serve):
    kept = torch.zeros(HIDDEN)

    class Keeps(Marked):
        @no_graph()
        def mark(self, h, out):
            kept.add_(h[0])
            out.copy_(h)

    world = make_world(Keeps)
    runner = make_runner(world, engine, enable_decode_graph=False, warm=False)
    with warm():
        runner.warmup()
    for num_tokens in (5, 8):
        pairs, batch = world.extend([num_tokens])
        with serve():
            out = runner.forward(batch)
            assert out.path == "prefill"
            world.check(out, pairs)


# --- state, and chance ----------------------------------------------------------------------------


def test_what_warming_up_writes_to_the_model_is_taken_back(engine):
    class Counts(Marked):
        def __init__(self):
            super().__init__()
            self.register_buffer("in_segments", torch.zeros(()))
            self.register_buffer("between", torch.zeros(()))

        @no_graph()
        def mark(self, h, out):
            self.between.add_(1)
            out.copy_(h)

        def after(self, h, batch):
            self.in_segments.add_(1)
            return h

    world = make_world(Counts)
    runner = make_runner(world, engine, enable_decode_graph=False)
    model = world.model
    for turn in range(1, 4):
        pairs, batch = world.extend([6])
        world.check(runner.forward(batch), pairs)
        assert (model.in_segments.item(), model.between.item()) == (turn, turn)
        change(model, "parameter")  # captures again, which is no forward
    assert prefill_use(runner).recaptures == 2


@pytest.mark.parametrize("register", [True, False], ids=["buffer", "attribute"])
def test_state_that_is_replaced_is_refused_and_written_in_place_it_works(engine, register):
    class Replaces(Decoder):
        in_place = False

        def __init__(self):
            super().__init__()
            self.decay = None
            if register:
                del self.decay
                self.register_buffer("decay", torch.ones(()))
            else:
                self.decay = torch.ones(())

        def after(self, h, batch):
            if self.in_place:
                self.decay.mul_(0.5)
            else:
                self.decay = self.decay * 0.5
            return h * self.decay

    world = make_world(Replaces)
    runner = make_runner(world, engine, enable_decode_graph=False)
    assert "replaces its tensor 'decay'" in refused(runner)[0][1]
    world.model.decay.fill_(1)
    _, batch = world.extend([6])
    eager = world.eagerly(batch)
    world.model.decay.fill_(1)
    close(runner.forward(batch).hidden_states, eager)
    world.model.in_place = True
    runner.capture()
    world.model.decay.fill_(1)
    for turn in (1, 2):
        out = runner.forward(batch)
        assert out.path == "prefill"
        assert world.model.decay.item() == 0.5**turn
        close(out.hidden_states, eager * 0.5 ** (turn - 1))


def test_a_function_whose_state_changes_its_result_is_no_reason_to_refuse(engine, caplog):
    steps = []

    class Counts(Marked):
        @no_graph()
        def mark(self, h, out):
            steps.append(1)
            out.copy_(h * len(steps))

    world = make_world(Counts)
    runner = make_runner(world, engine, enable_decode_graph=False)
    assert not runner.prefill.refusals
    assert "its padding was not checked" in caplog.text
    _, batch = world.extend([6])
    before = len(steps)
    eager = world.eagerly(batch)
    steps[before:] = []
    out = runner.forward(batch)
    assert (out.path, len(steps)) == ("prefill", before + 1)
    close(out.hidden_states, eager)


def test_random_numbers_are_no_reason_to_refuse_and_are_drawn_anew(engine, caplog):
    class Noisy(Decoder):
        def before(self, h, batch):
            return h + torch.rand(1, h.shape[1])

    world = make_world(Noisy)
    state = torch.get_rng_state()
    runner = make_runner(world, engine, enable_decode_graph=False)
    assert not runner.prefill.refusals
    assert "not checked" not in caplog.text
    _, batch = world.extend([8])
    torch.set_rng_state(state)
    outs = [runner.forward(batch).hidden_states.clone() for _ in range(2)]
    assert not torch.equal(*outs)
    torch.set_rng_state(state)
    close(outs[0], world.eagerly(batch))
