"""`reasoning_gym:NAME?option=value&...`: rows of a data set of the reasoning-gym package, made when they are asked for."""

from __future__ import annotations

import hashlib
import inspect
import os
from typing import Any, Literal

from grpo_rl.config.schema.kinds import Count, Seed
from grpo_rl.data.sources.source import split_options
from grpo_rl.data.tasks.made_rows import LazyRows, Row, row_of, split_of_text, typed_options
from grpo_rl.errors import ConfigError, DataError
from grpo_rl.rewards.rules import reasoning_gym as gym

PREFIX = "reasoning_gym:"
TRIES = 64
"""Entries that are made for one row of a split before the data set is reported to have too few questions."""
HASH_DEPENDENT = frozenset(
    {"codeio", "isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
)
"""Data sets that walk over sets of strings, or run programs that do: their rows are the same only under the same PYTHONHASHSEED."""
INSTRUCTION = "\n\nThink step by step. Then give the final answer, and nothing else, between <answer> and </answer>."


def reasoning_gym_rows(spec: str) -> LazyRows:
    """Return the rows that `reasoning_gym:NAME?option=value&...` stands for. Raises ConfigError for a wrong spec."""
    name, texts = split_options(spec)
    name = name.removeprefix(PREFIX)
    if "size" in texts:
        raise ConfigError(f"{PREFIX}{name}: size is called num_rows here")
    own = {key: text for key, text in texts.items() if key in OWN_OPTIONS}
    options = tuple(sorted((key, text) for key, text in texts.items() if key not in own))
    gym.build(name, options, 0)  # checks name and options
    if name in HASH_DEPENDENT and os.environ.get("PYTHONHASHSEED") != "0":
        raise ConfigError(
            f"{PREFIX}{name}: its rows depend on how Python hashes strings; start the command with PYTHONHASHSEED=0 before it"
        )
    return _rows(name, options, **typed_options(f"{PREFIX}{name}", _rows, own))


def _rows(
    name: str,
    options: gym.Options,
    *,
    num_rows: Count = 1000,
    seed: Seed = 0,
    split: Literal["all", "train", "val"] = "all",
    answer_tags: bool = True,
) -> LazyRows:
    """Return the rows of a data set with these options of the package's own, as text.

    `split`: train and val share no question. `answer_tags`: the prompt asks for <answer> tags. Row i depends on the options,
    the seed and i alone, and on no other row.
    """
    # Drawn from the user's, so that seeds 0 and 1 do not share all rows but one.
    seed = int.from_bytes(hashlib.sha256(f"{PREFIX}{seed}".encode()).digest()[:4], "big") >> 2

    def entry(number: int) -> dict[str, Any]:
        try:
            return gym.make_entry(name, options, seed, number)
        except Exception as error:  # the package's generators: whatever they raise is about this row
            raise DataError(f"{PREFIX}{name}, entry {number}: {type(error).__name__}: {error}") from error

    def row(index: int) -> Row:
        """Return row `index` in verl's format; `extra_info.gym` has what scoring needs."""
        number, found = index, None
        if split == "all":
            found = entry(index)
        for number in () if found else range(index * TRIES, (index + 1) * TRIES):
            made = entry(number)
            if split_of_text(made["question"]) == split:
                found = made
                break
        if found is None:
            raise DataError(
                f"{PREFIX}{name}: {TRIES} entries were made for row {index}, and none belongs to split={split}; "
                f"this data set has too few different questions to be split: leave split out"
            )
        carried = {"options": dict(options), "seed": seed, "entry": number, "metadata": gym.written(found["metadata"])}
        question = found["question"] + (INSTRUCTION if answer_tags else "")
        extra_info = {"split": split, "index": index, "gym": carried}
        return row_of(gym.SOURCE_PREFIX + name, question, found["answer"], extra_info, gym.category(name))

    return LazyRows(num_rows, row)


OWN_OPTIONS = tuple(name for name, one in inspect.signature(_rows).parameters.items() if one.kind is one.KEYWORD_ONLY)
"""The options that are not the package's."""
