"""Rules between keys: what they name must be there, sizes must fit, and no setting may silently do nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from grpo_rl.config import effects
from grpo_rl.config.checks import contradictions, engine_arguments, inputs, sizes
from grpo_rl.config.derived import Machine, settled
from grpo_rl.config.schema.fields import nearest
from grpo_rl.config.schema.tree import Config


def check(config: Config, machine: Machine) -> list[str]:
    """Return everything that is wrong between the keys, a line each with key, value, rule and remedy; nothing if it can run.

    The functions that are named are looked up later, by the plan.
    """
    run = settled(config)
    found = [*_without_machine(config, run), *sizes.problems(run, machine), *effects.problems(config, machine)]
    return list(dict.fromkeys(found))


def _without_machine(config: Config, run: Config) -> Iterator[str]:
    yield from inputs.problems(run)
    yield from sizes.problems_without_machine(run)
    yield from contradictions.problems(config)
    yield from engine_arguments.problems(run)


def between_sound_keys(config: Config, problems: Iterable[str]) -> Iterator[str]:
    """Yield what is wrong between the keys that `problems` leave alone: `config` has defaults where those were found.

    A line that names a key with a problem of its own, or one that a misspelt key may have meant, is left out: it
    may follow from nothing but the default. Sizes that depend on the machine are the plan's.
    """
    doubtful: set[str] = set()
    for problem in problems:
        key = re.split(r"[=:\s]", problem, maxsplit=1)[0]
        doubtful |= {name.rpartition(".")[2] for name in (key, *nearest(key))}
        if key.startswith(("recipe", "the")):
            return
    # No key is refused on GPUs that has an effect on CPUs.
    found = [*_without_machine(config, settled(config)), *effects.problems(config, Machine(1, 1, "cuda"))]
    # What is missing altogether may stand in the word or recipe that could not be read.
    yield from (line for line in found if "is not set" not in line and not doubtful & set(re.findall(r"\w+", line)))
