"""Settings of a command line or a recipe: each becomes a key of the schema, or a problem."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from grpo_rl.config import choices, recipes, secrets
from grpo_rl.config.convert import show, unknown_key
from grpo_rl.config.schema.fields import Kind, free_mapping, leaf_around, leaves, sections
from grpo_rl.config.verl import verl_answers
from grpo_rl.errors import did_you_mean

_WORD = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[^=]*)(?:=(?P<value>.*))?", re.DOTALL)
_KEY_SIGNS, _ESCAPED = re.compile(r"[\\()\[\]{}:=, ]"), r"\\\g<0>"
_NAME = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*", re.ASCII)
SEEDS = ("trainer.seed", "data.seed", "actor_rollout_ref.rollout.seed")
"""Keys that `seed=N` sets: new weights and dropout, order of the data, sampling."""
MACHINE = "trainer.machine"
SHORT = {"seed": SEEDS, "machine": (MACHINE,)}
_MACHINE = re.compile(r"(?:(?:(\d+)x)?(\d+)x)?[A-Za-z].*")
MOST_RUNS = 1000  # more are a slip, such as a range with too many zeros
HYDRA_REFUSED = {
    "hydra.job.chdir": "relative paths of data and models start at the folder in which the command is given",
    "hydra.output_subdir": "a run's folder has config.yaml and overrides.txt, in which secrets are hidden",
    "hydra.job_logging": "a run writes logs of its own, logs/ in its folder",
    "hydra.hydra_logging": "a run writes logs of its own, logs/ in its folder",
    "hydra.mode": "write --multirun for a sweep",
    "hydra.run": "the run's folder is trainer.default_local_dir/trainer.experiment_name",
    "hydra.searchpath": "give a folder of your own as --config-dir=FOLDER",
    "hydra.sweep.subdir": "the runs of a sweep are named after their values",
}
"""Hydra's own settings that a run has no use for, and why."""


@dataclass(slots=True)
class Settings:
    where: str = ""  # ends the messages about them: ` (in recipe NAME)`
    pairs: list[tuple[str, Any]] = field(default_factory=list)
    """Keys of the schema, or below a free mapping. `{}` clears a mapping, other mappings are merged."""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    meaningless: list[str] = field(default_factory=list)
    """verl's keys that bear on speed, memory, logs or processes alone."""

    @property
    def keys(self) -> set[str]:
        return {key for key, _ in self.pairs}

    def take(self, key: str, value: Any) -> None:
        if key in SHORT:
            for name in SHORT[key]:
                self.take(name, value)
            return
        if isinstance(value, Mapping) and not leaf_around(f"{key}."):
            for name, entry in value.items():
                self.take(f"{key}.{name}", entry)
            return
        place = verl_answers.place_of(key, value)
        if place != key:
            self.notes.append(f"{key}={show(value)}: is {place} here{self.where}")
        leaf = leaf_around(f"{place}.")
        if (of_value := verl_answers.ANSWERS.get(f"{place}={value}")) is not None:
            self.problems.append(f"{place}={show(value)}: a value of verl's that is not here{self.where}: {of_value.advice}")
        elif leaf and (leaf.key == place or leaf.kind.base is dict):
            self.pairs.append((place, value))
            if leaf.kind.base is dict:
                _remember_secrets(place.rpartition(".")[2], value)
        elif leaf:
            self.problems.append(f"{place}: {leaf.key} takes {leaf.kind.describe()}, so nothing lies below it")
        elif place in sections():
            if value is not None or not self.where:  # in a file: all lines of the group are commented out
                self.problems.append(f"{place}={show(value)}: is a group of keys, not a value; set {place}.NAME=...")
        elif (answer := verl_answers.answer_for(place)) is not None:
            if answer.means_nothing and value is not None:
                self.meaningless.append(place)
            elif problem := verl_answers.refusal(place, value, self.where):
                self.problems.append(problem)
        else:
            self.problems.append(unknown_key(place, self.where))


def _remember_secrets(name: str, value: Any) -> None:
    """Hide values in free mappings with names of secrets from what Hydra prints."""
    if isinstance(value, Mapping):
        for part, entry in value.items():
            _remember_secrets(str(part), entry)
    elif isinstance(value, str) and secrets.is_secret_name(name) and "${" not in value:
        secrets.remember([value])


