"""What a device graph would do: addresses, numbers and branches are baked, memory is reused."""

import pytest
import torch

from compile_backend.engines import CompiledPiece, HostEngine, StrictHostEngine, record_opaque
from compile_backend.errors import CaptureError, FallbackReason, ReplayError


@pytest.fixture
def engine():
    return StrictHostEngine()


@pytest.mark.usefixtures("mode")
def test_outputs_and_intermediates_keep_their_address(engine):
    seen = []

    def function(x):
        y = x * 2
        seen.append(y)
        return [y + 1, y.view(-1)[1:]]

    x = torch.ones(2, 2)
    replay = engine.capture(function, static_inputs=[x])
    addresses = [each.data_ptr() for each in [*seen, *replay.outputs]]
    x.fill_(5)
    got = replay()
    assert [each.data_ptr() for each in [*seen, *got]] == addresses
    assert seen[0].tolist() == [[10, 10]] * 2
    assert got[1].tolist() == [10, 10, 10]


def test_a_number_is_baked(engine):
    scale = {"by": 2.0}
    x = torch.ones(1)
    replay = engine.capture(lambda x: [x * scale["by"], x.shape[0]], static_inputs=[x])
    scale["by"] = 100.0
    assert replay()[0].item() == 2
    assert replay()[1] == 1


def test_a_branch_is_baked(engine):
    flag = {"negate": False}
    replay = engine.capture(
        lambda x: [-x if flag["negate"] else x + 0], static_inputs=[torch.ones(1)]
    )
    flag["negate"] = True
    assert replay()[0].item() == 1


@pytest.mark.usefixtures("mode")
def test_a_view_costs_nothing_and_an_in_place_write_is_replayed(engine):
    x = torch.zeros(2, 3)
    views = engine.capture(lambda x: [x.t(), x[0], x.view(-1)], static_inputs=[x])
    assert views.num_entries == 0
    x.fill_(3)
    assert views()[1].tolist() == [3, 3, 3]

    writes = engine.capture(lambda x: [x.view(-1)[::2].add_(1)], static_inputs=[x])
    writes()
    assert x.tolist() == [[5, 3, 5], [3, 5, 3]]


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize(
    "function",
    [
        lambda x: [torch.add(x, 1, out=torch.empty(0))],
        lambda x: [(x + 1).resize_(1)],
        lambda x: [torch.empty(0).set_(x + 1)],
    ],
    ids=["out", "resize_", "set_"],
)
def test_memory_that_moves_is_refused_as_on_a_device_and_fine_on_the_host(engine, function):
    x = torch.zeros(2)
    with pytest.raises(CaptureError) as caught:
        engine.capture(function, static_inputs=[x])
    assert caught.value.reason is FallbackReason.CAPTURE_FAILED
    replay = HostEngine().capture(function, static_inputs=[x])
    fresh = torch.tensor([3.0, 4.0])
    for _ in range(2):
        assert torch.equal(replay([fresh])[0], function(fresh)[0])


@pytest.mark.usefixtures("mode")
def test_a_fresh_tensor_between_two_recordings_does_not_reach_the_second(engine):
    x = torch.zeros(2)
    first = engine.capture(lambda x: [x + 1], static_inputs=[x])
    between = first.outputs[0] * 10
    second = engine.capture(lambda y: [y - 1], static_inputs=[between])
    x.fill_(5)
    moved = first()[0] * 10
    assert second()[0].tolist() == [9, 9]  # stale, as on a device: the caller copies
    between.copy_(moved)
    assert second()[0].tolist() == [59, 59]


def test_a_piece_that_changes_its_shape_is_an_error_not_a_broadcast(engine):
    lengths = iter((4, 1))
    piece = CompiledPiece(lambda x: x.new_ones(next(lengths)), "varies")
    replay = engine.capture(lambda x: [piece(x)], static_inputs=[torch.ones(4)])
    with pytest.raises(ReplayError, match=r"returned shape \[1\] where the capture had \[4\]"):
        replay()


