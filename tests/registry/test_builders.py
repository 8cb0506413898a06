"""The standard slots of decode, prefill and eager registries."""

from types import SimpleNamespace

import pytest
import torch

from compile_backend.errors import (
    SlotDefinitionError,
    SlotMismatchError,
    SlotNotFoundError,
)
from compile_backend.forward_batch import ForwardBatch, PPProxyTensors
from compile_backend.registry import (
    GraphSlot,
    build_decode_registry,
    build_eager_registry,
    build_prefill_registry,
)
from compile_backend.registry import PaddingPolicy as P

POISON = -77
MAX_BS, MAX_TOKENS = 8, 16
SIZES = {"device": "cpu", "max_bs": MAX_BS, "max_num_token": MAX_TOKENS}


def decode(**options):
    return build_decode_registry(
        **{**SIZES, "seq_len_fill_value": 3, "cache_loc_dtype": torch.int32, **options}
    )


def prefill(**options):
    return build_prefill_registry(**{**SIZES, "cache_loc_dtype": torch.int64, **options})


def fill(registry, batch, raw_bs, padded_bs, raw_tokens, padded_tokens, **options):
    registry.fill_from(
        batch,
        raw_bs=raw_bs,
        padded_bs=padded_bs,
        raw_num_tokens=raw_tokens,
        padded_num_tokens=padded_tokens,
        **options,
    )


def poison(registry):
    for name in registry.slot_names:
        buffer = registry.get_slot(name).buffer
        buffer.fill_(True if buffer.dtype is torch.bool else POISON)


TOKENS, BS = ("tokens", MAX_TOKENS), ("bs", MAX_BS)
DECODE_SLOTS = {
    "input_ids": (torch.int64, TOKENS, P.FOREACH_COPY, POISON),
    "positions": (torch.int64, TOKENS, P.ZERO, 0),
    "out_cache_loc": (torch.int32, TOKENS, P.ZERO, 0),
    "req_pool_indices": (torch.int64, BS, P.ZERO, 0),
    "seq_lens": (torch.int64, BS, P.FILL_SENTINEL, 3),
    "seq_lens_cpu": (torch.int64, BS, P.FILL_SENTINEL, 3),
    "mrope_positions": (torch.int64, TOKENS, P.ZERO, 0),
    "mamba_track_indices": (torch.int64, BS, P.ZERO, 0),
    "mamba_track_mask": (torch.bool, BS, P.ZERO, False),
    "encoder_lens": (torch.int32, BS, P.FILL_ONCE, POISON),
}
PREFILL_SLOTS = {
    "input_ids": (torch.int64, TOKENS, P.ZERO, 0),
    "positions": (torch.int64, TOKENS, P.ZERO, 0),
    "out_cache_loc": (torch.int64, TOKENS, P.ZERO, 0),
    "mrope_positions": (torch.int64, TOKENS, P.ZERO, 0),
    "mamba_track_indices": (torch.int64, BS, P.FOREACH_COPY, POISON),
    "mamba_track_mask": (torch.bool, BS, P.FOREACH_COPY, True),
    "mamba_track_seqlens": (torch.int64, BS, P.FOREACH_COPY, POISON),
}
CASES = [
    *(("decode", name, *facts) for name, facts in DECODE_SLOTS.items()),
    *(("prefill", name, *facts) for name, facts in PREFILL_SLOTS.items()),
]


def live_fields(kind, rows, step):
    """A batch in which every slot of the kind has ``rows`` live rows."""
    slots = DECODE_SLOTS if kind == "decode" else PREFILL_SLOTS
    fields = {}
    for name, (dtype, _, _, _) in slots.items():
        shape = (3, rows) if name == "mrope_positions" else (rows,)
        values = torch.arange(torch.Size(shape).numel()).view(shape) + 100 * step
        fields[name] = (values % 2 == 0) if dtype is torch.bool else values.to(dtype)
    return ForwardBatch(batch_size=rows, **fields)


