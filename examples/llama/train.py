"""Train the example's weights, once, on a CPU, in about half an hour on two cores.

    python examples/llama/train.py

The text is the King James Version as Debian packages it (its copyright has expired). The text is
not part of this repository; install it first:

    apt-get install bible-kjv bible-kjv-text

Stop it at any time: the file is written every few hundred steps.
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.llama.model import WEIGHTS, Llama, LlamaConfig, load_model, save_weights
from examples.llama.tokenizer import encode

VERSE = re.compile(r"^(?P<book>\d?[A-Za-z]+)(?P<chapter>\d+):(?P<verse>\d+) (?P<text>.*)$")
EVAL_WINDOWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Everything the result depends on; written into the weights' metadata."""

    steps: int
    batch_size: int
    seq_len: int
    peak_lr: float
    weight_decay: float = 0.1
    warmup_steps: int = 100
    bf16: bool = True  # autocast; twice as fast where the CPU has bfloat16 dot products
    seed: int = 0


def read_text() -> str:
    """Return the text, one verse a line behind its reference, from Debian's ``bible`` program."""
    command = ["bible", "-f", "-l", "100000", "Gen1:1-Rev22:21"]
    try:
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError as error:
        raise SystemExit(
            "the program `bible`, which prints the training text, is not installed; on Debian or "
            "Ubuntu: apt-get install bible-kjv bible-kjv-text"
        ) from error
    return done.stdout


def split_chapters(text: str) -> list[str]:
    """Return the chapters in order, one verse a line, without references."""
    chapters: dict[tuple[str, str], list[str]] = {}
    for line in text.splitlines():
        match = VERSE.match(line)
        if match is None:
            raise ValueError(f"expected 'Book1:2 text' but the text holds the line {line!r}")
        chapters.setdefault((match["book"], match["chapter"]), []).append(match["text"])
    return ["\n".join(verses) + "\n" for verses in chapters.values()]


def to_ids(chapters: list[str]) -> Tensor:
    return torch.tensor([i for chapter in chapters for i in encode(chapter)], dtype=torch.uint8)


def windows(ids: Tensor, starts: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, each [len(starts), seq_len] int64."""
    span = ids[starts[:, None] + torch.arange(seq_len + 1)].long()
    return span[:, :-1], span[:, 1:]


def learning_rate(step: int, config: TrainConfig) -> float:
    """Linear warm-up, then a cosine down to a twentieth of the peak."""
    if step < config.warmup_steps:
        return config.peak_lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.peak_lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def loss_of(model: Llama, inputs: Tensor, targets: Tensor, *, bf16: bool) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        logits = model.forward_dense(inputs)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate(model: Llama, ids: Tensor, config: TrainConfig) -> float:
    """Return nats per byte on evenly spaced windows of the held-out chapters, in float32."""
    starts = torch.linspace(0, ids.numel() - config.seq_len - 1, EVAL_WINDOWS).long()
    losses = [
        loss_of(model, *windows(ids, part, config.seq_len), bf16=False) for part in starts.split(16)
    ]
    return torch.stack(losses).mean().item()


def build_optimizer(model: Llama, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW that decays the matrices and leaves the norms' gains alone."""
    decay = [p for p in model.parameters() if p.dim() >= 2]
    no_decay = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW(
        [
            {"params": decay, "weight_decay": config.weight_decay},
            {"params": no_decay, "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        fused=True,
    )


def train(model: Llama, config: TrainConfig, out: Path, *, save_every: int) -> None:
    """Train ``model`` and write ``out`` every ``save_every`` steps and at the end."""
    chapters = split_chapters(read_text())
    held_out = [c for i, c in enumerate(chapters) if i % 25 == 12]
    train_ids = to_ids([c for i, c in enumerate(chapters) if i % 25 != 12])
    val_ids = to_ids(held_out)
    print(f"{train_ids.numel():,} bytes to train on, {val_ids.numel():,} held out", flush=True)

    optimizer = build_optimizer(model, config)
    generator = torch.Generator().manual_seed(config.seed)
    began, running = time.perf_counter(), 0.0
    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        limit = train_ids.numel() - config.seq_len
        starts = torch.randint(limit, (config.batch_size,), generator=generator)
        loss = loss_of(model, *windows(train_ids, starts, config.seq_len), bf16=config.bf16)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

        running = loss.item() if step == 0 else 0.98 * running + 0.02 * loss.item()
        if (step + 1) % 50 == 0:
            seconds = time.perf_counter() - began
            bytes_per_s = (step + 1) * config.batch_size * config.seq_len / seconds
            print(
                f"step {step + 1:5d}  train loss {running:.4f}  {bytes_per_s:,.0f} bytes/s  "
                f"{seconds:.0f} s",
                flush=True,
            )
        if (step + 1) % save_every == 0 or step + 1 == config.steps:
            val_loss = evaluate(model, val_ids, config)
            print(f"step {step + 1:5d}  val loss {val_loss:.4f} nats per byte", flush=True)
            notes = {
                "data": "King James Version, Debian package bible-kjv-text (public domain text)",
                "license": "Apache-2.0",
                "trained": f"{step + 1} steps of {config}",
                "val_loss_nats_per_byte": f"{val_loss:.4f}",
            }
            save_weights(model, out, notes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    parser.add_argument("--init", type=Path, help="weights to start from, with a new optimizer")
    parser.add_argument("--steps", type=int, default=4500)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--peak-lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=250)
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    config = TrainConfig(
        steps=args.steps,
        batch_size=args.batch_size,
        seq_len=args.seq_len,
        peak_lr=args.peak_lr,
        bf16=args.bf16,
        seed=args.seed,
    )
    if args.init is None:
        model = Llama(LlamaConfig())
    else:
        model = load_model(args.init).train().requires_grad_(True)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters; {config}", flush=True)
    train(model, config, args.out, save_every=args.save_every)


if __name__ == "__main__":
    main()
