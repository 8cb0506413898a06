"""What is allocated is what arrives: the formulas, the refusals, and a scheduler that tries."""

import dataclasses
import itertools
import math
import re
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from compile_backend.errors import SlotMismatchError, SlotOverflowError
from compile_backend.forward_batch import ForwardBatch, ForwardMode
from compile_backend.registry import capacity, prepare_mlp_sync_batch
from compile_backend.runner_config import RunnerConfig

Mode = ForwardMode


def speculative(role, algorithm="EAGLE", draft_tokens=4, steps=3, **options):
    names = {
        "speculative_algorithm": algorithm,
        "speculative_role": role,
        "speculative_num_draft_tokens": draft_tokens,
        "speculative_num_steps": steps,
    }
    return RunnerConfig(**names, **options)


def batch_of(mode, batch_size, num_tokens, **fields):
    tokens = torch.empty(num_tokens, dtype=torch.int64, device="meta")
    lens = torch.empty(batch_size, dtype=torch.int64, device="meta")
    return ForwardBatch(
        forward_mode=mode, batch_size=batch_size, input_ids=tokens, seq_lens=lens, **fields
    )


# Formulas


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({"chunked_prefill_size": 8192}, 8192),
        ({"chunked_prefill_size": 8192, "pp_size": 2}, 8192),
        ({"chunked_prefill_size": 8192, "enable_dynamic_chunking": True}, 8192),
        ({"chunked_prefill_size": 8192, "enable_dynamic_chunking": True, "pp_size": 2}, 16384),
        (
            {
                "chunked_prefill_size": 8192,
                "enable_dynamic_chunking": True,
                "pp_size": 2,
                "max_prefill_tokens": 8192,
            },
            10240,
        ),
        (
            {
                "chunked_prefill_size": 5,
                "enable_dynamic_chunking": True,
                "pp_size": 2,
                "max_prefill_tokens": 1,
            },
            7,
        ),
        ({"chunked_prefill_size": None, "max_total_num_tokens": 777}, 777),
        (
            {
                "chunked_prefill_size": -1,
                "max_total_num_tokens": 777,
                "enable_dynamic_chunking": True,
                "pp_size": 2,
            },
            777,
        ),
    ],
)
def test_the_prefill_ceiling(options, tokens):
    assert capacity.max_prefill_buffer_tokens(RunnerConfig(**options)) == tokens


def test_the_profilers_probe_is_exact_for_a_chunk_that_floats_cannot_hold():
    chunk = 2**60 + 1
    config = RunnerConfig(
        chunked_prefill_size=chunk, pp_size=2, enable_dynamic_chunking=True, max_prefill_tokens=1
    )
    assert capacity.max_prefill_buffer_tokens(config) == math.ceil(Fraction(5, 4) * chunk)


@pytest.mark.parametrize(
    ("config", "width", "max_bs"),
    [
        (RunnerConfig(), 1, 64),
        (RunnerConfig(dllm_block_size=32), 32, 64),
        (speculative("target"), 4, 64),
        (speculative("target", speculative_eagle_topk=8), 4, 64),
        (speculative("target", speculative_adaptive_max_draft_tokens=9), 9, 64),
        (speculative("target", "DFLASH", 16, steps=0), 16, 64),
        (speculative("draft"), 4, 64),
        (speculative("draft", steps=9), 4, 64),
        (speculative("draft", steps=9, speculative_multi_layer_eagle=True), 18, 64),
        (speculative("draft", speculative_eagle_topk=8), 8, 64),
        (speculative("draft", speculative_adaptive_max_draft_tokens=9), 9, 64),
        (speculative("draft", "FROZEN_KV_MTP", speculative_eagle_topk=3), 4, 192),
        (speculative("draft", "FROZEN_KV_MTP"), 4, 64),
        (speculative("target", "FROZEN_KV_MTP", speculative_eagle_topk=3), 4, 64),
    ],
)
def test_rows_and_tokens_per_row(config, width, max_bs):
    assert capacity.num_tokens_per_bs(config) == width
    assert capacity.max_bs(config) == max_bs
    assert capacity.max_decode_tokens(config) == width * max_bs


def test_mlp_sync_aligns_to_attention_tp_and_context_parallelism_together():
    config = RunnerConfig(attn_tp_size=3, attn_cp_size=2, enable_mlp_sync=True)
    assert (capacity.cp_padding_size(config), capacity.mlp_sync_alignment(config)) == (4, 12)
    assert capacity.mlp_sync_align(config, 128) == 132
    assert capacity.mlp_sync_align(config, 125) == 132  # 126, then 128, would not be 3 * n
    assert capacity.mlp_sync_align(config, 132) == 132
    assert capacity.max_bs(config) == 72
    assert capacity.max_num_token(config) == 2052