@pytest.mark.parametrize("sizes", [(3, 5, 3), (5, 3), (8, 1, 8)], ids=str)
@pytest.mark.parametrize(
    ("kind", "name", "dtype", "axis", "policy", "tail"),
    CASES,
    ids=[f"{c[0]}-{c[1]}" for c in CASES],
)
def test_every_standard_slot_is_live_rows_then_its_fill(
    kind, name, dtype, axis, policy, tail, sizes
):
    if kind == "decode":
        registry = decode(enable_mamba_track=True, is_encoder_decoder=True)
    else:
        registry = prefill(enable_mamba_track=True)
    slot = registry.get_slot(name)
    assert (slot.dtype, slot.padding_policy) == (dtype, policy)
    axis_name, length = axis
    assert axis_name in (slot.axis if isinstance(slot.axis, tuple) else (slot.axis,))
    assert slot.buffer.shape == ((3, length) if name == "mrope_positions" else (length,))
    for step, raw in enumerate(sizes):
        poison(registry)
        expected = slot.buffer.clone()
        expected[..., raw:8] = tail
        batch = live_fields(kind, raw, step)
        expected[..., :raw] = getattr(batch, name)
        fill(registry, batch, raw, 8, raw, 8)
        assert torch.equal(slot.buffer, expected)
        view = registry.extract_buffer(
            padded_bs=8, padded_num_tokens=8, forward_batch_template=batch
        )
        assert torch.equal(getattr(view, name), expected[..., :8])
        assert getattr(view, name).data_ptr() == slot.buffer.data_ptr()


def test_each_registry_has_its_standard_slots_and_no_others():
    base = {"input_ids", "positions", "out_cache_loc", "mrope_positions"}
    requests = {"req_pool_indices", "seq_lens", "seq_lens_cpu"}
    globals_ = {"global_num_tokens_gpu", "global_num_tokens_for_logprob_gpu"}
    assert set(decode().slot_names) == base | requests
    everything = {
        "enable_mamba_track": True,
        "is_encoder_decoder": True,
        "enable_num_token_non_padded": True,
        "require_gathered_buffer": True,
    }
    extras = {"mamba_track_indices", "mamba_track_mask", "encoder_lens", "num_token_non_padded"}
    assert set(decode(**everything).slot_names) == base | requests | extras | globals_
    without = decode(**everything, register_global_num_tokens=False)
    assert set(without.slot_names) == base | requests | extras
    eager = build_eager_registry(**SIZES, cache_loc_dtype=torch.int64, **everything)
    assert set(eager.slot_names) == base | requests | extras
    assert eager.get_slot("seq_lens").pad_value == 0
    assert set(prefill().slot_names) == base
    embeds = {"hidden_size": 4, "embed_dtype": torch.float32}
    assert set(prefill(is_multimodal=True, **embeds).slot_names) == base | {"input_embeds"}
    assert set(prefill(register_input_embeds=True, **embeds).slot_names) == base | {"input_embeds"}
    off = prefill(is_multimodal=True, register_input_embeds=False)
    assert set(off.slot_names) == base


def test_pooled_by_default():
    assert {fact.owner for fact in decode().slot_facts()} == {"pool"}
    assert {fact.owner for fact in decode(share_pool=False).slot_facts()} == {"registry"}


def test_lengths_on_the_host_stay_on_the_host():
    assert decode(device="meta", share_pool=False).get_slot("seq_lens_cpu").buffer.is_cpu


def test_encoder_lens_start_at_their_fill_value():
    registry = decode(is_encoder_decoder=True, encoder_len_fill_value=4)
    assert registry.get_slot("encoder_lens").buffer.tolist() == [4] * MAX_BS


def test_text_between_images_has_no_mrope_positions():
    registry = decode()
    for step, has_image in enumerate([True, False, True]):
        batch = live_fields("decode", 3, step)
        if not has_image:
            batch.mrope_positions = None
        fill(registry, batch, 3, 4, 3, 4)
        view = registry.extract_buffer(
            padded_bs=4, padded_num_tokens=4, forward_batch_template=batch
        )
        if has_image:
            assert torch.equal(view.mrope_positions[:, :3], batch.mrope_positions)
            assert view.mrope_positions[:, 3].tolist() == [0, 0, 0]
        else:
            assert view.mrope_positions is None
        assert torch.equal(view.positions[:3], batch.positions)


