"""The fill on a CUDA device: same bytes as on the host, one launch, one copy, no wait."""

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from compile_backend.forward_batch import ForwardBatch
from compile_backend.registry import (
    CudaGraphBufferRegistry,
    GraphSlot,
    PaddingPolicy,
    build_decode_registry,
    build_prefill_registry,
)
from compile_backend.registry.fill_kernel import BLOCK
from compile_backend.registry.staging import MAX_MIRRORS

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
P = PaddingPolicy
LONG_CYCLES = 200_000_000  # about a tenth of a second of one kernel

DECODE = {
    "seq_len_fill_value": 3,
    "cache_loc_dtype": torch.int64,
    "enable_mamba_track": True,
    "is_encoder_decoder": True,
    "enable_num_token_non_padded": True,
    "require_gathered_buffer": True,
    "require_mlp_tp_gather": True,
    "dp_size": 3,
}
PREFILL = {
    "cache_loc_dtype": torch.int64,
    "is_multimodal": True,
    "hidden_size": 5,
    "embed_dtype": torch.bfloat16,
    "enable_mamba_track": True,
    "enable_num_token_non_padded": True,
}
KINDS = pytest.mark.parametrize(
    ("build", "options"),
    [(build_decode_registry, DECODE), (build_prefill_registry, PREFILL)],
    ids=["decode", "prefill"],
)
PLACES = pytest.mark.parametrize("place", ["cuda", "cpu", "mixed"])


def make(build, options, device):
    sizes = {"device": device, "max_bs": 64, "max_num_token": 4096, "share_pool": False}
    return build(**sizes, **options)


def make_batch(rows, step, place="cuda"):
    """Fields on ``place`` ("mixed": on both in turn); ``seq_lens_cpu`` is on the host always."""
    numbers = torch.arange(rows) + 100 * step
    fields = {
        "input_ids": numbers,
        "positions": numbers.int(),  # widened
        "out_cache_loc": numbers + 1,
        "req_pool_indices": numbers + 2,
        "seq_lens": torch.arange(min(rows + 2, 64)) + step,  # longer than raw: cut
        "mrope_positions": torch.arange(3 * rows).view(rows, 3).t() + step,  # strided
        "mamba_track_indices": numbers,
        "mamba_track_mask": numbers % 2 == 0,
        "mamba_track_seqlens": numbers + 3,
        "encoder_lens": numbers.int(),
    }
    for at, (name, field) in enumerate(fields.items()):
        if place == "cuda" or (place == "mixed" and at % 2):
            moved = field.cuda()
            fields[name] = moved.t().contiguous().t() if field.dim() > 1 else moved
    return ForwardBatch(batch_size=rows, seq_lens_cpu=numbers + 4, **fields)


def fill(registry, batch, padded):
    rows = batch.batch_size
    registry.fill_from(
        batch, raw_bs=rows, padded_bs=padded, raw_num_tokens=rows, padded_num_tokens=padded
    )


def poison(registry):
    for name in registry.slot_names:
        buffer = registry.get_slot(name).buffer
        buffer.fill_(True if buffer.dtype is torch.bool else 77)


