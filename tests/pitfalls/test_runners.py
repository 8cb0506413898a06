"""Kinds of fault of captured graphs, as the serving runners meet them.

Most are held where the runner's behaviour is tested:

==== ===========================================================================================
kind tests
==== ===========================================================================================
B1   below; runners/test_values.py ``decode_of_every_size_in_any_order_equals_eager``,
     ``extends_of_every_size_in_any_order_equal_eager``
B3   runners/test_warmup.py ``warm_up_writes_nothing_but_the_scratch_row``,
     ``padded_rows_write_the_scratch_row_which_is_nobodys``; below
B4   below; runners/test_fallbacks.py ``rows_that_are_mixed_replay_at_their_exact_size``
B5   below; runners/test_hostile.py ``a_size_that_is_a_value_is_never_a_padded_one``
B7   runners/test_tracing.py ``a_step_with_images_changes_nothing_for_the_text_around_it``,
     ``embeddings_that_a_batch_brings_are_the_ones_that_are_used``
B8   runners/test_capacity.py ``what_does_not_fit_is_refused_and_the_next_batch_is_served``,
     ``a_batch_exactly_at_capacity_is_served``
B9   runners/test_capacity.py ``graphs_never_hold_more_rows_than_their_slots``
B12  below; runners/test_values.py ``two_runners_of_one_process_take_turns``
B13  every prefill on ``host_strict`` in runners/test_values.py: attention, which allocates, runs
     as written between two segments
B16  runners/test_hostile.py ``a_model_that_changes_itself_is_refused``;
     runners/test_outputs.py ``a_weight_returned_as_it_is_is_that_very_tensor``
B17  runners/test_warmup.py ``a_buffer_that_counts_is_written_once_per_call...``
B18  runners/test_outputs.py ``copied_outputs_of_all_steps_survive_the_later_ones``,
     ``outputs_are_overwritten_by_the_next_forward_unless_they_are_copied``
B19  runners/test_warmup.py ``buckets_are_captured_in_warm_up_alone_and_the_largest_first``;
     runners/test_steady_state.py ``replays_keep_no_memory``
B20  runners/test_hostile.py ``a_plan_is_made_anew_before_every_replay``; runners/test_values.py
     ``a_long_random_trace_equals_eager...`` (three KV lengths in the key)
B21  below; every test of runners/ that counts hits
B23  runners/test_eager.py ``an_idle_batch_has_no_rows_and_touches_nothing``
B24  runners/test_hostile.py ``a_bucket_that_cannot_be_captured_leaves_the_others``; below
B25  runners/test_hostile.py ``new_weights_are_used_at_the_next_forward``,
     ``untying_a_weight_is_noticed``, ``a_cache_that_moved_is_noticed_before_the_replay``
B26  below
==== ===========================================================================================
"""

import pytest
import torch

from compile_backend.attention import SCRATCH_SLOT, TorchNativeBackend
from compile_backend.errors import ConfigError
from tests.runners.models import HIDDEN, Decoder, close, make_world

FEW = {"cudagraph_capture_sizes": (8,), "prefill_capture_sizes": (16,), "max_padding_waste": 16.0}
SENTINEL = 41


@pytest.fixture(params=["host", "host_strict"])
def engine(request) -> str:
    return request.param


def poison_slots(runner):
    """Every byte of every slot is somebody else's."""
    for registry in runner.registries:
        for name in registry.slot_names:
            registry.get_slot(name).layout.buffer.fill_(SENTINEL)


def test_every_slot_is_live_rows_then_its_fill_whatever_was_there(engine):
    """B1: sizes 3,5,3 / 5,3 / 8,1,8 on poisoned buffers, in decode and in prefill."""
    world = make_world(Decoder, 1)
    runner = world.runner(engine=engine, **FEW)
    requests = world.cached(8)
    fills = {"seq_lens": world.backend.seq_len_fill_value}
    fills["seq_lens_cpu"] = fills["seq_lens"]
    for n in (3, 5, 3, 5, 3, 8, 1, 8):
        pairs, extend = world.extend((n, 1))
        for each, batch, padded, live in (
            (runner.decode, world.decode(requests[:n]), 8, n),
            (runner.prefill, extend, 16, n + 1),
        ):
            poison_slots(runner)
            view = each.load_batch(batch)
            for name in ("positions", "out_cache_loc", "req_pool_indices", "seq_lens"):
                value, given = getattr(view, name), getattr(batch, name)
                if not each.registry.has_slot(name) or value is given:
                    continue
                want = torch.cat([given, torch.full((padded - live,), fills.get(name, 0))])
                assert torch.equal(value, want), name
            poison_slots(runner)
            want = world.eagerly(batch)
            close(runner.forward(batch).hidden_states, want)
        for request, _ in pairs:
            world.finish(request)
    assert runner.explain().hits == 16


