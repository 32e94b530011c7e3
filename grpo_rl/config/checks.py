"""Rules between keys: what they name must be there, sizes must fit, and no setting may silently do nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from grpo_rl.config import (
    algorithm_checks,
    data_checks,
    input_checks,
    name_checks,
    reward_checks,
    security_checks,
    size_checks,
    switch_checks,
)
from grpo_rl.config.derived import Machine
from grpo_rl.config.fields import nearest
from grpo_rl.config.schema import Config


def check(config: Config, machine: Machine) -> list[str]:
    """Everything that is wrong between the keys, one line each: key, value, rule, what to do. Empty if it can run.

    Names are looked up in tables here; what they stand for is loaded later, by the plan.
    """
    found = [
        *data_checks.problems(config),
        *input_checks.problems(config),
        *size_checks.problems(config, machine),
        *switch_checks.problems(config),
        *security_checks.problems(config),
        *algorithm_checks.problems(config),
        *name_checks.problems(config),
        *reward_checks.problems(config, machine),
    ]
    return list(dict.fromkeys(found))


def between_sound_keys(config: Config, problems: Iterable[str]) -> Iterator[str]:
    """What is wrong between the keys that `problems` leave alone: `config` has defaults where those were found.

    A line that names a key with a problem of its own, or one that a misspelt key may have meant, is left out: it
    may follow from nothing but the default. Sizes that depend on the machine are the plan's.
    """
    doubtful: set[str] = set()
    for problem in problems:
        key = re.split(r"[=:\s]", problem, maxsplit=1)[0]
        doubtful |= {name.rpartition(".")[2] for name in (key, *nearest(key))}
        if key.startswith(("recipe", "the")):
            return
    found = [
        *data_checks.problems(config),
        *input_checks.problems(config),
        *size_checks.problems_without_machine(config),
        *switch_checks.problems(config),
        *security_checks.problems(config),
        *algorithm_checks.problems(config),
        *name_checks.problems(config),
    ]
    # What is missing altogether may stand in the word or recipe that could not be read.
    yield from (line for line in found if "is not set" not in line and not doubtful & set(re.findall(r"\w+", line)))