@dataclass(slots=True)
class Line(Settings):
    words: list[str] = field(default_factory=list)
    """In Hydra's grammar: schema keys for verl's, text in quotes, the default for `~key`."""
    choice_of: dict[str, str] = field(default_factory=dict)  # the choice of each named group; `recipe` is one

    def set(self, key: str, value: str) -> None:
        """Add a setting with a value in Hydra's grammar. If the key takes text, `001` and `a=b` are text."""
        leaf = leaves().get(key)
        parsed = parsed_word(f"++{key}={value}")
        is_plain = not value.startswith(("[", "{", "'", '"')) and "${" not in value
        is_text = isinstance(parsed, str) or (not parsed.is_sweep_override() and isinstance(parsed.value(), bool | int | float))
        if leaf is not None and _is_text(leaf.kind) and is_plain and is_text:
            value = quoted(value)
            parsed = parsed_word(f"++{key}={value}")
        if isinstance(parsed, str):
            self.problems.append(f"{key}={show(value)}: cannot be read ({parsed}); put the value in quotes: '{key}=\"...\"'")
        elif parsed.is_sweep_override():
            hint = "a run takes one value for each key; --multirun makes a run for each; quote a comma that belongs to it"
            if leaf is not None and leaf.kind.item is not None:
                hint = f"a list is written {key}=[a,b]"
            self.problems.append(f"{key}={show(value)}: several values; {hint}")
        else:
            count = len(self.pairs)
            self.take(key, parsed.value())
            for place, part in self.pairs[count:]:
                # A mapping of several keys was split.
                self._write(place, value if part is parsed.value() else written(part), part)

    def _write(self, key: str, text: str, value: Any) -> None:
        if value == {}:  # Hydra merges mappings: an empty one would change nothing
            self.words.append(f"++{key}=null")
        self.words.append(f"++{key}={text}")

    def reset(self, key: str) -> None:
        """Set a key or group to the schema's defaults. Hydra's deletion would break `${key}`."""
        of_group = [leaf for leaf in leaves().values() if leaf.key == key or leaf.key.startswith(f"{key}.")]
        for leaf in of_group:
            self.pairs.append((leaf.key, leaf.default))
            self._write(leaf.key, written(leaf.default), leaf.default)
        if free_mapping(key):
            self.pairs.append((key, None))
            self.words.append(f"~{key}")
        elif not of_group:
            self.problems.append(unknown_key(key))

    def choose(self, group: str, name: str, folders: Sequence[Path]) -> None:
        """Choose a file of a group; `null` for none."""
        if group == "recipe" and name in ("", "null"):
            self.problems.append(f"recipe={name}: a recipe is chosen with recipe=NAME or recipe=path/to/file.yaml")
        elif self.choice_of.get(group, name) != name:
            self.problems.append(
                f"{group}={name}: {group}={self.choice_of[group]} was given before; a run has one {group}, which may build on others"
            )
        elif name == "null":
            self.words.append(f"~{group}")
        elif problem := choices.problem(folders, group, name):
            self.problems.append(problem)
        else:
            self.choice_of[group] = name
            self.words.append(f"{group}={quoted(name)}")


def read(words: Iterable[str], folders: Sequence[Path] = ()) -> Line:
    folders = folders or [recipes.conf()]
    line = Line()
    machine = ""
    for word in words:
        match = _WORD.fullmatch(word)
        assert match is not None
        sign, key, value = match["sign"], match["key"].strip(), match["value"]
        if not key or (value is None and sign != "~"):
            start = "options are in --help" if word.startswith("-") else "settings are written key=value"
            line.problems.append(f"{show(word)}: not understood; {start}")
        elif key.startswith(("hydra.", "hydra/")):
            _take_hydra(line, word, key, value)
        elif not _NAME.fullmatch(key):
            line.problems.append(
                f"{show(word)}: {key[:100]!a} is not a key; keys are words with dots between them, like trainer.save_freq=10"
            )
        elif sign == "~" and value is not None:
            line.problems.append(f"~{key}={value}: write ~{key} (back to the default), or {key}={value} to set it")
        elif key == "recipe":
            line.choose(key, (value or "").strip().strip("'\""), folders)
        elif value is None:
            for name in SHORT.get(key, (key,)):
                line.reset(name)
        elif key in choices.groups(folders) and not value.startswith("{") and "," not in value:
            line.choose(key, value.strip("'\""), folders)
        elif "." not in key and not _is_known(key) and (suggestion := did_you_mean(key, choices.groups(folders), most=1)):
            line.problems.append(f"{show(key)}: unknown key and no group of choices.{suggestion}")
        else:
            machine = value if key == "machine" else machine
            for name in SHORT.get(key, (key,)):
                line.set(name, value)
    _take_machine(line, machine)
    return line


