"""A checked Config of what Hydra composes: values are resolved, and `convert.py` enforces the schema's rules."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

import hydra
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_rl.config import command_line, hydra_files, relative_paths, secrets
from grpo_rl.config.checks import all_rules, inputs
from grpo_rl.config.command_line import Command
from grpo_rl.config.convert import convert_or_explain, show
from grpo_rl.config.hydra_files import Reading
from grpo_rl.config.overrides import is_secret
from grpo_rl.config.schema.fields import flat, free_mapping, leaves, nested
from grpo_rl.config.schema.tree import Config
from grpo_rl.config.verl import verl_answers
from grpo_rl.errors import ConfigError
from grpo_rl.frozen import frozen

VERSION_BASE = "1.3"
_LOCK = RLock()
_RAISE = "HYDRA_FULL_ERROR"  # makes Hydra raise instead of printing and ending the process
_HYDRAS_ERRORS = (HydraException, OmegaConfBaseException, ValueError, AssertionError)
T = TypeVar("T")
_BEGIN = re.compile(r"(\\*)\$\{")  # an expression's beginning, with the backslashes before it


@frozen
class Composed:
    config: Config
    resolved: dict[str, Any]
    """To be saved and shown: values from the environment stay `${oc.env:NAME}`, secrets are hidden."""
    recipe: str | None
    recipe_is_default: bool
    overrides: tuple[str, ...]  # words of the command line, secrets hidden
    notes: tuple[str, ...] = ()  # keys that were set and have no meaning here: a line each, for the plan

    def yaml(self) -> str:
        return to_yaml(self.resolved)


def compose(argv: Sequence[str]) -> Composed:
    """Raises ConfigError with a line for each problem."""
    command = read(argv)
    command.line.problems += [f"--{name}: is for python -m grpo_rl.main" for name in command.other_work]
    with hydra_files.reading(command.folders, command.config_name) as reading:
        return _checked_at_once(command, reading)


def as_words(settings: Sequence[str | Mapping[str, Any] | DictConfig], folder: Path) -> list[str]:
    """Return a command line in which a configuration that Hydra composed is a recipe file in `folder`, its
    relative paths made absolute. Raises ConfigError for anything else."""
    words: list[str] = []
    for entry in settings:
        if isinstance(entry, str):
            words.append(entry)
        elif isinstance(entry, DictConfig):
            tree: Any = OmegaConf.to_container(entry, resolve=False)
            file = folder / f"composed_{len(words)}.yaml"
            file.write_text(to_yaml(nested(relative_paths.from_folder(flat(tree), Path.cwd()))), encoding="utf-8")
            words.append(f"recipe={file}")
        else:
            raise ConfigError(f"{entry!r:.80}: neither a word such as key=value nor a configuration that Hydra has composed")
    return words


def launch(command: Command, work: Callable[[Composed], T]) -> T:
    """Return the result of `work` on what Hydra's main composes. Raises as `compose` and `work` do."""
    outcome: Future[T] = Future()
    with hydra_files.reading(command.folders, command.config_name) as reading:
        if command.line.problems:
            return work(_checked_at_once(command, reading))

        def task(composed: DictConfig) -> None:
            # Hydra would print what is raised, and return nothing.
            try:
                outcome.set_result(work(checked(composed, command, reading)))
            except BaseException as error:
                outcome.set_exception(error)

        try:
            main_of_hydra(command, task, command.line.words)
        except _HYDRAS_ERRORS as error:
            checked(OmegaConf.create({}), command, reading, [_one_line(error.__cause__ or error)])
    return outcome.result(timeout=0)


def print_asked(command: Command) -> int:
    """Let Hydra print what the options ask for. Raises ConfigError for problems of words and files."""
    with hydra_files.reading(command.folders, command.config_name) as reading:
        words = command.line.words
        if command.options.shell_completion:
            words = list(command.rest)
        elif problems := [*command.line.problems, *_hydras(command)[0], *reading.problems]:
            raise ConfigError([secrets.redact(problem) for problem in dict.fromkeys(problems)])
        try:
            with redirect_stdout(secrets.HidingStream(sys.stdout)):
                main_of_hydra(command, lambda composed: None, [*command.shown, *words])
        except SystemExit as ended:
            return ConfigError.exit_code if ended.code else 0
        except _HYDRAS_ERRORS as error:
            raise ConfigError(secrets.redact(_one_line(error.__cause__ or error))) from None
    return 0


