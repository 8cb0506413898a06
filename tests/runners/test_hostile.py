"""Models and backends that do what a captured graph does not survive, and changes after capture."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compile_backend import (
    FallbackReason,
    ForwardMode,
    GraphSlot,
    PassError,
    declare_batch,
    explain,
)
from compile_backend.attention import TorchNativeBackend
from tests.runners.models import HIDDEN, Decoder, close, make_world

FEW = {"cudagraph_capture_sizes": (4,), "prefill_capture_sizes": (8,), "engine": "host_strict"}


def model_with(after):
    """A decoder of one layer whose last step is ``after(self, h, batch)``."""
    return type("Hostile", (Decoder,), {"after": after})


def paths_of(world, runner, sizes, tolerance=2e-4):
    """Decode each number of requests, compare with the model itself, and say which path ran."""
    requests = world.cached(max(sizes))
    paths = []
    for n in sizes:
        batch = world.decode(requests[:n])
        want = world.eagerly(batch)
        out = runner.forward(batch)
        close(out.hidden_states, want, tolerance)
        paths.append(out.path)
    return paths


# --- what a model must not read ----------------------------------------------------------------

READS = {
    "seq_lens_sum as a factor": (lambda self, h, b: h * b.seq_lens_sum, "seq_lens_sum"),
    "seq_lens_sum in a branch": (
        lambda self, h, b: h * 2 if b.seq_lens_sum > 3 else h,
        "seq_lens_sum",
    ),
    "seq_lens_sum as a size": (
        lambda self, h, b: h + torch.ones(b.seq_lens_sum).sum(),
        "seq_lens_sum",
    ),
    "a list's maximum": (
        lambda self, h, b: h if b.forward_mode.is_decode() else h * max(b.extend_seq_lens_cpu),
        "extend_seq_lens_cpu",
    ),
    "a list made a tensor": (
        lambda self, h, b: (
            h if b.forward_mode.is_decode() else h + torch.tensor(b.extend_seq_lens_cpu).sum()
        ),
        "extend_seq_lens_cpu",
    ),
    "a list in a loop": (
        lambda self, h, b: (
            h if b.forward_mode.is_decode() else h + sum(n for n in b.extend_prefix_lens_cpu)
        ),
        "extend_prefix_lens_cpu",
    ),
    "a slice": (
        lambda self, h, b: h if b.forward_mode.is_decode() else h[: b.extend_num_tokens],
        "extend_num_tokens",
    ),
    "a tensor without a slot": (
        lambda self, h, b: h if b.forward_mode.is_decode() else h + b.extend_seq_lens.sum(),
        "extend_seq_lens",
    ),
}


@pytest.mark.parametrize("name", [name for name in READS if name != "a slice"])
def test_reading_a_field_that_a_graph_would_bake_names_the_field(name):
    after, field = READS[name]
    world = make_world(model_with(after), 1)
    with pytest.raises(PassError, match=rf"the model reads the batch field '{field}'") as error:
        world.runner(**FEW)
    assert "no slot" in str(error.value).splitlines()[0]


def test_a_read_that_the_tracer_does_not_name_is_among_the_fields_that_the_error_lists():
    after, field = READS["a slice"]
    with pytest.raises(PassError, match=rf"fields without a slot cannot be read \(.*{field}"):
        make_world(model_with(after), 1).runner(**FEW)


@pytest.mark.parametrize("kind", ["attribute", "counter", "buffer"])
def test_a_model_that_changes_itself_is_refused(kind):
    """B16: the assignment is Dynamo's to repeat, and a replay would not."""

    def after(self, h, batch):
        if kind == "attribute":
            self.last = h
        elif kind == "counter":
            self.count = getattr(self, "count", 0) + 1
        else:
            self.frequencies = self.frequencies.to(h.dtype)
        return h

    world = make_world(model_with(after), 1)
    before = world.model.frequencies.data_ptr()
    with pytest.raises(PassError, match=r"changes .* while it runs.*in place"):
        world.runner(**FEW)
    assert world.model.frequencies.data_ptr() == before