def test_a_scratch_row_that_is_not_a_number_reaches_no_request(engine):
    """B3: unused entries of a request's table point at the scratch row, with weight 0."""
    world = make_world(Decoder, 1)
    runner = world.runner(engine=engine, **FEW)
    for cache in (world.kv.k, world.kv.v):
        assert torch.isfinite(cache[:, SCRATCH_SLOT]).all()
        cache[:, SCRATCH_SLOT] = 1e30
    requests = world.cached(8, length=3)
    for n in (3, 8, 1):
        world.serve(runner, requests[:n])
        pairs, batch = world.extend((n,))
        world.check(runner.forward(batch), pairs)
        world.finish(pairs[0][0])
    assert runner.explain().hits == 6


class FillsWithTwo(TorchNativeBackend):
    """The same attention; a padded request is two tokens long."""

    @property
    def seq_len_fill_value(self):
        return 2


def test_what_padded_rows_are_filled_with_changes_no_live_row(engine):
    """B4: metamorphic; the fill value of lengths, and what lies in the scratch row."""
    results = []
    for backend, scratch in ((TorchNativeBackend, 0.0), (FillsWithTwo, 0.0), (FillsWithTwo, 9.0)):
        world = make_world(Decoder, 1, backend=backend)
        runner = world.runner(engine=engine, **FEW)
        torch.manual_seed(3)
        requests = world.cached(5)
        world.kv.k[:, SCRATCH_SLOT] = scratch
        out = runner.forward(world.decode(requests))
        assert out.path == "decode"
        results.append(out.hidden_states.clone())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


class OneLength(TorchNativeBackend):
    """Notes how many rows each attention call is given, and of what."""

    seen: list[tuple[int, ...]] = []

    def forward_extend(self, q, k, v, *, layer_id, scale, context):
        batch = context.forward_batch
        fields = batch.input_ids, batch.positions, batch.out_cache_loc
        self.seen.append((len(q), len(k), *map(len, fields)))
        return super().forward_extend(q, k, v, layer_id=layer_id, scale=scale, context=context)


def test_a_break_op_sees_one_length_and_the_live_requests(engine):
    """B5: all token-axis tensors at the padded size; requests and host lengths at the live one."""
    world = make_world(Decoder, 2, backend=OneLength)
    runner = world.runner(engine=engine, **FEW)
    OneLength.seen.clear()
    for lengths in ((5,), (3, 4), (16,)):
        pairs, batch = world.extend(lengths)
        out = runner.forward(batch)
        world.check(out, pairs)
        assert out.path == "prefill"
    assert OneLength.seen == [(16,) * 5] * 6


def test_a_second_larger_runner_moves_no_buffer_of_the_first(engine):
    """B12: the pool gives another size its own storage; a captured address stays."""
    world, larger = make_world(Decoder, 1), make_world(Decoder, 1, max_requests=64)
    runner = world.runner(engine=engine, **FEW)
    requests = world.cached(8)
    world.serve(runner, requests)
    addresses = {
        (i, name): registry.get_slot(name).layout.buffer.data_ptr()
        for i, registry in enumerate(runner.registries)
        for name in registry.slot_names
    }
    second = larger.runner(
        engine=engine, **{**FEW, "max_running_requests": 32, "chunked_prefill_size": 64}
    )
    larger_requests = larger.cached(20)
    for n in (3, 8, 5):
        larger.serve(second, larger_requests[: 2 * n])
        world.serve(runner, requests[:n])
    assert addresses == {
        (i, name): registry.get_slot(name).layout.buffer.data_ptr()
        for i, registry in enumerate(runner.registries)
        for name in registry.slot_names
    }
    assert runner.explain().hits == 4


