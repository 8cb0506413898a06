"""Which pieces share one compiled artefact: equal up to names and weights, and in nothing else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from compile_backend import explain
from compile_backend.inspect.report import GraphReport
from compile_backend.passes.dedupe import fingerprint, share_pieces
from tests import custom_ops as ops

Body = Callable[..., Tensor]


def report_of(
    first: Body,
    second: Body,
    make_inputs: Callable[[], list[Any]],
    *,
    dynamic: bool | None = None,
) -> GraphReport:
    """The report of a program whose two pieces are ``first`` and ``second``, which ran right.

    Both are given a break op's result and the inputs.
    """

    def fn(*inputs):
        x = ops.opaque(first(ops.opaque(inputs[0]), *inputs[1:]))
        return ops.opaque(second(x, *inputs[1:]))

    options = {
        "compiler": "aot_eager",
        "engine": "none",
        "splitting_ops": ["graphbuf_test::opaque"],
    }
    run = torch.compile(fn, backend="graphbuf", options=options, dynamic=dynamic)
    with torch.inference_mode():
        given, wanted = make_inputs(), make_inputs()
        torch.testing.assert_close(run(*given), fn(*wanted), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(given, wanted)
    (report,) = explain(run).reports
    assert len(report.built.pieces) == 2, str(explain(run))
    return report


def x_and(*others: Callable[[], Any]) -> Callable[[], list[Any]]:
    """A maker of inputs: [5, 4] rows, then what each of ``others`` makes."""

    def make():
        torch.manual_seed(1)
        return [torch.randn(5, 4), *(make_other() for make_other in others)]

    return make


def weight(*shape: int, **kwargs: Any) -> Callable[[], Tensor]:
    return lambda: torch.randn(*(shape or (4, 4)), **kwargs)


def column_major() -> Tensor:
    return torch.randn(4, 4).t()


def of_any_length() -> Tensor:
    tensor = torch.randn(2, 3, 4)
    torch._dynamo.mark_dynamic(tensor, 1)
    return tensor


class Overlapping:
    """Makes two halves of one storage, in turn."""

    def __init__(self) -> None:
        self._halves: list[Tensor] = []

    def __call__(self) -> Tensor:
        self._halves = self._halves or list(torch.randn(8).split(4))
        return self._halves.pop(0)


def two_halves() -> tuple[Overlapping, Overlapping]:
    half = Overlapping()
    return half, half


def in_autocast(dtype: torch.dtype) -> Body:
    def body(x, w):
        with torch.autocast("cpu", dtype=dtype):
            y = x @ w
        return y.float()

    return body


def checkpointed(inner: Callable[[Tensor], Tensor]) -> Body:
    return lambda x: checkpoint(inner, x, use_reentrant=False)


# Each: the two pieces, and what they are given beside a break op's result.
EQUAL = {
    "other weights": (
        lambda x, a, b: (x @ a).relu(),
        lambda x, a, b: (x @ b).relu(),
        x_and(weight(), weight()),
    ),
    "operands the other way round": (
        lambda x, a: x - a,
        lambda x, a: a - x,
        x_and(weight(5, 4)),
    ),
    "parts of an input, equally aligned": (
        lambda x, a: x @ a[0].sin() + a[0, :, 0],
        lambda x, a: x @ a[1].sin() + a[1, :, 0],
        x_and(weight(2, 4, 4)),
    ),
    "parts of an input, aligned whatever its size": (
        lambda x, a: x * a[0].sin().sum(0),
        lambda x, a: x * a[1].sin().sum(0),
        x_and(of_any_length),
    ),
    "a subgraph": (
        checkpointed(lambda x: x.sin() * 2),
        checkpointed(lambda y: y.sin() * 2),
        x_and(),
    ),
    "halves of two storages": (
        lambda x, a, b, c, d: x * a + b,
        lambda x, a, b, c, d: x * c + d,
        x_and(*two_halves(), *two_halves()),
    ),
}

DIFFERENT = {
    "an operator": (lambda x: x.sin(), lambda x: x.cos(), x_and()),
    "a function": (torch.sin, torch.cos, x_and()),
    "an integer": (lambda x: x + 1, lambda x: x + 2, x_and()),
    "integer and float": (lambda x: x * 2, lambda x: x * 2.0, x_and()),
    "integer and bool": (lambda x: x * 1, lambda x: x * True, x_and()),
    "zeros of both signs": (lambda x: x * 0.0, lambda x: x * -0.0, x_and()),
    "the last bit of a float": (lambda x: x + 1e-5, lambda x: x + 1.0000000000000002e-5, x_and()),
    "a keyword": (lambda x: torch.add(x, x), lambda x: torch.add(x, x, alpha=2), x_and()),
    "a dtype": (
        lambda x: x.to(torch.float16).to(torch.float32),
        lambda x: x.to(torch.bfloat16).to(torch.float32),
        x_and(),
    ),
    "a slice": (
        lambda x: x.repeat(1, 2)[:, :4] * 2,
        lambda x: x.repeat(1, 2)[:, 4:] * 2,
        x_and(),
    ),
    "a nested index": (
        lambda x: x.mul(2)[..., [1, 0, 2, 3]],
        lambda x: x.mul(2)[..., [0, 1, 2, 3]],
        x_and(),
    ),
    "which operand": (lambda x, a: x.relu() - a, lambda x, a: a - x.relu(), x_and(weight(5, 4))),
    "one input for two": (
        lambda x, a, b: x * a + a,
        lambda x, a, b: x * a + b,
        x_and(weight(4), weight(4)),
    ),
    "a stride": (
        lambda x, a, b: x @ a,
        lambda x, a, b: x @ b,
        x_and(weight(), column_major),
    ),
    "a size": (
        lambda x, a, b: x * a,
        lambda x, a, b: x * b,
        x_and(weight(4), weight(1)),
    ),
    "a rank": (lambda x, a, b: x * a, lambda x, a, b: x * b, x_and(weight(4), weight(1, 4))),
    "the dtype of an input": (
        lambda x, a, b: x * a,
        lambda x, a, b: x * b,
        x_and(weight(4), weight(4, dtype=torch.float64)),
    ),
    "a parameter and a tensor": (
        lambda x, a, b: x * a,
        lambda x, a, b: x * b,
        x_and(weight(4), lambda: nn.Parameter(torch.randn(4))),
    ),
    "the alignment": (
        lambda x, a: x * a[0].sin().sum(),
        lambda x, a: x * a[1].sin().sum(),
        x_and(weight(2, 5)),
    ),
    "places where they are asked for": (
        lambda x, a: x * a[0].as_strided((4,), (1,), 0),
        lambda x, a: x * a[1].as_strided((4,), (1,), 0),
        x_and(weight(2, 4)),
    ),
    "inputs that share memory": (
        lambda x, a, b, c, d: x * a + b,
        lambda x, a, b, c, d: x * c + d,
        x_and(*two_halves(), weight(4), weight(4)),
    ),
    "shared memory that is written": (
        lambda x, a, b, c, d: x * a.add_(b),
        lambda x, a, b, c, d: x * c.add_(d),
        x_and(*two_halves(), *two_halves()),
    ),
    "autocast": (in_autocast(torch.bfloat16), in_autocast(torch.float16), x_and(weight())),
    "a subgraph": (
        checkpointed(lambda x: x.sin() * 2),
        checkpointed(lambda x: x.sin() * 3),
        x_and(),
    ),
}

EQUAL_SYMBOLS = {
    "of a size": (
        lambda x, a, b: x * a.sum(0),
        lambda x, a, b: x * b.sum(0),
        x_and(weight(6, 4), weight(6, 4)),
    ),
    "of a size that tracing has fixed": (
        lambda x, w: x @ w,
        lambda x, w: x @ w,
        x_and(lambda: nn.Parameter(torch.randn(4, 4))),
    ),
    "of a float": (lambda x, s: x * s, lambda x, s: x * s, x_and(lambda: 0.3)),
    "of an integer": (lambda x, n: x + n, lambda x, n: x + n, x_and(lambda: 7)),
}

DIFFERENT_SYMBOLS = {
    "of a size": (
        lambda x, a, b: x * a.sum(0),
        lambda x, a, b: x * b.sum(0),
        x_and(weight(6, 4), weight(7, 4)),
    ),
    "of a float": (
        lambda x, s, t: x * s,
        lambda x, s, t: x * t,
        x_and(lambda: 0.3, lambda: 0.4),
    ),
    "of an integer": (
        lambda x, n, m: x + n,
        lambda x, n, m: x + m,
        x_and(lambda: 7, lambda: 9),
    ),
}


@pytest.mark.parametrize("name", EQUAL)
def test_pieces_that_differ_in_nothing_a_compiler_sees_are_compiled_once(name):
    report = report_of(*EQUAL[name])
    assert report.built.num_compiled == 1, [
        p.print_readable(print_output=False) for p in report.built.pieces
    ]


@pytest.mark.parametrize("name", DIFFERENT)
def test_pieces_that_differ_are_compiled_apart(name):
    assert report_of(*DIFFERENT[name]).built.num_compiled == 2


@pytest.mark.parametrize("name", EQUAL_SYMBOLS)
def test_pieces_of_the_same_symbols_are_compiled_once(name):
    assert report_of(*EQUAL_SYMBOLS[name], dynamic=True).built.num_compiled == 1


@pytest.mark.parametrize("name", DIFFERENT_SYMBOLS)
def test_pieces_of_different_symbols_are_compiled_apart(name):
    assert report_of(*DIFFERENT_SYMBOLS[name], dynamic=True).built.num_compiled == 2


def test_an_output_more_makes_another_piece():
    def fn(x):
        a = ops.opaque(x) + 1
        b = ops.opaque(a * 2) + 1
        return ops.opaque(b * 2), b

    run = torch.compile(
        fn,
        backend="graphbuf",
        options={"compiler": "eager", "splitting_ops": ["graphbuf_test::opaque"]},
    )
    with torch.inference_mode():
        x = torch.randn(5, 4)
        torch.testing.assert_close(run(x), fn(x))
    (report,) = explain(run).reports
    assert (len(report.built.pieces), report.built.num_compiled) == (2, 2)


# --- graphs that are made by hand ---------------------------------------------------------------


def with_attribute(attribute: Any, op: str = "get_attr", annotation: Any = None) -> fx.GraphModule:
    """``x * held`` or ``held(x)``, ``held`` being an attribute of the module."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = FAKE
    if op == "get_attr":
        result = graph.call_function(torch.mul, (x, graph.get_attr("held")))
    else:
        result = graph.call_module("held", (x,))
    if annotation is not None:
        result.meta["custom"] = annotation
    graph.output((result,))
    return fx.GraphModule({"held": attribute}, graph)


