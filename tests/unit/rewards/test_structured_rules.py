"""Fields of JSON, JSON schemas, instructions: values worked out by hand, and the task's own answers."""

import json
from typing import Any

import pytest

from grpo_rl.data.tasks.registry import task_rows
from grpo_rl.rewards.rules.structured_rules import instructions, json_fields, json_schema

GOLD = '{"name": "Ada", "age": 36, "city": "London"}'


@pytest.mark.parametrize(
    ("response", "score", "acc"),
    [
        (GOLD, 1.0, 1.0),
        ('  {"city":"London" , "age":36,"name":"Ada"}\n', 1.0, 1.0),
        ('{"city": "London", "age": 36, "name": " Ada"}', 2 / 3, 0.0),
        # All fields, and other text: 1 - 0.2.
        (f"Here it is: {GOLD}", 0.8, 0.0),
        (f"```json\n{GOLD}\n```", 0.8, 0.0),
        (f"{GOLD} {GOLD}", 0.8, 0.0),
        # Two of three; a number that is text is another value, and so is another case.
        ('{"name": "Ada", "age": "36", "city": "London"}', 2 / 3, 0.0),
        ('{"name": "ada", "age": 36, "city": "London"}', 2 / 3, 0.0),
        ('{"name": "Ada", "age": 36}', 2 / 3, 0.0),
        # Three right ones of four keys.
        ('{"name": "Ada", "age": 36, "city": "London", "country": "UK"}', 3 / 4, 0.0),
        ("{}", 0.0, 0.0),
        ("", 0.0, 0.0),
        ("name: Ada, age: 36, city: London", 0.0, 0.0),
        ('{"name": "Ada", "age": 36, "city": "London"', 0.0, 0.0),
        ('{x {"name": "Ada", "age": 36, "city": "London"}', 0.8, 0.0),
        (f"<think>{{}}</think>{GOLD}", 1.0, 1.0),
        ('["name", "Ada"]', 0.0, 0.0),
        ('{"name": NaN, "age": 36, "city": "London"}', 0.0, 0.0),
        ('{"a": ' * 5000 + "1" + "}" * 5000, 0.0, 0.0),
    ],
)
def test_the_score_is_the_share_of_right_fields_and_less_with_other_text(response: str, score: float, acc: float) -> None:
    for gold in (GOLD, json.loads(GOLD)):
        result = json_fields("", response, gold)
        assert (result["score"], result["acc"]) == (pytest.approx(score), acc)


def test_values_are_compared_as_json_has_them() -> None:
    gold = {"n": 1, "yes": True, "none": None, "list": ["a", {"b": 2.0}]}
    assert json_fields("", json.dumps(gold), gold)["acc"] == 1.0
    assert json_fields("", '{"n": 1.0, "yes": true, "none": null, "list": ["a", {"b": 2}]}', gold)["acc"] == 1.0
    assert json_fields("", '{"n": true, "yes": 1, "none": "null", "list": [{"b": 2}, "a"]}', gold)["score"] == 0.0
    with pytest.raises(ValueError, match="no JSON object"):
        json_fields("", "{}", "[1]")


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0}, "tags": {"type": "array", "items": {"enum": ["a", "b"]}}},
    "required": ["age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("response", "valid", "is_json"),
    [
        ('{"age": 3}', 1, 1),
        ('{"age": 3, "tags": ["a", "b"]}', 1, 1),
        ('{"age": 3, "tags": ["c"]}', 0, 1),
        ('{"age": -1}', 0, 1),
        ('{"age": 3.5}', 0, 1),
        ('{"age": 3, "name": "x"}', 0, 1),
        ('"text"', 0, 1),
        ('Sure: {"age": 3}', 0, 0),
        ("", 0, 0),
        ('{"age": Infinity}', 0, 0),
        ('{"age": ' + "9" * 5000 + "}", 0, 0),
    ],
)
def test_a_response_is_right_if_the_schema_takes_it(response: str, valid: int, is_json: int) -> None:
    as_option = json_schema("", response, None, schema=SCHEMA)
    assert as_option == {"score": valid, "acc": valid, "json": is_json}
    assert json_schema("", response, None, {"json_schema": json.dumps(SCHEMA)}) == as_option
    assert json_schema("", response, SCHEMA) == as_option


