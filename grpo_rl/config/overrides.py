"""The command line's `key=value` words, checked against the schema before Hydra sees them."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, Quote, QuotedString
from hydra.errors import HydraException

from grpo_rl.config.checks import security_rules
from grpo_rl.config.convert import show, unknown_key, value_problem
from grpo_rl.config.recipes import VERLS_DEFAULTS
from grpo_rl.config.schema.fields import Kind, Leaf, free_mapping, leaves, sections
from grpo_rl.config.verl import verl_answers

_WORD = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[^=]*)(?:=(?P<value>.*))?", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*", re.ASCII)
_LONGEST_KEY = 200
_MOST_WORDS = 1000
_MOST_CHARACTERS = 1_000_000
MOST_PROBLEMS = 200
"""The number of problems after which no more are looked for: the rest follows from the first."""
_AMBIGUOUS = re.compile(r"[+-]?(0\d[\d_]*|\d[\d_]*_[\d_]*)")
_RESOLVER = re.compile(r"\$\{\s*([\w.]+)\s*:")
_RESOLVERS = ("oc.env", "oc.select")
_FILE_OPTIONS = ("--config-path", "--config-name")
SEEDS = ("trainer.seed", "data.seed", "actor_rollout_ref.rollout.seed")
"""The keys that `seed=N` sets: of new weights and dropout, of the order of the data, and of sampling."""
MACHINE = "trainer.machine"
"""The key that `machine=NAME` sets."""
_MACHINE = re.compile(r"(?:(?:(\d+)x)?(\d+)x)?[A-Za-z].*")
_VERLS_TEXT = ("algorithm.rollout_correction.rollout_rs", "algorithm.rollout_correction.rollout_rs_threshold")
"""Lists that verl writes as text, which become lists when all words are together."""
MOST_RUNS = 1000
"""The most runs of one sweep: more are a slip, such as a range with too many zeros."""


@dataclass(slots=True)
class CommandLine:
    """A command line taken apart: the recipe, the overrides for Hydra, and everything that is wrong with them."""

    recipe: str | None = None
    keys: set[str] = field(default_factory=set)
    """All keys that are set."""
    overrides: list[Override] = field(default_factory=list)
    """`++key=value` and `~key` in Hydra's grammar, each one valid on its own."""
    cleared: list[str] = field(default_factory=list)
    """Free mappings that were assigned `{}`, which in Hydra adds nothing and clears nothing."""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Words that are taken and have no meaning here, a line for each."""


def read(words: list[str]) -> CommandLine:
    """Return the command line taken apart. Never raises for what a user typed: see `problems`."""
    line = CommandLine()
    words = _with_verls_file(line, words)
    machine = ""
    size = sum(map(len, words))
    if len(words) > _MOST_WORDS or size > _MOST_CHARACTERS:
        line.problems.append(
            f"the command line has {len(words)} settings and {size} characters: at most {_MOST_WORDS} and {_MOST_CHARACTERS}; "
            "write them into a file and name it, as recipe=my.yaml"
        )
        return line
    for word in words:
        if len(line.problems) >= MOST_PROBLEMS:
            line.problems.append(f"and more: after {MOST_PROBLEMS} problems the other words were not looked at")
            break
        match = _WORD.fullmatch(word)
        assert match is not None
        sign, key, value = match["sign"] or "", match["key"].strip(), match["value"]
        key = MACHINE if key == "machine" else key
        problem = _form(word, sign, key, value)
        if problem:
            line.problems.append(problem)
        elif key == "recipe":
            _take_recipe(line, word, sign, value)
        elif key == "seed" and value is not None and sign != "~":
            for name in SEEDS:
                _assign(line, name, value)
        elif sign == "~":
            _reset(line, key, value)
        else:
            assert value is not None
            if key == MACHINE:
                machine = value
            here = verl_answers.place_of(key, value)
            if here != key:
                line.notes.append(f"{key}={show(value)}: is {here} here")
            _assign(line, here, value)
    _take_machine(line, machine)
    return line


def _with_verls_file(line: CommandLine, words: list[str]) -> list[str]:
    """Return the words with `--config-path=FOLDER --config-name=NAME`, by which verl's examples name a file, as a recipe.

    `ppo_trainer`, the file of verl's defaults, stands for the defaults here, and is left out.
    """
    given = {
        option: word.partition("=")[2].strip("'\"")
        for word in words
        for option in _FILE_OPTIONS
        if word.startswith(f"{option}=")
    }
    if not given:
        return words
    rest = [word for word in words if word.partition("=")[0] not in _FILE_OPTIONS]
    folder, name = given.get("--config-path", ""), given.get("--config-name", "")
    if name in VERLS_DEFAULTS or not name:
        return rest
    if "megatron" in name:
        line.problems.append(f"--config-name={name}: belongs to verl's other backend; the actor runs FSDP2, leave it out")
        return rest
    if not folder:
        line.problems.append(f"--config-name={name}: give the file as recipe=FOLDER/{name.removesuffix('.yaml')}.yaml")
        return rest
    return [f"recipe={folder.rstrip('/')}/{name.removesuffix('.yaml')}.yaml", *rest]


def _take_machine(line: CommandLine, name: str) -> None:
    """Set the number of GPUs (one, where it says none) and of machines as a machine's name says, unless the words set them."""
    match = _MACHINE.fullmatch(name)
    nodes, gpus = match.groups() if match else (None, None)
    for key, value in (("trainer.nnodes", nodes), ("trainer.n_gpus_per_node", gpus or ("1" if match else None))):
        if value is not None and key not in line.keys:
            _assign(line, key, value)


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
        parsed = _try(f"++{key}={value}") if value is not None and _NAME.fullmatch(key) else ""
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