# --- live-token counts -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "ranks", "live", "bucket", "expected"),
    [
        (0, 2, 1018, 1024, 512),
        (1, 2, 1018, 1024, 506),
        (0, 1, 1018, 1024, 1018),
        (3, 4, 600, 1024, 0),
        (2, 4, 600, 1024, 88),
        (1, 2, 1018, 1018, 509),
    ],
)
@pytest.mark.parametrize("build", [build_decode_registry, build_prefill_registry])
def test_the_live_count_is_sharded_over_the_bucket(build, rank, ranks, live, bucket, expected):
    options = {"seq_len_fill_value": 1} if build is build_decode_registry else {}
    registry = build(
        device="cpu",
        max_bs=1024,
        max_num_token=1024,
        cache_loc_dtype=torch.int64,
        enable_num_token_non_padded=True,
        require_gathered_buffer=True,
        attn_tp_size=ranks,
        attn_tp_rank=rank,
        **options,
    )
    misleading = torch.tensor([live // ranks], dtype=torch.int32)  # split at the raw length
    batch = ForwardBatch(num_token_non_padded=misleading, num_token_non_padded_cpu=live)
    for _ in range(2):
        fill(registry, batch, 1, 1, live, bucket)
        view = registry.extract_buffer(
            padded_bs=1, padded_num_tokens=bucket, forward_batch_template=batch
        )
        assert view.num_token_non_padded.tolist() == [expected]
        assert view.num_token_non_padded.dtype is torch.int32
    uncounted = ForwardBatch(num_token_non_padded=misleading)  # all raw tokens are live
    fill(registry, uncounted, 1, 1, live, bucket)
    assert registry.get_slot("num_token_non_padded").buffer.tolist() == [expected]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"num_token_non_padded": torch.tensor([4], dtype=torch.int32)}, 4),
        ({"num_token_non_padded": torch.tensor(4, dtype=torch.int32)}, 4),
        ({"num_token_non_padded_cpu": 4}, 4),
        ({}, 5),
    ],
    ids=["vector", "scalar", "host", "raw"],
)
def test_the_live_count_is_plain_without_a_gathered_buffer(fields, expected):
    registry = decode(enable_num_token_non_padded=True)
    slot = registry.get_slot("num_token_non_padded")
    for step in range(2):
        slot.buffer.fill_(POISON - step)
        fill(registry, ForwardBatch(**fields), 5, 8, 5, 8)
        assert slot.buffer.tolist() == [expected]


def test_a_live_count_that_would_be_cut_is_refused():
    registry = decode(enable_num_token_non_padded=True)
    with pytest.raises(SlotMismatchError, match="num_token_non_padded"):
        fill(registry, ForwardBatch(num_token_non_padded=torch.tensor(4)), 5, 8, 5, 8)


@pytest.mark.parametrize(("gathers", "length"), [(False, 1), (True, 4)])
def test_global_token_counts_are_the_buckets(gathers, length):
    registry = decode(require_gathered_buffer=True, require_mlp_tp_gather=gathers, dp_size=4)
    for padded in (8, 16):
        batch = ForwardBatch()
        fill(registry, batch, 3, 8, 3, padded)
        view = registry.extract_buffer(
            padded_bs=8, padded_num_tokens=padded, forward_batch_template=batch
        )
        assert view.global_num_tokens_gpu.tolist() == [padded] * length
        assert view.global_num_tokens_for_logprob_gpu.tolist() == [padded] * length


def test_eager_carries_the_batchs_own_global_counts():
    registry = build_eager_registry(
        **SIZES, cache_loc_dtype=torch.int64, require_gathered_buffer=True
    )
    counts = torch.tensor([7])
    view = registry.extract_buffer(
        padded_bs=3,
        padded_num_tokens=3,
        forward_batch_template=ForwardBatch(global_num_tokens_gpu=counts),
    )
    assert view.global_num_tokens_gpu is counts