def test_plans_of_attention_do_not_grow_under_a_captured_graph(engine):
    """B12: a second, larger runner on one backend is refused; the first goes on."""
    world = make_world(Decoder, 1, max_requests=64)
    runner = world.runner(engine=engine, **FEW)
    requests = world.cached(8)
    world.serve(runner, requests)
    with pytest.raises(ConfigError, match=r"max_bs=\d+\) after plans .*call it once"):
        world.runner(engine=engine, **{**FEW, "max_running_requests": 32})
    for n in (3, 8):
        world.serve(runner, requests[:n])
    assert runner.explain().hits == 3


def test_the_bucket_and_the_live_counts_travel_with_the_result(engine):
    """B21: decode and prefill in turns; each result carries the numbers of the runner that ran."""
    world = make_world(Decoder, 1)
    runner = world.runner(engine=engine, **FEW)
    requests = world.cached(8)
    for n in (3, 8, 1):
        out = world.serve(runner, requests[:n])
        assert (out.path, out.bucket, out.batch_size, out.num_tokens) == ("decode", 8, n, n)
        pairs, batch = world.extend((n, 2))
        out = runner.forward(batch)
        world.check(out, pairs)
        assert (out.path, out.bucket) == ("prefill", 16)
        assert (out.batch_size, out.num_tokens) == (2, n + 2)
        for request, _ in pairs:
            world.finish(request)
    found = runner.decode.find(world.decode(requests[:3]))
    assert found.key in runner.decode.graphs.keys


class FailsOnce(TorchNativeBackend):
    """Raises in the middle of a forward, once it is told to."""

    fails = False

    def forward_extend(self, q, k, v, *, layer_id, scale, context):
        if self.fails and layer_id == 1:
            self.fails = False
            raise RuntimeError("attention failed")
        return super().forward_extend(q, k, v, layer_id=layer_id, scale=scale, context=context)


@pytest.mark.parametrize("when", ["warm-up", "replay"])
def test_an_error_in_layer_k_of_n_reaches_the_caller_or_refuses_and_a_retry_works(engine, when):
    """B24: modes, lock, slots and context are as before; other batches are served."""
    world = make_world(Decoder, 2, backend=FailsOnce)
    runner = world.runner(warm=False, engine=engine, **FEW)
    if when == "warm-up":
        world.backend.fails = True
        with pytest.raises(RuntimeError, match="attention failed"):
            runner.warmup()  # in the dry run, before anything is captured
        assert runner.warmup_facts is None
    runner.warmup()
    if when == "replay":
        world.backend.fails = True
        batch = world.extend((5, 3))[1]
        grad = torch.is_grad_enabled()
        with pytest.raises(RuntimeError, match="attention failed"):
            runner.forward(batch)
        assert torch.is_grad_enabled() == grad
        want = world.eagerly(batch)
        close(runner.forward(batch).hidden_states, want)
    requests = world.cached(8)
    for n in (3, 8):
        assert world.serve(runner, requests[:n]).path == "decode"
        pairs, batch = world.extend((n,))
        out = runner.forward(batch)
        world.check(out, pairs)
        assert out.path == "prefill"


class ReadsStrides(Decoder):
    """Reads a slot that is wider than its view, in a way that depends on its layout."""

    def before(self, h, batch):
        if batch.mrope_positions is None:
            return h
        flat = batch.mrope_positions.contiguous().view(-1).view(3, -1)
        return h + 0.1 * flat.to(h.dtype).sum(0)[:, None]


def test_a_view_of_a_wide_slot_has_the_values_of_its_own_columns(engine):
    """B26: [3, n] of a slot [3, capacity]."""
    world = make_world(ReadsStrides, 1)
    config = {**FEW, "is_multimodal": True, "hidden_size": HIDDEN, "embed_dtype": torch.float32}
    runner = world.runner(engine=engine, **config)
    requests = world.cached(8)
    for n in (3, 8, 5):
        mrope = torch.randint(1, 30, (3, n))
        batch = world.decode(requests[:n], mrope_positions=mrope)
        view = runner.eager.load_batch(batch).mrope_positions
        assert torch.equal(view, mrope)
        want = world.eagerly(batch)
        close(runner.forward(batch).hidden_states, want)
