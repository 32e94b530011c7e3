"""Every rule over every hostile response: bounded time, a finite score, no code run."""

import math
import sys
import time
from pathlib import Path

import pytest

from grpo_rl.rewards.math.math_rule import equivalent
from grpo_rl.rewards.registry import REWARDS

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from hostile_responses import CANARY, hostile_responses

RULES = [name for name in REWARDS if name not in ("auto", "code")]
"""Without `auto`, and without two whose ground truths are of another kind: they have hostile texts of their own."""
GOLDS = {
    "countdown": {"numbers": [44, 19, 35], "target": 98},
    "multiple_choice": "B",
    "json_fields": {"name": "Ada", "age": 36},
    "json_schema": {"type": "object", "required": ["name"]},
    "instructions": [["with_word", "zebra"], ["no_commas", 1]],
}
GOLD = "271828"
LONGEST = {"arithmetic_process": 20_000}
"""Characters of the longest text for a rule that says something of each."""


@pytest.fixture(scope="module")
def responses():
    equivalent("x<1", "1>x")  # the first import takes a second
    CANARY.unlink(missing_ok=True)
    return hostile_responses()


def timed(rule, text, gold):
    start = time.process_time()
    result = REWARDS.get(rule)("math", text, gold)
    return result, time.process_time() - start


@pytest.mark.parametrize("rule", RULES)
def test_a_hostile_response_scores_a_finite_number_within_a_second(rule, responses):
    for name, text in responses:
        if len(text) > LONGEST.get(rule, len(text)):
            continue
        result, seconds = timed(rule, text, GOLDS.get(rule, GOLD))
        numbers = [value for key, value in result.items() if key != "steps"] if isinstance(result, dict) else [result]
        assert all(math.isfinite(number) for number in numbers), name
        assert seconds < 1, name
        if isinstance(result, dict):
            assert result.get("acc", 0) == 0, name
    assert not CANARY.exists()


def test_a_hostile_response_to_a_question_for_algebra_scores_0_within_a_second(responses):
    # Only short answers get as far as the gate.
    for name, text in responses:
        if len(text) > 3_000:
            continue
        result, seconds = timed("math", text, r"x < \sqrt{12}")
        assert result["score"] == 0, name
        assert seconds < 1, name
    assert not CANARY.exists()


GROWING = {
    "boxes": r"\boxed{",
    "answers": "<answer>",
    "digits": "7",
    "words": "ab ",
    "dollars": "a $ b ",
    "phrases": "answer is ",
    "marks": "#### ",
    "thoughts": "<think></think>",
    "closed": "1</answer>",
    "lists": "[",
    "objects": '{"a":',
}


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "arithmetic_process"])
def test_the_time_grows_no_faster_than_the_text(rule):
    for name, piece in GROWING.items():
        small, large = (piece * (size // len(piece)) for size in (64_000, 512_000))
        before = min(timed(rule, small, GOLDS.get(rule, GOLD))[1] for _ in range(2))
        after = timed(rule, large, GOLDS.get(rule, GOLD))[1]
        # 8 times the text: quadratic time would be 64 times as long. What takes next to nothing cannot be compared.
        assert after < 32 * before + 0.02, f"{name}: {before:.4f} s, then {after:.4f} s"
