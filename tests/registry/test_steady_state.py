"""A fill that has been planned: nothing allocated, nothing planned again, a bounded cache."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from compile_backend.forward_batch import ForwardBatch
from compile_backend.registry import CudaGraphBufferRegistry, GraphSlot, build_decode_registry
from compile_backend.registry import registry as registry_module
from compile_backend.registry.fill import BoundedCache


def make_batch(rows):
    numbers = torch.arange(rows)
    return ForwardBatch(
        batch_size=rows,
        input_ids=numbers,
        positions=numbers.int(),  # widened while it is copied
        out_cache_loc=numbers + 1,
        req_pool_indices=numbers + 2,
        seq_lens=torch.arange(rows + 2),  # longer than raw: cut
        seq_lens_cpu=numbers + 4,
        mrope_positions=numbers.expand(3, rows),
        mamba_track_indices=numbers,
        mamba_track_mask=numbers > 1,
        encoder_lens=numbers.int(),
    )


@pytest.fixture
def decode():
    return build_decode_registry(
        device="cpu",
        max_bs=64,
        max_num_token=64,
        seq_len_fill_value=1,
        cache_loc_dtype=torch.int64,
        enable_mamba_track=True,
        is_encoder_decoder=True,
        enable_num_token_non_padded=True,
        require_gathered_buffer=True,
        share_pool=False,
    )


def step(registry, batch, raw, padded):
    registry.fill_from(
        batch, raw_bs=raw, padded_bs=padded, raw_num_tokens=raw, padded_num_tokens=padded
    )
    return registry.extract_buffer(
        padded_bs=padded, padded_num_tokens=padded, forward_batch_template=batch
    )


def allocations(run):
    """Sizes in bytes of the blocks that ``run`` takes from torch's CPU allocator."""
    # acc_events: some versions warn, once per process, that events of earlier cycles are dropped
    options = {"activities": [ProfilerActivity.CPU], "profile_memory": True, "acc_events": True}
    with profile(**options) as recorded:
        run()
    events = recorded.profiler.kineto_results.events()
    return [event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0]


def test_the_allocation_counter_sees_one_byte():
    assert allocations(lambda: torch.empty(1, dtype=torch.uint8))
    assert allocations(lambda: torch.arange(5) + 1)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_steady_state_fill_allocates_nothing(decode, mode):
    batches = [make_batch(5), make_batch(5), make_batch(3)]
    with mode():
        for batch in batches:
            step(decode, batch, batch.batch_size, 8)

        def run():
            for batch in batches:
                step(decode, batch, batch.batch_size, 8)

        assert allocations(run) == []


def test_a_steady_state_fill_by_name_allocates_nothing():
    registry = CudaGraphBufferRegistry(
        device="cpu", max_bs=8, max_num_tokens=8, max_sizes={"dim0": 4, "dim1": 6}
    )
    for name in ("x", "y"):
        registry.register_slot(
            GraphSlot(name, lambda bs, tokens: (4, 6), torch.float32, axis=("dim0", "dim1"))
        )
    values = {"x": torch.ones(3, 5), "y": torch.ones(5, 3).t()}
    raw, padded = {"dim0": 3, "dim1": 5}, {"dim0": 4, "dim1": 6}

    def run():
        registry.fill_tensors(values, raw=raw, padded=padded)
        registry.view("x", padded)

    run()
    assert allocations(run) == []


def test_shapes_seen_before_are_not_planned_again(decode, monkeypatch):
    planned = []
    plan_fill = registry_module.plan_fill

    def counting(entries, raw, padded):
        planned.append((dict(raw), dict(padded)))
        return plan_fill(entries, raw, padded)

    monkeypatch.setattr(registry_module, "plan_fill", counting)
    for rows, padded in ((5, 8), (3, 4), (5, 8), (5, 8), (3, 4), (3, 8)):
        step(decode, make_batch(rows), rows, padded)
    assert len(planned) == 3
    absent = make_batch(5)
    absent.encoder_lens = None
    step(decode, absent, 5, 8)
    step(decode, absent, 5, 8)
    assert len(planned) == 4


def test_a_bounded_cache_drops_what_was_used_longest_ago():
    cache = BoundedCache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == 1
    cache.put("c", 3)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (1, None, 3)
    assert len(cache) == 2


def test_more_shapes_than_plans_still_fill_right(monkeypatch):
    monkeypatch.setattr(registry_module, "MAX_PLANS", 4)
    registry = CudaGraphBufferRegistry(device="cpu", max_bs=1, max_num_tokens=64)
    slot = registry.register_slot(GraphSlot("x", lambda bs, tokens: (tokens,), torch.int64))
    for raw in [*range(20), *range(20)]:
        registry.fill_tensors(
            {"x": torch.full((raw,), raw)}, raw={"tokens": raw}, padded={"tokens": 64}
        )
        assert slot.buffer[:raw].eq(raw).all()
    assert len(registry._plans) == 4
