"""What a configuration names must exist and be harmless: files, models, packages, addresses, run names."""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from grpo_rl.config.convert import show
from grpo_rl.config.schema.tree import Config
from grpo_rl.errors import Problems

_MODEL, _SCORER, _JUDGE = "actor_rollout_ref.model", "reward.reward_model", "reward.judge"
INSTALL = {
    "wandb": "python -m pip install wandb==0.31.0",
    "mlflow": "python -m pip install mlflow-skinny==3.17.2 'sqlalchemy>=2,<3' 'alembic>=1.14,<2'",
}
"""Trackers outside of the plain installation, as pyproject.toml pins them."""
SMOLLM2 = "SmolLM2-135M-Instruct"  # the folder that scripts/get_smollm2.py makes, for the recipes `real/`
BY_IMPORT = "weights in GGUF are not trained as they are; grpo-rl import-gguf FILE.gguf FOLDER makes a model folder of them"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
OWN_CODE, SCORER_CODE = f"{_MODEL}.trust_remote_code", f"{_SCORER}.trust_remote_code"


def problems(config: Config) -> Problems:
    yield from _data(config)
    yield from _models(config)
    yield from _rewards(config)
    yield from _judge(config)
    yield from _run(config)


def _data(config: Config) -> Problems:
    data, custom = config.data, config.data.custom_cls
    if not data.train_files and not config.trainer.val_only:
        yield (
            "data.train_files is not set: give data files (.parquet, .jsonl, .json, .csv, .arrow), a folder, hf:owner/name?split=train, "
            "or a task, such as data.train_files=task:arithmetic"
        )
    weights = data.train_weights
    if weights is not None and (custom.path is not None or len(weights) != len(data.train_files)):
        entries = (
            f"{len(data.train_files)} entries" if custom.path is None else "one class, data.custom_cls, that reads them all"
        )
        yield f"data.train_weights: has {len(weights)} weights, and data.train_files has {entries}; give one weight for each entry"
    for key in ("train_files", "val_files", "val_prompt_files") if custom.path is None else ():
        for file in getattr(data, key):
            if problem := _data_file(file, elsewhere=config.trainer.machine is not None):
                yield f"data.{key}={file}: {problem}"
    if (custom.path is None) != (custom.name is None):
        present, missing = ("path", "name") if custom.name is None else ("name", "path")
        yield f"data.custom_cls.{present}={getattr(custom, present)}: needs data.custom_cls.{missing} as well"
    template = data.chat_template
    if template is not None and not re.search("{[{%]", template) and not os.path.isfile(os.path.expanduser(template)):
        yield f"data.chat_template={template}: neither a Jinja template ({{{{ ... }}}}) nor a file"


def _data_file(file: str, *, elsewhere: bool) -> str | None:
    """Return what is wrong with one entry; a run `elsewhere` may have files that are not here."""
    if file.startswith("task:"):
        return None
    if file.startswith("hf:"):
        if importlib.util.find_spec("datasets") is None:
            return "the package datasets is not installed; install the extra `data` (pip install datasets), or name files"
        options = file.partition("?")[2].split("&")
        return None if any(option.startswith("split=") for option in options) else f"needs a split: {file}?split=train"
    path = Path(file).expanduser()
    if elsewhere or os.path.exists(path) or ("?" in file and os.path.exists(os.path.expanduser(file.rpartition("?")[0]))):
        return None
    names = difflib.get_close_matches(path.name, os.listdir(path.parent), n=2) if os.path.isdir(path.parent) else []
    hint = f"; there is {' and '.join(str(path.parent / name) for name in names)}" if names else ""
    return f"there is no file {path.absolute()}{hint}"