def test_outputs_of_recordings_do_not_share_memory(engine):
    x = torch.zeros(2)
    small, large = (engine.capture(lambda x: [x + 1], static_inputs=[x]) for _ in range(2))
    assert small.outputs[0].data_ptr() != large.outputs[0].data_ptr()


def test_a_break_op_that_is_entered_is_recorded_operator_by_operator(engine):
    replay = engine.capture(
        lambda x: [record_opaque(torch.nn.functional.silu, x * 2)], static_inputs=[torch.ones(1)]
    )
    assert "silu" in replay.describe()
    assert replay.num_entries == 2


@pytest.mark.usefixtures("mode")
def test_externals_are_what_a_replay_reads_by_address():
    for engine in (StrictHostEngine(), HostEngine()):
        layer = torch.nn.Linear(2, 2)
        cache = torch.zeros(2)

        def function(x, layer=layer, cache=cache):
            cache.add_(1)
            return [layer(x) + cache + torch.tensor([1.0, 1.0])]

        x = torch.ones(1, 2)
        replay = engine.capture(function, static_inputs=[x])
        assert {id(each) for each in replay.externals} == {
            id(each) for each in (cache, layer.weight, layer.bias)
        }
        before = replay()[0].clone()
        layer.weight = torch.nn.Parameter(torch.full((2, 2), 50.0))
        assert layer.weight not in {*replay.externals}
        assert (replay()[0] - before).abs().max() <= 1  # the old weight, and one more in the cache


def test_the_pool_is_what_the_recording_alone_keeps():
    x = torch.ones(1000)
    weight = torch.ones(1000)

    def function(x):
        y = x + weight  # 4000 bytes
        return [y.view(10, 100) * 2, torch.tensor([1.0, 2.0])]  # 4000 and 8

    assert StrictHostEngine().capture(function, static_inputs=[x]).pool_bytes == 8008
    assert HostEngine().capture(function, static_inputs=[x]).pool_bytes == 8


@pytest.mark.usefixtures("mode")
def test_a_constant_nobody_writes_costs_nothing():
    x = torch.ones(2)
    for engine in (StrictHostEngine(), HostEngine()):
        replay = engine.capture(lambda x: [x * torch.tensor([1.0, 2.0])], static_inputs=[x])
        assert replay.num_entries == 1


def test_a_program_reads_as_code():
    def function(x):
        parts = (x + 1).split(1)
        return [torch.cat([parts[1], parts[0]]).clamp(min=0.5), None, 3]

    x = torch.ones(2, 3)
    with torch.no_grad():
        host = HostEngine().capture(function, static_inputs=[x])
        strict = StrictHostEngine().capture(function, static_inputs=[x])
    assert host.describe().splitlines()[1:] == [
        "def replay(i0):",
        "    r1 = torch_add(i0, 1)",
        "    (r2, r3,) = torch_split(r1, 1)",
        "    del r1",
        "    r4 = torch_cat([r3, r2])",
        "    del r3, r2",
        "    r5 = torch_clamp(r4, 0.5)",
        "    del r4",
        "    return [r5, None, 3]",
    ]
    assert strict.describe().splitlines()[1:] == [
        "def replay():",
        "    overwrite(r1, torch_add(i0, 1))",
        "    overwrite(r4, torch_cat([r3, r2]))",
        "    overwrite(r5, torch_clamp(r4, 0.5))",
        "    return [r5, None, 3]",
    ]


def test_names_of_the_users_functions_do_not_clash_with_the_programs_own():
    def i0(t):
        return t + 1

    def args(t):
        return t * 2

    def lambda_(t):
        return t - 1

    lambda_.__name__ = "lambda"
    x = torch.ones(1)
    replay = HostEngine().capture(
        lambda x: [record_opaque(lambda_, record_opaque(args, record_opaque(i0, x)))],
        static_inputs=[x],
    )
    assert replay([torch.full((1,), 3.0)])[0].item() == 7
