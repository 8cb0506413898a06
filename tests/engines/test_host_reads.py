"""What hands a tensor's values to Python is refused, with its reason, and leaves nothing behind."""

import copy

import pytest
import torch

from compile_backend.engines import HostEngine, StrictHostEngine
from compile_backend.errors import CaptureError, FallbackReason

np = pytest.importorskip("numpy", reason="reads by numpy are among what is tested")

HOST_READ = FallbackReason.HOST_READ
SHAPE = FallbackReason.DATA_DEPENDENT_SHAPE


def _branch(x):
    return x + 1 if x.sum() > 0 else x - 1


def _contains(x):
    return x if 1.0 in x else x + 1


READS = {
    "item": lambda x: x * x[0].item(),
    "bool": _branch,
    "int": lambda x: x * int(x[0]),
    "float": lambda x: x * float(x[0]),
    "complex": lambda x: x * complex(x[0]).real,
    "index": lambda x: [x, x + 1][torch.tensor(1) + 0],
    "slice_end": lambda x: x[: torch.tensor(2) + 0],
    "range": lambda x: x * len(range(x[0].long())),
    "tolist": lambda x: x * sum(x.tolist()),
    "numpy": lambda x: x * float(x.numpy().sum()),
    "array": lambda x: x * float(np.asarray(x).sum()),
    "dlpack": lambda x: x * float(np.from_dlpack(x.clone()).sum()),
    "from_dlpack": lambda x: torch.from_dlpack(x) + 1,
    "format": lambda x: x * float(f"{x[0]:.3f}"),
    "repr": lambda x: x * len(repr(x)),
    "print": lambda x: x * len(str(x)),
    "equal": lambda x: x * torch.equal(x, x),
    "allclose": lambda x: x * torch.allclose(x, x),
    "is_nonzero": lambda x: x * x[0].is_nonzero(),
    "contains": _contains,
    "deepcopy": copy.deepcopy,
}
SHAPES = {
    "nonzero": lambda x: torch.nonzero(x),
    "argwhere": lambda x: torch.argwhere(x),
    "where": lambda x: torch.where(x > 0)[0],
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "mask_index": lambda x: x[x > 0],
    "unique": lambda x: torch.unique(x),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "bincount": lambda x: torch.bincount(x.long()),
}
CASES = [
    *(pytest.param(fn, HOST_READ, id=name) for name, fn in READS.items()),
    *(pytest.param(fn, SHAPE, id=name) for name, fn in SHAPES.items()),
]


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize(("read", "reason"), CASES)
def test_a_read_is_refused_with_its_reason(recorder, found_as_left, read, reason):
    x = torch.tensor([1.0, 2.0, 3.0])
    with found_as_left(), pytest.raises(CaptureError) as caught:
        recorder.capture(lambda x: [read(x + 0)], static_inputs=[x])
    assert caught.value.reason is reason
    read(x + 0)  # fine outside a capture, so the refusal is the only thing in its way


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("source", ["input", "external", "constant"])
def test_a_read_of_any_tensor_is_refused(recorder, source):
    outside = torch.ones(1)

    def function(x):
        tensor = {"input": x, "external": outside, "constant": torch.tensor([2.0])}[source]
        return [x * tensor.item()]

    with pytest.raises(CaptureError) as caught:
        recorder.capture(function, static_inputs=[torch.ones(1)])
    assert caught.value.reason is HOST_READ


@pytest.mark.usefixtures("mode")
def test_a_refusal_that_the_function_swallows_still_counts(recorder):
    def swallows(x):
        try:
            factor = x.max().item()
        except Exception:  # noqa: BLE001 - what careless code does
            factor = 1.0
        return [x * factor]

    def replaces(x):
        try:
            return [x * x.max().item()]
        except Exception as error:
            raise KeyError("mine") from error

    def meets_another(x):
        try:
            x.max().item()
        except CaptureError:
            return [x.nonzero()]

    for function in (swallows, replaces, meets_another):
        with pytest.raises(CaptureError) as caught:
            recorder.capture(function, static_inputs=[torch.ones(2)])
        assert caught.value.reason is HOST_READ