def _models(config: Config) -> Problems:
    model, scorer = config.model, config.reward.reward_model
    scorer_only = config.trains_only_reward_model  # without a policy
    if not scorer_only and not model.path:
        yield f"{_MODEL}.path is not set: give a Hugging Face model folder, or builtin:arithmetic for the embedded model"
    elif not scorer_only:
        keys = f"{_MODEL}.path", f"{_MODEL}.tokenizer_path"
        yield from _model_folder(config, OWN_CODE, keys[0], model.path, keys[1], model.tokenizer_path)
        if config.may_have_critic and config.critic_has_own_model:
            path = config.critic.model.path
            if path.startswith("builtin:"):
                yield f"critic.model.path={path}: an embedded model has to be the actor's too; a model folder, or leave it out"
            yield from _model_folder(config, OWN_CODE, "critic.model.path", path)
    if not scorer.enable and not scorer_only:
        return
    embedded = config.trains_reward_model
    if scorer.model_path is None:
        example = ", or builtin:arithmetic" if embedded else " with a head of one label"
        yield f"{_SCORER}.model_path is not set: the reward model needs one, a model folder{example}"
    key, tokenizer_key = f"{_SCORER}.model_path", f"{_SCORER}.tokenizer_path"
    tokenizer = scorer.tokenizer_path if scorer_only else scorer.tokenizer_path or ""
    yield from _model_folder(config, SCORER_CODE, key, scorer.model_path or "", tokenizer_key, tokenizer, builtin=embedded)


def _model_folder(
    config: Config,
    switch: str,
    key: str,
    path: str,
    tokenizer_key: str = "",
    tokenizer: str | None = "",
    *,
    builtin: bool = True,
) -> Problems:
    """Yield why a folder holds no usable model, or brings code that `switch` does not allow, as far as no hub
    is asked. `tokenizer` is its folder, None for the model's, empty if none is needed. Of a run elsewhere
    only config.json is read."""
    folder, elsewhere = Path(path).expanduser(), config.trainer.machine is not None
    none_there = f"no tokenizer there (none of {', '.join(_TOKENIZER_FILES)})"
    if not path or (builtin and path.startswith("builtin:")):
        pass
    elif is_gguf(folder):
        yield f"{key}={path}: {BY_IMPORT}"
    elif not folder.exists():
        if folder.name == SMOLLM2:
            yield f"{key}={path}: there is no such folder yet; python scripts/get_smollm2.py makes it, and downloads 93 MB"
        elif not _HUB_NAME.fullmatch(path):
            yield f"{key}={path}: there is no such folder, and a name on the hub looks like organisation/name"
    elif not (folder / "config.json").is_file():
        yield f"{key}={path}: no config.json there; a Hugging Face model folder has config.json, *.safetensors and a tokenizer"
    elif not elsewhere and not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        yield f"{key}={path}: no weights there (*.safetensors)"
    elif not elsewhere and tokenizer is None and not _has_tokenizer(folder):
        yield f"{key}={path}: {none_there}; name its folder in {tokenizer_key}"
    if tokenizer and Path(tokenizer).expanduser().is_dir():
        if not _has_tokenizer(Path(tokenizer).expanduser()):
            yield f"{tokenizer_key}={tokenizer}: {none_there}"
    elif tokenizer and not _HUB_NAME.fullmatch(tokenizer):
        yield f"{tokenizer_key}={tokenizer}: there is no such folder"
    for named, place in ((key, path), (tokenizer_key, tokenizer)):
        for name in ("config.json", "tokenizer_config.json") if place and switch not in allows_code(config) else ():
            if brings_code(Path(str(place)).expanduser() / name):
                yield (
                    f"{named}={place}: its {name} names Python code of its own (auto_map); read that code, then set "
                    f"{switch}=true on the command line if it may run"
                )


def is_gguf(path: Path) -> bool:
    """Return whether this is a GGUF file, or a folder of such files and no model for transformers."""
    return path.suffix == ".gguf" or (not (path / "config.json").is_file() and any(path.glob("*.gguf")))


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def allows_code(config: Config) -> list[str]:
    model, scorer = config.model, config.reward.reward_model
    allowed = {OWN_CODE: model.trust_remote_code, SCORER_CODE: scorer.trust_remote_code}
    return [key for key, is_allowed in allowed.items() if is_allowed]


