"""Equal layers run one compiled piece: as many compilations for 12 layers as for 3."""

import pytest
import torch
from torch import nn
from torch._functorch.aot_autograd import AOT_COUNTER

from compile_backend import explain
from compile_backend.passes.partition import value_of
from tests import custom_ops as ops
from tests.backend.conftest import compiled

SIZES = (5, 3, 8, 5, 7, 3, 8)
HEADS, WIDTH = 2, 8
ROWWISE = ["graphbuf_test::store", "graphbuf_test::attend"]


class Block(nn.Module):
    """Attention over a cache of this layer, which is written; then a small network."""

    def __init__(self):
        super().__init__()
        self.norm, self.ffn_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qk = nn.Linear(WIDTH, 2 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, cache, memory, loc, lens):
        q, k = self.qk(self.norm(x)).chunk(2, dim=-1)
        ops.store(k, cache, loc)
        x = x + ops.attend(q, cache, lens)
        x = x + (x @ memory.t()).softmax(-1) @ memory
        return x + self.down(nn.functional.silu(self.up(self.ffn_norm(x))))


class Transformer(nn.Module):
    """Every layer has its own weights, its own part of ``pool`` (written) and of ``memory``."""

    def __init__(self, num_layers):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))
        self.register_buffer("pool", torch.zeros(num_layers, 16, WIDTH))
        self.register_buffer("memory", torch.randn(num_layers, 4, WIDTH))

    def forward(self, x, loc, lens):
        for i, layer in enumerate(self.layers):
            x = layer(x, self.pool[i], self.memory[i], loc, lens)
        return x


def transformers(num_layers):
    """Two that are equal: one to compile, one to compare with."""
    model, reference = Transformer(num_layers).eval(), Transformer(num_layers).eval()
    reference.load_state_dict(model.state_dict())
    return model, reference


def calls(sizes=SIZES):
    return [
        (torch.randn(n, WIDTH), torch.randperm(16)[:n], torch.randint(1, 16, (n,))) for n in sizes
    ]


def assert_equal_calls(run, model, reference, sizes=SIZES):
    with torch.inference_mode():
        for args in calls(sizes):
            torch.testing.assert_close(run(*args), reference(*args), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(model.pool, reference.pool, rtol=1e-4, atol=1e-5)


def num_compilations(num_layers):
    """What AOTAutograd counted, for one graph; also what ``explain`` says of it."""
    torch._dynamo.reset()
    model, reference = transformers(num_layers)
    run = compiled(model, {"compiler": "aot_eager", "rowwise_ops": ROWWISE})
    counter_before = next(AOT_COUNTER)
    assert_equal_calls(run, model, reference, sizes=(5, 7))
    num_compiled = next(AOT_COUNTER) - counter_before - 1
    explanation = explain(run)
    assert explanation.num_graphs == 1
    assert explanation.num_pieces == num_layers + 1
    assert f"pieces {num_layers + 1} ({explanation.num_compiled_pieces} compiled)" in str(
        explanation
    )
    return num_compiled, explanation.num_compiled_pieces


def test_more_layers_are_not_more_compilations():
    assert num_compilations(3) == num_compilations(12) == (3, 3)


def test_layers_that_share_a_piece_keep_their_own_weights(setting):
    model, reference = transformers(4)
    run = compiled(model, {**setting, "rowwise_ops": ROWWISE})
    assert_equal_calls(run, model, reference)
    explanation = explain(run)
    assert explanation.num_compiled_pieces < explanation.num_pieces
    if setting["engine"] != "none":
        assert explanation.hits + explanation.recaptures >= 1, str(explanation)


@pytest.mark.parametrize("how", ["values", "tensors", "modules"])
def test_weights_may_change_layers_between_calls(capturing, how):
    model, reference = transformers(4)
    run = compiled(model, {**capturing, "rowwise_ops": ROWWISE})
    assert_equal_calls(run, model, reference)
    for net in (model, reference):
        first, other = net.layers[1], net.layers[2]
        if how == "values":
            with torch.no_grad():
                for a, b in zip(first.parameters(), other.parameters(), strict=True):
                    a_values = a.clone()
                    a.copy_(b)
                    b.copy_(a_values)
        elif how == "tensors":
            first.up.weight, other.up.weight = other.up.weight, first.up.weight
        else:
            first.down, other.down = other.down, first.down
    assert_equal_calls(run, model, reference)


def test_each_place_keeps_its_name_and_its_code_in_the_dump(tmp_path):
    model, reference = transformers(4)
    options = {"compiler": "aot_eager", "debug_dump_path": str(tmp_path)}
    assert_equal_calls(compiled(model, options), model, reference, sizes=(5,))
    (folder,) = tmp_path.iterdir()
    pieces = [(folder / f"piece_{number}.py").read_text() for number in range(5)]
    assert "layers_modules_1_" in pieces[2]
    assert "layers_modules_2_" in pieces[3]
    split = (folder / "01_after_split.py").read_text()
    assert all(f"self.piece_{number}(" in split for number in range(5))


def test_layers_in_other_layouts_do_not_share():
    model, reference = transformers(4)
    for net in (model, reference):
        up = net.layers[1].up
        up.weight = nn.Parameter(up.weight.detach().t().contiguous().t())
    run = compiled(model, {"compiler": "aot_eager", "rowwise_ops": ROWWISE})
    assert_equal_calls(run, model, reference)
    assert explain(run).num_compiled_pieces == 4


# --- parts of inputs ----------------------------------------------------------------------------


class Memories(nn.Module):
    """Reads a part of ``memory`` per layer, which nothing writes."""

    def __init__(self, read):
        super().__init__()
        self.read = read
        self.register_buffer("memory", torch.randn(2, 5, 4, 4))

    def forward(self, x):
        for i in range(5):
            x = ops.opaque(self.read(x, self.memory, i)) + 1
        return x


def indexed(x, memory, i):
    return x @ memory[0, i] + memory[1, i, 0]


def indexed_twice(x, memory, i):
    keys, values = memory[0], memory[1]
    return x @ keys[i] + values[i][0]


def selected(x, memory, i):
    return x @ memory.select(0, 1).narrow(0, i, 1)[0]


def unbound(x, memory, i):
    keys, values = memory
    return x @ keys[i] + values[i, 0]


@pytest.mark.parametrize("read", [indexed, indexed_twice, selected, unbound])
def test_parts_of_an_input_do_not_keep_layers_from_sharing(setting, read):
    model = Memories(read)
    options = {"splitting_ops": ["graphbuf_test::opaque"], "rowwise_ops": ["graphbuf_test::opaque"]}
    run = compiled(model, {**setting, **options})
    with torch.inference_mode():
        for n in SIZES:
            x = torch.randn(n, 4)
            torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)
    for report in explain(run).reports:
        assert (len(report.built.pieces), report.built.num_compiled) == (6, 3)


