"""Short texts about a person, to be answered by a JSON object of what they say."""

# ruff: noqa: SIM905  lists of words are read more easily without quotes
from __future__ import annotations

import json
import random
from typing import Any, Literal

from grpo_rl.config.schema.kinds import AnySeed, Count
from grpo_rl.data.tasks.made_rows import LazyRows, Row, row_of

Split = Literal["train", "val"]
Level = Literal["easy", "hard"]

NAMES: dict[Split, tuple[str, ...]] = {
    "train": tuple(
        "Anna Ben Carla David Elena Felix Greta Hugo Ines Jonas Karin Leo Mira Nils Olga Paul Rosa Simon Tina Victor Wanda Yusuf "
        "Amir Bella Cedric Dina Emil Fatima Georg Hanna Ivan Julia Kofi Lina Marco Nora Omar Petra Ravi Sofia".split()
    ),
    "val": tuple(
        "Adele Boris Chiara Dmitri Edith Farid Gisela Henrik Isabel Jakob Kemal Louise Milan Nadia Oskar Priya".split()
    ),
}
CITIES: dict[Split, tuple[str, ...]] = {
    "train": tuple(
        "Berlin Paris Madrid Lisbon Oslo Vienna Rome Dublin Prague Athens Helsinki Warsaw Zurich Geneva Munich Lyon Porto Milan "
        "Turin Bergen Cairo Lagos Nairobi Delhi Tokyo Seoul Lima Boston Chicago Denver".split()
    ),
    "val": tuple("Hamburg Naples Valencia Krakow Cork Tampere Basel Marseille Mumbai Osaka Quito Seattle".split()),
}
HOBBIES: dict[Split, tuple[str, ...]] = {
    "train": ("chess", "running", "painting", "cooking", "swimming", "reading", "hiking", "singing", "cycling", "gardening"),
    "val": ("sailing", "pottery", "climbing", "dancing", "baking", "skiing"),
}
PHRASINGS: dict[Split, tuple[str, ...]] = {
    "train": (
        "{name} is {age} years old and lives in {city}.",
        "My name is {name}, I am {age} and I live in {city}.",
        "{name}, {age}, from {city}, joined our team today.",
        "In {city} I met {name}, who has just turned {age}.",
        "Our new colleague {name} moved to {city} at the age of {age}.",
        "Hello, this is {name} from {city}. I am {age} years old.",
        "At {age}, {name} still works in a bakery in {city}.",
        "The {age}-year-old {name} drives a taxi in {city}.",
        "{city} is the home of {name}, aged {age}.",
        "I am writing to you from {city}. I am {age}, and my name is {name}.",
        "Please register {name} ({age}) for the course in {city}.",
        "{name} celebrated birthday number {age} with friends in {city}.",
        "Last week {name} rented a flat in {city}; the form says {age} years.",
        "A witness called {name}, {age} years of age, was heard in {city}.",
    ),
    "val": (
        "We spoke to {name} in {city}, a gardener of {age} years.",
        "Born {age} years ago, {name} has never left {city}.",
        "Dear all, please welcome {name}! {name} comes from {city} and is {age}.",
        "The prize went to {name} of {city}, who is only {age}.",
        "Ticket for {name}, age {age}, departing from {city}.",
        "Among the guests in {city} was {name}, {age} years old.",
    ),
}
OPENINGS: dict[Split, tuple[str, ...]] = {
    "train": (
        "Hi, this is {name}.",
        "My name is {name}.",
        "Please add {name} to the list.",
        "I would like to introduce {name}.",
    ),
    "val": ("Greetings from {name}!", "The form was filled in by {name}."),
}
DETAILS: dict[str, dict[Split, tuple[str, ...]]] = {
    "age": {"train": ("The age is {age}.", "Age: {age} years.", "{age} years old."), "val": ("Turned {age} this spring.",)},
    "city": {
        "train": ("The address is in {city}.", "Home is {city}.", "Living in {city}."),
        "val": ("You can find us in {city}.",),
    },
    "hobbies": {
        "train": ("Hobbies: {hobbies}.", "Free time goes into {hobbies}.", "Interested in {hobbies}."),
        "val": ("Weekends are for {hobbies}.",),
    },
}
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
    fields: dict[str, Any] = {"name": rng.choice(NAMES[split]), "age": rng.randint(18, 79), "city": rng.choice(CITIES[split])}
    if level == "easy":
        return rng.choice(PHRASINGS[split]).format(**fields), fields
    fields["age"] = fields["age"] if rng.random() < 0.7 else None
    fields["city"] = fields["city"] if rng.random() < 0.7 else None
    hobbies = fields["hobbies"] = rng.sample(HOBBIES[split], rng.choice((0, 1, 2, 3)))
    listed = fields | {"hobbies": " and ".join(filter(None, [", ".join(hobbies[:-1]), *hobbies[-1:]]))}
    details = [rng.choice(DETAILS[key][split]).format(**listed) for key in DETAILS if fields[key]]
    rng.shuffle(details)
    return " ".join(filter(None, [rng.choice(OPENINGS[split]).format(**fields), *details, rng.choice(CLOSINGS)])), fields
