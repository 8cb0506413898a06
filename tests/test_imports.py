"""Imports follow the data flow: registry -> engines -> runners, passes below the backend.

Also: importing the package needs no optional package and no device.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "compile_backend"

BASE = {"errors", "config", "compat"}
# What each part may import, of the other parts. The root module `compile_backend/x.py` is part `x`.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "config": {"errors"},
    "compat": set(),
    "cli": set(),
    "forward_batch": {"errors"},
    "runner_config": {"config", "errors", "forward_batch"},
    "registry": {"errors", "config", "forward_batch", "runner_config"},
    "engines": {"errors", "config"},
    "extras": {"errors"},
    "attention": {"errors", "engines", "extras", "forward_batch"},
    "declared": {"errors", "registry"},
    "compilers": BASE,
    "passes": BASE | {"registry"},
    "owners": {"compat"},
    "output_plan": {"passes"},
    "slots": {"errors", "passes", "registry"},
    "call_plan": {"errors", "output_plan", "passes", "registry"},
    "program": {"errors", "engines", "output_plan", "passes"},
    "padding_check": {"errors", "slots"},
    "dynamic_batch": {"compat", "passes"},
    "padding_plan": {"config", "engines", "errors", "passes"},
    "pieces": BASE | {"compilers", "engines", "passes"},
    "compiled_graph": BASE | {"engines", "output_plan", "padding_plan", "passes", "pieces"},
    "graph_files": {"passes"},
    "step": set(),
    "served_graph": BASE
    | {
        "call_plan",
        "engines",
        "output_plan",
        "padding_check",
        "passes",
        "program",
        "slots",
        "step",
    },
    "runners": BASE
    | {"attention", "compiled_graph", "declared", "engines", "forward_batch", "graph_files"}
    | {"output_plan"}
    | {"extras", "passes", "program", "registry", "runner_config", "step"},
    "inspect": BASE | {"graph_files", "owners", "passes", "served_graph"},
}
PARTS = sorted({path.relative_to(ROOT).parts[0].removesuffix(".py") for path in ROOT.rglob("*.py")})
UNCHECKED = {"__init__", "backend"}  # the public names, and the table of contents


def imported_parts(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
            if node.module == "compile_backend":
                names = [f"compile_backend.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {n.split(".")[1] for n in names if n.startswith("compile_backend.")}
    return found


@pytest.mark.parametrize("part", [p for p in PARTS if p not in UNCHECKED])
def test_a_part_imports_only_what_lies_before_it(part):
    assert part in ALLOWED, f"say in ALLOWED what {part} may import"
    files = [ROOT / f"{part}.py"] if (ROOT / f"{part}.py").exists() else (ROOT / part).rglob("*.py")
    for path in files:
        foreign = imported_parts(path) - {part} - ALLOWED[part]
        assert not foreign, f"{path.relative_to(ROOT)} imports {sorted(foreign)}"


def test_importing_the_package_needs_no_optional_package():
    code = (
        "import sys\n"
        "for name in ('depyf', 'flashinfer', 'deep_gemm', 'triton', 'transformers', 'safetensors',"
        " 'tqdm', 'numpy'):\n"
        "    sys.modules[name] = None\n"
        "import compile_backend\n"
        "assert compile_backend.GraphbufConfig.check().engine == 'auto'\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=ROOT.parent)