def quoted(text: str) -> str:
    """Return text in quotes, so that a command line takes it as it is."""
    return QuotedString(text=text, quote=Quote.single).with_quotes()


def _form(word: str, sign: str, key: str, value: str | None) -> str | None:
    if not key or (value is None and sign != "~"):
        start = (
            "options are --help, --cfg, --multirun and --version" if word.startswith("-") else "settings are written key=value"
        )
        return f"{show(word)}: not understood; {start}"
    if "@" in key or ":" in key:
        return f"{show(word)}: packages (@) cannot be chosen here; settings are written key=value"
    if len(key) > _LONGEST_KEY:
        return f"{show(key)}: is not a key; the longest one has {max(map(len, leaves()))} characters"
    if not _NAME.fullmatch(key):
        foreign = [character for character in key if not character.isascii()]
        hint = f"; it holds {_name_of(foreign[0])}, which only looks like a letter of a key" if foreign else ""
        return f"{show(word)}: {key!r} is not a key; keys are words with dots between them, like trainer.save_freq=10{hint}"
    return None


def _name_of(character: str) -> str:
    return f"{character!r} ({unicodedata.name(character, 'without a name')})"


def _take_recipe(line: CommandLine, word: str, sign: str, value: str | None) -> None:
    name = (value or "").strip().strip("'\"")
    if sign == "~" or not name:
        line.problems.append(f"{word}: a recipe is chosen with recipe=NAME or recipe=path/to/file.yaml")
    elif line.recipe is not None and line.recipe != name:
        line.problems.append(f"{word}: recipe={line.recipe} was given before; a run has one recipe, which may build on others")
    else:
        line.recipe = name


def _reset(line: CommandLine, key: str, value: str | None) -> None:
    """Set a key back to the schema's default (`~key`), whatever the recipe has."""
    if value is not None:
        line.problems.append(f"~{key}={value}: write ~{key} (back to the default), or {key}={value} to set it")
    elif free_mapping(key):
        line.overrides.append(_parser().parse_override(f"~{key}"))
    elif key in leaves() or key in sections():
        line.keys.add(key)
        for leaf in leaves().values():
            if leaf.key == key or leaf.key.startswith(key + "."):
                text = f"~{leaf.key}" if leaf.kind.base is dict else f"++{leaf.key}={_written(leaf.default)}"
                line.overrides.append(_parser().parse_override(text))
    else:
        line.problems.append(unknown_key(key))


