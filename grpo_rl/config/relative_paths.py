"""Rules of relative paths: a recipe file's start at its own folder, those of the command line at the current one.

Recipes of the package are not touched: their paths (`data/gsm8k/train.parquet`) stand for files that a user puts there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_A = "actor_rollout_ref"
_ELSEWHERE = re.compile(r"(task|reasoning_gym|hf|builtin):|[/~]|.*\$\{", re.DOTALL)
"""Values that no folder changes: generated or fetched data, embedded models, absolute paths, expressions."""
_FUNCTION = re.compile(r"(?P<factor>[^:*]*\*\s*)?(?P<file>[^:*]+\.py)(?P<rest>:\w+)?")

FILES = (
    "data.train_files",
    "data.val_files",
    "data.cache_dir",
    "reward.custom_reward_function.path",
    "trainer.resume_from_path",
    f"{_A}.rollout.multi_turn.tool_config_path",
    f"{_A}.rollout.multi_turn.interaction_config_path",
)
"""Keys whose values are paths, whatever they look like."""
PERHAPS = (
    f"{_A}.model.path",
    f"{_A}.model.tokenizer_path",
    "critic.model.path",
    "reward.reward_model.model_path",
    "reward.reward_model.tokenizer_path",
    "data.chat_template",
    "reward.judge.template",
)
"""Keys whose values may also be a name on the hub or a text: a path where it begins with a dot or is there."""
FUNCTIONS = (
    "algorithm.adv_estimator",
    "algorithm.kl_penalty",
    f"{_A}.actor.policy_loss.loss_mode",
    f"{_A}.actor.loss_agg_mode",
    f"{_A}.actor.kl_loss_type",
    f"{_A}.rollout.name",
    f"{_A}.rollout.multi_turn.environment.name",
    f"{_A}.rollout.multi_turn.format",
    "data.custom_cls.path",
    "reward.functions",
    "reward.batched",
    "reward.judge.parser",
)
"""Keys whose values may name a function as `file.py:function`, with a factor where rewards are summed."""


OPTIONS = (
    "algorithm.adv_options",
    f"{_A}.actor.policy_loss.options",
    f"{_A}.rollout.multi_turn.environment.options",
    "reward.custom_reward_function.reward_kwargs",
)
"""Keys with options of the user's own, any text of which may be a path, as in PERHAPS."""
BY_NAME = ("reward.function_kwargs", f"{_A}.rollout.multi_turn.tools")
"""Keys with options by name, whose names may be `file.py:function`."""


def function_files(tree: Any) -> list[str]:
    """Return the Python files that the strings in `tree`, values and names of keys, name as `file.py` or `file.py:function`."""
    if isinstance(tree, Mapping):
        return sorted({*function_files(list(tree)), *function_files(list(tree.values()))})
    if isinstance(tree, str):
        match = _FUNCTION.fullmatch(tree)
        return [] if match is None else [match["file"].strip()]
    return sorted({file for entry in tree for file in function_files(entry)}) if isinstance(tree, list | tuple) else []


def from_folder(tree: Mapping[str, Any], folder: Path, prefix: str = "") -> dict[str, Any]:
    """Return `tree` (keys of the configuration, nested) with its relative paths made absolute, starting at `folder`."""
    # A data set class of the user's own gets names, which need not be files.
    names_for_own_class = prefix == "data." and bool((tree.get("custom_cls") or {}).get("path"))
    moved: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in BY_NAME and isinstance(value, Mapping):
            moved[name] = {_function(str(function), folder): _options(options, folder) for function, options in value.items()}
        elif key in OPTIONS:
            moved[name] = _options(value, folder)
        elif isinstance(value, Mapping):
            moved[name] = from_folder(value, folder, f"{key}.")
        elif key in FILES or key in PERHAPS or key in FUNCTIONS:
            move = _function if key in FUNCTIONS else _file if key in FILES and not names_for_own_class else _perhaps
            moved[name] = [move(entry, folder) for entry in value] if isinstance(value, list) else move(value, folder)
        else:
            moved[name] = value
    return moved


def _options(value: Any, folder: Path) -> Any:
    if isinstance(value, Mapping):
        return {name: _options(entry, folder) for name, entry in value.items()}
    return [_options(entry, folder) for entry in value] if isinstance(value, list) else _perhaps(value, folder)


def _file(value: Any, folder: Path) -> Any:
    return value if not isinstance(value, str) or not value or _ELSEWHERE.match(value) else _joined(folder, value)


def _perhaps(value: Any, folder: Path) -> Any:
    if not isinstance(value, str) or not value or _ELSEWHERE.match(value) or "\n" in value or len(value) > 1000:
        return value
    is_path = value.startswith(("./", "../")) or (folder / value).exists()
    return _joined(folder, value) if is_path else value


def _function(value: Any, folder: Path) -> Any:
    match = _FUNCTION.fullmatch(value) if isinstance(value, str) else None
    if match is None or _ELSEWHERE.match(match["file"].strip()):
        return value
    return f"{match['factor'] or ''}{_joined(folder, match['file'].strip())}{match['rest'] or ''}"


def _joined(folder: Path, value: str) -> str:
    return str(folder / value)
