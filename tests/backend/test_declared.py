"""Declared batches: fields in slots by their owner's policies, everything else passed through."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compile_backend import (
    FallbackReason,
    GraphSlot,
    PaddingError,
    PaddingPolicy,
    SlotDefinitionError,
    declare_batch,
    explain,
)
from tests import custom_ops as ops
from tests.backend.conftest import compiled

ENGINES = ["host", "host_strict"]
HIDDEN = 4


@dataclass
class Pool:
    """A cache hung on the batch: looks like a field, and is none."""

    k: Tensor


@dataclass
class Step:
    input_ids: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    out_cache_loc: Tensor  # [tokens]
    seq_lens: Tensor  # [bs]
    mrope: Tensor | None = None  # [3, tokens]
    batch_size: int = 0
    scale: float = 1.0
    pool: Any = None


def slot(name, policy, axis="tokens", pad_value=None, dtype=torch.int64, shape=None):
    def default_shape(max_bs, max_num_tokens):
        return (max_bs if axis == "bs" else max_num_tokens,)

    return GraphSlot(
        name,
        shape or default_shape,
        dtype,
        axis=axis,
        padding_policy=policy,
        pad_value=pad_value,
    )


def declare(lens_policy=PaddingPolicy.FILL_SENTINEL, ids_policy=PaddingPolicy.FOREACH_COPY):
    declare_batch(
        Step,
        [
            slot("input_ids", ids_policy),
            slot("positions", PaddingPolicy.ZERO),
            slot("out_cache_loc", PaddingPolicy.ZERO),
            slot("seq_lens", lens_policy, "bs", 1),
            GraphSlot(
                "mrope",
                lambda max_bs, max_num_tokens: (3, max_num_tokens),
                torch.int64,
                padding_policy=PaddingPolicy.ZERO,
                slice_fn=lambda buffer, bs, tokens: buffer[:, :tokens],
            ),
        ],
        size_fields={"batch_size": "bs"},
    )


@pytest.fixture(autouse=True)
def declared_step():
    declare()


class Decoder(nn.Module):
    """Embeds tokens, rotates by position, stores and reads a cache. Row 0 of it is scratch."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, HIDDEN)
        self.proj = nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("angles", torch.linspace(0, 1, 64))

    def forward(self, batch: Step):
        h = self.embed(batch.input_ids)
        if batch.mrope is not None:
            h = h + batch.mrope[0, :, None] * 0.1 + batch.mrope[2, :, None]
        h = self.proj(h) * torch.cos(self.angles[batch.positions])[:, None]
        ops.store(h, batch.pool.k, batch.out_cache_loc)
        lens = batch.positions.clamp(min=1)
        return (h + ops.attend(h, batch.pool.k[1:], lens)) * batch.scale


def step(tokens, pool, *, bs=None, mrope=False, scale=1.0):
    return Step(
        input_ids=torch.randint(0, 32, (tokens,)),
        positions=torch.randint(0, 8, (tokens,)),
        out_cache_loc=1 + torch.randperm(15)[:tokens],
        seq_lens=torch.randint(1, 5, (tokens if bs is None else bs,)),
        mrope=torch.randint(0, 9, (3, tokens)) if mrope else None,
        batch_size=tokens if bs is None else bs,
        scale=scale,
        pool=pool,
    )


def options(engine, **more):
    return {
        "compiler": "aot_eager",
        "engine": engine,
        "cudagraph_capture_sizes": [2, 4, 8],
        "splitting_ops": ["graphbuf_test::attend"],
        **more,
    }


def run_steps(model, run, steps, pool, reference_pool):
    for batch in steps:
        mine = Step(**{**vars(batch), "pool": pool})
        theirs = Step(**{**vars(batch), "pool": reference_pool})
        before = {name: value for name, value in vars(mine).items() if name != "pool"}
        got = run(mine)
        want = model(theirs)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(pool.k[1:], reference_pool.k[1:])
        assert pool.k.isfinite().all(), "the scratch row must stay finite"
        assert all(getattr(mine, name) is value for name, value in before.items())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "PIECEWISE"])
