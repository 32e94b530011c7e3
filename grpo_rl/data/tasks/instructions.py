"""Short pieces of writing under constraints that a program can check, after IFEval (arXiv 2311.07911)."""

from __future__ import annotations

import json
import random
from typing import Literal

from grpo_rl.config.schema.kinds import AnySeed, Count
from grpo_rl.data.tasks.made_rows import LazyRows, Row, refuse, row_of

Split = Literal["train", "val"]
Constraint = tuple[str, int | str]

TOPICS: dict[Split, tuple[str, ...]] = {
    "train": (
        *("cats", "the moon", "bread", "winter", "football", "a river", "your favourite book", "trains", "the sea", "coffee"),
        *("a good teacher", "mountains", "music", "the internet", "bees", "a market", "sleep", "robots", "gardens", "rain"),
        *("a birthday", "bridges", "apples", "libraries", "the desert", "clocks", "bicycles", "soup", "forests", "the stars"),
    ),
    "val": (
        *("horses", "autumn", "airports", "chocolate", "a lighthouse", "friendship", "volcanoes", "the theatre"),
        *("tea", "snow"),
    ),
}
WORDINGS: dict[str, dict[Split, tuple[str, ...]]] = {
    "at_most_words": {
        "train": ("Use at most {value} words.", "Do not write more than {value} words."),
        "val": ("Keep it to {value} words or fewer.",),
    },
    "at_least_words": {
        "train": ("Use at least {value} words.", "Write {value} words or more."),
        "val": ("It should not be shorter than {value} words.",),
    },
    "lowercase": {
        "train": ("Write everything in lowercase letters.", "Use no capital letters."),
        "val": ("The whole answer should be in lowercase, without any capitals.",),
    },
    "uppercase": {
        "train": ("Write everything in capital letters.", "USE ONLY UPPERCASE LETTERS."),
        "val": ("The whole answer should be in all caps.",),
    },
    "bullets": {
        "train": ('Answer with exactly {value} bullet points, each beginning with "- ".',),
        "val": ('Give a list of {value} items, and begin each of them with "- ".',),
    },
    "without_word": {
        "train": ('Do not use the word "{value}".', 'The word "{value}" is forbidden.'),
        "val": ('Avoid the word "{value}".',),
    },
    "with_word": {
        "train": ('Use the word "{value}".', 'The word "{value}" must be in your answer.'),
        "val": ('Be sure to mention the word "{value}".',),
    },
    "first_word": {
        "train": ('Begin with the word "{value}".', 'The first word must be "{value}".'),
        "val": ('Let your answer start with the word "{value}".',),
    },
    "no_commas": {
        "train": ("Do not use commas.", "Your answer must not have any commas."),
        "val": ("Leave out all commas.",),
    },
}
VALUES: dict[str, tuple[int | str, ...]] = {
    "at_most_words": (10, 15, 20, 25),
    "at_least_words": (15, 20, 25),
    "bullets": (2, 3, 4),
    "without_word": ("the", "is", "and", "of", "it"),
    "with_word": ("blue", "often", "never", "quiet", "seven", "window"),
    "first_word": ("Today", "Sometimes", "Look", "Perhaps", "Once"),
}
EXCLUDE = (
    {"at_most_words", "at_least_words"},
    {"lowercase", "uppercase"},
    {"bullets", "first_word"},
    {"bullets", "at_most_words"},
)
"""Constraints that may contradict each other."""


def instructions(*, num_rows: Count = 512, constraints: str = "1,2", split: Split = "train", seed: AnySeed = 0) -> LazyRows:
    """Rows in verl's format; the ground truth, for the reward `instructions`, is JSON text of constraints.

    `constraints` is how many a row has, each number equally likely. The splits share no topic and no wording.
    """
    counts = [int(part) if part.isdigit() else 0 for part in constraints.split(",")]
    refuse(
        "instructions",
        (all(1 <= count <= 3 for count in counts), f"constraints={constraints} must be 1, 2, 3, or several like 1,2"),
    )

    def make(index: int) -> Row:
        rng = random.Random(f"instructions:{split}:{seed}:{index}")
        drawn = _drawn(rng, rng.choice(counts))
        sentences = [rng.choice(WORDINGS[kind][split]).format(value=value) for kind, value in drawn]
        prompt = f"Write one or two sentences about {rng.choice(TOPICS[split])}. {' '.join(sentences)}"
        if any(kind == "bullets" for kind, _ in drawn):
            prompt = prompt.replace("one or two sentences", "something", 1)
        return row_of("instructions", prompt, json.dumps(drawn), {"split": split, "index": index}, ability="instructions")

    return LazyRows(num_rows, make)


def _drawn(rng: random.Random, count: int) -> list[Constraint]:
    while True:
        kinds = rng.sample(list(WORDINGS), count)
        if not any(pair <= set(kinds) for pair in EXCLUDE):
            return [(kind, rng.choice(VALUES.get(kind, (1,)))) for kind in kinds]