def test_a_schema_that_is_none_or_refers_elsewhere_is_an_error_and_nothing_is_fetched() -> None:
    with pytest.raises(ValueError, match="is no JSON schema"):
        json_schema("", "{}", {"type": "nonesuch"})
    with pytest.raises(Exception, match=r"127\.0\.0\.1"):
        json_schema("", "{}", {"$ref": "http://127.0.0.1:9/schema.json"})


@pytest.mark.parametrize("level", ["easy", "hard"])
@pytest.mark.parametrize("split", ["train", "val"])
def test_the_tasks_own_answers_are_right_and_other_rows_answers_are_not(level: str, split: str) -> None:
    rows = task_rows(f"task:json_extraction?level={level}&split={split}&num_rows=200")
    shuffled = task_rows(f"task:json_extraction?level={level}&split={split}&num_rows=200&golds=shuffled")
    others = 0.0
    for row, other in zip(rows, shuffled, strict=True):
        gold, extra = row["reward_model"]["ground_truth"], row["extra_info"]
        assert json_fields("", extra["demonstration"], gold)["score"] == 1.0
        assert json_schema("", gold, None, extra)["score"] == 1.0
        assert other["prompt"] == row["prompt"]
        others += json_fields("", gold, other["reward_model"]["ground_truth"])["acc"]
        said, text = json.loads(gold), row["prompt"][0]["content"]
        values = [said["name"], said["age"], said["city"], *said.get("hobbies", [])]
        assert all(str(value) in text for value in values if value is not None)
    assert others / 200 < 0.02


@pytest.mark.parametrize("task", ["json_extraction?level=easy", "json_extraction?level=hard", "instructions?constraints=1,2"])
def test_row_i_depends_on_the_options_and_i_alone_and_splits_share_no_prompt(task: str) -> None:
    short, long = task_rows(f"task:{task}&num_rows=20"), task_rows(f"task:{task}&num_rows=400")
    assert [short[index] for index in range(20)] == long[:20]
    val = task_rows(f"task:{task}&num_rows=400&split=val")
    prompts = [{row["prompt"][0]["content"] for row in rows[:]} for rows in (long, val)]
    assert not prompts[0] & prompts[1] and min(map(len, prompts)) > 150


@pytest.mark.parametrize(
    ("constraint", "kept", "broken"),
    [
        (["at_most_words", 5], "One two three four five.", "One two three four five six."),
        (["at_least_words", 6], "One two three, four five six", "One two three four five - !"),
        (["lowercase", 1], "all of it is small, 7 too.", "all of it is Small, really."),
        (["uppercase", 1], "ALL OF IT IS LARGE 7.", "ALL OF IT IS NOt LARGE."),
        (["bullets", 2], "- one two three\n\n- four five", "Here: one two\n- three\n- four five"),
        (["bullets", 2], "- one two three\n- four five", "- one two three\n- four\n- five"),
        (["without_word", "the"], "There is nothing other than this", "There is The end of it"),
        (["with_word", "blue"], "The sky is Blue, again and again", "The sky is bluer than it was"),
        (["first_word", "Today"], '"Today" is a good day for it', "It is a good day today"),
        (["no_commas", 1], "One two three four five.", "One two, three four five."),
    ],
)
def test_each_constraint_is_kept_and_broken(constraint: list[Any], kept: str, broken: str) -> None:
    right = ["with_word", kept.replace('"', " ").split()[-1].strip(".!")]
    assert instructions("", kept, json.dumps([constraint])) == {"score": 1.0, "acc": 1.0}
    assert instructions("", kept, [constraint, right]) == {"score": 1.0, "acc": 1.0}
    assert instructions("", kept, [constraint, ["with_word", "zebra"]]) == {"score": 0.5, "acc": 0.0}
    assert instructions("", broken, [constraint]) == {"score": 0.0, "acc": 0.0}


def test_a_response_of_hardly_any_words_keeps_no_constraint() -> None:
    for text in ("", "- ", "ok", "one two three four"):
        assert instructions("", text, [["no_commas", 1], ["at_most_words", 20]])["score"] == 0.0
    with pytest.raises(ValueError, match="no list of constraints"):
        instructions("", "one two three four five", '[["rhymes", 1]]')