def brings_code(file: Path) -> bool:
    """Return whether a model's JSON file asks for code from its folder; False if it cannot be read."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "auto_map" in content


def _rewards(config: Config) -> Problems:
    reward = config.reward
    scores = config.samples_answers or config.collects
    by_model = reward.reward_model.enable or config.has_judge or config.plays_episodes
    if scores and not reward.functions and not by_model:
        yield "reward.functions=[]: without a reward there is nothing to learn from; auto takes the rule of the data source"
    if len(set(reward.functions)) < len(reward.functions):
        yield f"reward.functions={show(reward.functions)}: a function is named twice; give it a factor instead (2*name)"
    for name in reward.audit:
        if name in reward.functions:
            yield f"reward.audit={name}: is in reward.functions too, and an audit is by what the policy is not trained on"
        if "*" in name:
            yield f"reward.audit={name}: takes no factor, as an audit is no sum"
    if "judge" in reward.audit and reward.judge.base_url is None:
        yield "reward.audit=judge: needs reward.judge.base_url"
    if reward.on_failure == "value" and reward.failure_value is None:
        yield "reward.on_failure=value: gives every failed reward reward.failure_value, which is not set; give it, e.g. 0"


def _judge(config: Config) -> Problems:
    """Check the address; `rewards/models/judge.py` reads the rest for the plan."""
    judge = config.reward.judge
    if judge.base_url is None:
        return
    address = urlsplit(judge.base_url)
    # Addresses are not shown: they may hold a secret.
    if address.scheme not in ("http", "https") or not address.hostname:
        yield f"{_JUDGE}.base_url: must be http(s)://host[:port]/v1"
    if address.username or address.password or address.query:
        yield f"{_JUDGE}.base_url: has a user, password or query in it; give a key by {_JUDGE}.api_key_env"
    if judge.model is None:
        yield f"{_JUDGE}.model is not set: the name of the model at {_JUDGE}.base_url"


def _run(config: Config) -> Problems:
    trainer, names = config.trainer, config.trainer.logger
    for name in ("project_name", "experiment_name"):
        value = getattr(trainer, name)
        if value is not None and not stays_below(value):
            yield f"trainer.{name}={value!r}: {NAME_RULE}"
    folder, resumed = trainer.default_local_dir, trainer.resume_from_path
    if not folder.strip() or not folder.isprintable():
        yield f"trainer.default_local_dir={folder!r}: give the folder in which runs are made, a path without control characters"
    else:
        path = Path(folder).expanduser()
        above = next(entry for entry in (path, *path.parents) if entry.exists())
        if not above.is_dir():
            yield f"trainer.default_local_dir={folder}: {above} is a file, so no folder can be made there"
    if trainer.resume_mode == "resume_path":
        if resumed is None:
            yield "trainer.resume_mode=resume_path: needs trainer.resume_from_path, a folder .../checkpoints/step_N"
        elif not os.path.isdir(resumed):
            yield f"trainer.resume_from_path={show(resumed)}: there is no folder {show(os.path.abspath(resumed))}"
    # A run that is only planned here needs no packages here.
    for name in [] if trainer.dry_run else missing_loggers(config):
        installed = ",".join(other for other in dict.fromkeys(names) if other != name)
        yield f"trainer.logger: {name} is not installed; {INSTALL[name]}, or trainer.logger=[{installed}]"


NAME_RULE = "it must name a folder below trainer.default_local_dir, without '..', a leading '/' or control characters, at most 200 bytes"


def stays_below(name: str) -> bool:
    if not name.strip() or not name.isprintable() or len(name.encode(errors="replace")) > 200:
        return False
    return not name.startswith(("/", "~")) and not any(part in ("..", ".") for part in name.split("/"))


def missing_loggers(config: Config) -> list[str]:
    return [name for name in INSTALL if name in config.trainer.logger and importlib.util.find_spec(name) is None]
