"""Any slots, any order of sizes: the buffers are what a row-by-row model of the policies says."""

import math
from itertools import product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_backend.registry import CudaGraphBufferRegistry, GraphSlot, PaddingPolicy

P = PaddingPolicy
MAXIMA = {"bs": 4, "tokens": 6}
POISON = 113
DTYPES = {torch.int64: [torch.int64, torch.int32], torch.float32: [torch.float32, torch.bfloat16]}

axes = st.lists(st.sampled_from(["bs", "tokens", None]), min_size=1, max_size=3).map(tuple)
slots = st.lists(
    st.tuples(axes, st.sampled_from(list(P)), st.sampled_from(list(DTYPES)), st.integers(-3, 3)),
    min_size=1,
    max_size=4,
)
steps = st.lists(
    st.tuples(
        st.integers(0, 4),
        st.integers(0, 4),
        st.integers(0, 6),
        st.integers(0, 6),
        st.integers(0, 7),
    ),
    min_size=1,
    max_size=5,
)


def size_of(axis, sizes):
    return 2 if axis is None else sizes[axis]


def model_fill(buffer, axis, raw, padded, live, tail):
    """Write ``live`` and ``tail`` into the flat ``buffer``, one element at a time."""
    shape = [size_of(one, padded) for one in axis]
    for place, index in enumerate(product(*map(range, shape))):
        if all(at < size_of(one, raw) for at, one in zip(index, axis, strict=True)):
            if live is not None:
                buffer[place] = live[index]
        elif tail is not None:
            buffer[place] = tail


@settings(max_examples=120, deadline=None)
@given(slots, steps)
def test_fills_match_the_model(descriptions, fills):
    registry = CudaGraphBufferRegistry(device="cpu", max_bs=4, max_num_tokens=6)
    models, tails = {}, {}
    for number, (axis, policy, dtype, value) in enumerate(descriptions):
        name = f"s{number}"
        takes_value = policy in (P.FILL_SENTINEL, P.FILL_ONCE)
        slot = registry.register_slot(
            GraphSlot(
                name,
                lambda bs, tokens, axis=axis: tuple(size_of(one, MAXIMA) for one in axis),
                dtype,
                axis=axis,
                padding_policy=policy,
                pad_value=value if takes_value else None,
            )
        )
        start = value if takes_value else 0
        models[name] = torch.full_like(slot.buffer, start).view(-1)
        tails[name] = {P.ZERO: 0, P.FILL_SENTINEL: value}.get(policy)
        assert torch.equal(slot.buffer.view(-1), models[name])

    for number, (one_bs, two_bs, one_tokens, two_tokens, absent) in enumerate(fills):
        (raw_bs, padded_bs), (raw_tokens, padded_tokens) = (
            sorted((one_bs, two_bs)),
            sorted((one_tokens, two_tokens)),
        )
        raw = {"bs": raw_bs, "tokens": raw_tokens}
        padded = {"bs": padded_bs, "tokens": padded_tokens}
        batch = type("Batch", (), {})()
        for index, (axis, _, dtype, _) in enumerate(descriptions):
            name = f"s{index}"
            shape = [size_of(one, raw) for one in axis]
            source_dtype = DTYPES[dtype][number % 2]
            live = torch.arange(math.prod(shape)).view(shape).add(number).to(source_dtype)
            setattr(batch, name, None if index == absent else live)
            if number % 3 == 0:
                registry.get_slot(name).buffer.fill_(POISON)
                models[name].fill_(POISON)
            model_fill(models[name], axis, raw, padded, getattr(batch, name), tails[name])
        registry.fill_from(
            batch,
            raw_bs=raw_bs,
            padded_bs=padded_bs,
            raw_num_tokens=raw_tokens,
            padded_num_tokens=padded_tokens,
        )
        view = registry.extract_buffer(
            padded_bs=padded_bs, padded_num_tokens=padded_tokens, forward_batch_template=batch
        )
        for index, (axis, _, _, _) in enumerate(descriptions):
            name = f"s{index}"
            assert torch.equal(registry.get_slot(name).buffer.view(-1), models[name]), name
            if index == absent:
                assert getattr(view, name) is None
            else:
                shape = [size_of(one, padded) for one in axis]
                head = models[name][: math.prod(shape)].view(shape)
                assert torch.equal(getattr(view, name), head)
