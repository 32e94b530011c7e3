"""The judge's prompt and the parsers of its answer, with answers that try to be something else."""

from __future__ import annotations

import contextlib
import time

import pytest

from grpo_rl.errors import ConfigError
from grpo_rl.rewards.models.judge import json_score, load_template, marked_score, parser_for, question
from grpo_rl.types import Prompt, Rollout


def rollout(text="an answer", ground_truth="4", messages=({"role": "user", "content": "2+2?"},)) -> Rollout:
    return Rollout(
        Prompt("p", (1,), "raw", "test", ground_truth, messages=messages), 0, (1,), (0.0,), "stop", ((0, 1),), text=text
    )


def test_a_template_is_filled_once_and_braces_of_a_response_stay_text():
    template = '{{"a": {other}}} {prompt}|{response}|{ground_truth}|{response}'
    filled = question(template, rollout("{ground_truth}{prompt}{}\\1"))
    assert filled == '{{"a": {other}}} 2+2?|{ground_truth}{prompt}{}\\1|4|{ground_truth}{prompt}{}\\1'


def test_a_template_is_built_in_a_file_or_the_text_itself(tmp_path):
    (tmp_path / "ask.txt").write_text("rate {response}")
    assert load_template(str(tmp_path / "ask.txt")) == load_template("rate {response}") == "rate {response}"
    assert "[answer to judge]\nx\n" in question(load_template(None), rollout("x"))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_template(str(tmp_path / "none.txt"))


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("score: 7", 7.0),
        ("Reasons.\n**Score: 8.5/10**", 8.5),
        ("score: 3\nNo, on reflection:\nSCORE = -2", -2.0),
        ("The score is hard to tell. score: 4.", 4.0),
        ("Score: **6**", 6.0),
        ("score: 5, and the score of others: unknown", 5.0),
        ("score: 1e5", None),
        ("score: 1,000", None),
        ("score: ٤", None),
        ("7", None),
        ("", None),
        ("score: " + "9" * 100, None),
    ],
)
def test_the_last_marked_score_is_read(answer, score):
    if score is None:
        with pytest.raises(ValueError, match="no `score: x`"):
            marked_score(answer)
    else:
        assert marked_score(answer) == score


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ('{"score": 7}', 7.0),
        ('```json\n{"why": "{odd", "score": "6.5"}\n```', 6.5),
        ('{"score": 1} then {"score": 2}', 2.0),
        ('{"score": 3} and {"other": 4}', 3.0),
    ],
)
def test_a_number_is_read_from_the_last_object_that_has_the_key(answer, score):
    assert json_score(answer, "score") == score


@pytest.mark.parametrize(
    "answer",
    ['{"score": true}', '{"score": null}', '{"score": [1]}', '{"scor": 1}', "{" * 50_000, '{"score": ' + "9" * 5000 + "}"],
)
def test_json_without_a_number_is_said_so_and_quickly(answer):
    started = time.process_time()
    with pytest.raises(ValueError, match="score"):
        json_score(answer, "score")
    assert time.process_time() - started < 5.0


@pytest.mark.parametrize("unit", ["score", "score: ", "1.", "{", '{"score":', "-", "score**", "["])
def test_every_parser_takes_linear_time(unit):
    for parse in (marked_score, lambda text: json_score(text, "score")):
        started = time.process_time()
        with contextlib.suppress(ValueError):
            parse(unit * 20_000)
        assert time.process_time() - started < 5.0


def test_a_parser_is_a_name_a_key_or_a_function(tmp_path):
    (tmp_path / "mine.py").write_text("def read(text):\n    return float(len(text))\n")
    assert parser_for("score")("score: 2") == 2.0
    assert parser_for("json:rating")('{"rating": 3}') == 3.0
    assert parser_for(f"{tmp_path / 'mine.py'}:read")("four") == 4.0
    with pytest.raises(ConfigError, match="no function 'other'"):
        parser_for(f"{tmp_path / 'mine.py'}:other")