with FakeTensorMode():
    FAKE = torch.empty(4)
    FAKE_ALIAS, OTHER_FAKE = FAKE.view(4), torch.empty(4)


@pytest.mark.parametrize(
    ("op", "make"),
    [("get_attr", lambda: torch.ones(4)), ("call_module", nn.ReLU)],
    ids=["constant", "module"],
)
def test_attributes_are_compared_by_identity(op, make):
    held = make()
    assert fingerprint(with_attribute(held, op)) == fingerprint(with_attribute(held, op))
    assert fingerprint(with_attribute(held, op)) != fingerprint(with_attribute(make(), op))


def test_one_tensor_one_storage_and_two_are_three_kinds_of_input():
    def piece(first, second):
        gm = fx.symbolic_trace(lambda x, y: x + y)
        placeholders = gm.graph.find_nodes(op="placeholder")
        for node, value in zip(placeholders, (first, second), strict=True):
            node.meta["example_value"] = value
        return gm

    kinds = [piece(FAKE, FAKE), piece(FAKE, FAKE_ALIAS), piece(FAKE, OTHER_FAKE)]
    assert len({fingerprint(gm) for gm in kinds}) == 3
    assert fingerprint(piece(FAKE, FAKE)) == fingerprint(piece(OTHER_FAKE, OTHER_FAKE))


