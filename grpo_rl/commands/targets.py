"""The model or run that a command names: `RUN`, `RUN@step`, a Hugging Face folder, `builtin:NAME`, or a hub
model. A checkpoint is exported once, to `RUN/exports/step_N`. Of a run that somebody else sent no code is run
and no address is reached before the user allows it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_rl.arguments import Arguments
from grpo_rl.checkpoint.store import CheckpointStore
from grpo_rl.config.checks.inputs import BY_IMPORT, is_gguf
from grpo_rl.config.schema.fields import leaves
from grpo_rl.errors import CheckpointError, ConfigError, DataError
from grpo_rl.frozen import frozen
from grpo_rl.telemetry.rundir import RunDir, links_out, named_run, no_run, run_config

if TYPE_CHECKING:
    from grpo_rl.telemetry.terminal.console import Console

BUILTIN = "builtin:"
START = "start"
_AT = re.compile(r"(?P<run>.+)@(?P<step>\d+|last|start)")
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@frozen
class Target:
    label: str
    model: str  # folder, `builtin:NAME` or hub name; empty: export the checkpoint first
    run: Path | None = None
    step: int | None = None  # of the checkpoint; None for an exported model

    @property
    def export_folder(self) -> Path:
        assert self.run is not None and self.step is not None
        return self.run / "exports" / f"step_{self.step}"


def find_target(text: str, *, trusted: bool = False) -> Target:
    """Raises ConfigError if `text` names nothing, DataError for a run without that step."""
    if text.startswith(BUILTIN):
        from grpo_rl.models.builtin import get_builtin

        get_builtin(text)
        return Target(text, text)
    run = named_run(text)
    if run is not None:
        return _newest(text, run)
    path = Path(text).expanduser()
    if (path / "config.json").is_file():
        return Target(text, str(path))
    match = _AT.fullmatch(text)
    if match is not None and (run := named_run(match["run"])) is not None:
        return _at(text, run, match["step"], trusted)
    if is_gguf(path):
        raise ConfigError(f"{text}: {BY_IMPORT}")
    if _HUB.fullmatch(text) and not Path(text).exists():
        return Target(text, text)
    raise ConfigError(
        no_run(
            match["run"] if match is not None else text,
            ", no model (a folder with config.json), no builtin:NAME and no owner/name of the hub",
        )
    )


def model_folder(target: Target, console: Console, *, trusted: bool = False) -> str:
    """Return a target's folder or name, exporting its checkpoint if need be. Raises ConfigError before
    anything is read of a run that is not `trusted` whose model brings code or links."""
    if target.model:
        return target.model
    assert target.run is not None and target.step is not None
    from grpo_rl.checkpoint.exporting import export_policy, is_exported
    from grpo_rl.cluster.warm_start import unstarted_folder

    base = _trained_from(target.run)
    if not trusted:
        refuse_model(target.run, base)
    checkpoint = RunDir(target.run).checkpoints / f"step_{target.step}"
    if not is_exported(checkpoint, target.export_folder):
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        with console.progress(f"exporting step {target.step} of {target.run.name}"):
            export_policy(checkpoint, unstarted_folder(base["path"]), base, target.export_folder)
    return str(target.export_folder)


def _trained_from(run: Path) -> dict[str, Any]:
    model: dict[str, Any] = run_config(run).get("actor_rollout_ref", {}).get("model", {})
    if not isinstance(model.get("path"), str):
        raise DataError(f"{run / 'config.yaml'}: actor_rollout_ref.model.path is missing")
    return model


def _newest(text: str, run: Path) -> Target:
    """Return the exported model of a run, else its newest checkpoint."""
    run_dir = RunDir(run)
    if (run_dir.model / "config.json").is_file():
        return Target(text, str(run_dir.model), run)
    steps = CheckpointStore(run_dir.checkpoints).steps()
    if steps:
        return Target(f"{text}@{steps[-1]}", "", run, steps[-1])
    raise DataError(
        f"{run}: has no exported model and no checkpoint yet (trainer.save_freq, trainer.export_at_end); "
        f"{text}@start is the model that it began with"
    )


def _at(text: str, run: Path, step: str, trusted: bool) -> Target:
    if step == START or step == "0":
        path = _trained_from(run)["path"]
        if not trusted:
            refuse_settings(run, {"actor_rollout_ref.model.path": path})
        return Target(text, path, run)
    steps = CheckpointStore(RunDir(run).checkpoints).steps()
    if not steps:
        raise CheckpointError(f"{run}: has no checkpoint (trainer.save_freq); {run} alone names its exported model")
    number = steps[-1] if step == "last" else int(step)
    if number not in steps:
        raise CheckpointError(f"{run}: there is no checkpoint of step {number}; there are {', '.join(map(str, steps))}")
    return Target(text if step != "last" else f"{run}@{number}", "", run, number)


# ---- what the file of a run may do by itself -----------------------------------------------------------

FLAG = "--trust-run"
_TEXTS = frozenset(
    [
        *("data.prompt_key", "data.reward_fn_key", "data.data_source", "data.ground_truth_key", "data.extra_info_key"),
        *("data.system_prompt", "data.val_files", "actor_rollout_ref.model.path", "reward.reward_model.model_path"),
        *("reward.reward_model.tokenizer_path", "reward.reward_model.step_separator"),
    ]
)
"""Keys whose text a model reads, or that name columns, data files and models: none of it is run."""
_WORD = re.compile(r"([\d.]+\s*\*\s*)?\w+")  # a registered name; code has a dot, colon or slash
_OWN_TASK = re.compile(r"task:(?!\w+(\?|$))")


def add_trust_option(parser: Arguments) -> None:
    parser.add_argument(FLAG, action="store_true", help="run what the run's file names: it is yours, or you have read it")


def refuse_settings(run: Path, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings that may name code, a command, an address or a file."""
    refused = [f"{key}={value!r}" for key, value in settings.items() if not _is_harmless(key, value)]
    _refuse(refused, f"stands in {run / 'config.yaml'}, and may run code or a command, or reach an address or a file")


