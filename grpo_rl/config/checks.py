"""Rules between keys: what they name must be there, sizes must fit, and no setting may silently do nothing."""

from __future__ import annotations

from grpo_rl.config import data_checks, input_checks, reward_checks, size_checks, switch_checks
from grpo_rl.config.derived import Machine
from grpo_rl.config.schema import Config


def check(config: Config, machine: Machine) -> list[str]:
    """Everything that is wrong between the keys, one line each: key, value, rule, what to do. Empty if it can run.

    Names that need the registries (estimators, losses, rewards, engines, tasks) are bound later, by the plan.
    """
    found = [
        *data_checks.problems(config),
        *input_checks.problems(config),
        *size_checks.problems(config, machine),
        *switch_checks.problems(config),
        *reward_checks.problems(config, machine),
    ]
    return list(dict.fromkeys(found))
