"""The kernel's table, and the kernel itself: interpreted on a CPU, and compiled for a GPU."""

import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest
import torch

from compile_backend.registry import CudaGraphBufferRegistry, GraphSlot
from compile_backend.registry.device_fill import DeviceFill, DevicePlanner
from compile_backend.registry.fill import SlotSource
from compile_backend.registry.fill_kernel import (
    BLOCK,
    AddressRanges,
    Conversion,
    Load,
    head_item,
    item_of_block,
    number_item,
    table_rows,
    tail_item,
)

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def copied(head, source, **options):
    options = {"sources_are_aligned": True, **options}
    return head_item(head, source.dtype, source.stride(), 3, **options)


def addresses(item, strides):
    """Element offsets in the order in which the kernel visits them."""
    ranges = map(range, item.sizes)
    return [sum(i * s for i, s in zip(at, strides, strict=True)) for at in product(*ranges)]


# --- items -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make_head", "make_source", "num_dims"),
    [
        (lambda x: x[:3], lambda x: x[:3], 1),
        (lambda x: x[:, :3], lambda x: x[:, :3], 2),
        (lambda x: x[:, :3, :2], lambda x: x[:, :3, :2], 3),
        (lambda x: x[:3, 1], lambda x: x[:3, 1], 2),
        (lambda x: x[:2], lambda x: x[:2].flip(0), 1),
        (lambda x: x[:2], lambda x: x.permute(2, 1, 0).contiguous().permute(2, 1, 0)[:2], 3),
        (lambda x: x[:2, :3], lambda x: x[:1, :3].expand(2, 3, 5), 2),
        (lambda x: x[:, 2, 3], lambda x: x[:, 2, 3], 1),
        (lambda x: x[1, 2, 3], lambda x: x[1, 2, 3], 0),
        (lambda x: x[:0], lambda x: x[:0], None),
    ],
)
def test_an_item_visits_each_element_and_its_source(make_head, make_source, num_dims):
    base = torch.zeros(4, 6, 5, dtype=torch.int32)
    head, source = make_head(base), make_source(torch.arange(120).view(4, 6, 5).int())
    item = copied(head, source, sources_are_aligned=False)
    assert (item.numel, item.destination) == (head.numel(), head.data_ptr())
    if num_dims is None:
        return
    assert sum(size > 1 for size in item.sizes) == num_dims
    flat = torch.arange(120).view(4, 6, 5)
    wanted = make_head(flat).flatten() - make_head(flat).flatten()[0]
    assert addresses(item, item.strides) == wanted.tolist()
    place = [
        sum(i * s for i, s in zip(at, source.stride(), strict=True))
        for at in product(*map(range, source.shape))
    ]
    assert addresses(item, item.source_strides) == place


def test_four_separate_dimensions_are_too_many():
    base = torch.zeros(3, 4, 5, 6)
    assert copied(base[:2, :3, :4, :5], torch.zeros(2, 3, 4, 5)) is None
    assert tail_item(base[:2, :3, :4, :5], 0) is None
    assert copied(base[:2], torch.zeros(2, 4, 5, 6)).numel == 240 // 2


@pytest.mark.parametrize(
    ("numel", "dtype", "offset", "is_wide"),
    [
        (8, torch.int32, 0, True),
        (7, torch.int32, 0, False),  # no whole words
        (8, torch.int32, 1, False),  # an odd address
        (16, torch.bool, 8, True),
        (4, torch.bfloat16, 4, True),
        (3, torch.int64, 1, True),
    ],
)
def test_a_run_of_whole_words_is_moved_in_words(numel, dtype, offset, is_wide):
    head = torch.zeros(64, dtype=dtype)[offset : offset + numel]
    source = torch.zeros(numel, dtype=dtype)
    item = copied(head, source)
    assert item.width == (8 if is_wide else dtype.itemsize)
    assert item.numel * item.width == numel * dtype.itemsize
    assert copied(head, source, sources_are_aligned=False).width == dtype.itemsize
    strided = copied(head, torch.zeros(2 * numel, dtype=dtype)[::2])
    assert strided.width == dtype.itemsize
    assert strided.source_strides[-1] == 2


@pytest.mark.parametrize("value", [-2, 3])
def test_a_tail_in_words_repeats_its_bits(value):
    item = tail_item(torch.zeros(8, dtype=torch.int16), value)
    assert (item.load, item.width, item.numel) == (Load.CONSTANT, 8, 2)
    words = torch.tensor([item.constant] * 2)
    assert words.view(torch.int16).tolist() == [value] * 8
    assert tail_item(torch.zeros(2, 9)[:, 1:], -0.0).constant == 0


