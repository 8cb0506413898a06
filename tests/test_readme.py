"""The README's code runs as it stands, and its facts agree with the package."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from compile_backend import GraphbufConfig, declaration_of

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_first_example_runs_as_pasted(capsys):
    exec(BLOCKS[0], {})
    printed = capsys.readouterr().out
    assert "batch=8: 3 hits" in printed
    assert "fallbacks: none" in printed


@pytest.mark.inductor
def test_the_serving_example_runs_as_pasted(tmp_path):
    script = tmp_path / "example.py"
    script.write_text(BLOCKS[1])
    run = subprocess.run(
        [sys.executable, str(script)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    printed = run.stdout
    assert "decode 1 torch.Size([1, 100])" in printed
    assert "decode 1  prefill 1  hits 2" in printed
    assert "fallbacks: none" in printed


def test_the_declaration_runs_as_pasted():
    scope = {"__name__": "readme"}
    exec(BLOCKS[2], scope)
    assert set(declaration_of(scope["Step"]).slots) == {"input_ids", "out_cache_loc", "seq_lens"}


def test_every_option_is_listed_with_its_default():
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", README, re.MULTILINE))
    config = GraphbufConfig()
    assert set(rows) >= {option.name for option in dataclasses.fields(GraphbufConfig)}
    for option in dataclasses.fields(GraphbufConfig):
        shown = rows[option.name].strip().strip("`")
        value = getattr(config, option.name)
        expected = {"()": "[]"}.get(repr(value), str(value))
        assert shown == expected, option.name


def test_the_documents_that_it_links_to_exist():
    for target in re.findall(r"\]\(((?!http|#)[^)]+)\)", README):
        assert (ROOT / target).exists(), target


def test_no_placeholder_is_left():
    assert not re.findall(r"\b[A-Z]+_[A-Z_]+\b", re.sub(r"`[^`]*`|```.*?```", "", README))