# --- input_embeds ----------------------------------------------------------------------------


def test_input_embeds_are_reset_and_never_copied():
    registry = prefill(is_multimodal=True, hidden_size=4, embed_dtype=torch.bfloat16)
    slot = registry.get_slot("input_embeds")
    assert (slot.buffer.shape, slot.buffer.dtype) == ((MAX_TOKENS, 4), torch.bfloat16)
    slot.buffer.fill_(5)
    batch = ForwardBatch(input_embeds=torch.ones(3, 4))
    fill(registry, batch, 1, 1, 3, 8)
    assert slot.buffer[:3].eq(5).all()
    assert slot.buffer[3:8].eq(0).all()
    assert slot.buffer[8:].eq(5).all()
    view = registry.extract_buffer(padded_bs=1, padded_num_tokens=8, forward_batch_template=batch)
    assert view.input_embeds.data_ptr() == slot.buffer.data_ptr()


def test_input_embeds_without_a_slot_are_the_batchs_own():
    registry = prefill()
    batch = ForwardBatch(input_embeds=torch.ones(3, 4))
    view = registry.extract_buffer(padded_bs=1, padded_num_tokens=8, forward_batch_template=batch)
    assert view.input_embeds is batch.input_embeds


def test_input_embeds_need_their_size_and_dtype():
    for options in ({}, {"hidden_size": 4}, {"embed_dtype": torch.float32}):
        with pytest.raises(SlotDefinitionError, match="hidden_size"):
            prefill(is_multimodal=True, **options)


# --- adopting a source -----------------------------------------------------------------------


def make_source(**extra):
    long = torch.int64
    return SimpleNamespace(
        input_ids=torch.zeros(MAX_TOKENS, dtype=long),
        positions=torch.zeros(MAX_TOKENS, dtype=long),
        out_cache_loc=torch.zeros(MAX_TOKENS, dtype=torch.int32),
        req_pool_indices=torch.zeros(MAX_BS, dtype=long),
        seq_lens=torch.zeros(MAX_BS, dtype=long),
        seq_lens_cpu=torch.zeros(MAX_BS, dtype=long),
        mrope_positions=torch.zeros(3, MAX_TOKENS, dtype=long),
        **extra,
    )


def test_a_sources_tensors_become_the_buffers():
    source = make_source()
    registry = decode(source=source)
    for name in registry.slot_names:
        assert registry.get_slot(name).buffer is getattr(source, name)
    fill(registry, live_fields("decode", 3, 0), 3, 4, 3, 4)
    assert source.seq_lens[:4].tolist() == [0, 1, 2, 3]
    assert {fact.owner for fact in registry.slot_facts()} == {"bound"}


def test_one_error_names_everything_a_source_lacks():
    source = make_source()
    del source.positions
    source.seq_lens = None
    with pytest.raises(SlotNotFoundError, match=r"\['positions', 'seq_lens'\]"):
        decode(source=source)
    source.positions = torch.zeros(MAX_TOKENS, dtype=torch.int64)
    source.seq_lens = torch.zeros(MAX_BS, dtype=torch.int64)
    decode(source=source)


def test_a_source_with_other_dtypes_or_sizes_is_refused():
    with pytest.raises(SlotMismatchError, match=r"'out_cache_loc' is torch\.int64"):
        decode(source=make_source(), cache_loc_dtype=torch.int64)
    with pytest.raises(SlotDefinitionError, match="'input_ids' needs a buffer of at least"):
        decode(source=make_source(), max_num_token=MAX_TOKENS + 1)


def test_request_ids_are_head_copies_when_the_source_has_them():
    source = make_source(rids_int=torch.zeros(MAX_BS, dtype=torch.int32))
    registry = decode(source=source)
    assert registry.has_slot("rids_int")
    assert not registry.has_slot("bootstrap_room_ids_int")
    source.rids_int.fill_(POISON)
    batch = live_fields("decode", 3, 0)
    batch.rids_int = torch.tensor([1, 2, 3], dtype=torch.int32)
    fill(registry, batch, 3, 5, 3, 5)
    assert source.rids_int.tolist() == [1, 2, 3] + [POISON] * 5