def refuse_model(run: Path, model: Mapping[str, Any]) -> None:
    """Raise ConfigError if a run's first model brings code, or it or the checkpoints link to elsewhere."""
    own_code = model.get("trust_remote_code")
    _refuse([f"actor_rollout_ref.model.trust_remote_code={own_code!r}"] if own_code else [], f"stands in {run / 'config.yaml'}")
    folders = [os.path.expanduser(str(model.get(key))) for key in ("path", "tokenizer_path")]
    links = [link for folder in folders if os.path.isdir(folder) for link in links_out(Path(folder), deep=False)]
    links += [run / "checkpoints"] if (run / "checkpoints").is_symlink() else []
    _refuse(list(map(str, links)), "is a link out of its folder")


def _refuse(items: Sequence[str], why: str) -> None:
    if items:
        raise ConfigError([f"{item}: {why}; {FLAG} allows it, if the run is yours or you have read it" for item in items])


def _is_harmless(key: str, value: Any) -> bool:
    if key not in leaves():  # part of a key's value: `tools.search.folder` in `tools`
        return False
    if isinstance(value, list):
        return all(_is_harmless(key, entry) for entry in value)
    if not isinstance(value, str):
        return _is_plain(value)
    if "${" in value:  # reads the environment
        return False
    if key == "data.chat_template":  # else the name of a file
        return "{{" in value or "{%" in value
    return (key in _TEXTS and not _OWN_TASK.match(value)) or _WORD.fullmatch(value) is not None


def _is_plain(value: Any) -> bool:
    """Return whether options are numbers alone: a word may be a command to a tool."""
    if isinstance(value, Mapping):
        return all(_WORD.fullmatch(str(name)) and _is_plain(entry) for name, entry in value.items())
    return all(map(_is_plain, value)) if isinstance(value, list) else value is None or isinstance(value, bool | int | float)