def test_it_counts_which_inputs_are_written():
    def piece(writes):
        gm = with_attribute(None, "call_module")
        (x,) = gm.graph.find_nodes(op="placeholder")
        (call,) = gm.graph.find_nodes(op="call_module")
        x.meta["storages"], call.meta["writes"] = frozenset({1}), frozenset(writes)
        return gm

    assert fingerprint(piece({1})) == fingerprint(piece({1, 2}))
    assert fingerprint(piece({1})) != fingerprint(piece({2}))


def test_annotations_for_the_compiler_count():
    held = torch.ones(4)
    plain = with_attribute(held)
    annotated = with_attribute(held, annotation={"backend": "other"})
    assert fingerprint(plain) != fingerprint(annotated)


def test_a_constant_that_is_not_understood_equals_only_itself():
    class Setting:
        def __eq__(self, other):
            return True

        def __hash__(self):
            return 0

    def piece(setting):
        piece = with_attribute(constant)
        (mul,) = piece.graph.find_nodes(op="call_function", target=torch.mul)
        mul.kwargs = {"how": setting}
        return piece

    setting, constant = Setting(), torch.ones(4)
    assert fingerprint(piece(setting)) == fingerprint(piece(setting))
    assert fingerprint(piece(setting)) != fingerprint(piece(Setting()))


def test_the_first_piece_of_a_kind_stands_for_the_others():
    a, b = torch.ones(4), torch.ones(4)
    pieces = {"p": with_attribute(a), "q": with_attribute(b), "r": with_attribute(a)}
    plan = share_pieces(pieces)
    assert plan.representatives == {"p": "p", "q": "q", "r": "p"}
    assert plan.num_compiled == 2
    assert share_pieces({}).num_compiled == 0