# --- what a model may read ---------------------------------------------------------------------


def test_a_branch_on_the_mode_makes_a_graph_for_each(engine):
    world = make_world(
        model_with(lambda self, h, b: h * 2 if b.forward_mode.is_decode() else h * 3), 1
    )
    runner = world.runner(**{**FEW, "engine": engine})
    assert paths_of(world, runner, (3, 4)) == ["decode", "decode"]
    for mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
        batch = world.extend((3, 4), mode)[1]
        want = world.eagerly(batch)
        out = runner.forward(batch)
        close(out.hidden_states, want)
        assert out.path == "prefill"
    graphs = [{key.graph for key in each.graphs.keys} for each in runner.graph_runners]
    assert graphs[0].isdisjoint(graphs[1])
    assert len(runner.explain().traces) == 4  # decode, extend, mixed and lm_head


USES_A_SIZE = {
    "rows": lambda self, h, b: h * h.shape[0],
    "batch_size": lambda self, h, b: h * b.batch_size,
    "arange": lambda self, h, b: h + torch.arange(h.shape[0]).flip(0)[:, None],
}


@pytest.mark.parametrize("name", USES_A_SIZE)
def test_a_size_that_is_a_value_is_never_a_padded_one(engine, name):
    world = make_world(model_with(USES_A_SIZE[name]), 1)
    runner = world.runner(**{**FEW, "engine": engine})
    assert paths_of(world, runner, (3, 4, 2, 4)) == ["eager", "decode", "eager", "decode"]
    for lengths in ((3, 4), (4, 4), (8,), (7,)):
        batch = world.extend(lengths)[1]
        want = world.eagerly(batch)
        close(runner.forward(batch).hidden_states, want)
    (reason,) = runner.explain().fallbacks
    assert reason in (FallbackReason.PADDING_UNSAFE, FallbackReason.OUTPUT_NOT_PREFIX)


def test_batch_size_may_shape_a_view(engine):
    """Decode has as many tokens as requests. What the view does to padded rows is not proven."""

    def after(self, h, b):
        return h.view(b.batch_size, -1, HIDDEN).flatten(0, 1) if b.forward_mode.is_decode() else h

    world = make_world(model_with(after), 1)
    runner = world.runner(**{**FEW, "engine": engine})
    assert paths_of(world, runner, (4, 3, 4, 1))[0] == "decode"


def test_requests_and_tokens_may_meet_in_decode(engine):
    def after(self, h, b):
        return h * b.seq_lens[:, None] if b.forward_mode.is_decode() else h

    world = make_world(model_with(after), 1)
    runner = world.runner(**{**FEW, "engine": engine})
    assert paths_of(world, runner, (3, 4, 1)) == ["decode"] * 3


def test_an_int_attribute_is_fixed_when_the_model_is_traced(engine):
    """A promise of ModelRunner: what is no tensor does not change after warm-up."""
    world = make_world(model_with(lambda self, h, b: h * self.factor), 1)
    world.model.factor = 2
    runner = world.runner(**{**FEW, "engine": engine})
    assert paths_of(world, runner, (4,)) == ["decode"]
    requests = world.cached(4)
    batch = world.decode(requests)
    twice = world.eagerly(batch)
    world.model.factor = 3
    out = runner.forward(batch)
    assert out.path == "decode"
    close(out.hidden_states, twice)


@pytest.mark.parametrize("training", [False, True])
def test_dropout_is_captured_when_it_does_nothing_and_never_padded_when_it_draws(training):
    world = make_world(model_with(lambda self, h, b: F.dropout(h, 0.5, self.training)), 1)
    world.model.train(training)
    runner = world.runner(**FEW)
    if not training:
        assert paths_of(world, runner, (3, 4)) == ["decode", "decode"]
        return
    requests = world.cached(4)
    batch = world.decode(requests)
    masks = [runner.forward(batch).hidden_states.eq(0) for _ in range(2)]
    masks = [runner.forward(batch).hidden_states.eq(0).clone() for _ in range(2)]
    assert not torch.equal(*masks)
    assert runner.forward(world.decode(requests[:3])).reason is FallbackReason.PADDING_UNSAFE