@pytest.mark.usefixtures("mode")
def test_the_message_says_what_to_do_and_doing_it_works(feed):
    from compile_backend.engines import record_opaque

    x = torch.tensor([1.0, 2.0])
    with pytest.raises(CaptureError, match="read it inside a break op"):
        HostEngine().capture(lambda x: [x * x.max().item()], static_inputs=[x])
    replay = HostEngine().capture(
        lambda x: [record_opaque(lambda t: t * t.max().item(), x)], static_inputs=[x]
    )
    assert replay([torch.tensor([1.0, 4.0])])[0].tolist() == [4, 16]
    with pytest.raises(CaptureError, match="nonzero_static"):
        HostEngine().capture(lambda x: [x.nonzero()], static_inputs=[x])
    replay = HostEngine().capture(lambda x: [x.nonzero_static(size=2)], static_inputs=[x])
    assert replay([torch.tensor([0.0, 4.0])])[0].tolist() == [[1], [-1]]


@pytest.mark.usefixtures("mode")
def test_metadata_is_not_a_read(engine, feed):
    def function(x):
        assert x.is_contiguous()
        assert x.dtype is torch.float32
        assert torch.is_same_size(x, x)
        assert x.data_ptr() != 0
        assert not x.is_pinned()
        scale = torch.result_type(x, 1).itemsize
        return [x * x.shape[0] * x.numel() * len(x) * x.stride(0) * scale]

    x = torch.ones(3)
    replay = engine.capture(function, static_inputs=[x])
    assert feed(engine, replay, [x], [torch.full((3,), 2.0)])[0].tolist() == [216.0] * 3
    assert replay.num_entries == (1 if engine.name == "none" else 5)  # the multiplications


@pytest.mark.usefixtures("mode")
def test_a_masked_write_is_for_the_host_only():
    def fill(x):
        y = x.clone()
        y[y > 1] = 0.0
        return [y]

    def spread(x):
        y = x.clone()
        y[x > 1] = x[:1].expand(2)
        return [y]

    x = torch.tensor([1.0, 2.0, 3.0])
    for engine in (HostEngine(), StrictHostEngine()):
        assert engine.capture(fill, static_inputs=[x])()[0].tolist() == [1, 0, 0]
    assert HostEngine().capture(spread, static_inputs=[x])()[0].tolist() == [1, 1, 1]
    with pytest.raises(CaptureError) as caught:
        StrictHostEngine().capture(spread, static_inputs=[x])
    assert caught.value.reason is SHAPE


@pytest.mark.usefixtures("mode")
def test_a_repeat_of_known_total_is_recorded(engine, feed):
    def function(x, repeats):
        return [x.repeat_interleave(repeats, output_size=4)]

    x, repeats = torch.tensor([1.0, 2.0]), torch.tensor([1, 3])
    replay = engine.capture(function, static_inputs=[x, repeats])
    got = feed(engine, replay, [x, repeats], [x, torch.tensor([3, 1])])
    assert got[0].tolist() == [1, 1, 1, 2]


@pytest.mark.usefixtures("mode")
def test_memory_that_no_operator_shows_is_refused(recorder):
    def parameter(x):
        return [torch.nn.Parameter(x * 2, requires_grad=False) + 1]

    def storage(x):
        return [torch.empty(0).set_((x * 2).untyped_storage()) + 1]

    def data(x):
        y = x + 1
        y.data = x * 5
        return [y * 2]

    def layout_of_an_input(x):
        x.to(torch.float32)  # returns x itself
        return [x.unsqueeze_(0) + 1]

    for function in (parameter, storage, data, layout_of_an_input):
        with pytest.raises(CaptureError) as caught:
            recorder.capture(function, static_inputs=[torch.ones(2)])
        assert caught.value.reason is FallbackReason.CAPTURE_FAILED
