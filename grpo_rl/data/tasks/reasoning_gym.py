"""`reasoning_gym:NAME?option=value&...`: rows of a data set of the reasoning-gym package, made when they are asked for."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from grpo_rl import gym
from grpo_rl.data.tasks.gym_process import EntryProcess, needs_own_process
from grpo_rl.data.tasks.made_rows import LazyRows, Row, split_of_text
from grpo_rl.data.tasks.options import one_of, split_spec, whole
from grpo_rl.errors import ConfigError, DataError

PREFIX = "reasoning_gym:"
ROWS = 1000
TRIES = 64
"""Entries that are made for one row of a split before the data set is reported to have too few questions."""
INSTRUCTION = "\n\nThink step by step. Then give the final answer, and nothing else, between <answer> and </answer>."
OWN_OPTIONS = {
    "num_rows": "rows of the data set, 1000 if not given",
    "seed": "another number gives other rows, 0 if not given",
    "split": "all, train or val: the last two share no question",
    "answer_tags": "true: the prompt asks for <answer> tags; false: the question alone",
}


@dataclass(frozen=True, slots=True)
class GymSpec:
    """The content of a name such as `reasoning_gym:NAME?...`."""

    name: str
    options: gym.Options
    """The package's own options, as text."""
    num_rows: int
    seed: int
    """The package's seed, drawn from the user's so that seeds 0 and 1 do not share all rows but one."""
    split: str
    answer_tags: bool


def parse(spec: str) -> GymSpec:
    """The spec, its name and options checked by building the data set once. Raises ConfigError."""
    name, texts = split_spec(spec, PREFIX)
    if "size" in texts:
        raise ConfigError(f"{PREFIX}{name}: size is called num_rows here")
    options = tuple(sorted((key, text) for key, text in texts.items() if key not in OWN_OPTIONS))
    gym.build(name, options, 0)
    what = f"{PREFIX}{name}: "
    seed = whole(what + "seed", texts.get("seed", "0"), at_least=0)
    return GymSpec(
        name=name,
        options=options,
        num_rows=whole(what + "num_rows", texts.get("num_rows", str(ROWS)), at_least=1),
        seed=int.from_bytes(hashlib.sha256(f"{PREFIX}{seed}".encode()).digest()[:4], "big") >> 2,
        split=one_of(what + "split", texts.get("split", "all"), ("all", "train", "val")),
        answer_tags=one_of(what + "answer_tags", texts.get("answer_tags", "true"), ("true", "false")) == "true",
    )


class GymSource:
    """Makes the rows of a spec. Row i depends on the options, the seed and i alone, and on no other row."""

    def __init__(self, spec: GymSpec) -> None:
        self.spec = spec
        self._process = EntryProcess(spec.name, spec.options, spec.seed) if needs_own_process(spec.name) else None

    def row(self, index: int) -> Row:
        """Row `index` in verl's format; `extra_info.gym` has what scoring needs as plain JSON. Raises DataError."""
        spec = self.spec
        if spec.split == "all":
            return to_row(spec, index, index, self._entry(index))
        for entry_index in range(index * TRIES, (index + 1) * TRIES):
            entry = self._entry(entry_index)
            if split_of_text(entry["question"]) == spec.split:
                return to_row(spec, index, entry_index, entry)
        raise DataError(
            f"{PREFIX}{spec.name}: {TRIES} entries were made for row {index}, and none belongs to split={spec.split}; "
            f"this data set has too few different questions to be split: leave split out"
        )

    def _entry(self, entry_index: int) -> dict[str, Any]:
        spec = self.spec
        if self._process is not None:
            return self._process.entry(entry_index)
        try:
            return gym.make_entry(spec.name, spec.options, spec.seed, entry_index)
        except Exception as error:  # the package's generators: whatever they raise is about this row
            raise DataError(f"{PREFIX}{spec.name}, entry {entry_index}: {type(error).__name__}: {error}") from error


def to_row(spec: GymSpec, index: int, entry_index: int, entry: dict[str, Any]) -> Row:
    """The entry in verl's row format; metadata without a plain form is left out, and made again where it is scored."""
    carried: dict[str, Any] = {"options": dict(spec.options), "seed": spec.seed, "entry": entry_index}
    try:
        carried["metadata"] = gym.encode(entry["metadata"])
    except TypeError:
        if spec.name in gym.HASH_DEPENDENT:
            raise
    return {
        "data_source": gym.SOURCE_PREFIX + spec.name,
        "prompt": [{"role": "user", "content": entry["question"] + (INSTRUCTION if spec.answer_tags else "")}],
        "ability": gym.category(spec.name),
        "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
        "extra_info": {"split": spec.split, "index": index, "gym": carried},
    }


def reasoning_gym_rows(spec: str) -> LazyRows:
    """The rows that `reasoning_gym:NAME?option=value&...` stands for. Raises ConfigError for a wrong spec."""
    source = GymSource(parse(spec))
    return LazyRows(source.spec.num_rows, source.row)
