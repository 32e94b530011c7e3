"""Checks that the files, folders, models and packages which a configuration names are there."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from grpo_rl.config.derived import (
    collects,
    critic_has_own_model,
    has_judge,
    has_reward_model,
    plays_episodes,
    samples_answers,
    trains_only_reward_model,
)
from grpo_rl.config.schema.tree import Config

INSTALL = {
    "wandb": "python -m pip install wandb==0.31.0",
    "mlflow": "python -m pip install mlflow-skinny==3.17.2 'sqlalchemy>=2,<3' 'alembic>=1.14,<2' pandas==3.1.1",
}
"""The command that installs each tracker which is no part of the plain installation, as pyproject.toml pins it."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def problems(config: Config) -> Iterator[str]:
    """Yield what is named and cannot be found or read."""
    yield from _model(config)
    yield from _rewards(config)
    yield from _checkpoint(config)
    yield from _loggers(config)


def _model(config: Config) -> Iterator[str]:
    if trains_only_reward_model(config):
        return  # it has no policy: `reward_rules` looks at its model
    model = config.actor_rollout_ref.model
    key = "actor_rollout_ref.model.path"
    if not model.path:
        yield f"{key} is not set: give a Hugging Face model folder, or builtin:arithmetic for the embedded model"
    elif not model.path.startswith("builtin:"):
        problem = model_folder(
            model.path, needs_tokenizer=model.tokenizer_path is None, elsewhere=config.trainer.machine is not None
        )
        if problem:
            yield f"{key}={model.path}: {problem}"
    yield from _critic_model(config)
    if model.tokenizer_path is not None:
        folder = Path(model.tokenizer_path).expanduser()
        if folder.is_dir() and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            yield f"actor_rollout_ref.model.tokenizer_path={folder}: no tokenizer there (none of {', '.join(_TOKENIZER_FILES)})"
        elif not folder.is_dir() and not _HUB_NAME.fullmatch(model.tokenizer_path):
            yield f"actor_rollout_ref.model.tokenizer_path={folder}: there is no such folder"


def _critic_model(config: Config) -> Iterator[str]:
    path = config.critic.model.path
    if not critic_has_own_model(config):
        return
    if path.startswith("builtin:"):
        yield f"critic.model.path={path}: an embedded model has to be the actor's too; a model folder, or leave it out"
        return
    problem = model_folder(path, needs_tokenizer=False, elsewhere=config.trainer.machine is not None)
    if problem:
        yield f"critic.model.path={path}: {problem}"


def model_folder(path: str, *, needs_tokenizer: bool, elsewhere: bool = False) -> str | None:
    """Return why the folder cannot hold a model; None where it can, or where only asking a hub would show it.

    Where the run is `elsewhere` only its config.json is read.
    """
    folder = Path(path).expanduser()
    if not folder.exists():
        if _HUB_NAME.fullmatch(path):
            return None
        return "there is no such folder, and a name on the hub looks like organisation/name"
    if not (folder / "config.json").is_file():
        return "no config.json there; a Hugging Face model folder has config.json, *.safetensors and a tokenizer"
    if elsewhere:
        return None
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        return "no weights there (*.safetensors)"
    if needs_tokenizer and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return f"no tokenizer there (none of {', '.join(_TOKENIZER_FILES)}); name its folder in actor_rollout_ref.model.tokenizer_path"
    return None


def _rewards(config: Config) -> Iterator[str]:
    reward, custom = config.reward, config.reward.custom_reward_function
    if (samples_answers(config) or collects(config)) and not (
        reward.functions or has_reward_model(config) or has_judge(config) or plays_episodes(config)
    ):
        yield "reward.functions=[]: without a reward there is nothing to learn from; auto takes the rule of the data source"
    if len(set(reward.functions)) < len(reward.functions):
        yield f"reward.functions=[{','.join(reward.functions)}]: a function is named twice; give it a factor instead (2*name)"
    if reward.on_failure == "value" and reward.failure_value is None:
        yield "reward.on_failure=value: gives every failed reward reward.failure_value, which is not set; give it, e.g. 0"
    if custom.path is not None:
        if Path(custom.path).suffix != ".py" or not Path(custom.path).is_file():
            yield f"reward.custom_reward_function.path={custom.path}: there is no Python file {Path(custom.path).absolute()}"
        if reward.functions != ["auto"]:
            yield (
                f"reward.custom_reward_function.path={custom.path}: would replace reward.functions=[{','.join(reward.functions)}]; "
                f"add {custom.path}:{custom.name} to reward.functions instead"
            )


def _checkpoint(config: Config) -> Iterator[str]:
    trainer = config.trainer
    if trainer.resume_mode == "resume_path":
        if trainer.resume_from_path is None:
            yield "trainer.resume_mode=resume_path: needs trainer.resume_from_path, a folder .../checkpoints/step_N"
        elif not Path(trainer.resume_from_path).is_dir():
            yield f"trainer.resume_from_path={trainer.resume_from_path}: there is no folder {Path(trainer.resume_from_path).absolute()}"


def _loggers(config: Config) -> Iterator[str]:
    names = config.trainer.logger
    if len(set(names)) < len(names):
        yield f"trainer.logger=[{','.join(names)}]: a logger is named twice"
    if config.trainer.dry_run:
        return  # planned here, to be run elsewhere: the plan says what that machine needs
    for name in missing_loggers(config):
        others = ",".join(other for other in dict.fromkeys(names) if other != name)
        yield f"trainer.logger: {name} is not installed; {INSTALL[name]}, or trainer.logger=[{others}]"


def missing_loggers(config: Config) -> list[str]:
    """Return the trackers that are named and not installed on this machine."""
    return [name for name in INSTALL if name in config.trainer.logger and importlib.util.find_spec(name) is None]
