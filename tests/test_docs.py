"""The table of rules in docs/runners.md names code and tests that exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "runners.md").read_text()
PLACE = r"`([\w/]+\.py)` `([\w.]+)`"
ROWS = [
    tuple(cell.strip() for cell in line.strip("|").split("|"))
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| rule ")
]


@cache
def defined_in(path: Path) -> frozenset[str]:
    """Functions, classes and ``Class.member`` of a file."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            members = [m.name for m in node.body if isinstance(m, ast.FunctionDef)]
            found.update(f"{node.name}.{member}" for member in members)
    return frozenset(found)


def test_the_page_has_its_table():
    assert len(ROWS) >= 30
    assert all(len(row) == 3 and row[0] for row in ROWS)
    assert len({row[0] for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: re.sub(r"\W+", "-", row[0])[:60])
def test_a_rule_names_code_and_a_test_that_exist(row):
    rule, where, test = row
    (code_file, name), (test_file, test_name) = (
        re.fullmatch(PLACE, cell).groups() for cell in (where, test)
    )
    assert name in defined_in(ROOT / "compile_backend" / code_file), rule
    assert test_name.startswith("test_")
    assert test_name in defined_in(ROOT / "tests" / "runners" / test_file), rule