def test_a_bfloat16_model_is_served(engine):
    torch.manual_seed(1)
    world = make_world(Decoder, 1, dtype=torch.bfloat16)
    world.model.bfloat16()
    runner = world.runner(**{**FEW, "engine": engine})
    assert paths_of(world, runner, (3, 4, 1), tolerance=5e-2) == ["decode"] * 3
    pairs, batch = world.extend((3, 4))
    out = runner.forward(batch)
    world.check(out, pairs, tolerance=0.1)
    assert (out.path, out.logits.dtype) == ("prefill", torch.bfloat16)


# --- attention backends ------------------------------------------------------------------------


class PlansLengths(TorchNativeBackend):
    """Scales each request by a tensor that planning writes from the live lengths."""

    def init_graph_state(self, *, max_bs, max_num_tokens):
        super().init_graph_state(max_bs=max_bs, max_num_tokens=max_num_tokens)
        if not hasattr(self, "scales"):
            self.scales = torch.ones(max_bs)

    def init_forward_metadata(self, forward_batch, *, graph_key=None):
        if forward_batch.forward_mode.is_decode():
            if not hasattr(self, "scales"):
                self.scales = torch.ones(64)
            n = forward_batch.batch_size
            self.scales[:n] = forward_batch.seq_lens_cpu.float() / 8
        return super().init_forward_metadata(forward_batch, graph_key=graph_key)

    def forward_decode(self, q, k, v, *, layer_id, scale, context):
        out = super().forward_decode(q, k, v, layer_id=layer_id, scale=scale, context=context)
        return out * self.scales[: q.shape[0], None, None]


class PlansLazily(TorchNativeBackend):
    """Works out a plan in the first layer that needs one, and drops it when a batch is planned."""

    plan = None

    def init_forward_metadata(self, forward_batch, *, graph_key=None):
        self.plan = None
        return super().init_forward_metadata(forward_batch, graph_key=graph_key)

    def forward_decode(self, q, k, v, *, layer_id, scale, context):
        if self.plan is None:
            self.plan = context.forward_batch.seq_lens.float() / 8
        out = super().forward_decode(q, k, v, layer_id=layer_id, scale=scale, context=context)
        return out * self.plan[:, None, None]


class ReadsTheHost(TorchNativeBackend):
    """Decode reads the host, so only the segments between attention calls are captured."""

    full_graph_modes = frozenset()

    def forward_decode(self, q, k, v, *, layer_id, scale, context):
        out = super().forward_decode(q, k, v, layer_id=layer_id, scale=scale, context=context)
        return out * int(context.forward_batch.seq_lens[0])


@pytest.mark.parametrize("backend", [PlansLengths, PlansLazily, ReadsTheHost])
def test_a_plan_is_made_anew_before_every_replay(engine, backend):
    """B20: short requests at capture, requests of other lengths at each replay."""
    world = make_world(Decoder, 2, backend=backend)
    runner = world.runner(**{**FEW, "engine": engine})
    assert runner.decode.graphs.mode == ("PIECEWISE" if backend is ReadsTheHost else "FULL")
    requests = [world.cached(1, length=n)[0] for n in (2, 9, 14, 5)]
    for turn in ((0, 1, 2), (2, 0), (3, 2, 1, 0), (1,), (0, 1, 2)):
        batch = world.decode([requests[i] for i in turn])
        want = world.eagerly(batch)
        out = runner.forward(batch)
        close(out.hidden_states, want, 1e-3)
        assert out.path == "decode"
    assert runner.explain().hits == 5


# --- captures that fail ------------------------------------------------------------------------


@torch.library.custom_op("graphbuf_runners::no_fours", mutates_args=())
def no_fours(x: torch.Tensor) -> torch.Tensor:
    """A copy, unless there are four rows."""
    if x.shape[0] == 4:
        raise ValueError("no fours")
    return x.clone()