def main_of_hydra(command: Command, task: Callable[[DictConfig], Any], words: Sequence[str]) -> None:
    start = hydra.main(version_base=VERSION_BASE, config_path=str(command.folders[0]), config_name=command.config_name)
    argv, environment = sys.argv, os.environ.get(_RAISE)
    sys.argv, os.environ[_RAISE] = [argv[0], *words], "1"
    try:
        with _no_outer_hydra():
            start(task)()
    finally:
        sys.argv = argv
        if environment is None:
            del os.environ[_RAISE]
        else:
            os.environ[_RAISE] = environment


def read(argv: Sequence[str]) -> Command:
    """Return the command line, and hide the secrets in it from now on."""
    secrets.remember_environment()
    typed = (word.partition("=")[2] for word in argv if is_secret(word))
    secrets.remember(value.strip("'\"") for value in typed if "${" not in value)
    return command_line.read(argv)


def _checked_at_once(command: Command, reading: Reading) -> Composed:
    problems, composed = _hydras(command)
    return checked(composed, command, reading, problems)


def _hydras(command: Command) -> tuple[list[str], DictConfig]:
    with _LOCK, _no_outer_hydra(), initialize_config_dir(str(command.folders[0]), version_base=VERSION_BASE):
        try:
            return [], hydra.compose(command.config_name, command.line.words)
        except _HYDRAS_ERRORS as error:
            return [_one_line(error.__cause__ or error)], OmegaConf.create({})


@contextmanager
def _no_outer_hydra() -> Iterator[None]:
    """Put aside the Hydra of a program that composes within its own `@hydra.main`: a process has one."""
    outer, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = outer


def checked(composed: DictConfig, command: Command, reading: Reading, problems: Sequence[str] = ()) -> Composed:
    """Raises ConfigError as `compose`."""
    line = command.line
    problems = [*line.problems, *reading.problems, *problems]
    all_settings = (line, *reading.settings.values())
    notes = [note for settings in all_settings for note in settings.notes]
    if meaningless := dict.fromkeys(key for settings in all_settings for key in settings.meaningless):
        notes.append(f"{', '.join(meaningless)}: no meaning here; verl's keys of speed, memory, logs or processes")
    raw, safe = _resolve(composed, problems)
    named_keys = {key for settings in all_settings for key in settings.keys}
    for tree in (raw, safe) if raw else ():
        notes += _implied(tree, named_keys)
    config, value_problems = convert_or_explain(raw)
    if reading.is_verls and (note := verl_answers.other_defaults(named_keys, config.model.path, config.data.train_files)):
        notes.append(note)
    secrets.remember([os.environ.get(config.reward.judge.api_key_env or "")])
    problems += value_problems
    problems += [
        f"{key}=true: stands in the recipe; running a model folder's own code has to be typed: {key}=true on the command line"
        for key in inputs.allows_code(config)
        if key not in line.keys
    ]
    if problems:
        problems += all_rules.between_sound_keys(config, problems)
        raise ConfigError([secrets.redact(problem) for problem in dict.fromkeys(problems)])
    return Composed(
        config=config,
        resolved=_shareable(config, raw, safe),
        recipe=line.choice_of.get("recipe"),
        recipe_is_default=command.recipe_is_default,
        overrides=tuple(
            f"{word.partition('=')[0]}={secrets.HIDDEN}" if is_secret(word) else secrets.redact(word) for word in command.argv
        ),
        notes=tuple(secrets.redact(note) for note in dict.fromkeys(notes)),
    )


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _implied(tree: dict[str, Any], named_keys: Collection[str]) -> Iterator[str]:
    """Set what follows from other keys and is not among `named_keys`, with a line for each."""
    verl_answers.in_lists(tree["algorithm"]["rollout_correction"])
    parts, actor = tree["actor_rollout_ref"], "actor_rollout_ref.actor.use_kl_loss"
    if tree["algorithm"]["use_kl_in_reward"] and actor not in named_keys:
        parts["actor"]["use_kl_loss"] = False
        yield f"{actor}=false: the KL is in the reward (algorithm.use_kl_in_reward=true)"
    folder, prefix = parts["model"]["lora_adapter_path"], "actor_rollout_ref.model."
    if not folder or f"{prefix}lora_rank" in named_keys:
        return
    try:
        adapter = json.loads((Path(str(folder)).expanduser() / "adapter_config.json").read_text(encoding="utf-8"))
        shape = {"lora_rank": adapter["r"], "lora_alpha": adapter["lora_alpha"], "target_modules": adapter["target_modules"]}
    except (OSError, ValueError, TypeError, LookupError):
        return  # the checks report it
    for name, value in shape.items():
        if f"{prefix}{name}" not in named_keys:
            parts["model"][name] = [value] if isinstance(value, str) else value
            yield f"{prefix}{name}={show(value)}: is the adapter's in {prefix}lora_adapter_path"


