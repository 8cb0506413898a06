"""Kinds of fault in what a slot is: its presence, its capacity, its address and its strides.

Each test names its kind. What other tests hold already is not repeated:

==== ===========================================================================================
kind tests elsewhere
==== ===========================================================================================
B7   backend/test_declared.py ``a_field_that_comes_and_goes``; registry/test_fill.py
     ``optional_fields_come_and_go``; registry/test_builders.py
     ``text_between_images_has_no_mrope_positions``
B8   registry/test_fill.py ``capacity_exactly_one_above_and_far_above``,
     ``a_refused_batch_writes_nothing_and_later_batches_work``; backend/test_sizes.py
     ``strict_raises_above_the_largest_bucket_and_the_advice_helps``.
     One rule for what all producers bring is the serving runners' and is tested with those.
B9   registry/test_registry.py ``a_slice_past_the_end_raises_instead_of_returning_fewer_rows``;
     registry/test_tensors.py ``a_buffer_smaller_than_the_largest_size_is_refused``;
     registry/test_fill.py ``a_field_longer_than_raw_gives_its_first_raw_rows``
B12  registry/test_pool.py ``a_captured_storage_is_never_dropped_grown_or_replaced``;
     registry/test_registry.py ``addresses_stay_through_fills_and_further_registrations``
B26  registry/test_fill.py ``a_slice_fn_is_cut_filled_and_reset_along_its_dimension``,
     ``a_slice_fn_that_copies_is_refused``; backend/test_state.py ``a_non_contiguous_argument``
==== ===========================================================================================
"""

import pytest
import torch
from torch import nn

from compile_backend import (
    FallbackReason,
    ForwardBatch,
    GraphSlot,
    SlotOverflowError,
    declare_batch,
    explain,
)
from compile_backend.engines import HostEngine, StrictHostEngine
from compile_backend.registry import (
    CudaGraphBufferRegistry,
    build_decode_registry,
    input_pool,
)
from tests.backend.conftest import compiled
from tests.pitfalls.conftest import SIZES, Step, declare_step, make_step, token_slot


@pytest.fixture(autouse=True)
def declared_step():
    declare_step()


def declared_addresses(run):
    return {
        fact.name: fact.address
        for report in explain(run).reports
        if report.served.facts.slots is not None
        for fact in report.served.facts.slots.declared.slot_facts()
    }


# --- B7: an absent optional field turns into a zero or stale buffer --------------------------


def test_an_optional_argument_that_is_absent_is_not_a_buffer_of_zeros(capturing):
    """B7: image, text, image; zeros are a value, None is another branch."""

    def fn(ids, mrope=None):
        positions = ids + 100 if mrope is None else mrope[:, 0] * mrope[:, 2]
        return positions * 2

    run = compiled(fn, capturing)
    with torch.inference_mode():
        for n in (5, 3, 5, 7, 3):
            ids, image = torch.randint(0, 9, (n,)), torch.randint(1, 9, (n, 3))
            for mrope in (image, None, torch.zeros_like(image), None, image):
                args = (ids,) if mrope is None else (ids, mrope)
                assert torch.equal(run(*args), fn(*args))
    explanation = explain(run)
    assert explanation.num_graphs == 2
    assert explanation.hits == explanation.calls - explanation.num_cudagraph_captured


# --- B8: buffers too small for a legal batch -------------------------------------------------


class PerToken(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 4)

    def forward(self, batch):
        return self.embed(batch.ids) * batch.positions[:, None] + batch.lens[:, None]


@pytest.mark.parametrize("above", [9, 64])
def test_a_batch_above_the_capacity_runs_on_its_own_tensors(padding, above):
    """B8: at capacity, above it, and within it again; no slot is half-written."""
    model = PerToken().eval()
    run = compiled(model, padding)
    with torch.inference_mode():
        for n in (8, above, 5, above, 8, 7):
            slots = explain(run).reports[-1].served.facts.slots.declared if n == above else None
            names = () if slots is None else slots.slot_names
            before = [slots.get_slot(name).buffer.clone() for name in names]
            batch = make_step(n)
            torch.testing.assert_close(run(batch), model(batch))
            for name, buffer in zip(names, before, strict=True):
                assert torch.equal(slots.get_slot(name).buffer, buffer)
    explanation = explain(run)
    assert explanation.fallbacks == {FallbackReason.ABOVE_LARGEST_BUCKET: 2}
    assert (explanation.num_cudagraph_captured, explanation.hits) == (1, 3)


