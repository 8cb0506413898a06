"""Batches above capacity are refused by name, with nothing written; the next one is served."""

import pytest
import torch

from compile_backend import ForwardMode, SlotMismatchError, SlotOverflowError
from tests.runners.models import Decoder, make_world

FEW = {
    "max_running_requests": 4,
    "chunked_prefill_size": 8,
    "cudagraph_capture_sizes": (4,),
    "prefill_capture_sizes": (8,),
}


def decode(n):
    return lambda world: world.decode(world.cached(n, length=1))


def extend(*lengths, **fields):
    return lambda world: world.extend(lengths, **fields)[1]


def with_field(make, **fields):
    def build(world):
        batch = make(world)
        for name, value in fields.items():
            setattr(batch, name, value)
        return batch

    return build


TOO_LARGE = {
    "one request": (decode(5), r"batch_size brings 5 rows .* 4 .* max_running_requests .* 5"),
    "many requests": (decode(40), r"batch_size brings 40 rows .* 4 .* max_running_requests .* 40"),
    "one token": (extend(9), r"input_ids brings 9 tokens .* 8 .* chunked_prefill_size .* 9"),
    "many tokens": (extend(30, 30), r"60 tokens .* 8 .* chunked_prefill_size .* 60"),
    "mixed": (
        lambda world: world.extend((9,), ForwardMode.MIXED)[1],
        r"9 tokens .* 8 in a batch of mode MIXED; raise chunked_prefill_size",
    ),
    "positions alone": (
        with_field(extend(4), mrope_positions=torch.zeros(3, 9, dtype=torch.int64)),
        r"mrope_positions brings 9 tokens .* 8",
    ),
    "lengths alone": (
        with_field(decode(3), seq_lens=torch.ones(5, dtype=torch.int64)),
        r"seq_lens brings 5 rows .* 4",
    ),
}
DOES_NOT_FIT = {
    "dtype": (with_field(decode(3), positions=torch.ones(3)), r"positions.*float32"),
    "rank": (
        with_field(decode(3), out_cache_loc=torch.ones(3, 1, dtype=torch.int64)),
        r"out_cache_loc",
    ),
    "fewer rows": (
        with_field(decode(3), req_pool_indices=torch.ones(2, dtype=torch.int64)),
        r"req_pool_indices.*2",
    ),
}
REFUSED = {
    **{name: (SlotOverflowError, *case) for name, case in TOO_LARGE.items()},
    **{name: (SlotMismatchError, *case) for name, case in DOES_NOT_FIT.items()},
}


@pytest.mark.parametrize("graphs", [True, False])
def test_what_does_not_fit_is_refused_and_the_next_batch_is_served(engine, graphs):
    world = make_world(Decoder, 1, num_slots=2048, max_requests=256)
    runner = world.runner(
        engine=engine, enable_decode_graph=graphs, enable_prefill_graph=graphs, **FEW
    )
    requests = world.cached(4)
    registries = [each.registry for each in (runner.eager, *runner.graph_runners)]
    buffers = [r.get_slot(name).layout.buffer for r in registries for name in r.slot_names]
    num_served = 0
    for error, make, message in REFUSED.values():
        batch = make(world)
        before = [tensor.clone() for tensor in (*buffers, world.kv.k, world.kv.v)]
        paths = dict(runner.explain().paths)
        with pytest.raises(error, match=message):
            runner.forward(batch)
        after = (*buffers, world.kv.k, world.kv.v)
        assert all(map(torch.equal, before, after))
        assert dict(runner.explain().paths) == paths
        out = world.serve(runner, requests[: 3 + num_served % 2])
        assert out.path == ("decode" if graphs else "eager")
        num_served += 1
    assert runner.explain().hits == (num_served if graphs else 0)


def test_a_batch_exactly_at_capacity_is_served(engine):
    world = make_world(Decoder, 1)
    runner = world.runner(engine=engine, strict=True, **FEW)
    world.serve(runner, world.cached(4))
    for lengths in ((8,), (2, 2, 2, 2), (5, 3)):
        pairs, batch = world.extend(lengths)
        world.check(runner.forward(batch), pairs)
    assert runner.explain().hits == 4


def test_a_request_without_new_tokens_is_refused_before_anything_runs(engine):
    """Its last row would be somebody else's."""
    world = make_world(Decoder, 1)
    runner = world.runner(engine=engine, **FEW)
    pairs = [(world.request(3), 3), (world.request(2), 0), (world.request(2), 2)]
    batch = world.batch(pairs)
    before = world.kv.k.clone()
    with pytest.raises(ValueError, match=r"request 1 .*\[3, 0, 2\].*leave it out"):
        runner.forward(batch)
    assert torch.equal(world.kv.k, before)
    assert runner.explain().paths == {}


def test_graphs_never_hold_more_rows_than_their_slots(engine):
    """B9: capture sizes above the capacity become the capacity."""
    world = make_world(Decoder, 1)
    sizes = {"cudagraph_capture_sizes": (2, 64), "prefill_capture_sizes": (4, 999)}
    runner = world.runner(engine=engine, **{**FEW, **sizes})
    assert sorted(key.bs for key in runner.decode.graphs.keys) == [2, 2, 4, 4]  # two KV lengths
    assert sorted(key.tokens for key in runner.prefill.graphs.keys) == [4, 8]
    for each in runner.graph_runners:
        for name in each.registry.slot_names:
            for key in each.graphs.keys:
                sizes = {"bs": key.bs or 1, "tokens": key.tokens}
                view = each.registry.view(name, sizes)
                assert view.shape[-1] in (key.bs or 1, key.tokens)