@no_fours.register_fake
def _(x):
    return torch.empty_like(x)


@pytest.mark.parametrize("option", ["rowwise_ops", "splitting_ops"])
def test_a_bucket_that_cannot_be_captured_leaves_the_others(engine, option):
    """B24: bucket 4 of 2, 4, 8 raises, in decode and in prefill."""
    world = make_world(model_with(lambda self, h, b: no_fours(h) + 1), 1)
    random, grad = torch.get_rng_state(), torch.is_grad_enabled()
    runner = world.runner(
        engine=engine,
        cudagraph_capture_sizes=(2, 4, 8),
        prefill_capture_sizes=(4, 8),
        **{option: ("graphbuf_runners::no_fours",)},
    )
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.is_grad_enabled() == grad
    assert not world.kv.k.any()
    requests = world.cached(8, length=6)
    for n, path in ((8, "decode"), (2, "decode"), (7, "decode"), (3, "eager"), (1, "decode")):
        batch = world.decode(requests[:n])
        want = world.eagerly(batch)
        out = runner.forward(batch)
        close(out.hidden_states, want)
        assert out.path == path
    with pytest.raises(ValueError, match="no fours"):
        runner.forward(world.decode(requests[:4]))
    out = runner.forward(world.extend((5, 3))[1])
    assert out.path == "prefill"
    refused = [str(entry) for use in runner.explain().runners for entry in use.refused]
    assert len(refused) == 2 + 1  # two KV lengths of decode, one prefill
    assert all("no fours" in entry for entry in refused)
    assert runner.warmup_facts.num_refused == 3


# --- changes after capture ---------------------------------------------------------------------


def replace(model):
    model.layers[0].out.weight = nn.Parameter(torch.randn_like(model.layers[0].out.weight))


def swap_data(model):
    model.layers[0].out.weight.data = torch.randn_like(model.layers[0].out.weight)


def load(model):
    model.load_state_dict({k: torch.randn_like(v) / 4 for k, v in model.state_dict().items()})


def assign(model):
    values = {k: torch.randn_like(v) / 4 for k, v in model.state_dict().items()}
    model.load_state_dict(values, assign=True)


def replace_head(model):
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))


def replace_buffer(model):
    model.frequencies = torch.rand_like(model.frequencies)


@pytest.mark.parametrize("update", [replace, swap_data, load, assign, replace_head, replace_buffer])
def test_new_weights_are_used_at_the_next_forward(engine, update):
    """B25: in place, replaced, reloaded; every bucket, decode and prefill, and lm_head."""
    world = make_world(Decoder, 1)
    runner = world.runner(engine=engine, cudagraph_capture_sizes=(2, 4), prefill_capture_sizes=(8,))
    num_forwards = 0
    for _ in range(2):
        requests = world.cached(4)
        for n in (3, 2, 4):
            world.serve(runner, requests[:n])
        pairs, batch = world.extend((7,))
        world.check(runner.forward(batch), pairs)
        for request in (*requests, pairs[0][0]):
            world.finish(request)
        num_forwards += 4
        with torch.no_grad():
            update(world.model)
    requests = world.cached(4)
    world.serve(runner, requests)
    assert runner.explain().hits == num_forwards + 1
    assert not runner.explain().fallbacks
    moved = engine == "host_strict" and update is not load
    assert any(use.recaptures for use in runner.explain().runners) == moved


class Tied(Decoder):
    """Two layers with one output projection, and embeddings that are the head."""

    def __init__(self):
        super().__init__(2)
        self.layers[1].out.weight = self.layers[0].out.weight
        self.lm_head.weight = self.embed.weight