def _is_known(key: str) -> bool:
    return key in SHORT or key in sections() or verl_answers.answer_for(key) is not None


def _take_hydra(line: Line, word: str, key: str, value: str | None) -> None:
    name = key.replace("/", ".")
    if name in ("hydra.run.dir", "hydra.sweep.dir") and value:
        folder = Path(value.strip("'\""))
        line.notes.append(
            f"{key}={value}: is trainer.default_local_dir={folder.parent} trainer.experiment_name={folder.name} here"
        )
        line.set("trainer.default_local_dir", str(folder.parent))
        line.set("trainer.experiment_name", folder.name)
        return
    answer = None if name == "hydra.job.chdir" and value == "false" else refused_of_hydra(name)
    if answer is not None:
        line.problems.append(f"{show(word)}: {answer}")
    else:
        line.words.append(word)


def refused_of_hydra(key: str) -> str | None:
    return next((reason for place, reason in HYDRA_REFUSED.items() if f"{key}.".startswith(f"{place}.")), None)


def _take_machine(line: Line, name: str) -> None:
    """A machine's name tells GPUs (1 by default) and nodes, unless the words set them."""
    if match := _MACHINE.fullmatch(name):
        nodes, gpus = match.groups()
        for key, value in (("trainer.nnodes", nodes), ("trainer.n_gpus_per_node", gpus or "1")):
            if value is not None and key not in line.keys:
                line.set(key, value)


def parsed_word(text: str) -> Override | str:
    """Return Hydra's reading of a word, or the error's first line."""
    try:
        return _parser().parse_override(text)
    except (HydraException, ValueError) as error:  # ValueError: a number with more digits than Python reads
        return str(error).splitlines()[0]


@cache
def _parser() -> OverridesParser:
    return OverridesParser.create()


def _is_text(kind: Kind) -> bool:
    return (kind.base is str and not kind.choices) or (kind.item is not None and _is_text(kind.item))


def written(value: Any) -> str:
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_KEY_SIGNS.sub(_ESCAPED, str(name))}:{written(part)}" for name, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(written, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def quoted(text: str) -> str:
    return QuotedString(text=text, quote=Quote.single).with_quotes()


@dataclass(slots=True)
class Axes:
    """The words of a sweep: `key=a,b,c`, `key=choice(a,b)` and `key=range(1,4)` are axes."""

    fixed: list[str] = field(default_factory=list)
    values: dict[str, list[str]] = field(default_factory=dict)
    """The values of each axis in Hydra's grammar; the last key changes fastest."""
    drawn: dict[str, str] = field(default_factory=dict)
    """Keys that a sweeper draws from a range (`interval(0,1)`), with the range."""
    words: list[str] = field(default_factory=list)  # all these keys in Hydra's grammar
    problems: list[str] = field(default_factory=list)


def axes(words: Sequence[str], folders: Sequence[Path]) -> Axes:
    """Take a sweep's words apart. Problems of a single value show when its run is composed."""
    parts = Axes()
    for word in words:
        match = _WORD.fullmatch(word)
        assert match is not None
        key, value = match["key"].strip(), match["value"]
        parsed = parsed_word(f"++{key}={value}") if value is not None and _NAME.fullmatch(key) else ""
        if isinstance(parsed, str) or not parsed.is_sweep_override():
            parts.fixed.append(word)
            continue
        if key in parts.values or key in parts.drawn:
            parts.problems.append(f"{show(word)}: {key} has a list of values already")
            continue
        # A group's choice overrides; any other key need not be there before.
        sign = "" if key in choices.groups(folders) else "++"
        parts.words.append(f"{sign}{key}={value}")
        if parsed.is_discrete_sweep():
            parts.values[key] = [str(text) for text in parsed.sweep_string_iterator()]
            if len(set(parts.values[key])) < len(parts.values[key]):
                parts.problems.append(f"{show(word)}: a value stands there twice")
        else:
            parts.drawn[key] = str(value)
            if key not in leaves() and not free_mapping(key):
                parts.problems.append(unknown_key(key))
    return parts


def is_secret(word: str) -> bool:
    """Return whether a word sets what is no key of the schema and named like a secret."""
    key, equals, _ = word.partition("=")
    return bool(equals) and secrets.is_secret_name(key.rpartition(".")[2]) and key.lstrip("+~") not in leaves()