def test_nothing_is_aligned_without_mlp_sync():
    config = RunnerConfig(attn_tp_size=3, attn_cp_size=2)
    assert capacity.mlp_sync_align(config, 125) == 125
    assert capacity.mlp_sync_padded_tokens(config, [125], same_size=False) == [125]


def test_the_token_capacity_is_that_of_the_wider_of_prefill_and_decode():
    assert capacity.max_num_token(RunnerConfig(chunked_prefill_size=8)) == 64
    assert capacity.max_num_token(RunnerConfig(chunked_prefill_size=65)) == 65
    padded = speculative(
        "target", chunked_prefill_size=8, max_running_requests=5, enable_mlp_sync=True,
        attn_tp_size=4,
    )  # fmt: skip
    assert capacity.max_num_token(padded) == 32  # 8 padded rows of 4, not 20 live tokens


# Capture sizes


def test_default_sizes_include_an_off_stride_maximum():
    config = RunnerConfig(max_running_requests=21, chunked_prefill_size=19)
    assert capacity.decode_capture_sizes(config) == (1, 2, 4, 8, 16, 21)
    assert capacity.prefill_capture_sizes(config) == (1, 2, 4, 8, 16, 19)


def test_sizes_are_aligned_and_listed_sizes_above_capacity_become_it():
    config = RunnerConfig(
        max_running_requests=10,
        chunked_prefill_size=16,
        cudagraph_capture_sizes=(1, 2, 4, 8, 16, 32),
        prefill_capture_sizes=(4, 7),
        enable_mlp_sync=True,
        attn_tp_size=4,
    )
    assert capacity.decode_capture_sizes(config) == (4, 8, 12)
    assert capacity.prefill_capture_sizes(config) == (4, 8)


def test_a_list_below_capacity_stands_as_it_is():
    config = RunnerConfig(cudagraph_capture_sizes=(1, 2), prefill_capture_sizes=(16,))
    assert capacity.decode_capture_sizes(config) == (1, 2)
    assert capacity.prefill_capture_sizes(config) == (16,)


# Refusals


@pytest.mark.parametrize(
    ("config", "mode", "batch_size", "num_tokens", "field"),
    [
        (RunnerConfig(), Mode.DECODE, 65, 65, "batch_size"),
        (RunnerConfig(), Mode.EXTEND, 3, 2049, "input_ids"),
        (RunnerConfig(chunked_prefill_size=8), Mode.DECODE, 10, 65, "input_ids"),
        (RunnerConfig(pp_size=2, enable_dynamic_chunking=True), Mode.EXTEND, 3, 16385, "input_ids"),
        (
            RunnerConfig(chunked_prefill_size=0, max_total_num_tokens=99),
            Mode.MIXED, 2, 100, "input_ids",
        ),
        (
            speculative("draft", "FROZEN_KV_MTP", speculative_eagle_topk=3),
            Mode.DECODE, 193, 193, "batch_size",
        ),
        (speculative("target", chunked_prefill_size=8), Mode.TARGET_VERIFY, 64, 257, "input_ids"),
        (
            speculative(
                "target", chunked_prefill_size=8, speculative_adaptive_max_draft_tokens=6
            ),
            Mode.TARGET_VERIFY, 60, 420, "input_ids",
        ),
        (
            RunnerConfig(dllm_block_size=4, chunked_prefill_size=8),
            Mode.DLLM_EXTEND, 64, 257, "input_ids",
        ),
    ],
)  # fmt: skip
def test_a_batch_above_capacity_is_refused_and_the_advice_works(
    config, mode, batch_size, num_tokens, field
):
    batch = batch_of(mode, batch_size, num_tokens)
    with pytest.raises(SlotOverflowError, match=field) as caught:
        capacity.check_capacity(batch, config)
    message = str(caught.value)
    brought = batch_size if field == "batch_size" else num_tokens
    limits = (capacity.max_bs(config), capacity.max_num_token(config))
    assert f"brings {brought}" in message
    assert f"hold {limits[field != 'batch_size']}" in message
    setting, value = re.search(r"raise (\w+) to at least (\d+)", message).groups()
    capacity.check_capacity(batch, dataclasses.replace(config, **{setting: int(value)}))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"seq_lens_cpu": torch.empty(65)}, "seq_lens_cpu"),
        ({"mrope_positions": torch.empty(3, 2049)}, "mrope_positions"),
        ({"input_embeds": torch.empty(2049, 1)}, "input_embeds"),
        ({"extend_num_tokens": 2049}, "extend_num_tokens"),
        ({"global_num_tokens_cpu": [4, 2049]}, r"global_num_tokens_cpu\[1\]"),
    ],
)
def test_every_sized_field_is_looked_at(fields, named):
    capacity.check_capacity(batch_of(Mode.EXTEND, 64, 2048), RunnerConfig())
    with pytest.raises(SlotOverflowError, match=named):
        capacity.check_capacity(batch_of(Mode.EXTEND, 2, 4, **fields), RunnerConfig())