def work_on_device(run):
    """Names of the kernels that ``run`` launches, and of its copies."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    names = [
        event.name()
        for event in recorded.profiler.kineto_results.events()
        if event.device_type() == DeviceType.CUDA
    ]
    copies = [name for name in names if name.startswith(("Memcpy", "Memset"))]
    return [name for name in names if name not in copies], copies


def has_kernel(registry):
    planner = registry._device_planner
    assert planner.kernel is not None, planner.no_kernel_reason
    return True


# --- bytes -------------------------------------------------------------------------------------


@KINDS
@PLACES
def test_the_slots_hold_what_the_host_path_writes(build, options, place):
    on_host, on_device = make(build, options, "cpu"), make(build, options, "cuda")
    assert has_kernel(on_device)
    sizes = [(5, 8), (3, 4), (64, 64), (5, 8), (0, 4), (33, 64)]
    for step, (rows, padded) in enumerate(sizes):
        for registry, where in ((on_host, "cpu"), (on_device, place)):
            poison(registry)
            fill(registry, make_batch(rows, step, where), padded)
        for name in on_host.slot_names:
            wanted, got = (r.get_slot(name).buffer.cpu() for r in (on_host, on_device))
            assert torch.equal(got, wanted), (name, rows, padded)


@pytest.mark.parametrize(
    ("dtype", "source_dtype"),
    [
        (torch.int64, torch.int32),
        (torch.int64, torch.uint32),
        (torch.int64, torch.bool),
        (torch.int32, torch.int16),
        (torch.int16, torch.uint8),
        (torch.float32, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float16),
        (torch.float64, torch.bfloat16),
        (torch.float64, torch.float32),
        (torch.float64, torch.int32),
        (torch.float32, torch.int16),
        (torch.float16, torch.int8),
        (torch.bfloat16, torch.int8),
        (torch.bfloat16, torch.uint8),
        (torch.bfloat16, torch.bfloat16),
        (torch.float8_e4m3fn, torch.float8_e4m3fn),
        (torch.bool, torch.bool),
        (torch.complex64, torch.complex64),  # by the grouped calls
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [1, 1000, 3 * BLOCK + 1])
def test_every_pair_of_dtypes_is_copied_as_torch_copies_it(dtype, source_dtype, rows):
    capacity = 4 * BLOCK
    registry = CudaGraphBufferRegistry(device="cuda", max_bs=1, max_num_tokens=capacity)
    slot = registry.register_slot(
        GraphSlot("x", lambda bs, tokens: (tokens, 3), dtype, padding_policy=P.ZERO)
    )
    values = torch.randn(rows, 3, device="cuda") * 100
    if source_dtype in (torch.uint8, torch.uint32):
        values = values.abs()
    source = (values > 0) if source_dtype is torch.bool else values.to(source_dtype)
    for one in (source, source.t().contiguous().t(), source.cpu()):
        slot.buffer.copy_(torch.ones(capacity, 3).to(dtype))
        expected = slot.buffer.clone()
        expected[:rows].copy_(one)
        expected[rows : rows + 500].zero_()
        sizes = {"raw": {"tokens": rows}, "padded": {"tokens": min(rows + 500, capacity)}}
        registry.fill_tensors({"x": one}, **sizes)
        assert torch.equal(slot.buffer.view(torch.uint8), expected.view(torch.uint8))


def test_offsets_beyond_32_bits():
    rows = 2**31 + 2 * BLOCK
    if torch.cuda.mem_get_info()[0] < 4 * rows:
        pytest.skip("needs 8 GiB of free device memory")
    registry = CudaGraphBufferRegistry(device="cuda", max_bs=1, max_num_tokens=rows + 8)
    slot = registry.register_slot(
        GraphSlot("x", lambda bs, tokens: (tokens,), torch.int8, padding_policy=P.ZERO)
    )
    slot.buffer.fill_(7)
    source = torch.ones(rows - 1, dtype=torch.int8, device="cuda")
    sizes = {"raw": {"tokens": rows - 1}, "padded": {"tokens": rows + 3}}
    registry.fill_tensors({"x": source}, **sizes)
    assert slot.buffer[:: 2**20].eq(1).all()
    assert slot.buffer[rows - 4 :].tolist() == [1, 1, 1, 0, 0, 0, 0, 7, 7, 7, 7, 7]


# --- launches, copies, waits -------------------------------------------------------------------


@KINDS
def test_a_device_batch_is_one_launch(build, options):
    registry = make(build, options, "cuda")
    assert has_kernel(registry)
    batches = [make_batch(5, step) for step in range(3)]
    fill(registry, batches[0], 8)
    kernels, copies = work_on_device(lambda: [fill(registry, batch, 8) for batch in batches])
    assert len(kernels) == 3, kernels
    assert all("fill_items" in name for name in kernels)
    assert copies == []


@KINDS
@pytest.mark.parametrize("place", ["cpu", "mixed"])
def test_a_host_batch_is_one_copy_and_one_launch(build, options, place):
    registry = make(build, options, "cuda")
    assert has_kernel(registry)
    batches = [make_batch(5, step, place) for step in range(3)]
    fill(registry, batches[0], 8)
    kernels, copies = work_on_device(lambda: [fill(registry, batch, 8) for batch in batches])
    assert len(kernels) == 3, kernels
    assert all("fill_items" in name for name in kernels)
    assert len(copies) == 3, copies
    assert all("HtoD" in name and "Pinned" in name for name in copies)


def test_resetting_tails_is_one_launch():
    registry = make(build_decode_registry, DECODE, "cuda")
    reset = lambda: registry.reset_padding(padded_bs=8, padded_num_tokens=8)
    reset()
    kernels, copies = work_on_device(reset)
    assert (len(kernels), copies) == (1, [])


@KINDS
@PLACES
def test_a_fill_synchronises_nothing(build, options, place):
    registry = make(build, options, "cuda")
    fill(registry, make_batch(5, 0, place), 8)  # compiles the kernel
    before = torch.cuda.get_sync_debug_mode()
    for rows in (3, 4):  # the first round makes mirrors; both plan, since their sizes are new
        batches = [make_batch(one, one, place) for one in (5, rows, 5)]
        torch.cuda.synchronize()
        torch.cuda._sleep(LONG_CYCLES)
        slept = torch.cuda.Event()
        slept.record()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for batch in batches:
                fill(registry, batch, 8)
            was_ahead = not slept.query()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    assert was_ahead
    torch.cuda.synchronize()


def test_a_steady_fill_allocates_nothing():
    registry = make(build_decode_registry, DECODE, "cuda")
    batch = make_batch(5, 1, "mixed")
    fill(registry, batch, 8)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(3):
        fill(registry, batch, 8)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


# --- what is in flight -------------------------------------------------------------------------


def counting_registry():
    registry = CudaGraphBufferRegistry(device="cuda", max_bs=1, max_num_tokens=4096)
    slot = registry.register_slot(
        GraphSlot("x", lambda bs, tokens: (tokens,), torch.int64, padding_policy=P.ZERO)
    )
    return registry, slot.buffer


SIZES = {"raw": {"tokens": 4000}, "padded": {"tokens": 4096}}


def test_a_host_field_may_be_overwritten_while_its_copy_is_in_flight():
    registry, buffer = counting_registry()
    field = torch.zeros(4000, dtype=torch.int64)
    registry.fill_tensors({"x": field}, **SIZES)
    torch.cuda.synchronize()
    results = []
    for step in range(1, 3 * MAX_MIRRORS):
        torch.cuda._sleep(LONG_CYCLES // 10)
        registry.fill_tensors({"x": field.fill_(step)}, **SIZES)
        results.append(buffer.clone())
    assert 1 < len(registry._device_planner.ring) <= MAX_MIRRORS
    field.fill_(-1)
    for step, result in enumerate(results, start=1):
        assert result[:4000].eq(step).all()
        assert result[4000:].eq(0).all()


@pytest.mark.parametrize("marks_copy_out", [True, False], ids=["marked", "unmarked"])
@pytest.mark.parametrize("place", ["cuda", "cpu"])
def test_a_fill_on_another_stream_waits_for_the_last_use(marks_copy_out, place):
    registry, buffer = counting_registry()
    fields = [torch.full((4000,), step, device=place) for step in range(8)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results = []
    for step, field in enumerate(fields):
        with torch.cuda.stream(streams[step % 2]):
            registry.fill_tensors({"x": field}, **SIZES)
            torch.cuda._sleep(LONG_CYCLES // 10)  # the replay
            results.append(buffer.clone())
            if marks_copy_out:
                registry.after_copy_out()
    torch.cuda.synchronize()
    for step, result in enumerate(results):
        assert result[:4000].eq(step).all()


def test_registries_on_one_device_wait_for_each_other():
    (one, buffer), (other, _) = counting_registry(), counting_registry()
    assert one._device_planner.order is other._device_planner.order
    shared = CudaGraphBufferRegistry(device="cuda", max_bs=1, max_num_tokens=4096)
    shared.register_slot(
        GraphSlot("x", lambda bs, tokens: (tokens,), torch.int64, padding_policy=P.ZERO),
        bind=buffer,
    )
    first, second = (torch.full((4000,), value, device="cuda") for value in (1, 2))
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        one.fill_tensors({"x": first}, **SIZES)
        torch.cuda._sleep(LONG_CYCLES)
        result = buffer.clone()
        one.after_copy_out()
    with torch.cuda.stream(torch.cuda.Stream()):
        shared.fill_tensors({"x": second}, **SIZES)
    torch.cuda.synchronize()
    assert result[:4000].eq(1).all()
    assert buffer[:4000].eq(2).all()
