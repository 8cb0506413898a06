"""The ``graphbuf`` console command: ``graphbuf env`` says what is installed and what it can do."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import shutil
import sys
from collections.abc import Sequence

import torch

__all__ = ["main"]

# distribution -> (extra that installs it, what it is for)
_OPTIONAL = {
    "depyf": ("depyf", "readable dumps of compiled code"),
    "flashinfer-python": ("cuda", "attention kernels and autotune"),
    "sgl-deep-gemm": ("deepgemm", "FP8 matrix kernels and their warm-up"),
    "safetensors": ("examples", "the example's weights"),
    "triton": ("", "Inductor and fill kernels on a GPU; comes with CUDA builds of torch"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status. ``argv`` defaults to the process's arguments."""
    parser = argparse.ArgumentParser(prog="graphbuf", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("env", help="versions, devices and optional packages")
    parser.parse_args(argv)
    print("\n".join(environment()))
    return 0


def environment() -> list[str]:
    """Lines on versions, devices, the compiler Inductor needs, and optional packages."""
    lines = [
        f"graphbuf {_version('graphbuf') or 'from a checkout, not installed'}",
        f"python {platform.python_version()} on {platform.platform()}",
        f"torch {torch.__version__} (supported: 2.11 to 2.15)",
        f"C++ compiler for Inductor: {_compiler() or 'none found; use compiler=aot_eager'}",
        f"CPU threads {torch.get_num_threads()}; engines on the CPU: host, host_strict",
    ]
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        lines.append(f"CUDA {torch.version.cuda}: {', '.join(names)}")
    else:
        lines.append("CUDA: no device")
    for distribution, (extra, purpose) in _OPTIONAL.items():
        version = _version(distribution)
        remedy = f'; pip install "graphbuf[{extra}]"' if extra else ""
        state = version or f"not installed{remedy}"
        lines.append(f"{distribution}: {state} ({purpose})")
    return lines


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


if __name__ == "__main__":
    sys.exit(main())
