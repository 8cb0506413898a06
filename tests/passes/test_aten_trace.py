"""The ATen trace of a Dynamo graph: operators, writes, aliases, obstacles to a capture."""

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from compile_backend.errors import FallbackReason
from compile_backend.passes.aten_trace import (
    AtenTrace,
    source_line,
    storage_of,
    storages_in,
    trace_aten,
)
from compile_backend.passes.capturability import capturability

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def traced(fn: Callable, *args: object, dynamic: bool | None = None) -> AtenTrace:
    """The trace of ``fn``'s one Dynamo graph, made inside the backend call as a backend would."""
    traces: list[AtenTrace] = []

    def backend(gm: fx.GraphModule, example_inputs: list[object]) -> Callable:
        traces.append(trace_aten(gm))
        return gm.forward

    with torch.no_grad():
        torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)(*args)
    (trace,) = traces
    return trace


def names(trace: AtenTrace) -> list[str]:
    return [call.name for call in trace.calls]


def node_named(trace: AtenTrace, name: str) -> fx.Node:
    return next(node for node in trace.gm.graph.nodes if node.name == name)


def test_composite_operators_are_decomposed_and_mapped_to_their_node():
    trace = traced(lambda x: nn.functional.rms_norm(x, (4,)) + 1, torch.randn(5, 4))
    assert names(trace)[-1] == "aten.add.Tensor"
    norm = node_named(trace, "rms_norm")
    ops = trace.ops_of(norm)
    assert "aten.rsqrt.default" in ops
    assert "aten.add.Tensor" not in ops
    assert all("rms_norm" not in op for op in ops)


def test_composite_operators_are_decomposed_for_inference_tensors_too():
    with torch.inference_mode():
        x = torch.randn(5, 4)
    trace = traced(lambda x: x.reshape(-1, 2).contiguous(), x)
    assert not {"aten.reshape.default", "aten.contiguous.default"} & set(names(trace))


def test_an_argument_is_found_by_its_schema_name():
    trace = traced(lambda x: x.amax(dim=1, keepdim=True), torch.randn(5, 4))
    (call,) = trace.calls
    assert call.name == "aten.amax.default"
    assert (call.argument("dim"), call.argument("keepdim")) == ([1], True)
    assert call.argument("nonsense", "default") == "default"


def test_writes_are_attributed_to_the_written_input_through_views():
    def fn(x: Tensor, y: Tensor) -> Tensor:
        x[0].add_(y)
        return x * 2

    trace = traced(fn, torch.ones(3, 4), torch.ones(4))
    (x,) = trace.mutated
    (writer,) = trace.mutated[x]
    assert x.name == "l_x_"
    assert trace.ops_of(writer) == ["aten.add_.Tensor"]


def test_an_out_argument_is_a_write():
    trace = traced(lambda x, y: torch.add(x, 1, out=y), torch.ones(3), torch.empty(3))
    assert [node.name for node in trace.mutated] == ["l_y_"]


def test_a_graph_without_writes_has_none():
    trace = traced(lambda x: x.clone().add_(1), torch.ones(3))
    assert not trace.mutated
    assert trace.writers  # the clone itself is written


def test_two_inputs_on_one_storage_stay_on_one_storage():
    base = torch.ones(6)
    trace = traced(lambda a, b: a.add_(1).sum() + b.sum(), base[:3], base[3:])
    assert {node.name for node in trace.mutated} == {"l_a_", "l_b_"}


def test_outputs_name_the_inputs_that_they_alias():
    trace = traced(lambda x, y: (x.view(-1), x + y, y[0]), torch.ones(2, 2), torch.ones(2, 2))
    assert [[n.name for n in nodes] for nodes in trace.output_aliases] == [
        ["l_x_"],
        [],
        ["l_y_"],
    ]


def test_metadata_mutation_leaves_dynamos_own_fakes_alone():
    shapes = []

    def backend(gm: fx.GraphModule, example_inputs: list[object]) -> Callable:
        (x,) = (n.meta["example_value"] for n in gm.graph.nodes if n.op == "placeholder")
        shapes.append(tuple(x.shape))
        trace_aten(gm)
        shapes.append(tuple(x.shape))
        return gm.forward

    def fn(x: Tensor) -> Tensor:
        x.t_()
        return x + 1

    with torch.no_grad():
        torch.compile(fn, backend=backend, dynamic=False)(torch.ones(2, 3))
    assert shapes[0] == shapes[1]


