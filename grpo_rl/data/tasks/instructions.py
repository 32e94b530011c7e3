"""Short pieces of writing under constraints that a program can check, after IFEval (arXiv 2311.07911)."""

from __future__ import annotations

import json
import random
from pathlib import Path

from grpo_rl.config.schema.kinds import AnySeed, Count
from grpo_rl.data.tasks.made_rows import LazyRows, Row, Split, refuse, row_of
from grpo_rl.run_files import read_yaml

Constraint = tuple[str, int | str]

_WORDS = read_yaml(Path(__file__).with_suffix(".yaml"))
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
        sentences = [rng.choice(_WORDS["wordings"][kind][split]).format(value=value) for kind, value in drawn]
        topic = rng.choice(_WORDS["topics"][split])
        prompt = f"Write one or two sentences about {topic}. {' '.join(sentences)}"
        if any(kind == "bullets" for kind, _ in drawn):
            prompt = prompt.replace("one or two sentences", "something", 1)
        return row_of("instructions", prompt, json.dumps(drawn), {"split": split, "index": index}, ability="instructions")

    return LazyRows(num_rows, make)


def _drawn(rng: random.Random, count: int) -> list[Constraint]:
    while True:
        kinds = rng.sample(list(_WORDS["wordings"]), count)
        if not any(pair <= set(kinds) for pair in EXCLUDE):
            return [(kind, rng.choice(_WORDS["values"].get(kind, (1,)))) for kind in kinds]