def only_the_last_piece_takes_parts(x, w):
    return ops.opaque(x + 1) * w[0] + w[1]


def every_piece_takes_the_same_part(x, w):
    return ops.opaque(x * w[0]) * w[0] + 1


def parts_of_computed_sizes(x, w):
    half, third = x.shape[0] // 2, x.shape[0] // 3
    return ops.opaque(x[:half] * w[0]).sum() + x[:third].relu()


def other_views(x, w):
    return ops.opaque(x @ w.t()) @ w.permute(1, 0).relu()


@pytest.mark.parametrize(
    "fn",
    [
        only_the_last_piece_takes_parts,
        every_piece_takes_the_same_part,
        parts_of_computed_sizes,
        other_views,
    ],
    ids=lambda fn: fn.__name__,
)
def test_a_view_that_keeps_no_pieces_apart_stays_the_compilers(fn):
    run = compiled(fn, {"compiler": "eager", "splitting_ops": ["graphbuf_test::opaque"]})
    with torch.inference_mode():
        x, w = torch.randn(5, 4), torch.randn(4, 4)
        torch.testing.assert_close(run(x, w), fn(x, w))
    (report,) = explain(run).reports
    for piece in report.built.pieces:
        placeholders = piece.graph.find_nodes(op="placeholder")
        tensors = {node.name for node in placeholders if isinstance(value_of(node), torch.Tensor)}
        assert tensors <= {"l_x_", "l_w_", "opaque_default"}


def test_parts_of_columns_of_the_batch_are_read_anew(setting):
    def fn(x):
        y = x[:, 0]
        for i in range(1, 5):
            y = ops.opaque(y * x[:, i].relu()) + 1
        return y

    options = {"splitting_ops": ["graphbuf_test::opaque"], "rowwise_ops": ["graphbuf_test::opaque"]}
    run = compiled(fn, {**setting, **options})
    with torch.inference_mode():
        for n in SIZES:
            x = torch.randn(n, 6)
            torch.testing.assert_close(run(x), fn(x))


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_parts_of_what_is_reshaped_in_place_stay_where_they_are(compiler):
    def fn(x, y):
        y = ops.opaque(y + x[0].sum() * 2)
        torch.ops.aten.t_(x)
        y = ops.opaque(y * x[1].relu().sum())
        return y + x[0].sum()

    options = {"engine": "none", "splitting_ops": ["graphbuf_test::opaque"]}
    run = compiled(fn, {**options, "compiler": compiler})
    with torch.inference_mode():
        for _ in range(2):
            x, y = torch.randn(3, 3), torch.randn(5, 4)
            own = x.clone()
            torch.testing.assert_close(run(own, y), fn(x, y))
            torch.testing.assert_close(own, x)


# --- the real compiler --------------------------------------------------------------------------


@pytest.mark.inductor
def test_compiled_code_is_shared_too():
    model, reference = transformers(4)
    run = compiled(model, {"cudagraph_capture_sizes": [4, 8], "rowwise_ops": ROWWISE})
    assert_equal_calls(run, model, reference)
    assert explain(run).num_compiled_pieces == 3
