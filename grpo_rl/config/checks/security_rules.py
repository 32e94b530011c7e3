"""Rules against harm by a configuration: code not asked for, files outside the run's folder, an open cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from grpo_rl.config.schema.tree import Config

OWN_CODE = "actor_rollout_ref.model.trust_remote_code"
SCORER_CODE = "reward.reward_model.trust_remote_code"
_CODE_FILES = ("config.json", "tokenizer_config.json")


def problems(config: Config) -> Iterator[str]:
    """Yield paths and names that lead elsewhere, and model folders that bring code of their own."""
    yield from _paths(config)
    yield from _code_in_models(config)


def _paths(config: Config) -> Iterator[str]:
    trainer = config.trainer
    for name in ("project_name", "experiment_name"):
        value = getattr(trainer, name)
        if value is not None and not _stays_below(value):
            yield (
                f"trainer.{name}={value!r}: it must name a folder below trainer.default_local_dir, without '..', a leading '/' or "
                "control characters, at most 200 bytes"
            )
    folder = trainer.default_local_dir
    if not folder.strip() or not folder.isprintable():
        yield f"trainer.default_local_dir={folder!r}: give the folder in which runs are made, a path without control characters"
        return
    path = Path(folder).expanduser()
    above = next((entry for entry in (path, *path.parents) if entry.exists()), None)
    if above is not None and not above.is_dir():
        yield f"trainer.default_local_dir={folder}: {above} is a file, so no folder can be made there"
    resumed = trainer.resume_from_path
    if resumed is not None and not resumed.isprintable():
        yield f"trainer.resume_from_path={resumed!r}: a path without control characters"


def _stays_below(name: str) -> bool:
    if not name.strip() or not name.isprintable() or len(name.encode(errors="replace")) > 200:
        return False
    return not name.startswith(("/", "~")) and not any(part in ("..", ".") for part in name.split("/"))


def _code_in_models(config: Config) -> Iterator[str]:
    model, scorer = config.actor_rollout_ref.model, config.reward.reward_model
    folders = {
        "actor_rollout_ref.model.path": (model.path, OWN_CODE),
        "actor_rollout_ref.model.tokenizer_path": (model.tokenizer_path, OWN_CODE),
        "critic.model.path": (config.critic.model.path, OWN_CODE),
    }
    if scorer.enable:
        folders |= {
            "reward.reward_model.model_path": (scorer.model_path, SCORER_CODE),
            "reward.reward_model.tokenizer_path": (scorer.tokenizer_path, SCORER_CODE),
        }
    allowed = allows_code(config)
    for key, (folder, switch) in folders.items():
        if not folder or folder.startswith("builtin:") or switch in allowed:
            continue
        for name in _CODE_FILES:
            if brings_code(Path(folder).expanduser() / name):
                yield (
                    f"{key}={folder}: its {name} names Python code of its own (auto_map); read that code, then set "
                    f"{switch}=true on the command line if it may run"
                )


def allows_code(config: Config) -> list[str]:
    """Return the keys by which this configuration lets the code of model folders run."""
    allowed = {
        OWN_CODE: config.actor_rollout_ref.model.trust_remote_code,
        SCORER_CODE: config.reward.reward_model.trust_remote_code,
    }
    return [key for key, is_allowed in allowed.items() if is_allowed]


def brings_code(file: Path) -> bool:
    """Return whether a model's JSON file asks for Python code from its folder. False for one that is not there or no JSON."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "auto_map" in content
