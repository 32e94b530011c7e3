"""Relative paths start at a recipe file's folder, or the current one for the command line's. Those of the
package's recipes (`data/gsm8k/train.parquet`) are not changed: a user puts files there."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_A, _R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_ELSEWHERE = re.compile(r"(task|hf|builtin):|[/~]|.*\$\{", re.DOTALL)  # values that no folder changes
_FUNCTION = re.compile(r"(?P<factor>[^:*]*\*\s*)?(?P<file>[^:*]+\.py)(?P<rest>:\w+)?")

_DATA = ("data.train_files", "data.val_files")
FILES = (
    *_DATA,
    *("reward.custom_reward_function.path", "trainer.resume_from_path"),
    *(f"{_R}.multi_turn.tool_config_path", f"{_R}.multi_turn.interaction_config_path"),
)
PERHAPS = (
    *("actor_rollout_ref.model.path", "actor_rollout_ref.model.tokenizer_path", "critic.model.path", "data.chat_template"),
    *("reward.reward_model.model_path", "reward.reward_model.tokenizer_path", "reward.judge.template", "reward.judge.rubric"),
    *("algorithm.adv_options", f"{_A}.policy_loss.options", f"{_R}.multi_turn.environment.options"),
    *("reward.custom_reward_function.reward_kwargs", "reward.function_kwargs", f"{_R}.multi_turn.tools"),
)
"""Keys with a path, a hub name, a text or options: a path if it begins with a dot or exists."""
FUNCTIONS = (
    *("algorithm.adv_estimator", "algorithm.kl_penalty", f"{_A}.kl_loss_type", f"{_A}.loss_agg_mode"),
    *(
        f"{_A}.policy_loss.loss_mode",
        f"{_R}.name",
        f"{_R}.function",
        f"{_R}.multi_turn.environment.name",
        f"{_R}.multi_turn.format",
    ),
    *("data.custom_cls.path", "reward.functions", "reward.audit", "reward.batched", "reward.judge.parser"),
    *("algorithm.filter_groups.metric", "data.curriculum", "trainer.schedule"),
)
"""Keys that may name `file.py:function`, with a factor if rewards are summed."""


def function_files(tree: Any) -> list[str]:
    """Return the files that strings in `tree`, values and names, name as `file.py` or `file.py:function`."""
    if isinstance(tree, Mapping):
        return sorted({*function_files(list(tree)), *function_files(list(tree.values()))})
    if isinstance(tree, str):
        match = _FUNCTION.fullmatch(tree)
        return [] if match is None else [match["file"].strip()]
    return sorted({file for entry in tree for file in function_files(entry)}) if isinstance(tree, list | tuple) else []


def from_folder(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return values by dotted keys with relative paths made absolute from `folder`."""
    # The names for a user's data set class need not be files.
    names = _DATA if values.get("data.custom_cls.path") else ()

    def placed(value: Any, key: str) -> Any:
        if isinstance(value, Mapping):
            return {placed(str(name), FUNCTIONS[0]): placed(entry, key) for name, entry in value.items()}
        if isinstance(value, list):
            return [placed(entry, key) for entry in value]
        if not isinstance(value, str) or not value:
            return value
        if key in FUNCTIONS:
            match = _FUNCTION.fullmatch(value)
            if match is None or _ELSEWHERE.match(match["file"].strip()):
                return value
            return f"{match['factor'] or ''}{folder / match['file'].strip()}{match['rest'] or ''}"
        if _ELSEWHERE.match(value):
            return value
        is_path = key in FILES and key not in names
        is_path = is_path or value.startswith(("./", "../")) or os.path.exists(folder / value)
        return str(folder / value) if is_path else value

    return {
        key: placed(value, key) if key in FILES or key in PERHAPS or key in FUNCTIONS else value
        for key, value in values.items()
    }