# MLP sync of the scheduler

GATHER = RunnerConfig(
    dp_size=3, dp_rank=1, attn_tp_size=2, enable_mlp_sync=True, require_mlp_tp_gather=True
)


def test_ranks_that_gather_equal_shares_run_the_largest_aligned_size():
    assert capacity.mlp_sync_padded_tokens(GATHER, [0, 5, 3], same_size=True) == [6, 6, 6]
    assert capacity.mlp_sync_padded_tokens(GATHER, [0, 5, 3], same_size=False) == [0, 6, 4]


def test_a_prepared_batch_knows_every_ranks_size_and_shares_its_tensors():
    batch = ForwardBatch(batch_size=5, input_ids=torch.arange(5), seq_lens=torch.ones(5))
    prepared = prepare_mlp_sync_batch(batch, GATHER, [0, 5, 8])
    assert prepared.global_num_tokens_cpu == [8, 8, 8]
    assert prepared.global_num_tokens_gpu.tolist() == [8, 8, 8]
    assert prepared.num_token_non_padded_cpu == 5
    assert prepared.input_ids is batch.input_ids
    assert batch.global_num_tokens_cpu is None
    apart = prepare_mlp_sync_batch(batch, GATHER, [0, 5, 8], same_size=False)
    assert apart.global_num_tokens_cpu == [0, 6, 8]


def test_a_rank_that_does_not_gather_counts_itself_alone():
    config = RunnerConfig(dp_size=3, dp_rank=1, attn_tp_size=2, enable_mlp_sync=True)
    batch = ForwardBatch(batch_size=5, input_ids=torch.arange(5))
    assert prepare_mlp_sync_batch(batch, config, [5]).global_num_tokens_cpu == [6]
    assert prepare_mlp_sync_batch(batch, RunnerConfig(), [5]) is batch


@pytest.mark.parametrize(
    ("counts", "error", "message"),
    [
        ([5], SlotMismatchError, "one count for each"),
        ([0, 4, 8], SlotMismatchError, "4 for this rank.*5 tokens"),
        ([-1, 5, 8], SlotMismatchError, "rank 0 counts -1"),
        ([0, 5, 2049], SlotOverflowError, "rank 2 brings 2049 tokens but buffers hold 2048"),
    ],
)
def test_counts_that_cannot_be_are_refused(counts, error, message):
    batch = ForwardBatch(batch_size=5, input_ids=torch.arange(5))
    with pytest.raises(error, match=message):
        prepare_mlp_sync_batch(batch, GATHER, counts)


# A scheduler that tries


@st.composite
def configs(draw):
    chunk = draw(st.one_of(st.none(), st.integers(-1, 60)))
    options = {
        "max_running_requests": draw(st.integers(1, 20)),
        "chunked_prefill_size": chunk,
        "max_prefill_tokens": draw(st.integers(1, 90)),
        "max_total_num_tokens": draw(st.integers(1, 200)),
        "enable_dynamic_chunking": draw(st.booleans()),
        "pp_size": draw(st.integers(1, 2)),
        "attn_tp_size": draw(st.integers(1, 4)),
        "attn_cp_size": draw(st.integers(1, 3)),
        "enable_mlp_sync": draw(st.booleans()),
    }
    kind = draw(st.sampled_from(["plain", "dllm", "EAGLE", "DFLASH", "FROZEN_KV_MTP"]))
    if kind == "dllm":
        options["dllm_block_size"] = draw(st.integers(1, 8))
    elif kind != "plain":
        tokens = draw(st.integers(1, 6))
        options |= {
            "speculative_algorithm": kind,
            "speculative_role": draw(st.sampled_from(["target", "draft"])),
            "speculative_num_draft_tokens": tokens,
            "speculative_num_steps": draw(st.integers(1, 6)),
            "speculative_eagle_topk": 1 if kind == "DFLASH" else draw(st.integers(1, 4)),
            "speculative_multi_layer_eagle": kind == "EAGLE" and draw(st.booleans()),
            "speculative_adaptive_max_draft_tokens": draw(
                st.none()
                if options["enable_mlp_sync"]  # the two do not go together
                else st.one_of(st.none(), st.integers(tokens, 9))
            ),
        }
    return RunnerConfig(**options)


