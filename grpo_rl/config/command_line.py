"""The command line: Hydra's options, and words `key=value`, which Hydra gets once they have been checked."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from grpo_rl.config import hydra_files, overrides, recipes
from grpo_rl.config.convert import show
from grpo_rl.config.overrides import Line
from grpo_rl.config.recipes import PRIMARY
from grpo_rl.errors import ConfigError, did_you_mean
from grpo_rl.frozen import frozen

_RECIPE_UNLESS_SET = {"actor_rollout_ref.model.path", "data.train_files"}
_RECIPE_UNLESS_CHOSEN = {"recipe", "model", "data"}
CFG_CHOICES = ("job", "hydra", "all")
INFO_CHOICES = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help shows all options")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    for names in (("--help", "-h"), ("--hydra-help",), ("--version",), ("--resolve",), ("--run", "-r"), ("--multirun", "-m")):
        parser.add_argument(*names, action="store_true")
    parser.add_argument("--shell-completion", "-sc", action="store_true")
    parser.add_argument("--cfg", "-c", choices=CFG_CHOICES)
    parser.add_argument("--info", "-i", choices=INFO_CHOICES)
    for names in (("--package", "-p"), ("--config-path", "-cp"), ("--config-name", "-cn"), ("--config-dir", "-cd")):
        parser.add_argument(*names)
    return parser


@frozen
class Command:
    options: argparse.Namespace
    folders: Sequence[Path]  # of primary files and choices, the first one first
    config_name: str
    line: Line
    argv: Sequence[str]
    rest: Sequence[str]  # words that are no options, as typed
    recipe_is_default: bool
    """Neither a recipe, a model nor data were named: the embedded model learns the embedded task."""

    @property
    def other_work(self) -> list[str]:
        options = vars(self.options).items()
        return [name.replace("_", "-") for name, value in options if value and not name.startswith("config")]

    @property
    def shown(self) -> list[str]:
        """Options that let Hydra print something instead of a run."""
        words = []
        for name in ("help", "hydra_help", "shell_completion", "cfg", "info", "package", "resolve"):
            if value := getattr(self.options, name):
                words += [f"--{name.replace('_', '-')}", *([] if value is True else [value])]
        return words


def read(argv: Sequence[str]) -> Command:
    """Read a command line; wrong settings go to `line.problems`. Raises ConfigError for wrong options."""
    options, rest = _parser().parse_known_args(_with_values(argv))
    folders, config_name, problems = _primary(options)
    line = overrides.read(rest, folders)
    line.problems[:0] = problems
    keyed = line.keys & _RECIPE_UNLESS_SET or line.choice_of.keys() & _RECIPE_UNLESS_CHOSEN
    recipe_is_default = options.config_name is None and not keyed
    if recipe_is_default and not any("recipe" in word for word in rest):
        line.choose("recipe", recipes.DEFAULT_RECIPE, folders)
    return Command(options, folders, config_name, line, argv, rest, recipe_is_default)


def _with_values(argv: Sequence[str]) -> list[str]:
    """Add the usual value after `--cfg` and `--info` if none follows; argparse would take the next word."""
    words: list[str] = []
    for word, following in itertools.zip_longest(argv, argv[1:]):
        words.append(word)
        if word in ("--cfg", "-c") and following not in CFG_CHOICES:
            words.append("job")
        if word in ("--info", "-i") and following not in INFO_CHOICES:
            words.append("all")
    return words


def _primary(options: argparse.Namespace) -> tuple[list[Path], str, list[str]]:
    conf, problems = recipes.conf(), []
    path, name, added = ((getattr(options, key) or "").strip("'\"") for key in ("config_path", "config_name", "config_dir"))
    name = (name or PRIMARY).removesuffix(".yaml")
    folders = [Path(path).expanduser().absolute(), conf] if path else [conf]
    if added:
        folders.append(Path(added).expanduser().absolute())
    holders = [folder for folder in folders if (folder / f"{name}.yaml").is_file()]
    for option, folder in (("--config-path", path and folders[0]), ("--config-dir", added and folders[-1])):
        # verl's examples name the folder of its own defaults, which conf/ has.
        if folder and not folder.is_dir() and not (option == "--config-path" and holders):
            problems.append(f"{option}={folder}: there is no such folder")
    folders = [folder for folder in folders if folder.is_dir()]
    if not holders:
        known = [entry.stem for folder in folders for entry in folder.glob("*.yaml")]
        problems.append(
            f"--config-name={show(name)}: there is no {name}.yaml in {', '.join(map(str, folders))}."
            f"{did_you_mean(name, known, most=1)} Name its folder too, --config-path=FOLDER, or give it as recipe=FOLDER/{name}.yaml"
        )
        return folders, PRIMARY, problems
    try:
        folders += hydra_files.searched(holders[0] / f"{name}.yaml")
    except ConfigError as error:
        problems += error.problems
    # A user's file with the name of the package's: the package's is still found by its name.
    return folders, f"./{name}" if name == PRIMARY and holders[0] != conf else name, problems
