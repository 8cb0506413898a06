"""What a replay computes: the function's own results, from the values it is given now."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

W = torch.randn(4, 4)
B = torch.randn(4)


def _linear_relu(x):
    return [F.relu(F.linear(x, W, B))]


def _views(x):
    head = x[:2]
    return [head.t().reshape(-1), x.view(4, 2)[1:, 0], head.expand(2, 4) + 1, x.unsqueeze(0)]


def _in_place_on_a_view(x):
    y = x.clone()
    y[:, 0].mul_(3)
    y[1].fill_(2)
    return [y, y.sum()]


def _out_arguments(x):
    y = torch.empty(2, 4)
    torch.add(x, 1, out=y)
    values, indices = torch.empty(2), torch.empty(2, dtype=torch.int64)
    torch.max(x, dim=1, out=(values, indices))
    return [y, values, indices]


def _foreach(x):
    parts = [x.clone(), x + 1]
    torch._foreach_mul_(parts, 2)
    sums = torch._foreach_add(parts, parts)
    torch._foreach_copy_(parts, sums)
    return [*parts, *sums]


def _several_results(x):
    values, indices = x.topk(2, dim=-1)
    a, b = x.split(2, dim=-1)
    (_, _unused), c = torch.aminmax(x), x.unbind(0)[1]
    return [values, indices, torch.cat([b, a], dim=-1), c]


def _factories(x):
    mask = torch.arange(4, dtype=torch.float32) > 1
    return [
        x.masked_fill(mask, -math.inf),
        x + torch.full((4,), float("nan")),
        torch.zeros_like(x, dtype=torch.float64),
        torch.ones(2, 2, dtype=torch.bfloat16),
    ]


def _keywords_and_layouts(x):
    return [
        x.to(torch.float64),
        x.contiguous(memory_format=torch.contiguous_format),
        torch.var(x, dim=[1], correction=0, keepdim=True),
        torch.empty_like(x, memory_format=torch.preserve_format).copy_(x),
        x.sum(dim=(0, 1)),
        F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], scale=0.5),
        F.layer_norm(x, (4,), eps=1e-6),
    ]


def _lists_with_holes(x):
    rows = torch.tensor([1, 0])
    y = x.clone()
    y[:, rows] = 0.0
    return [x[rows], x[:, rows], y]


def _constants(x):
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
    return [x * scale, x + torch.tensor(2.0), torch.tensor(5), scale]


def _written_constant(x):
    count = torch.tensor([1.0, 1.0, 1.0, 1.0])
    count.add_(x[0])
    tail = torch.tensor([1.0, 1.0])
    tail[:1] += 1
    return [count, tail]


def _unusual_dtypes(x):
    z = torch.complex(x, x + 1)
    return [x > 0, z.conj() * z, z.real, x[:0] + 1, x[:, :0].sum(), (x > 0).logical_not()]


def _layout_changes_in_place(x):
    y = x + 1
    before = y * 2
    y.t_()
    after = y + 3
    y.unsqueeze_(0).add_(1)
    constant = torch.tensor([[1.0, 2.0]])
    constant.transpose_(0, 1)
    return [before, after, y, y.swapdims_(1, 2), constant, y.sum()]


def _no_tensors(x):
    return [None, 3, 2.5, True, x.shape[0]]


def _nothing(x):
    return []


def _same_result_twice(x):
    y = x + 1
    return [y, y, y[0], x]


def _setitem_and_scatter(x):
    y = torch.zeros(2, 4)
    y[:, 1:3] = x[:, :2]
    y.scatter_(1, torch.tensor([[3], [0]]), x[:, :1])
    return [y]


def _overrides_in_python(x):
    """Methods that Tensor overrides in Python, each of which calls the one of its base class."""
    return [
        x.unflatten(-1, (2, 2)) + 1,
        x.split(2, dim=-1)[1] * 2,
        *(y.unflatten(0, (1, -1)) for y in x.unbind()),
    ]


FUNCTIONS = [
    _linear_relu,
    _views,
    _in_place_on_a_view,
    _out_arguments,
    _foreach,
    _several_results,
    _factories,
    _keywords_and_layouts,
    _lists_with_holes,
    _constants,
    _written_constant,
    _unusual_dtypes,
    _layout_changes_in_place,
    _no_tensors,
    _nothing,
    _same_result_twice,
    _setitem_and_scatter,
    _overrides_in_python,
]


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda each: each.__name__.strip("_"))
def test_replays_compute_what_the_function_does_for_fresh_values(engine, feed, function):
    x = torch.randn(2, 4)
    expected = function(x.clone())
    replay = engine.capture(function, static_inputs=[x])
    assert_close(list(replay.outputs), expected, rtol=0, atol=0, equal_nan=True)
    for _ in range(3):
        fresh = torch.randn(2, 4)
        got = feed(engine, replay, [x], [fresh])
        expected = function(fresh.clone())
        assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
        for mine, eager in zip(got, expected, strict=True):
            assert type(mine) is type(eager)
            if isinstance(mine, torch.Tensor):
                assert (mine.dtype, mine.stride()) == (eager.dtype, eager.stride())


@pytest.mark.usefixtures("mode")
def test_a_replay_without_inputs_reads_the_captured_tensors_anew(engine):
    x = torch.zeros(3)
    replay = engine.capture(lambda x: [x + 1], static_inputs=[x])
    x.fill_(4)
    assert replay()[0].tolist() == [5, 5, 5]


@pytest.mark.usefixtures("mode")
def test_an_input_is_mutated_once_per_call_and_once_by_the_capture(engine):
    def bump(count):
        count.add_(1)
        return [count * 10]

    count = torch.zeros(1)
    replay = engine.capture(bump, static_inputs=[count])
    assert (count.item(), replay.outputs[0].item()) == (1, 10)
    for calls in (2, 3):
        (out,) = replay([count])
        assert (count.item(), out.item()) == (calls, 10 * calls)


def test_a_late_bound_input_is_mutated_and_the_captured_one_is_not():
    from compile_backend.engines import HostEngine

    captured, other = torch.zeros(1), torch.full((1,), 5.0)
    replay = HostEngine().capture(lambda c: [c.add_(1)], static_inputs=[captured])
    (out,) = replay([other])
    assert out is other
    assert (captured.item(), other.item()) == (1, 6)


@pytest.mark.usefixtures("mode")
def test_an_external_is_mutated_once_per_call(engine):
    cache = torch.zeros(4)

    def append(x):
        cache[1:3].add_(x)
        return [cache.sum()]

    x = torch.ones(2)
    replay = engine.capture(append, static_inputs=[x])
    assert cache.tolist() == [0, 1, 1, 0]
    replay()
    replay()
    assert cache.tolist() == [0, 3, 3, 0]


@pytest.mark.usefixtures("mode")
def test_an_external_that_changes_in_place_is_read_anew(engine):
    weight = torch.ones(3)
    x = torch.ones(3)
    replay = engine.capture(lambda x: [x * weight], static_inputs=[x])
    weight.fill_(7)
    assert replay()[0].tolist() == [7, 7, 7]


@pytest.mark.usefixtures("mode")
def test_an_output_that_is_an_input_or_an_external_is_that_tensor(engine):
    weight = torch.ones(3)
    x = torch.ones(3)
    replay = engine.capture(lambda x: [x, weight, x.add_(1)], static_inputs=[x])
    for out in (replay.outputs, replay([x])):
        assert out[0] is x
        assert out[1] is weight
        assert out[2] is x


@pytest.mark.usefixtures("mode")
def test_fresh_outputs_are_safe_to_keep_and_others_are_overwritten(engine, feed):
    x = torch.zeros(2)
    replay = engine.capture(lambda x: [x + 1, torch.tensor([7.0])], static_inputs=[x])
    kept = [feed(engine, replay, [x], [torch.full((2,), float(step))]) for step in (1, 2, 3)]
    values = [out[0].tolist() for out in kept]
    if engine.fresh_outputs:
        assert values == [[2, 2], [3, 3], [4, 4]]
        kept[0][1].zero_()  # whoever holds an output may write it
        assert replay([x])[1].item() == 7
        with pytest.raises(Exception, match="gone"):
            replay.outputs
    else:
        assert values == [[4, 4]] * 3
        assert all(out[0] is replay.outputs[0] for out in kept)


@pytest.mark.usefixtures("mode")
def test_random_operators_draw_anew_and_match_eager_for_the_same_seed(engine):
    def noisy(x):
        return [x + torch.rand(3), F.dropout(x, 0.5), torch.randn_like(x)]

    x = torch.ones(3)
    replay = engine.capture(noisy, static_inputs=[x])
    torch.manual_seed(3)
    first, second = ([each.clone() for each in replay()] for _ in range(2))
    assert not torch.equal(first[0], second[0])
    torch.manual_seed(3)
    assert_close(first, noisy(x), rtol=0, atol=0)
    assert_close(second, noisy(x), rtol=0, atol=0)


@pytest.mark.usefixtures("mode")
def test_a_generator_argument_is_the_callers_own(engine):
    generator = torch.Generator().manual_seed(1)
    x = torch.ones(3)
    replay = engine.capture(lambda x: [x * torch.rand(3, generator=generator)], static_inputs=[x])
    generator.manual_seed(5)
    got = replay()[0].clone()
    assert torch.equal(got, torch.rand(3, generator=generator.manual_seed(5)))


def test_warm_ups_run_first_and_leave_the_generator_alone(engine):
    calls = []

    def noisy(x):
        calls.append(1)
        return [x + torch.rand(1)]

    torch.manual_seed(2)
    replay = engine.capture(noisy, static_inputs=[torch.zeros(1)], warmups=2)
    assert len(calls) == 3
    if engine.name != "none":
        torch.manual_seed(2)
        assert torch.equal(replay.outputs[0], torch.rand(1))


@pytest.mark.parametrize("captured_in", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("replayed_in", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_recording_may_be_replayed_in_another_mode(engine, feed, captured_in, replayed_in):
    layer = torch.nn.Linear(4, 4)
    cache = torch.zeros(2, 4)

    def function(x):
        bias = torch.tensor([1.0, 2.0, 3.0, 4.0])
        bias.mul_(2)
        h = layer(x)
        h.add_(bias)
        cache.copy_(h)
        return [h.view(-1), bias]

    x = torch.randn(2, 4)
    with captured_in():
        replay = engine.capture(function, static_inputs=[x])
    for _ in range(2):
        fresh = torch.randn(2, 4)
        with torch.no_grad():
            expected = function(fresh)
        if engine.name == "none" and replayed_in is torch.enable_grad:
            pytest.skip("without an engine the caller's grad mode decides")
        with replayed_in():
            got = feed(engine, replay, [x], [fresh])
        assert not any(each.requires_grad for each in got)
        assert_close(got, expected, rtol=0, atol=0)
        assert torch.equal(cache.view(-1), expected[0])


def test_a_capture_with_grad_enabled_records_without_gradients(recorder):
    layer = torch.nn.Linear(2, 2)
    replay = recorder.capture(lambda x: [layer(x)], static_inputs=[torch.ones(1, 2)])
    assert torch.is_grad_enabled()
    assert not replay.outputs[0].requires_grad
    assert not replay()[0].requires_grad
    assert torch.is_grad_enabled()
