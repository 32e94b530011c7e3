"""Regular expressions of the package give the same on every Python that it runs on."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "grpo_rl"
ONE_CHARACTER = {"LITERAL", "NOT_LITERAL", "ANY", "IN"}


def _text(node):
    """A string as it stands in the source, with a letter for each value that is put into it; None for anything else."""
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "x" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _possessive_groups(pattern):
    """The number of atomic groups and of possessive repeats of more than one character."""
    if not isinstance(pattern, re._parser.SubPattern | list | tuple):
        return 0
    found = 0
    if isinstance(pattern, tuple) and str(pattern[0]) == "POSSESSIVE_REPEAT":
        repeated = list(pattern[1][2])
        found = len(repeated) != 1 or str(repeated[0][0]) not in ONE_CHARACTER
    elif isinstance(pattern, tuple) and str(pattern[0]) == "ATOMIC_GROUP":
        found = 1
    return found + sum(map(_possessive_groups, pattern))


def _of_source(source):
    found = []
    for node in ast.walk(ast.parse(source)):
        text = _text(node)
        try:
            if text is not None and ("+" in text or "(?>" in text) and _possessive_groups(re._parser.parse(text)):
                found.append(text)
        except re.error:  # no pattern
            continue
    return found


@pytest.mark.filterwarnings("ignore")
def test_no_pattern_repeats_a_group_possessively_which_python_before_3_11_5_gets_wrong():
    assert _of_source(r"rf'{y}(?:,a)++', r'(?>b|c)', r'[0-9]++', r'(?:a)?', r'\(*+'") == ["x(?:,a)++", "(?>b|c)", "(?:,a)++"]
    wrong = {str(file.relative_to(PACKAGE)): _of_source(file.read_text()) for file in sorted(PACKAGE.rglob("*.py"))}
    assert {file: patterns for file, patterns in wrong.items() if patterns} == {}
