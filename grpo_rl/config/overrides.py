"""Settings as a command line or a recipe has them: each becomes a key of the schema, or is answered with what is wrong with it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from grpo_rl.config.convert import show, unknown_key
from grpo_rl.config.recipes import VERLS_DEFAULTS
from grpo_rl.config.schema.fields import Kind, free_mapping, leaves, sections
from grpo_rl.config.verl import verl_answers

_WORD = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[^=]*)(?:=(?P<value>.*))?", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*", re.ASCII)
_FILE_OPTIONS = ("--config-path", "--config-name")
SEEDS = ("trainer.seed", "data.seed", "actor_rollout_ref.rollout.seed")
"""The keys that `seed=N` sets: of new weights and dropout, of the order of the data, and of sampling."""
MACHINE = "trainer.machine"
"""The key that `machine=NAME` sets."""
_MACHINE = re.compile(r"(?:(?:(\d+)x)?(\d+)x)?[A-Za-z].*")
MOST_RUNS = 1000
"""The most runs of one sweep: more are a slip, such as a range with too many zeros."""
REMOVED = object()
"""The value of a part of a free mapping that `~key` takes away."""


@dataclass(slots=True)
class Settings:
    """The settings of one recipe or of the command line, in their order."""

    where: str = ""
    """Stands behind what is said of them: ` (in recipe NAME)`."""
    recipe: str | None = None
    pairs: list[tuple[str, Any]] = field(default_factory=list)
    """Keys of the schema, or below a free mapping, with their values. `{}` clears a mapping, other mappings are merged."""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What is taken and has another place here, or no meaning: a line each."""

    @property
    def keys(self) -> set[str]:
        """All keys that are set."""
        return {key for key, _ in self.pairs}

    def take(self, key: str, value: Any) -> None:
        """Add a setting, a group of settings, or what is wrong with it."""
        if free_mapping(key) is None and isinstance(value, Mapping) and key not in leaves():
            for name, entry in value.items():
                self.take(f"{key}.{name}", entry)
            return
        place = verl_answers.place_of(key, value)
        if place != key:
            self.notes.append(f"{key}={show(value)}: is {place} here{self.where}")
        above = next((name for name in leaves() if place.startswith(f"{name}.")), None)
        if place in leaves() or free_mapping(place):
            self.pairs.append((place, value))
        elif place in sections():
            if value is not None or not self.where:  # in a file: all lines of the group are commented out
                self.problems.append(f"{place}={show(value)}: is a group of keys, not a value; set {place}.NAME=...")
        elif (reply := verl_answers.reply(place, value, self.where)) is not None:
            self.problems += reply[0]
            self.notes += reply[1]
        elif above:
            self.problems.append(f"{place}: {above} takes {leaves()[above].kind.describe()}, so nothing lies below it")
        else:
            self.problems.append(unknown_key(place, self.where))

    def reset(self, key: str) -> None:
        """Set a key or a group back to the schema's defaults, whatever a recipe has."""
        found = [leaf for leaf in leaves().values() if leaf.key == key or leaf.key.startswith(f"{key}.")]
        self.pairs += [(leaf.key, leaf.default) for leaf in found]
        if free_mapping(key):
            self.pairs.append((key, REMOVED))
        elif not found:
            self.problems.append(unknown_key(key))


def read(words: Iterable[str]) -> Settings:
    """Return the settings of a command line. Never raises for what a user typed: see `problems`."""
    line = Settings()
    machine = ""
    for word in _with_verls_file(line, list(words)):
        match = _WORD.fullmatch(word)
        assert match is not None
        sign, key, value = match["sign"], match["key"].strip(), match["value"]
        if not key or (value is None and sign != "~"):
            start = (
                "options are --help, --cfg, --multirun and --version"
                if word.startswith("-")
                else "settings are written key=value"
            )
            line.problems.append(f"{show(word)}: not understood; {start}")
        elif not _NAME.fullmatch(key):
            line.problems.append(
                f"{show(word)}: {key[:100]!a} is not a key; keys are words with dots between them, like trainer.save_freq=10"
            )
        elif key == "recipe":
            _take_recipe(line, word, sign, value)
        elif sign == "~" and value is not None:
            line.problems.append(f"~{key}={value}: write ~{key} (back to the default), or {key}={value} to set it")
        elif value is None:
            line.reset(key)
        else:
            if key == "machine":
                key, machine = MACHINE, value
            for name in SEEDS if key == "seed" else (key,):
                _assign(line, name, value)
    _take_machine(line, machine)
    return line