def test_a_declared_batch_is_padded_around_its_break_ops(engine, mode):
    model = Decoder().eval()
    run = compiled(model, options(engine, cudagraph_mode=mode, check_padding=True))
    pools = [Pool(torch.zeros(16, HIDDEN)) for _ in range(2)]
    sizes = [5, 3, 8, 1, 7, 4, 2, 5, 8, 3, 6]
    with torch.inference_mode():
        run_steps(model, run, [step(n, pools[0]) for n in sizes], *pools)
    explanation = explain(run)
    assert explanation.hits >= 5, str(explanation)
    assert not explanation.fallbacks
    assert {f.name for r in explanation.reports if r.served.facts.slots for f in
            r.served.facts.slots.facts} == {"input_ids", "positions", "out_cache_loc"}  # fmt: skip


@pytest.mark.parametrize("engine", ENGINES)
def test_a_field_that_comes_and_goes(engine):
    model = Decoder().eval()
    run = compiled(model, options(engine))
    pools = [Pool(torch.zeros(16, HIDDEN)) for _ in range(2)]
    steps = [step(n, pools[0], mrope=m) for n in (5, 3, 7) for m in (True, False, True)]
    with torch.inference_mode():
        run_steps(model, run, steps, *pools)
    explanation = explain(run)
    assert explanation.hits >= 3, str(explanation)
    assert any("slot mrope" in line for line in str(explanation).splitlines())


class TwoAxes(nn.Module):
    """Tokens and requests have sizes of their own; the batch size is read as a number."""

    def forward(self, batch: Step):
        tokens = batch.input_ids.float()[:, None] * torch.ones(HIDDEN)
        live = torch.arange(4)[None] < batch.seq_lens[:, None]
        per_request = live.float().softmax(-1) * batch.seq_lens[:, None]
        return tokens, per_request.reshape(batch.batch_size, 2, 2)


@pytest.mark.parametrize("engine", ENGINES)
def test_two_axes_and_a_size_field(engine):
    model = TwoAxes()
    run = compiled(model, options(engine, second_axis_capture_sizes=[6, 9]))
    with torch.inference_mode():
        for tokens, bs in ((8, 3), (5, 2), (7, 5), (4, 3), (8, 6), (3, 2), (5, 4)):
            batch = step(tokens, None, bs=bs)
            for got, want in zip(run(batch), model(batch), strict=True):
                assert got.shape == want.shape
                torch.testing.assert_close(got, want)
    explanation = explain(run)
    labels = {bucket.label for bucket in explanation.buckets}
    assert labels & {"bs=4, tokens=9", "bs=8, tokens=9"}, str(explanation)
    assert explanation.hits >= 2, str(explanation)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_tail_is_reset_whatever_an_earlier_batch_left(engine):
    """3 after 8 after 5: each field equals live rows and fill, with the buffer poisoned before."""
    model = Decoder().eval()
    run = compiled(model, options(engine))
    pool = Pool(torch.zeros(16, HIDDEN))
    with torch.inference_mode():
        run(step(5, pool))
        served = explain(run).reports[-1].served
        slots = served.facts.slots
        for n in (3, 5, 3, 7, 4, 8, 5):
            for name in ("positions", "out_cache_loc"):
                slots.declared.get_slot(name).buffer.fill_(9)
            batch = step(n, pool)
            run(batch)
            bucket = next(size for size in (2, 4, 8) if size >= n)
            for name in ("positions", "out_cache_loc"):
                view = slots.view(name, {"tokens": bucket})
                assert view.shape == (bucket,)
                assert torch.equal(view[:n], getattr(batch, name))
                assert view[n:].eq(0).all()