def _assign(line: CommandLine, key: str, value: str) -> None:
    leaf = leaves().get(key)
    parsed = _parse(key, value, leaf)
    if isinstance(parsed, str):
        line.problems.append(parsed)
        return
    content = parsed.value()
    if refusal := _refused_value(key, value, content, leaf):
        line.keys.add(key)
        line.problems += refusal
        return
    if leaf is None and key not in sections() and free_mapping(key) is None:
        above = next((name for name in leaves() if key.startswith(name + ".")), None)
        answers = verl_answers.refusals(key, content)
        if answers is not None:
            line.problems += answers
            line.notes += verl_answers.notes(key, content)
        elif above:
            line.problems.append(f"{key}: {above} takes {leaves()[above].kind.describe()}, so nothing lies below it")
        else:
            line.problems.append(unknown_key(key))
        return
    if key in sections():
        if not isinstance(content, Mapping):
            line.problems.append(
                f"{key}={show(content)}: is a group of keys, not a value; set the keys in it, as {key}.NAME=..."
            )
            return
        line.keys |= {f"{key}.{name}" for name in content}
    if leaf is not None and leaf.kind.base is dict and content == {}:
        line.cleared.append(key)
    line.keys.add(key)
    line.overrides.append(parsed)


def _refused_value(key: str, value: str, content: Any, leaf: Leaf | None) -> list[str]:
    """Return what is wrong with a value by itself, so that it never reaches Hydra; empty where only composing shows it."""
    unknown = unknown_resolvers(value)
    if unknown:
        return [f"{key}={show(value)}: {unknown}"]
    if hidden := list(security_rules.targets({key.rpartition(".")[2]: content}, f"{key.rpartition('.')[0]}.".lstrip("."))):
        return hidden
    if leaf is None or "${" in value or leaf.key in _VERLS_TEXT:
        return []
    if leaf.kind.base in (int, float) and leaf.kind.item is None and _AMBIGUOUS.fullmatch(value.strip()):
        digits = value.strip().replace("_", "")
        return [
            f"{key}={show(value)}: is read differently by different programs (leading zeros are octal in YAML, _ is text); "
            f"write {show(digits.lstrip('0') or '0')}"
        ]
    problem = value_problem(leaf.key, content)
    return [] if problem is None else [problem]


def unknown_resolvers(text: str) -> str | None:
    """Return why an expression cannot be used: only other keys and the environment may be referred to. None where it can."""
    names = [name for name in _RESOLVER.findall(text) if name not in _RESOLVERS]
    if not names:
        return None
    return f"${{{names[0][:60]}:...}} cannot be used; an expression is ${{another.key}} or ${{oc.env:NAME}}, anything else is written as it is"


def _parse(key: str, value: str, leaf: Leaf | None) -> Override | str:
    """Return Hydra's reading of the override, or the problem. Where text is wanted, `001` and `a=b` are text."""
    wants_text = leaf is not None and _is_text(leaf.kind)
    parsed = _try(f"++{key}={value}")
    if wants_text and (isinstance(parsed, str) or _is_bare_scalar(parsed)) and _is_plain(value):
        parsed = _try(f"++{key}={quoted(value)}")
    if isinstance(parsed, str):
        return f"{key}={show(value)}: cannot be read ({parsed}); put the value in quotes: '{key}=\"...\"'"
    if parsed.is_sweep_override():
        wants_list = leaf is not None and leaf.kind.item is not None
        hint = (
            f"a list is written {key}=[a,b]"
            if wants_list
            else "a run takes one value for each key; --multirun makes a run for each; quote a comma that belongs to it"
        )
        return f"{key}={show(value)}: several values; {hint}"
    assert parsed.type is OverrideType.FORCE_ADD
    return parsed


def _try(text: str) -> Override | str:
    try:
        return _parser().parse_override(text)
    except (HydraException, ValueError) as error:
        # ValueError: a number with so many digits that Python does not read it.
        return "is too large" if isinstance(error, ValueError) else str(error).splitlines()[0]


@cache
def _parser() -> OverridesParser:
    return OverridesParser.create()


def _is_text(kind: Kind) -> bool:
    return (kind.base is str and not kind.choices) or (kind.item is not None and _is_text(kind.item))


def _is_bare_scalar(parsed: Override | str) -> bool:
    return isinstance(parsed, Override) and not parsed.is_sweep_override() and isinstance(parsed.value(), bool | int | float)


def _is_plain(value: str) -> bool:
    """Return whether the value is neither a list, a mapping, an interpolation nor already quoted."""
    return not value.startswith(("[", "{", "'", '"')) and "${" not in value


def _written(value: Any) -> str:
    """Return a value in Hydra's grammar."""
    if isinstance(value, list):
        return "[" + ",".join(_written(entry) for entry in value) + "]"
    return quoted(value) if isinstance(value, str) else show(value)
