#!/usr/bin/env bash
# Everything that only a CUDA device can show, in at most 8 minutes: the tests marked cuda, then
# benchmarks/gpu_decode. Runs from a checkout: torch, triton and pytest are enough, nothing is
# installed. The JSON of the benchmark is written to OUT (benchmarks/results).
#
#     scripts/gpu_check.sh [--dry-run] [OUT]
#
# --dry-run, for machines without a device: the tests are collected only, the benchmark runs tiny on
# the CPU. PYTHON chooses the interpreter. Exits with 1 if a part failed; later parts run all the
# same.
set -uo pipefail
out=
dry_run=
for argument in "$@"; do
  case $argument in
    --dry-run) dry_run=1 ;;
    -*) echo "usage: scripts/gpu_check.sh [--dry-run] [OUT]" >&2; exit 2 ;;
    *) out=$(realpath -m -- "$argument") ;;
  esac
done
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3}
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
failed=()

part() { # part NAME SECONDS COMMAND...: run it, within its time, and remember whether it failed
  local name=$1 seconds=$2 code
  shift 2
  echo "== $name (at most $seconds s)"
  timeout --kill-after=10 "$seconds" "$@"
  code=$?
  if [ "$code" -eq 0 ]; then return; fi
  failed+=("$name (exit code $code)")
}

echo "== device and versions"
command -v nvidia-smi > /dev/null && nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
part versions 60 "$python" - << 'END'
import platform

import torch

try:
    import triton
except ModuleNotFoundError:
    triton = None
device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
print(f"{device}; torch {torch.__version__}, CUDA {torch.version.cuda}, "
      f"triton {getattr(triton, '__version__', None)}, Python {platform.python_version()}")
END

# Named one by one, so that no other file is imported, which may need packages that are not here.
# Where a directory's conftest brings the mark, any test file of the directory may use it.
mapfile -t files < <("$python" - << 'END'
import ast
import importlib.util
import re
import sys
from pathlib import Path

marked = [path for path in sorted(Path("tests").rglob("*.py"))
          if re.search(r"pytest\.mark\.cuda|needs_cuda", path.read_text())]
files = {path for path in marked if path.name.startswith("test_")}
for path in marked:
    if path.name == "conftest.py":
        files.update(path.parent.glob("test_*.py"))
for path in sorted(files):
    imports = [node for node in ast.parse(path.read_text()).body
               if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in imports if isinstance(node, ast.ImportFrom)}
    packages = {name.split(".")[0] for name in names}
    missing = sorted(name for name in packages if importlib.util.find_spec(name) is None)
    if missing:
        print(f"left out: {path} imports {', '.join(missing)}, not installed", file=sys.stderr)
    else:
        print(path)
END
)
if [ "${#files[@]}" -eq 0 ]; then
  echo "no test file holds tests marked cuda" >&2
  exit 1
fi
# Warnings are errors in the tests, and without NumPy torch warns when it is imported.
tests=("$python" -m pytest -m cuda -q -p no:cacheprovider --continue-on-collection-errors)
tests+=(-W "ignore:Failed to initialize NumPy:UserWarning" "${files[@]}")
if [ -n "$dry_run" ]; then
  part "tests, collected" 120 "${tests[@]}" --collect-only -q
  part benchmark 120 "$python" -m benchmarks.gpu_decode --dry-run ${out:+--out "$out"}
else
  part tests 170 "${tests[@]}"
  part benchmark 280 "$python" -m benchmarks.gpu_decode --seconds 230 --out "${out:-benchmarks/results}"
fi

if [ "${#failed[@]}" -ne 0 ]; then
  printf '== FAILED: %s\n' "${failed[@]}"
  exit 1
fi
echo "== all parts passed"
