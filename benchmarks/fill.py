"""What does one step's fill and extract cost, beside the plainest correct loop?

The decode slots of a nine-field batch, five live rows in a bucket of eight. The plain loop narrows,
copies and resets field by field and slices a view of each, as one would write it by hand, and does
no checking. Run: ``python benchmarks/fill.py``.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._timing import compare
from compile_backend.forward_batch import ForwardBatch
from compile_backend.registry.builders import build_decode_registry
from compile_backend.registry.registry import CudaGraphBufferRegistry

RAW, PADDED, MAX_BS = 5, 8, 64
SEQ_LEN_FILL = 1
Step = Callable[[ForwardBatch], ForwardBatch]


def make_batch(num_rows: int, seed: int = 0) -> ForwardBatch:
    """A decode batch with nine filled fields."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randint(1, 1000, shape, generator=generator)

    lengths = numbers(num_rows)
    return ForwardBatch(
        batch_size=num_rows,
        input_ids=numbers(num_rows),
        positions=lengths - 1,
        out_cache_loc=numbers(num_rows),
        req_pool_indices=numbers(num_rows),
        seq_lens=lengths,
        seq_lens_cpu=lengths.clone(),
        mrope_positions=numbers(3, num_rows),
        mamba_track_indices=numbers(num_rows),
        mamba_track_mask=numbers(num_rows) > 500,
    )


def build_registry() -> CudaGraphBufferRegistry:
    """The decode slots of :func:`make_batch`."""
    return build_decode_registry(
        device="cpu",
        max_bs=MAX_BS,
        max_num_token=MAX_BS,
        seq_len_fill_value=SEQ_LEN_FILL,
        cache_loc_dtype=torch.int64,
        enable_mamba_track=True,
        share_pool=False,
    )


def registry_step() -> Step:
    """Fill and extract by the registry."""
    registry = build_registry()

    def step(batch: ForwardBatch) -> ForwardBatch:
        registry.fill_from(
            batch, raw_bs=RAW, padded_bs=PADDED, raw_num_tokens=RAW, padded_num_tokens=PADDED
        )
        return registry.extract_buffer(
            padded_bs=PADDED, padded_num_tokens=PADDED, forward_batch_template=batch
        )

    return step


def new_shape_step() -> Step:
    """The same, when no plan fits: more buckets in turn than plans are kept."""
    registry = build_registry()
    pairs = cycle([(bs, tokens) for bs in range(RAW, MAX_BS) for tokens in range(RAW, MAX_BS)])

    def step(batch: ForwardBatch) -> ForwardBatch:
        bs, tokens = next(pairs)
        registry.fill_from(
            batch, raw_bs=RAW, padded_bs=bs, raw_num_tokens=RAW, padded_num_tokens=tokens
        )
        return registry.extract_buffer(
            padded_bs=bs, padded_num_tokens=tokens, forward_batch_template=batch
        )

    return step


def plain_step() -> Step:
    """Fill and extract by a loop over the fields: (buffer, padded dimension, tail value) each."""
    tails = {"input_ids": None, "seq_lens": SEQ_LEN_FILL, "seq_lens_cpu": SEQ_LEN_FILL}
    buffers = {
        name: (torch.zeros(MAX_BS, dtype=torch.int64), 0, tails.get(name, 0))
        for name in (
            "input_ids",
            "positions",
            "out_cache_loc",
            "req_pool_indices",
            "seq_lens",
            "seq_lens_cpu",
            "mamba_track_indices",
        )
    }
    buffers["mrope_positions"] = (torch.zeros(3, MAX_BS, dtype=torch.int64), 1, 0)
    buffers["mamba_track_mask"] = (torch.zeros(MAX_BS, dtype=torch.bool), 0, 0)

    def step(batch: ForwardBatch) -> ForwardBatch:
        for name, (buffer, dim, tail_value) in buffers.items():
            source = getattr(batch, name)
            if source is None:
                continue
            buffer.narrow(dim, 0, RAW).copy_(source)
            if tail_value is not None and RAW < PADDED:
                buffer.narrow(dim, RAW, PADDED - RAW).fill_(tail_value)
        view = ForwardBatch.__new__(ForwardBatch)  # the cheapest copy there is, as the registry's
        view.__dict__.update(batch.__dict__)
        view.batch_size = PADDED
        for name, (buffer, dim, _) in buffers.items():
            if getattr(batch, name) is not None:
                setattr(view, name, buffer.narrow(dim, 0, PADDED))
        return view

    return step


def check_agreement(step: Step, other: Step) -> None:
    """Both leave the same batch, whatever came before."""
    for seed in range(3):
        batch = make_batch(RAW, seed)
        one, two = step(batch), other(batch)
        for field in fields(ForwardBatch):
            mine, theirs = getattr(one, field.name), getattr(two, field.name)
            if not isinstance(mine, Tensor):
                assert mine == theirs, (field.name, mine, theirs)
            elif field.name == "input_ids":  # its tail is nobody's business
                assert torch.equal(mine[:RAW], theirs[:RAW]), field.name
            else:
                assert torch.equal(mine, theirs), (field.name, mine, theirs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    batch = make_batch(RAW)
    with torch.inference_mode():
        plain, registry, new_shape = plain_step(), registry_step(), new_shape_step()
        check_agreement(plain, registry)
        print(f"fill + extract, 9 slots, {RAW} live rows in a bucket of {PADDED} of {MAX_BS}")
        compare(
            {
                "plain loop": lambda: plain(batch),
                "registry": lambda: registry(batch),
                "registry, every shape new": lambda: new_shape(batch),
            },
            rounds=rounds,
        )


if __name__ == "__main__":
    main()
