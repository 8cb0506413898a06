"""The port of a hand-written runner: same tokens, fewer lines, and mistakes that no longer pass."""

import pytest

from examples.llama.model import load_model
from examples.llama.server import PlainModel
from examples.port_a_runner import (
    MISTAKES,
    PROMPTS,
    HandWrittenRunner,
    PortedRunner,
    count_code_lines,
    serve_prompts,
)


@pytest.fixture(scope="module")
def trained():
    return load_model()


def test_both_runners_give_the_tokens_of_the_model(trained):
    expected = serve_prompts(trained, PlainModel)
    assert len(expected) == len(PROMPTS)
    assert len(set(map(tuple, expected))) == len(PROMPTS)
    assert serve_prompts(trained, HandWrittenRunner) == expected
    assert serve_prompts(trained, PortedRunner) == expected


def test_the_port_is_a_third_of_the_code_at_most():
    assert 3 * count_code_lines(PortedRunner) <= count_code_lines(HandWrittenRunner)


class Counted:
    """A docstring

    of three lines."""

    # a comment

    def value(self) -> list[int]:
        """Another."""
        return [
            1,  # with a comment
        ]


def test_code_lines_are_neither_blank_nor_comments_nor_docstrings():
    assert count_code_lines(Counted) == 5


@pytest.mark.parametrize(
    ("name", "expected", "says"),
    [
        ("a misspelt field", "refused", "seq_lens"),
        ("more rows than the largest graph", "right", "larger than the largest captured size"),
        ("a wrong dtype", "refused", "SlotMismatchError: slot 'positions'"),
        ("a stale row past the live batch", "right", "out of a graph"),
    ],
)
def test_a_mistake_that_passes_by_hand_does_not_pass_here(trained, name, expected, says):
    ((mistake, by_hand),) = [(m, make) for title, m, make in MISTAKES if title == name]
    assert mistake(trained, by_hand).kind == "silently wrong"
    verdict = mistake(trained, PortedRunner)
    assert verdict.kind == expected
    assert says in verdict.detail