def test_each_axis_has_a_capacity_of_its_own(padding):
    """B8: tokens fit and requests do not, and the other way round; then both do."""
    lens = GraphSlot("lens", lambda max_bs, max_num_tokens: (max_bs,), torch.int64, axis="bs")
    declare_batch(Step, [token_slot("ids"), lens])

    def fn(batch):
        return batch.ids * 2, batch.lens + 1

    sizes = {"cudagraph_capture_sizes": [3, 6], "second_axis_capture_sizes": [2, 4, 8]}
    run = compiled(fn, {**padding, **sizes})
    with torch.inference_mode():
        for tokens, bs in ((7, 5), (7, 7), (9, 5), (9, 7), (7, 4), (8, 6)):
            batch = make_step(tokens, lens=torch.randint(1, 9, (bs,)))
            for got, want in zip(run(batch), fn(batch), strict=True):
                assert torch.equal(got, want)
    assert explain(run).fallbacks == {FallbackReason.ABOVE_LARGEST_BUCKET: 3}
    assert explain(run).hits == 2


# --- B9: a slice past the end returns fewer rows ---------------------------------------------


@pytest.mark.parametrize("first", [3, 8])
def test_buffers_hold_the_largest_bucket_whatever_came_first(padding, first):
    """B9: sized by buckets, not by live sizes; a view has as many rows as its bucket."""
    run = compiled(lambda x: x * 2 + 1, padding)
    with torch.inference_mode():
        for n in (first, 5, 7, 3):
            x = torch.randn(n, 4)
            assert torch.equal(run(x), x * 2 + 1)
            slots = explain(run).reports[-1].served.facts.slots
            assert slots.derived.get_slot("l_x_").buffer.shape == (8, 4)
    for bucket in SIZES:
        view = slots.view("l_x_", {"batch": bucket})
        assert view.shape == (bucket, 4)
        assert view.data_ptr() == slots.derived.get_slot("l_x_").buffer.data_ptr()
    with pytest.raises(SlotOverflowError, match="holds 8 rows"):
        slots.view("l_x_", {"batch": 9})


# --- B12: a shared buffer grows after a graph has taken its address --------------------------


def test_a_larger_consumer_does_not_move_the_buffers_of_a_captured_graph(padding):
    """B12: the second model shares the names of the slots and asks for twice the rows."""
    models = [PerToken().eval() for _ in range(2)]
    small = compiled(models[0], padding)
    with torch.inference_mode():
        small(make_step(5))
        addresses = declared_addresses(small)
        large = compiled(models[1], {**padding, "cudagraph_capture_sizes": [16]})
        for n in (5, 7, 6):
            for model, run, tokens in ((models[1], large, 2 * n), (models[0], small, n)):
                batch = make_step(tokens, loc=torch.arange(tokens))
                torch.testing.assert_close(run(batch), model(batch))
    assert declared_addresses(small) == addresses
    assert not set(declared_addresses(large).values()) & set(addresses.values())
    assert (explain(small).hits, explain(small).recaptures) == (3, 0)


def test_a_captured_graph_keeps_its_pooled_buffers_for_the_process(padding):
    """B12: clearing the pool after a capture drops nothing that a graph reads."""
    model = PerToken().eval()
    run = compiled(model, padding)
    later = compiled(lambda batch: batch.ids * batch.positions + batch.lens, padding)
    with torch.inference_mode():
        run(make_step(5))
        input_pool.clear()
        later(make_step(5))
        batch = make_step(7)
        torch.testing.assert_close(run(batch), model(batch))
    assert declared_addresses(later) == declared_addresses(run)


