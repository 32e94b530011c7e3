"""What the refusal of a setting recommends is not refused itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml
from bad_configs import BAD
from config_tools import CPU, config_of
from test_bad_configs import refusal
from test_config_checks import CONTRADICTIONS
from test_schedule_rules import REFUSED, given_to_reward_model

from grpo_rl.config.checks.all_rules import check
from grpo_rl.config.convert import show
from grpo_rl.config.derived import Machine
from grpo_rl.config.schema.fields import leaves

SETTING = re.compile(r"(?<![\w.=\[])([a-z_]+(?:\.[a-z_0-9]+)+)=([^\s,;()]+?)(?=[.:,;)]?(?:\s|$))")
Refuse = Callable[[dict[str, Any]], list[str]]
"""The problems of a configuration in which these keys are changed further."""


def of_keys(keys: dict[str, Any], machine: Machine) -> Refuse:
    make = given_to_reward_model if keys.get("trainer.schedule") == "reward_model" else config_of
    return lambda changes: list(check(make(keys | changes), machine))


def of_words(words: list[str]) -> Refuse:
    return lambda changes: refusal([*words, *(f"{key}={show(value)}" for key, value in changes.items())])


CASES = [
    *(of_keys(keys, machine) for keys, machine, *_ in CONTRADICTIONS),
    *(of_keys(keys, CPU) for keys, _ in REFUSED),
    *(of_words(words) for words, *_ in BAD if all(re.match(r"\+*[a-z_]+\.[\w.]+=[^\n]{1,80}$", word) for word in words)),
]


def recommended(problem: str) -> Iterator[tuple[str, Any]]:
    """Yield the settings that a problem names with a value, but for the one that it refuses, which stands first."""
    for match in SETTING.finditer(problem):
        key, text = match.groups()
        if match.start() and key in leaves():
            try:
                value = yaml.safe_load(text)
            except yaml.YAMLError:
                continue
            if value != leaves()[key].default:
                yield key, value


@pytest.fixture(scope="module")
def tried() -> list[tuple[str, str, list[str]]]:
    """Each problem, a setting that it recommends, and what is wrong with that."""
    attempts = []
    for refuse in CASES:
        for problem in refuse({}):
            for key, value in recommended(problem):
                setting = f"{key}={show(value)}"
                attempts.append((problem, setting, [new for new in refuse({key: value}) if new.startswith(setting)]))
    return attempts


def test_no_check_refuses_what_the_message_of_another_recommends(tried: list[tuple[str, str, list[str]]]) -> None:
    assert [attempt for attempt in tried if attempt[2]] == []
    assert len({setting for _, setting, _ in tried}) > 12