class LeaksRows(nn.Module):
    """Its break op mixes rows: a promise the declaration makes and the model breaks."""

    def forward(self, batch: Step):
        x = batch.input_ids.float()[:, None] * torch.ones(HIDDEN)
        return ops.mix_rows(x)


def test_the_poison_run_catches_a_broken_promise():
    run = compiled(
        LeaksRows(),
        options("host", check_padding=True, splitting_ops=["graphbuf_test::mix_rows"]),
    )
    with torch.inference_mode(), pytest.raises(PaddingError, match=r"output 0 .*live rows"):
        run(step(5, None))


def test_a_broken_promise_is_caught_at_every_try_and_by_the_first_tail():
    """Not only at the first call: a full bucket has no tail, and poison does not stay behind."""
    options_ = options(
        "host", check_padding=True, splitting_ops=["graphbuf_test::mix_rows"], strict=True
    )
    run = compiled(LeaksRows(), options_)
    with torch.inference_mode():
        run(step(8, None))  # fills its bucket
        for n in (5, 5, 3, 7):
            with pytest.raises(PaddingError):
                run(step(n, None))
        torch._dynamo.reset()
        again = compiled(LeaksRows(), options_)
        with pytest.raises(PaddingError):
            again(step(6, None))


def test_naming_an_aten_operator_as_a_break_op_vouches_for_nothing():
    class Centres(nn.Module):
        def forward(self, batch: Step):
            return batch.positions.float() - batch.positions.float().mean(0)

    run = compiled(Centres(), options("host", splitting_ops=["aten::mean"]))
    model = Centres()
    with torch.inference_mode():
        for n in (5, 3, 8, 5):
            batch = step(n, None)
            torch.testing.assert_close(run(batch), model(batch))
    assert set(explain(run).fallbacks) == {FallbackReason.PADDING_UNSAFE}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (slot("positions", PaddingPolicy.ZERO, dtype=torch.int8), "int8.*int64"),
        (slot("positions", PaddingPolicy.ZERO, shape=lambda b, t: (t, 4)), r"2 dimension.*has 1"),
        (slot("positions", PaddingPolicy.ZERO, shape=lambda b, t: (64,)), "for any maximum"),
    ],
)
def test_a_slot_that_cannot_hold_its_field_is_refused(wrong, message):
    declare_batch(Step, [wrong])
    run = compiled(lambda batch: batch.positions * 2, options("host"))
    with torch.inference_mode(), pytest.raises(Exception, match=message):
        run(step(5, None))


@dataclass
class Loads:
    ids: Tensor
    loc: Tensor