@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize("by", ["argument", "batch"])
@pytest.mark.parametrize("holder", [PPProxyTensors, dict])
def test_proxy_tensors_are_dotted_slots_of_the_source(kind, by, holder):
    hidden = torch.full((MAX_TOKENS, 2), float(POISON))
    source = make_source(pp_proxy_tensors=PPProxyTensors({"hidden_states": hidden}))
    if kind == "decode":
        registry, tail = decode(source=source), POISON
    else:
        source.out_cache_loc = source.out_cache_loc.long()
        registry, tail = prefill(source=source), 0
    assert registry.get_slot("pp_proxy_tensors.hidden_states").buffer is hidden
    live = torch.randn(3, 2)
    proxies = holder({"hidden_states": live})
    batch = ForwardBatch(pp_proxy_tensors=proxies if by == "batch" else None)
    passed = {"pp_proxy_tensors": proxies} if by == "argument" else {}
    for padded in (3, 5):
        hidden.fill_(POISON)
        fill(registry, batch, 3, padded, 3, padded, **passed)
        assert torch.equal(hidden[:3], live)
        assert hidden[3:padded].eq(tail).all()
        assert hidden[padded:].eq(POISON).all()
    view = registry.extract_buffer(padded_bs=5, padded_num_tokens=5, forward_batch_template=batch)
    assert view.pp_proxy_tensors is batch.pp_proxy_tensors


def test_a_proxy_tensor_that_is_missing_is_an_error_and_no_proxies_are_not():
    hidden = torch.full((MAX_TOKENS, 2), 1.0)
    registry = decode(source=make_source(pp_proxy_tensors={"hidden_states": hidden}))
    fill(registry, ForwardBatch(), 3, 4, 3, 4)
    assert hidden.eq(1).all()
    with pytest.raises(SlotNotFoundError, match="'hidden_states'"):
        fill(registry, ForwardBatch(pp_proxy_tensors={"residual": hidden}), 3, 4, 3, 4)


def test_proxies_with_a_row_per_request_follow_the_requests():
    hidden = torch.zeros(MAX_BS, 2)
    registry = decode(source=make_source(pp_proxy_tensors={"hidden_states": hidden}))
    slot = registry.get_slot("pp_proxy_tensors.hidden_states")
    assert slot.slice_for(5, 10).shape == (5, 2)


def test_ngram_fields_are_dotted_slots_of_the_source():
    table = torch.arange(20).view(10, 2)
    starts = torch.full((MAX_BS,), POISON)
    info = SimpleNamespace(token_table=table, column_starts=starts, width=3)
    registry = decode(source=make_source(ngram_embedding_info=info))
    assert registry.get_slot("ngram_embedding_info.token_table").buffer is table
    assert not registry.has_slot("ngram_embedding_info.width")
    live = SimpleNamespace(token_table=table, column_starts=torch.tensor([4, 5, 6]))
    before = table.clone()
    fill(registry, ForwardBatch(ngram_embedding_info=live), 3, 5, 3, 5)
    assert starts.tolist() == [4, 5, 6, 0, 0] + [POISON] * 3
    assert torch.equal(table, before)
    fill(registry, ForwardBatch(), 2, 5, 2, 5)  # no info: only the tail is reset
    assert starts.tolist() == [4, 5, 0, 0, 0] + [POISON] * 3


def test_a_registry_of_standard_slots_takes_more():
    registry = decode()
    registry.register_slot(GraphSlot("temperature", lambda bs, t: (bs,), torch.float32, axis="bs"))
    batch = live_fields("decode", 2, 0)
    batch.temperature = torch.tensor([0.5, 1.0])
    fill(registry, batch, 2, 4, 2, 4)
    assert registry.get_slot("temperature").buffer[:2].tolist() == [0.5, 1.0]
