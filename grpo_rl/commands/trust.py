"""What the file of a run may do by itself: a run that somebody else sent runs and reaches nothing before the user allows it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_rl.arguments import Arguments
from grpo_rl.config.schema.fields import leaves
from grpo_rl.errors import ConfigError
from grpo_rl.telemetry.rundir import links_out

FLAG = "--trust-run"
_TEXTS = frozenset(
    [
        *("data.prompt_key", "data.reward_fn_key", "data.data_source", "data.ground_truth_key", "data.extra_info_key"),
        *("data.system_prompt", "data.val_files", "actor_rollout_ref.model.path", "reward.reward_model.model_path"),
        *("reward.reward_model.tokenizer_path", "reward.reward_model.step_separator"),
    ]
)
"""Keys whose text is shown to a model, or names columns, data files and models: nothing that it says is run."""
_WORD = re.compile(r"([\d.]+\s*\*\s*)?\w+")
"""A registered name, with a factor where rewards are summed. Code is named with a dot, a colon or a slash in it."""
_OWN_TASK = re.compile(r"task:(?!\w+(\?|$))")


def add_trust_option(parser: Arguments) -> None:
    """Add the option that lets what the run's file names run."""
    parser.add_argument(FLAG, action="store_true", help="run what the run's file names: it is yours, or you have read it")


def refuse_settings(run: Path, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError with each of these settings of a run that may name code, a command, an address or a file.

    What is harmless is listed, and not what is harmful: numbers, registered names, texts that nothing is run by.
    """
    found = [f"{key}={value!r}" for key, value in settings.items() if not _is_harmless(key, value)]
    _refuse(found, f"stands in {run / 'config.yaml'}, and may run code or a command, or reach an address or a file")


def refuse_model(run: Path, model: Mapping[str, Any]) -> None:
    """Raise ConfigError where the model that a run began with brings code, or it or the checkpoints are links to elsewhere.

    `model` is the section `actor_rollout_ref.model` of the run. A tokenizer that is read is written into the export.
    """
    own_code = model.get("trust_remote_code")
    _refuse([f"actor_rollout_ref.model.trust_remote_code={own_code!r}"] if own_code else [], f"stands in {run / 'config.yaml'}")
    folders = [os.path.expanduser(str(model.get(key))) for key in ("path", "tokenizer_path")]
    links = [link for folder in folders if os.path.isdir(folder) for link in links_out(Path(folder), deep=False)]
    links += [run / "checkpoints"] if (run / "checkpoints").is_symlink() else []
    _refuse(list(map(str, links)), "is a link out of its folder")


def _refuse(found: Sequence[str], why: str) -> None:
    if found:
        raise ConfigError([f"{one}: {why}; {FLAG} allows it, if the run is yours or you have read it" for one in found])


def _is_harmless(key: str, value: Any) -> bool:
    if key not in leaves():  # `tools.mcp.command` in place of `tools`: a part of a key's value
        return False
    if isinstance(value, Mapping):
        return _is_plain(value)
    if isinstance(value, list):
        return all(_is_harmless(key, one) for one in value)
    if not isinstance(value, str):
        return _is_plain(value)
    if "${" in value:  # reads the environment
        return False
    if key == "data.chat_template":  # another text is the name of a file
        return "{{" in value or "{%" in value
    return (key in _TEXTS and not _OWN_TASK.match(value)) or _WORD.fullmatch(value) is not None


def _is_plain(value: Any) -> bool:
    """Return whether options are numbers alone: any word may be a command to a tool."""
    if isinstance(value, Mapping):
        return all(_WORD.fullmatch(str(name)) and _is_plain(one) for name, one in value.items())
    return all(map(_is_plain, value)) if isinstance(value, list) else value is None or isinstance(value, bool | int | float)