class Scheduler:
    """Admits requests and says what each step runs: (mode, rows, tokens), padded for MLP sync."""

    def __init__(self, config):
        self.config = config
        self.chunk = max(config.chunked_prefill_size or 0, 0)
        self.can_size_chunks = (
            config.enable_dynamic_chunking and config.pp_size > 1 and self.chunk > 0
        )
        self.waiting = []  # prompt tokens still to compute, of requests that wait or are half done
        self.running = 0
        self.free = config.max_total_num_tokens  # of the pool, where prompts stay whole
        self.draft_tokens = config.speculative_num_draft_tokens

    def pad(self, size):
        if not self.config.enable_mlp_sync:
            return size
        halves = self.config.attn_cp_size * 2 if self.config.attn_cp_size > 1 else 1
        return next(
            n
            for n in itertools.count(size)
            if n % self.config.attn_tp_size == 0 and n % halves == 0
        )

    def emit(self, mode, rows, width=1):
        return mode, self.pad(rows), self.pad(self.pad(rows) * width)

    def emit_prefill(self, mode, rows, num_tokens):
        return mode, self.pad(rows), self.pad(num_tokens)

    def admit(self, prompt):
        """A request waits; a prompt that the pool could never hold is turned away."""
        if self.chunk or prompt <= self.config.max_total_num_tokens:
            self.waiting.append(prompt)

    def probe(self):
        """The profiler's longest run: one prompt of 1.25 chunks."""
        return self.emit_prefill(Mode.EXTEND, 1, math.ceil(Fraction(5, 4) * self.chunk))

    def prefill(self, wanted=None, beside_decode=False):
        """Prompts up to a chunk (of ``wanted`` tokens where chunks are sized), or whole ones."""
        budget = self.chunk
        if self.can_size_chunks and wanted is not None:
            budget = min(wanted, max(self.chunk, self.config.max_prefill_tokens))
        decoding = self.running if beside_decode else 0
        taken = rows = 0
        while self.waiting and self.running < self.config.max_running_requests:
            if self.chunk:
                room = budget - decoding - taken
                part = min(self.waiting[0], room)
                if part <= 0:
                    break
            else:
                part = self.waiting[0]
                is_over = taken > 0 and taken + part > self.config.max_prefill_tokens
                if part + decoding > self.free or is_over:
                    break
                self.free -= part
            rows, taken = rows + 1, taken + part
            self.waiting[0] -= part
            if self.waiting[0]:
                break
            self.waiting.pop(0)
            self.running += 1
        if rows == 0:
            return None
        mode = Mode.MIXED if decoding else Mode.EXTEND
        return self.emit_prefill(mode, rows + decoding, taken + decoding)

    def finish(self, count):
        self.running -= min(count, self.running)
        if self.running == 0:
            self.free = self.config.max_total_num_tokens

    def decode(self):
        """The batches that one round over the running requests launches."""
        config, rows = self.config, self.running
        if config.dllm_block_size is not None:
            return [self.emit(Mode.DLLM_EXTEND, rows, config.dllm_block_size)]
        if config.speculative_role == "none":
            return [self.emit(Mode.DECODE, rows)]
        if config.speculative_role == "target":
            return [self.emit(Mode.TARGET_VERIFY, rows, self.draft_tokens)]
        if config.speculative_algorithm == "FROZEN_KV_MTP":
            rows *= config.speculative_eagle_topk
        batches = [
            self.emit(Mode.DECODE, rows, config.speculative_eagle_topk),
            self.emit(Mode.DRAFT_EXTEND, rows, self.draft_tokens),
        ]
        if config.speculative_multi_layer_eagle:
            batches.append(self.emit(Mode.DRAFT_EXTEND, rows, 2 * config.speculative_num_steps))
        return batches

    def adapt(self, draft_tokens):
        """Adaptive speculation changes how many tokens are drafted, within its limit."""
        limit = self.config.speculative_adaptive_max_draft_tokens
        if limit is not None:
            self.draft_tokens = min(draft_tokens, limit)