@pytest.mark.parametrize("which", ["layer", "head"])
def test_untying_a_weight_is_noticed(engine, which):
    """B25: one of the two places gets a weight of its own."""
    world = make_world(Tied)
    runner = world.runner(**{**FEW, "engine": engine})
    requests = world.cached(4)
    assert world.serve(runner, requests).path == "decode"
    place = world.model.layers[1].out if which == "layer" else world.model.lm_head
    place.weight = nn.Parameter(torch.randn_like(place.weight))
    requests = world.cached(4)
    for _ in range(2):
        world.serve(runner, requests)
        pairs, batch = world.extend((7,))
        world.check(runner.forward(batch), pairs)
        world.finish(pairs[0][0])


def test_a_head_of_its_own_module_is_followed(engine):
    """A function that reads a weight of no module that the runner knows."""
    world, other = make_world(Decoder, 1), nn.Linear(HIDDEN, 7)
    runner = world.runner(lm_head=lambda h: other(h), **{**FEW, "engine": engine})
    requests = world.cached(4)
    for _ in range(3):
        out = runner.forward(world.decode(requests))
        with torch.no_grad():
            close(out.logits, other(out.hidden_states))
        other.weight = nn.Parameter(torch.randn_like(other.weight))


@pytest.mark.parametrize("forget", [False, True])
def test_a_cache_that_moved_is_noticed_before_the_replay(engine, forget):
    """B25; ``forget``: also when Dynamo no longer knows the model."""
    world = make_world(Decoder, 1)
    runner = world.runner(engine=engine, cudagraph_capture_sizes=(2, 4), prefill_capture_sizes=(8,))
    requests = world.cached(4)
    old = []
    for k in range(3):
        for n in (3, 2, 4):
            world.serve(runner, requests[:n])
        pairs, batch = world.extend((7,))
        world.check(runner.forward(batch), pairs)
        world.finish(pairs[0][0])
        old.append((world.kv.k, world.kv.v))
        world.kv.k, world.kv.v = world.kv.k.clone(), world.kv.v.clone()
        for tensor in old[-1]:
            tensor.fill_(float("nan"))
        if forget and k == 1:
            torch._dynamo.reset()
    world.serve(runner, requests)
    explanation = runner.explain()
    assert explanation.hits == explanation.paths["decode"] + explanation.paths["prefill"]
    if not forget:
        assert explanation.hits == 13
        moved = engine == "host_strict"
        assert (explanation.runners[0].recaptures > 0) == moved


# --- others in the process ---------------------------------------------------------------------


class Step:
    """A declared batch whose slot is the runner's own ``input_ids``."""

    def __init__(self, input_ids):
        self.input_ids = input_ids


def test_a_runner_and_a_compiled_function_share_slots_in_turns(engine):
    """``torch.compile(backend="graphbuf")`` on a declared batch of the same name and size."""
    slot = GraphSlot("input_ids", lambda max_bs, max_num_tokens: (max_num_tokens,), torch.int64)
    declare_batch(Step, [slot])
    world = make_world(Decoder, 1)
    runner = world.runner(
        engine=engine, copy_outputs=True, cudagraph_capture_sizes=(4,), prefill_capture_sizes=(8,)
    )
    table = nn.Embedding(48, 5)
    compiled = torch.compile(
        lambda step: table(step.input_ids) * 2,
        backend="graphbuf",
        options={
            "engine": engine, "compiler": "eager", "cudagraph_capture_sizes": [4, 8, 16],
        },
    )  # fmt: skip
    requests, kept = world.cached(4), []
    with torch.no_grad():
        for n in (3, 7, 4, 12, 3, 16, 5, 7, 12):
            step = Step(torch.randint(0, 48, (n,)))
            want = table(step.input_ids) * 2
            kept.append((compiled(step), want))
            batch = world.decode(requests[: 1 + n % 4])
            want = world.eagerly(batch)
            kept.append((runner.forward(batch).hidden_states, want))
    for got, want in kept:
        close(got, want)
    assert runner.explain().hits == 9
    mine = {fact.address for fact in runner.explain().slots["decode"]}
    facts = [report.served.facts.slots.facts for report in explain(compiled).reports]
    theirs = {fact.address for each in facts for fact in each}
    assert theirs
    assert theirs <= mine