@pytest.mark.parametrize("engine", [HostEngine(), StrictHostEngine()], ids=lambda e: e.name)
def test_a_recording_reads_what_its_registry_fills_after_a_larger_one_came(engine):
    """B12: the same through a registry and an engine by hand."""

    def pooled(max_bs):
        registry = CudaGraphBufferRegistry(
            device="cpu", max_bs=max_bs, max_num_tokens=0, share_pool=True
        )
        slot = GraphSlot("b12", lambda bs, tokens: (bs,), torch.int64, axis="bs")
        return registry, registry.register_slot(slot)

    registry, slot = pooled(4)
    replay = engine.capture(lambda x: [x * 2], static_inputs=[slot.slice_for(4, 0)])
    registry.mark_captured()
    input_pool.clear()
    _, larger = pooled(9)
    _, same = pooled(4)
    larger.buffer.fill_(1)
    same.slice_for(4, 0).fill_(5)
    assert replay()[0].tolist() == [10] * 4


# --- B26: a slice of a wide slot is not contiguous -------------------------------------------


def test_a_wide_field_of_a_declared_batch_reaches_the_graph_as_traced(padding):
    """B26: [3, tokens] cut from a wider buffer, in turn with a tight one, flattened inside."""

    def fn(batch):
        flat = batch.mrope.reshape(-1) * 2
        return flat.view(3, -1).t() + batch.positions[:, None], batch.mrope[1] + batch.mrope[2]

    run = compiled(fn, padding)
    wide = torch.zeros(3, 9, dtype=torch.int64)
    with torch.inference_mode():
        for step, n in enumerate((5, 3, 8, 5, 7, 3, 8, 5)):
            wide.random_(0, 9)
            mrope = wide[:, :n] if step % 2 else wide[:, :n].contiguous()
            batch = make_step(n, mrope=mrope)
            for got, want in zip(run(batch), fn(batch), strict=True):
                assert torch.equal(got, want)
                assert got.stride() == want.stride()


def test_a_piece_is_compiled_for_the_strides_of_the_views_it_gets(padding):
    """B26: the view of [3, tokens] is contiguous at every bucket and starts where the slot does."""
    run = compiled(lambda batch: (batch.mrope * 2).t() + batch.positions[:, None], padding)
    with torch.inference_mode():
        for n in (5, 3, 8, 7):
            run(make_step(n, mrope=torch.randint(0, 9, (3, n))))
    (report,) = explain(run).reports
    slots = report.served.facts.slots
    examples = [node.meta["example_value"] for node in report.built.pieces[0].graph.nodes
                if node.op == "placeholder"]  # fmt: skip
    (example,) = [e for e in examples if isinstance(e, torch.Tensor) and e.dim() == 2]
    (symbol,) = example.shape[1].node.expr.free_symbols
    for bucket in SIZES:
        view = slots.view("mrope", {"tokens": bucket})
        compiled_for = [int(s.node.expr.xreplace({symbol: bucket})) if isinstance(s, torch.SymInt)
                        else s for s in example.stride()]  # fmt: skip
        assert list(view.stride()) == compiled_for == [bucket, 1]
        assert view.data_ptr() == slots.declared.get_slot("mrope").buffer.data_ptr()
    assert explain(run).hits == 2


def test_a_graph_that_is_given_wide_slot_views_reads_the_slots_themselves(capturing):
    """B26: the views of a registry, whose rows lie a capacity apart, are read where they are."""
    registry = build_decode_registry(
        device="cpu",
        max_bs=8,
        max_num_token=8,
        seq_len_fill_value=1,
        cache_loc_dtype=torch.int64,
        share_pool=False,
    )

    def fn(positions, mrope):
        return positions + mrope[0] * mrope[2], mrope.t() * 2

    run = compiled(fn, {**capturing, "dynamic_batch": False})
    with torch.inference_mode():
        for n in (5, 3, 6, 4):
            live = torch.randint(1, 9, (n,))
            names = ("input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens")
            batch = ForwardBatch(
                **dict.fromkeys(names, live),
                seq_lens_cpu=live,
                mrope_positions=torch.randint(1, 9, (3, n)),
            )
            registry.fill_from(batch, raw_bs=n, padded_bs=6, raw_num_tokens=n, padded_num_tokens=6)
            view = registry.extract_buffer(
                padded_bs=6, padded_num_tokens=6, forward_batch_template=batch
            )
            assert view.mrope_positions.stride() == (8, 1)
            wanted = fn(batch.positions, batch.mrope_positions)
            for got, want in zip(run(view.positions, view.mrope_positions), wanted, strict=True):
                assert torch.equal(got[:n], want)
    explanation = explain(run)
    assert (explanation.hits, explanation.recaptures) == (3, 0)