def test_tracing_twice_gives_the_same_calls_and_adds_no_symbols():
    seen = []

    def backend(gm: fx.GraphModule, example_inputs: list[object]) -> Callable:
        env = next(
            n.meta["example_value"].node.shape_env for n in gm.graph.nodes if n.op == "placeholder"
        )
        state = (len(env.guards), len(env.pending_fresh_unbacked_symbols))
        first = trace_aten(gm)
        second = trace_aten(gm)
        seen.append((names(first), names(second), state))
        seen.append((len(env.guards), len(env.pending_fresh_unbacked_symbols)))
        return gm.forward

    def fn(x: Tensor) -> Tensor:
        return x.view(-1, 2)[x.view(-1, 2)[:, 0] > 0]

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        torch.compile(fn, backend=backend, dynamic=True)(torch.ones(6))
    (first, second, state), after = seen
    assert first == second
    assert "aten.index.Tensor" in first
    assert state == after
    assert state[1] == 0


def test_grad_mode_survives_a_graph_that_sets_it():
    def fn(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return x * 2

    torch._dynamo.reset()
    assert names(traced(fn, torch.ones(3))) == ["aten.mul.Tensor"]
    assert torch.is_grad_enabled()


def test_constants_and_module_parameters_are_traced():
    def fn(x: Tensor) -> Tensor:
        return x * torch.tensor([1.0, 2.0, 3.0])

    assert "aten.mul.Tensor" in names(traced(fn, torch.ones(3)))

    held = fx.symbolic_trace(nn.Sequential(nn.Linear(3, 2)))
    (x,) = (node for node in held.graph.nodes if node.op == "placeholder")
    x.meta["example_value"] = FakeTensorMode().from_tensor(torch.ones(4, 3))
    assert "aten.addmm.default" in names(trace_aten(held))


# --- obstacles to a capture ---------------------------------------------------------------------


def reasons(trace: AtenTrace) -> dict[str, FallbackReason]:
    return {obstacle.op: obstacle.reason for obstacle in capturability(trace).values()}


def test_an_ordinary_graph_has_no_obstacle():
    def fn(x: Tensor, i: Tensor) -> Tensor:
        return nn.functional.softmax(x[i], -1).masked_fill(x[i] > 0, 0.0)

    assert capturability(traced(fn, torch.ones(4, 3), torch.tensor([1, 2]))) == {}


def test_item_is_a_host_read_at_its_source_line():
    def fn(x: Tensor) -> Tensor:
        return x * x.sum().item()

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        trace = traced(fn, torch.ones(4))
    ((node, obstacle),) = capturability(trace).items()
    assert node.target == "item"
    assert obstacle.reason is FallbackReason.HOST_READ
    assert obstacle.op == "aten._local_scalar_dense.default"
    assert obstacle.source.startswith("test_aten_trace.py:")
    assert obstacle.source.endswith("in fn: return x * x.sum().item()")


def test_item_of_a_wrapped_python_number_is_no_host_read():
    trace = traced(lambda x, scale: x * scale, torch.ones(4), 0.37, dynamic=True)
    assert "aten._local_scalar_dense.default" in names(trace)
    assert capturability(trace) == {}


@pytest.mark.parametrize(
    ("fn", "op"),
    [
        (lambda x: x.nonzero(), "aten.nonzero.default"),
        (lambda x: x[x > 0], "aten.index.Tensor"),
        (lambda x: torch.masked_select(x, x > 0), "aten.masked_select.default"),
        (lambda x: torch.unique(x), "aten._unique2.default"),
    ],
)
def test_a_shape_that_depends_on_values_is_an_obstacle(fn, op):
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        trace = traced(fn, torch.ones(4))
    assert reasons(trace) == {op: FallbackReason.DATA_DEPENDENT_SHAPE}


def test_a_masked_write_of_one_number_is_no_obstacle_but_of_a_row_is():
    def fill(x: Tensor) -> Tensor:
        y = x.clone()
        y[x > 0] = 0.0
        return y

    def write(x: Tensor, rows: Tensor) -> Tensor:
        y = x.clone()
        y[x > 0] = rows
        return y

    assert capturability(traced(fill, torch.ones(4))) == {}
    torch._dynamo.reset()
    assert (
        FallbackReason.DATA_DEPENDENT_SHAPE
        in reasons(traced(write, torch.ones(4), torch.ones(4))).values()
    )


def test_integer_indexing_is_no_data_dependent_shape():
    assert capturability(traced(lambda x, i: x[i], torch.ones(4), torch.tensor([0, 1]))) == {}


def test_a_copy_to_another_device_is_an_obstacle():
    fake_mode = FakeTensorMode(shape_env=ShapeEnv())
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_method("to", (x, "meta"))
    graph.output(graph.call_function(torch.neg, (y,)))
    x.meta["example_value"] = fake_mode.from_tensor(torch.ones(3))
    trace = trace_aten(fx.GraphModule(nn.Module(), graph))
    obstacles = capturability(trace)
    assert obstacles[y].reason is FallbackReason.OTHER_DEVICE
    assert torch.device("meta") in trace.devices_of(y)


@torch.library.custom_op("atentrace::store", mutates_args={"cache"})
def store(k: Tensor, cache: Tensor) -> None:
    cache.copy_(k)


@torch.library.custom_op("atentrace::attend", mutates_args=())
def attend(q: Tensor) -> Tensor:
    return q.clone()


@attend.register_fake
def _(q: Tensor) -> Tensor:
    return torch.empty_like(q)


@torch.library.custom_op("atentrace::unsafe", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def unsafe(q: Tensor) -> Tensor:
    return q.clone()


@unsafe.register_fake
def _(q: Tensor) -> Tensor:
    return torch.empty_like(q)


def test_custom_operators_are_named_and_their_writes_seen():
    def fn(x: Tensor, cache: Tensor) -> Tensor:
        store(x * 2, cache)
        return attend(x) + cache

    trace = traced(fn, torch.ones(3), torch.zeros(3))
    custom = {name for node in trace.gm.graph.nodes for name in trace.custom_ops(node)}
    mutating = {name for node in trace.gm.graph.nodes for name in trace.mutating_custom_ops(node)}
    assert custom == {"atentrace.store.default", "atentrace.attend.default"}
    assert mutating == {"atentrace.store.default"}
    assert [node.name for node in trace.mutated] == ["l_cache_"]


def test_an_operator_tagged_unsafe_is_an_obstacle():
    trace = traced(lambda x: unsafe(x) + 1, torch.ones(3))
    assert list(reasons(trace)) == ["atentrace.unsafe.default"]


def test_a_higher_order_node_inherits_what_its_subgraph_holds():
    def fn(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(lambda y: attend(y.sin()), x, use_reentrant=False)

    traces: list[AtenTrace] = []

    def backend(gm: fx.GraphModule, example_inputs: list[object]) -> Callable:
        traces.append(trace_aten(gm))
        return gm.forward

    torch.compile(fn, backend=backend, fullgraph=True)(torch.ones(3, requires_grad=True))
    (trace,) = traces
    (call,) = [c for c in trace.calls if c.subgraphs]
    assert trace.ops_of(call.node)[1:] == ["aten.sin.default", "atentrace.attend.default"]
    assert trace.custom_ops(call.node) == ["atentrace.attend.default"]
    assert capturability(trace) == {}


def test_cond_reads_its_predicate_and_its_branches_count():
    def fn(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))

    trace = traced(fn, torch.ones(3))
    (obstacle,) = capturability(trace).values()
    assert (obstacle.reason, obstacle.op) == (FallbackReason.HOST_READ, "higher_order.cond")
    (call,) = [c for c in trace.calls if c.subgraphs]
    assert {"aten.sin.default", "aten.cos.default"} < set(trace.ops_of(call.node))


def test_a_call_that_fake_tensors_cannot_run_is_opaque_not_an_error():
    fake_mode = FakeTensorMode(shape_env=ShapeEnv())
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.Tensor.tolist, (x,))
    graph.output(y)
    x.meta["example_value"] = fake_mode.from_tensor(torch.ones(3))
    y.meta["example_value"] = x.meta["example_value"]
    trace = trace_aten(fx.GraphModule(nn.Module(), graph))
    (call,) = trace.calls
    assert call.opaque
    assert call.writes == storages_in(trace.values[x])


def test_source_line_prefers_the_users_frame_to_pytorchs():
    trace = traced(nn.Sequential(nn.Linear(3, 3)), torch.ones(2, 3))
    (linear,) = [n for n in trace.gm.graph.nodes if n.op == "call_function"]
    torch_file = os.path.join(os.path.dirname(torch.__file__), "nn", "modules", "linear.py")
    linear.meta["stack_trace"] = (
        '  File "/home/me/model.py", line 7, in forward\n    return self.proj(x)\n'
        f'  File "{torch_file}", line 125, in forward\n    return F.linear(\n'
    )
    assert source_line(linear) == "model.py:7, in forward: return self.proj(x)"
    linear.meta["stack_trace"] = None
    assert source_line(linear) == f"node {linear.name}"


def test_storage_of_tells_views_from_copies():
    x = torch.ones(4)
    assert storage_of(x) == storage_of(x[1:])
    assert storage_of(x) != storage_of(x.clone())
    assert storage_of(x.to_sparse()) < 0