class Stores(nn.Module):
    """Padded rows must be written where the slot of ``loc`` says, to the last row."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, 4), requires_grad=False)
        self.register_buffer("cache", torch.zeros(16, 4))

    def forward(self, loc, batch):
        h = self.table[batch.ids] * 2
        ops.store(h, self.cache, batch.loc if loc is None else loc)
        return h + batch.loc[:, None]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shared", ["two fields", "a field and an argument", "none"])
def test_one_tensor_in_two_places_keeps_the_policy_of_its_field(engine, shared):
    declare_batch(
        Loads,
        [
            slot("ids", PaddingPolicy.ZERO),
            slot("loc", PaddingPolicy.FILL_SENTINEL, pad_value=15),
        ],
    )
    model, reference = Stores(), Stores()
    reference.load_state_dict(model.state_dict())
    run = compiled(model, {"compiler": "aot_eager", "engine": engine})
    with torch.inference_mode():
        for n in (5, 3, 7, 5, 3):
            loc = 1 + torch.randperm(14)[:n]
            ids = loc if shared == "two fields" else torch.randint(0, 16, (n,))
            argument = loc if shared == "a field and an argument" else None
            batch = Loads(ids, loc)
            torch.testing.assert_close(run(argument, batch), reference(argument, batch))
            torch.testing.assert_close(model.cache[:15], reference.cache[:15])
    if shared == "two fields":
        assert set(explain(run).fallbacks) == {FallbackReason.PADDING_UNSAFE}
    else:
        assert not explain(run).fallbacks


@dataclass
class Prefill:
    ids: Tensor  # [tokens]
    info: Tensor  # [4, requests]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_inner_axis_of_one(engine):
    declare_batch(
        Prefill,
        [
            slot("ids", PaddingPolicy.ZERO),
            slot("info", PaddingPolicy.ZERO, "bs", dtype=torch.float32, shape=lambda b, t: (4, b)),
        ],
    )
    run = compiled(lambda b: (b.ids * 2, b.info * 3), {"compiler": "aot_eager", "engine": engine})
    with torch.inference_mode():
        for tokens, bs in ((7, 1), (5, 1), (7, 3), (1, 3), (6, 2), (1, 1), (7, 1)):
            batch = Prefill(torch.randint(0, 9, (tokens,)), torch.randn(4, bs))
            got = run(batch)
            torch.testing.assert_close(got, (batch.ids * 2, batch.info * 3))


def test_without_its_break_op_declared_rows_must_be_proven():
    class Sums(nn.Module):
        def forward(self, batch: Step):
            return batch.input_ids - batch.input_ids.amin()

    run = compiled(Sums(), options("host"))
    with torch.inference_mode():
        for n in (5, 3, 8, 5):
            batch = step(n, None)
            torch.testing.assert_close(run(batch), batch.input_ids - batch.input_ids.amin())
    assert set(explain(run).fallbacks) == {FallbackReason.PADDING_UNSAFE}


def test_a_subclass_inherits_the_declaration():
    @dataclass
    class Special(Step):
        extra: int = 0

    model = Decoder().eval()
    run = compiled(model, options("host"))
    pool = Pool(torch.zeros(16, HIDDEN))
    with torch.inference_mode():
        for n in (5, 3, 7):
            run(Special(**vars(step(n, pool))))
    assert "slot input_ids" in str(explain(run))


@pytest.mark.parametrize("position", ["keyword", "nested"])
def test_the_batch_is_found_wherever_it_is_passed(position):
    model = Decoder().eval()
    pool = Pool(torch.zeros(16, HIDDEN))
    if position == "keyword":
        run = compiled(model, options("host"))

        def call(batch):
            return run(batch=batch)
    else:
        inner = nn.Sequential(model)
        run = compiled(inner, options("host"))

        def call(batch):
            return run(batch)

    with torch.inference_mode():
        for n in (5, 3, 7):
            call(step(n, pool))
    assert "slot input_ids" in str(explain(run))
    assert explain(run).hits == 1


def test_bad_declarations_are_refused():
    with pytest.raises(SlotDefinitionError, match="no field 'input_idz'"):
        declare_batch(Step, [slot("input_idz", PaddingPolicy.ZERO)])
    twice = [slot("positions", PaddingPolicy.ZERO), slot("positions", PaddingPolicy.ZERO)]
    with pytest.raises(SlotDefinitionError, match="two slots"):
        declare_batch(Step, twice)
    with pytest.raises(SlotDefinitionError, match="axis 'rows'"):
        declare_batch(Step, [], size_fields={"batch_size": "rows"})
    with pytest.raises(SlotDefinitionError, match="no size field"):
        declare_batch(Step, [], size_fields={"bs": "bs"})
    with pytest.raises(SlotDefinitionError, match=r"axis 'rows'.*bs, tokens"):
        declare_batch(Step, [slot("positions", PaddingPolicy.ZERO, "rows")])
    computed = GraphSlot("positions", lambda b, t: (t,), torch.int64, post_fill=lambda *_: None)
    with pytest.raises(SlotDefinitionError, match="is computed"):
        declare_batch(Step, [computed])
    with pytest.raises(SlotDefinitionError, match="pass the batch's class"):
        declare_batch("Step", [])
    with pytest.raises(SlotDefinitionError, match="list of GraphSlot"):
        declare_batch(Step, slot("positions", PaddingPolicy.ZERO))