class SchedulerFits(RuleBasedStateMachine):
    """Nothing that the scheduler emits, in any order of events, is larger than its buffers."""

    @initialize(config=configs())
    def start(self, config):
        self.config, self.scheduler = config, Scheduler(config)

    def run(self, emitted):
        if emitted is None:
            return
        mode, rows, num_tokens = emitted
        capacity.check_capacity(batch_of(mode, rows, num_tokens), self.config)
        assert rows <= capacity.max_bs(self.config)
        assert num_tokens <= capacity.max_num_token(self.config)
        if mode in (Mode.EXTEND, Mode.MIXED):
            assert num_tokens <= capacity.prefill_capture_sizes(self.config)[-1]
        else:
            assert rows <= capacity.decode_capture_sizes(self.config)[-1]
            assert num_tokens <= capacity.max_decode_tokens(self.config)
        others = [num_tokens, 0] if self.config.enable_mlp_sync else [num_tokens]
        gather = dataclasses.replace(
            self.config, dp_size=len(others), require_mlp_tp_gather=self.config.enable_mlp_sync
        )
        sizes = capacity.mlp_sync_padded_tokens(gather, others, same_size=True)
        assert sizes == [num_tokens] * len(others)  # what was padded alone is not padded again

    @rule(prompt=st.integers(1, 250))
    def admit(self, prompt):
        self.scheduler.admit(prompt)

    @rule(wanted=st.one_of(st.none(), st.integers(1, 120)), beside_decode=st.booleans())
    def prefill(self, wanted, beside_decode):
        plain = self.config.speculative_role == "none" and self.config.dllm_block_size is None
        self.run(self.scheduler.prefill(wanted, beside_decode and plain))

    @precondition(lambda self: self.scheduler.can_size_chunks)
    @rule()
    def probe(self):
        self.run(self.scheduler.probe())

    @precondition(lambda self: self.scheduler.running)
    @rule()
    def decode(self):
        for emitted in self.scheduler.decode():
            self.run(emitted)

    @rule(draft_tokens=st.integers(1, 12))
    def adapt(self, draft_tokens):
        self.scheduler.adapt(draft_tokens)

    @rule(count=st.integers(1, 20))
    def finish(self, count):
        self.scheduler.finish(count)


SchedulerFits.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
test_no_batch_of_a_scheduler_exceeds_capacity = SchedulerFits.TestCase


@settings(max_examples=200, deadline=None)
@given(configs())
def test_every_capacity_is_reached_by_some_batch(config):
    prefills, rounds = [], []
    scheduler = Scheduler(config)
    scheduler.admit(1000 if scheduler.chunk else config.max_total_num_tokens)
    prefills.append(scheduler.prefill(wanted=1000))
    if scheduler.can_size_chunks:
        prefills += [scheduler.probe(), scheduler.prefill()]

    scheduler = Scheduler(config)
    for _ in range(config.max_running_requests):
        scheduler.admit(1)
        scheduler.free += 1  # a prompt that leaves the pool between two arrivals
        assert scheduler.prefill() is not None
    scheduler.adapt(1000)
    rounds += scheduler.decode()

    assert max(rows for _, rows, _ in rounds) == capacity.max_bs(config)
    assert max(tokens for *_, tokens in rounds) == capacity.max_decode_tokens(config)
    assert max(tokens for *_, tokens in prefills) == capacity.mlp_sync_align(
        config, capacity.max_prefill_buffer_tokens(config)
    )
    assert max(t for *_, t in prefills + rounds) == capacity.max_num_token(config)


@settings(max_examples=200, deadline=None)
@given(
    configs(),
    st.one_of(st.none(), st.sets(st.integers(1, 300), min_size=1).map(sorted)),
)
def test_capture_sizes_increase_are_aligned_and_stay_within_capacity(config, listed):
    config = dataclasses.replace(
        config, cudagraph_capture_sizes=listed, prefill_capture_sizes=listed
    )
    ceiling = capacity.mlp_sync_align(config, capacity.max_prefill_buffer_tokens(config))
    for sizes, largest in (
        (capacity.decode_capture_sizes(config), capacity.max_bs(config)),
        (capacity.prefill_capture_sizes(config), ceiling),
    ):
        assert all(size % capacity.mlp_sync_alignment(config) == 0 for size in sizes)
        assert all(smaller < larger for smaller, larger in itertools.pairwise(sizes))
        assert sizes[-1] <= largest
        if listed is None or listed[-1] >= largest:
            assert sizes[-1] == largest