def to_yaml(tree: Mapping[str, Any]) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(dict(tree)))


def _resolve(composed: DictConfig, problems: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return all values with `${...}` filled in, and the same with those from the environment left as
    expressions. Keys that cannot be resolved become problems and get their defaults."""
    failed: set[str] = set()
    raw: Any = None
    while raw is None:
        try:
            raw = OmegaConf.to_container(composed, resolve=True)
        except OmegaConfBaseException as error:
            key = (getattr(error, "full_key", None) or "").partition("[")[0]
            problems.append(f"{key or 'a value'}: cannot be resolved: {_one_line(error)}")
            if not key or key in failed:
                return {}, {}
            failed.add(key)
            OmegaConf.update(composed, key, leaves()[key].default if key in leaves() else None)
    safe: Any = copy.deepcopy(raw)
    if "oc.env" in str(OmegaConf.to_container(composed)):
        guarded = composed.copy()
        _guard_environment(guarded)
        safe = OmegaConf.to_container(guarded, resolve=True)
    return raw, safe


def _guard_environment(node: Any) -> None:
    for position in list(node.keys() if OmegaConf.is_dict(node) else range(len(node))):
        child = node._get_node(position)
        if OmegaConf.is_interpolation(node, position):
            expression = str(child._value())
            if "oc.env" in expression:
                # An odd number of backslashes before it has escaped it already.
                node[position] = _BEGIN.sub(lambda match: match[0] if len(match[1]) % 2 else f"{match[1]}\\${{", expression)
        elif OmegaConf.is_config(child) and not child._is_none() and not child._is_missing():
            _guard_environment(child)


def _shareable(config: Config, raw: dict[str, Any], safe: dict[str, Any]) -> dict[str, Any]:
    """Return every key of `config`; where `safe` differs, its expression takes the value's place."""

    def merge(value: Any, raw_value: Any, safe_value: Any, key: str) -> Any:
        if raw_value != safe_value and not isinstance(value, dict | list):
            return safe_value
        if free_mapping(key) and secrets.is_secret_name(key.rpartition(".")[2]) and secrets.may_be_secret(value):
            secrets.remember([value])
            return secrets.HIDDEN
        if isinstance(value, list):
            raw_value, safe_value = (
                entry if isinstance(entry, list) and len(entry) == len(value) else value for entry in (raw_value, safe_value)
            )
            return [merge(*entries, key) for entries in zip(value, raw_value, safe_value, strict=True)]
        if isinstance(value, dict):
            raw_value, safe_value = (entry if isinstance(entry, dict) else {} for entry in (raw_value, safe_value))
            return {
                name: merge(entry, raw_value.get(name), safe_value.get(name), f"{key}.{name}" if key else name)
                for name, entry in value.items()
            }
        return _escaped(value)

    shareable = merge(dataclasses.asdict(config), raw, safe, "")
    assert isinstance(shareable, dict)
    # The file is a recipe in another folder, and must mean the same there.
    return nested(relative_paths.from_folder(flat(shareable), Path.cwd()))


def _escaped(value: Any) -> Any:
    """Escape `${` in text, so that it is read as text again."""
    if isinstance(value, str):
        return _BEGIN.sub(lambda match: f"{match[1] * 2}\\${{", secrets.redact(value))
    return [_escaped(entry) for entry in value] if isinstance(value, list) else value
