"""The backend from a fresh process: installed without an import, or imported from a checkout."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

USE = """
import torch
{setup}
run = torch.compile(lambda x: x * 2, backend="graphbuf", options={{"compiler": "aot_eager"}})
with torch.inference_mode():
    for n in (5, 3, 5, 5):
        assert run(torch.ones(n)).tolist() == [2.0] * n
from compile_backend import explain
assert explain(run).hits == 2, explain(run)
"""


def run(code, cwd):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        check=False,
        cwd=cwd,
        capture_output=True,
        text=True,
    )


def is_installed():
    """Asked from elsewhere: in a checkout, what is left of a build looks like an installation."""
    code = (
        "import importlib.metadata as metadata\n"
        "print('graphbuf' in metadata.entry_points(group='torch_dynamo_backends').names)"
    )
    return run(code, tempfile.gettempdir()).stdout.strip() == "True"


@pytest.mark.skipif(not is_installed(), reason="the distribution graphbuf is not installed")
def test_the_string_is_enough_where_it_is_installed(tmp_path):
    check = "import sys\nassert 'compile_backend' not in sys.modules"
    result = run(USE.format(setup=check), tmp_path)
    assert result.returncode == 0, result.stderr


@pytest.mark.skipif(not is_installed(), reason="the distribution graphbuf is not installed")
@pytest.mark.parametrize("first", ["import compile_backend", "torch._dynamo.list_backends()"])
def test_the_order_of_imports_does_not_matter_where_it_is_installed(tmp_path, first):
    setup = f"import torch._dynamo\n{first}\nimport compile_backend"
    result = run(USE.format(setup=setup), tmp_path)
    assert result.returncode == 0, result.stderr


def test_a_checkout_needs_one_import():
    hide = (
        "import importlib.metadata as metadata\n"
        "metadata.entry_points = lambda **_: metadata.EntryPoints()\n"
        "import compile_backend"
    )
    result = run(USE.format(setup=hide), ROOT)
    assert result.returncode == 0, result.stderr


def test_the_console_command_tells_versions_and_extras():
    result = subprocess.run(
        [sys.executable, "-m", "compile_backend.cli", "env"],
        check=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert "torch 2." in result.stdout
    assert 'pip install "graphbuf[deepgemm]"' in result.stdout or "sgl-deep-gemm: " in result.stdout


def test_an_unknown_command_exits_with_the_usage():
    result = subprocess.run(
        [sys.executable, "-m", "compile_backend.cli", "capture"],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert "usage: graphbuf" in result.stderr