@pytest.mark.parametrize(
    ("slot", "source", "how"),
    [
        (torch.int64, torch.int32, (Load.I32, Conversion.NONE)),
        (torch.int64, torch.uint32, (Load.U32, Conversion.NONE)),
        (torch.int64, torch.bool, (Load.U8, Conversion.NONE)),
        (torch.float32, torch.bfloat16, (Load.I16, Conversion.BF16_TO_F32)),
        (torch.float64, torch.int32, (Load.I32, Conversion.INT_TO_F64)),
        (torch.float32, torch.float8_e4m3fn, None),
        (torch.complex64, torch.complex64, None),
        (torch.complex128, torch.float32, None),
    ],
)
def test_a_pair_of_dtypes_is_taken_or_refused(slot, source, how):
    item = copied(torch.zeros(4, dtype=slot), torch.zeros(4, dtype=source))
    assert how == (item and (item.load, item.conversion))


def test_numbers_go_to_integers():
    assert number_item(torch.zeros(3, dtype=torch.int32), 5).operand == 5
    for dtype in (torch.bool, torch.float32, torch.uint64):
        assert number_item(torch.zeros(3, dtype=dtype), 5) is None


def test_blocks_are_numbered_through_and_empty_items_left_out():
    sizes = [BLOCK + 1, 0, 5, 2 * BLOCK]
    items = [tail_item(torch.zeros(max(n, 1), dtype=torch.int64)[:n], 1) for n in sizes]
    rows = table_rows(items)
    assert [len(row) for row in rows] == [16] * 3
    assert [row[6] for row in rows] == [0, 2, 3]
    assert [row[7] for row in rows] == [BLOCK + 1, 5, 2 * BLOCK]
    assert item_of_block(items) == [0, 0, 1, 2, 2]


def test_ranges_tell_what_meets_them():
    block = torch.zeros(100, dtype=torch.uint8)
    start = block.data_ptr()
    ranges = AddressRanges([[block[10:20]], [block[40:41], block[50:60]], [block[:0]]])
    assert not ranges.overlap
    for low, high, meets in [
        (0, 10, False),
        (0, 11, True),
        (19, 40, True),
        (20, 40, False),
        (45, 46, True),  # between the parts of one group
        (0, 100, True),
        (60, 100, False),
        (30, 30, False),
    ]:
        assert ranges.touch(start + low, start + high) is meets
    assert AddressRanges([[block[:11]], [block[10:20]]]).overlap
    assert not AddressRanges([[block[:20], block[10:30]]]).overlap


def test_without_triton_the_grouped_calls_fill_and_the_reason_says_what_to_install():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from compile_backend.registry.device_fill import DevicePlanner\n"
        "from compile_backend.registry import CudaGraphBufferRegistry, GraphSlot\n"
        "planner = DevicePlanner(torch.device('cpu'), stages_all=True)\n"
        "assert planner.kernel is None and 'pip install triton' in planner.no_kernel_reason\n"
        "registry = CudaGraphBufferRegistry(device='cpu', max_bs=4, max_num_tokens=4)\n"
        "registry._device_planner = planner\n"
        "slot = registry.register_slot(GraphSlot('x', lambda bs, tokens: (bs,), torch.int64, "
        "axis='bs'))\n"
        "for step in (1, 2):\n"
        "    values = {'x': torch.full((3,), step).int()}\n"
        "    registry.fill_tensors(values, raw={'bs': 2}, padded={'bs': 4})\n"
        "    assert slot.buffer.tolist() == [step, step, 0, 0]\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=ROOT)


def test_slots_elsewhere_are_filled_beside_those_of_the_device():
    registry = CudaGraphBufferRegistry(device="meta", max_bs=4, max_num_tokens=4)
    slot = registry.register_slot(
        GraphSlot("x", lambda bs, tokens: (bs,), torch.int64, axis="bs", device="cpu")
    )
    planner = DevicePlanner(torch.device("meta"))
    source = torch.tensor([5, 6])
    plan = planner.plan([SlotSource(slot, source)], {"bs": 2}, {"bs": 4})
    assert isinstance(plan, DeviceFill)
    plan.run([source])
    assert slot.buffer.tolist() == [5, 6, 0, 0]


# --- the kernel --------------------------------------------------------------------------------


@needs_triton
def test_the_interpreted_kernel_leaves_the_bytes_that_grouped_calls_leave():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, "tests/registry/interpreted_fill.py"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout


@needs_triton
def test_the_kernel_compiles_for_a_gpu(tmp_path):
    """Its signature is the one that a launch gives it: no argument is typed or cut by its value."""
    code = (
        "from triton import compile\n"
        "from triton.backends.compiler import GPUTarget\n"
        "from triton.compiler import ASTSource\n"
        "from compile_backend.registry.triton_fill import MAX_OPERANDS, fill_items\n"
        "operands = fill_items.params[3:]\n"
        "assert len(operands) == MAX_OPERANDS\n"
        "assert all(p.annotation_type == 'i64' and p.do_not_specialize for p in operands)\n"
        "types = ['*i64', '*i32', 'constexpr', *['i64'] * MAX_OPERANDS]\n"
        "signature = dict(zip([p.name for p in fill_items.params], types, strict=True))\n"
        "source = ASTSource(fill_items, signature, constexprs={'block_size': 1024})\n"
        "binary = compile(source, target=GPUTarget('cuda', 90, 32), options={'num_warps': 4})\n"
        "assert len(binary.asm['cubin']) > 1000\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=ROOT, env=env)
