"""Short texts about a person, to be answered by a JSON object of what they say."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Literal

from grpo_rl.config.schema.kinds import AnySeed, Count
from grpo_rl.data.tasks.made_rows import LazyRows, Row, Split, row_of
from grpo_rl.run_files import read_yaml

Level = Literal["easy", "hard"]

_WORDS = read_yaml(Path(__file__).with_suffix(".yaml"))
CLOSINGS = ("", "Thanks!", "Best regards", "See you soon.", "Sent from my phone")
PROMPTS: dict[Level, str] = {
    "easy": "Return only a JSON object with the keys name, age and city for this text: {text}",
    "hard": (
        "Return only a JSON object with the keys name, age, city and hobbies (a list) for this e-mail. "
        "What it does not say is null, or an empty list.\n\n{text}"
    ),
}
_TEXT = {"type": "string"}
FIELDS: dict[Level, dict[str, Any]] = {
    "easy": {"name": _TEXT, "age": {"type": "integer"}, "city": _TEXT},
    "hard": {
        "name": _TEXT,
        "age": {"type": ["integer", "null"]},
        "city": {"type": ["string", "null"]},
        "hobbies": {"type": "array", "items": _TEXT},
    },
}
SCHEMAS = {
    level: {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    for level, fields in FIELDS.items()
}


def json_extraction(
    *,
    num_rows: Count = 512,
    level: Level = "easy",
    split: Split = "train",
    golds: Literal["right", "shuffled"] = "right",
    seed: AnySeed = 0,
) -> LazyRows:
    """Rows in verl's format; the ground truth is the object as JSON text, which is `extra_info.demonstration` too.

    The splits share no name, no city, no hobby and no phrasing. `level=hard` is an e-mail with a list, in which age and city may be
    missing. `golds=shuffled` gives each row the object of another one: a control from which nothing can be learnt.
    """

    def make(index: int) -> Row:
        text, fields = _drawn(level, split, f"json_extraction:{level}:{split}:{seed}:{index}")
        if golds == "shuffled":
            _, fields = _drawn(level, split, f"json_extraction:{level}:{split}:{seed}:{index}:other")
        gold = json.dumps(fields, ensure_ascii=False)
        extra_info = {"split": split, "index": index, "demonstration": gold, "json_schema": json.dumps(SCHEMAS[level])}
        return row_of("json_extraction", PROMPTS[level].format(text=text), gold, extra_info, ability="extraction")

    return LazyRows(num_rows, make)


def _drawn(level: Level, split: Split, seed: str) -> tuple[str, dict[str, Any]]:
    rng = random.Random(seed)

    def choice(kind: str) -> Any:
        return rng.choice(_WORDS[kind][split])

    fields: dict[str, Any] = {"name": choice("names"), "age": rng.randint(18, 79), "city": choice("cities")}
    if level == "easy":
        return choice("phrasings").format(**fields), fields
    for key in ("age", "city"):
        if rng.random() >= 0.7:
            fields[key] = None
    hobbies = fields["hobbies"] = rng.sample(_WORDS["hobbies"][split], rng.choice((0, 1, 2, 3)))
    listed = fields | {"hobbies": " and ".join(filter(None, [", ".join(hobbies[:-1]), *hobbies[-1:]]))}
    details = [rng.choice(wordings[split]).format(**listed) for key, wordings in _WORDS["details"].items() if fields[key]]
    rng.shuffle(details)
    return " ".join(filter(None, [choice("openings").format(**fields), *details, rng.choice(CLOSINGS)])), fields
