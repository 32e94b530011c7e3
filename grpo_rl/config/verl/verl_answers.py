"""Answers for verl's keys that are not in the schema, from `keys.txt`, so that verl's launch commands (FSDP
and vLLM) run as they are wherever their meaning exists. A key may have another place, only some values, or no
meaning (speed, memory, logs), which is noted; all others are refused with a replacement."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

from grpo_rl.config import recipes
from grpo_rl.config.convert import show
from grpo_rl.config.schema.fields import flat, groups_around, leaves
from grpo_rl.frozen import frozen


@frozen
class Answer:
    advice: str = ""
    accepts: tuple[str, ...] = ()
    target: str | None = None  # the key or group that takes its value here

    @property
    def means_nothing(self) -> bool:
        """It bears on speed, memory, logs or processes alone: any value is taken."""
        return not self.advice and self.target is None


_MEANING = re.compile(r"nothing|= (?P<target>\S+)(?: unless (?P<same>\S+))?|(?:only (?P<only>[^:]+)|not here): (?P<advice>.+)")


def _read(text: str) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    prefixes: list[str] = []
    for line in text.splitlines():
        if line.startswith("["):
            prefixes = line.strip("[]").split(", ")
        elif line and not line.startswith("#"):
            names, _, meaning = line.partition(" | ")
            match = _MEANING.fullmatch(meaning)
            assert match is not None, line
            values = match["only"] or match["same"]
            for prefix in prefixes:
                target = match["target"]
                target = f"{prefix[:-1]}{target}" if target and target.startswith(".") else target
                answer = Answer(match["advice"] or "", tuple(values.split(", ")) if values else (), target)
                answers |= {prefix + name: answer for name in names.split()}
    return answers


ANSWERS = _read(Path(__file__).with_name("keys.txt").read_text(encoding="utf-8"))


def other_defaults(named_keys: set[str], model: str, train_files: Sequence[str]) -> str | None:
    """Return a line with the defaults that differ from verl's, if a command with these keys may be one of verl's."""
    if not {"actor_rollout_ref.model.path", "data.train_files"} <= named_keys or "data.responses" in named_keys:
        return None
    path = recipes.conf() / "verl" / "ppo_trainer.yaml"
    named = [
        f"{'.'.join(key.split('.')[-2:])}={show(leaves()[key].default)} ({show(verls)})"
        for key, verls in flat(recipes.read(path, path.stem).entries).items()
        if key not in named_keys
    ]
    if not named or any(name.startswith(("builtin:", "task:")) for name in (model, *train_files)):
        return None
    return f"other defaults than verl's (in brackets; -cn ppo_trainer has them): {', '.join(named)}"


def in_lists(correction: MutableMapping[str, Any]) -> None:
    """Turn verl's comma-separated names and bounds (`lower_upper`) into lists."""
    modes, bounds = correction.get("rollout_rs"), correction.get("rollout_rs_threshold")
    if modes is None or isinstance(modes, str):
        correction["rollout_rs"] = modes = [mode.strip() for mode in (modes or "").split(",") if mode.strip()]
    if isinstance(bounds, list):
        return
    pairs = [str(bound).rpartition("_") for bound in ("" if bounds is None else str(bounds)).split(",") if bound.strip()]
    correction["rollout_rs_threshold"] = [upper for _, _, upper in pairs]
    if any(lower for lower, _, _ in pairs):
        correction["rollout_rs_threshold_lower"] = [
            lower or 1 / float(upper) for mode, (lower, _, upper) in zip(modes, pairs, strict=False) if mode.endswith("k1")
        ]


def place_of(key: str, value: Any) -> str:
    """Return the key that takes this value of `key` here."""
    name, answer = _nearest(key)
    if answer is None or answer.target is None or any(_same(value, right) for right in answer.accepts):
        return key
    return answer.target + key.removeprefix(name)


def answer_for(key: str) -> Answer | None:
    """Return the answer for `key` or the nearest group around it; None if verl has no such key."""
    name, answer = _nearest(key)
    # Accepted values of a group are not accepted for a key inside it.
    return answer if answer is None or name == key else dataclasses.replace(answer, accepts=())


def _nearest(key: str) -> tuple[str, Answer | None]:
    name = next((name for name in (key, *groups_around(key)) if name in ANSWERS), key)
    return name, ANSWERS.get(name)


def refusal(key: str, value: Any, where: str = "") -> str | None:
    """Return why verl's `key`, which has an answer, is refused with this value."""
    answer = answer_for(key)
    assert answer is not None
    if answer.means_nothing or value is None or any(_same(value, right) for right in answer.accepts):
        return None
    advice = answer.advice or f"use {answer.target}"
    if not answer.accepts:
        return f"{key}: a key of verl's that is not here{where}: {advice}"
    right = " or ".join(show(right) for right in answer.accepts)
    return f"{key}={show(value)}: only {right} is possible here{where}: {advice}"


def _same(value: Any, right: str) -> bool:
    """Compare by text or number: True and "true", 1 and 1.0 and "1" are the same; True and 1 are not."""
    if str(value).lower() == right.lower():
        return True
    try:
        return not isinstance(value, bool) and float(value) == float(right)
    except (TypeError, ValueError):
        return False