def _with_verls_file(line: Settings, words: list[str]) -> list[str]:
    """Return the words with `--config-path=FOLDER --config-name=NAME`, by which verl's examples name a file, as a recipe.

    `ppo_trainer`, the file of verl's defaults, stands for the defaults here, and is left out.
    """
    given = {word.partition("=")[0]: word.partition("=")[2].strip("'\"") for word in words if word.startswith(_FILE_OPTIONS)}
    rest = [word for word in words if not word.startswith(_FILE_OPTIONS)]
    folder, name = (given.get(option, "") for option in _FILE_OPTIONS)
    if not name or name in VERLS_DEFAULTS:
        return rest
    file = f"{name.removesuffix('.yaml')}.yaml"
    if folder:
        return [f"recipe={folder.rstrip('/')}/{file}", *rest]
    line.problems.append(f"--config-name={name}: give the file as recipe=FOLDER/{file}")
    return rest


def _take_machine(line: Settings, name: str) -> None:
    """Set the number of GPUs (one, where it says none) and of machines as a machine's name says, unless the words set them."""
    if match := _MACHINE.fullmatch(name):
        nodes, gpus = match.groups()
        for key, value in (("trainer.nnodes", nodes), ("trainer.n_gpus_per_node", gpus or "1")):
            if value is not None and key not in line.keys:
                _assign(line, key, value)


def _take_recipe(line: Settings, word: str, sign: str | None, value: str | None) -> None:
    name = (value or "").strip().strip("'\"")
    if sign == "~" or not name:
        line.problems.append(f"{word}: a recipe is chosen with recipe=NAME or recipe=path/to/file.yaml")
    elif line.recipe not in (None, name):
        line.problems.append(f"{word}: recipe={line.recipe} was given before; a run has one recipe, which may build on others")
    else:
        line.recipe = name


def _assign(line: Settings, key: str, value: str) -> None:
    """Take a setting whose value is written in Hydra's grammar. Where text is wanted, `001` and `a=b` are text."""
    leaf = leaves().get(key)
    parsed = _parsed(f"++{key}={value}")
    is_plain = not value.startswith(("[", "{", "'", '"')) and "${" not in value
    is_text = isinstance(parsed, str) or (not parsed.is_sweep_override() and isinstance(parsed.value(), bool | int | float))
    if leaf is not None and _is_text(leaf.kind) and is_plain and is_text:
        parsed = _parsed(f"++{key}={quoted(value)}")
    if isinstance(parsed, str):
        line.problems.append(f"{key}={show(value)}: cannot be read ({parsed}); put the value in quotes: '{key}=\"...\"'")
    elif parsed.is_sweep_override():
        hint = "a run takes one value for each key; --multirun makes a run for each; quote a comma that belongs to it"
        if leaf is not None and leaf.kind.item is not None:
            hint = f"a list is written {key}=[a,b]"
        line.problems.append(f"{key}={show(value)}: several values; {hint}")
    else:
        line.take(key, parsed.value())


def _parsed(text: str) -> Override | str:
    """Return Hydra's reading of a word, or why it cannot be read."""
    try:
        return _parser().parse_override(text)
    except (HydraException, ValueError) as error:  # ValueError: a number with more digits than Python reads
        return str(error).splitlines()[0]


@cache
def _parser() -> OverridesParser:
    return OverridesParser.create()


def _is_text(kind: Kind) -> bool:
    return (kind.base is str and not kind.choices) or (kind.item is not None and _is_text(kind.item))


def quoted(text: str) -> str:
    """Return text in quotes, so that a command line takes it as it is."""
    return QuotedString(text=text, quote=Quote.single).with_quotes()


@dataclass(slots=True)
class Axes:
    """The words of a sweep taken apart, in Hydra's grammar: `key=a,b,c`, `key=choice(a,b)` and `key=range(1,4)` are axes."""

    fixed: list[str] = field(default_factory=list)
    """The words that are the same in all runs."""
    values: dict[str, list[str]] = field(default_factory=dict)
    """The values of each key that has several, as they are written on a command line; the last key changes fastest."""
    problems: list[str] = field(default_factory=list)


def axes(words: Sequence[str]) -> Axes:
    """Return the words of a sweep taken apart. What is wrong with a single value shows where its run is composed."""
    found = Axes()
    for word in words:
        match = _WORD.fullmatch(word)
        assert match is not None
        key, value = match["key"].strip(), match["value"]
        parsed = _parsed(f"++{key}={value}") if value is not None and _NAME.fullmatch(key) else ""
        if isinstance(parsed, str) or not parsed.is_sweep_override():
            found.fixed.append(word)
        elif not parsed.is_discrete_sweep():
            found.problems.append(f"{show(word)}: a sweep needs single values: {key}=1,2,3 or {key}=range(1,4)")
        elif key in found.values:
            found.problems.append(f"{show(word)}: {key} has a list of values already")
        else:
            found.values[key] = [str(value) for value in parsed.sweep_string_iterator()]
            if len(set(found.values[key])) < len(found.values[key]):
                found.problems.append(f"{show(word)}: a value stands there twice")
    if not found.values and not found.problems:
        found.problems.append("--multirun: no setting has several values; write them with commas, such as seed=1,2,3")
    runs = math.prod(map(len, found.values.values()))
    if runs > MOST_RUNS:
        found.problems.append(f"--multirun: {runs:,} runs; at most {MOST_RUNS:,}")
    return found
