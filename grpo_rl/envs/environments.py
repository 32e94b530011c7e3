"""Environments and tools by name, or from a user's own file: where their classes are, and how they are made and checked."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_rl.errors import ConfigError
from grpo_rl.registry import fits, load_function, out_of_bounds

_GAMES, _TOOLS = "grpo_rl.envs.games", "grpo_rl.envs.tools"
ENVIRONMENTS: dict[str, str] = {
    "number_guessing": f"{_GAMES}.number_guessing:NumberGuessing",
    "word_game": f"{_GAMES}.word_game:WordGame",
    "grid_world": f"{_GAMES}.grid_world:GridWorld",
    "arithmetic": f"{_GAMES}.answers_in_turns:ArithmeticInTurns",
    "countdown": f"{_GAMES}.answers_in_turns:CountdownInTurns",
    "gsm8k": f"{_GAMES}.answers_in_turns:Gsm8kInTurns",
    "reasoning_gym": f"{_GAMES}.answers_in_turns:ReasoningGymInTurns",
    "endpoint": "grpo_rl.envs.endpoint:ChatEndpoint",
}
"""The place, `module:Class`, of each environment by its name. A class is imported where it is used, and no sooner."""
TOOLS: dict[str, str] = {
    "calculator": f"{_TOOLS}.number_tools:Calculator",
    "python": f"{_TOOLS}.python_interpreter:PythonInterpreter",
    "search": f"{_TOOLS}.retrieval:Search",
    "check_answer": f"{_TOOLS}.number_tools:CheckAnswer",
    "mcp": f"{_TOOLS}.mcp_tools:McpTool",
}
"""The place of each tool by its name."""


_OF_VERL = (("execute", "call", "schema, begin, call and close"), ("generate_response", "step", "reset, step and close"))
"""Methods by which a class that was written for verl is recognized, the method in their place, and all that there are."""


@dataclass(frozen=True, slots=True)
class Named:
    """An environment or a tool as the configuration names it."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    schema: dict[str, Any] | None = None
    """A tool's schema that takes the place of the class's own; None: the class's own."""


def class_of(name: str, table: Mapping[str, str], kind: str) -> Any:
    """Return the class that is registered as `name`, or named `file.py:Class`, `module:Class` or `package.module.Class`.

    Raises ConfigError, with the known names, when there is none.
    """
    place = table.get(name)
    if place is None and ":" in name:
        place = name
    if place is None and "." in name and not name.endswith(".py"):  # as verl writes a class
        module, _, last = name.rpartition(".")
        place = f"{module}:{last}"
    if place is None:
        near = difflib.get_close_matches(name, table, n=2, cutoff=0.5)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        known = ", ".join(sorted(table)) or "none"
        raise ConfigError(f"unknown {kind} {name!r}.{hint} Known: {known}; or your own as path/to/file.py:Class")
    return load_function(place, kind)


def made(named: Named, table: Mapping[str, str], kind: str) -> Any:
    """Return a new object of the class with its options. Raises ConfigError for options that it does not take."""
    found = class_of(named.name, table, kind)
    check_class(named, found, kind, is_ours=named.name in table)
    return found(**named.options)


def check_class(named: Named, found: Any, kind: str, *, is_ours: bool = False) -> None:
    """Raise ConfigError, with the options that there are, unless the class takes these ones; of ours the types are known, too."""
    for theirs, own, contract in _OF_VERL:
        if hasattr(found, theirs) and not hasattr(found, own):
            raise ConfigError(
                f"{kind} {named.name!r}: has `{theirs}`, as verl's classes; here a {kind} has {contract} (docs/agents.md)"
            )
    if problems := out_of_bounds(f"{kind} {named.name!r}", found, named.options):
        raise ConfigError(problems)
    try:
        signature = inspect.signature(found)
        signature.bind(**named.options)
        for name, value in named.options.items() if is_ours else ():
            default = signature.parameters[name].default
            if default is not inspect.Parameter.empty and not fits(value, default):
                raise TypeError(f"{name}={value!r} is not of the type of its default, {default!r}")
    except TypeError as error:
        known = ", ".join(name for name in signature.parameters) or "none"
        raise ConfigError(f"{kind} {named.name!r}: {error}; its options are {known}") from None
    except ValueError:
        pass  # written in C, without a signature


def schema_of(named: Named, tool: Any) -> dict[str, Any]:
    """Return a tool's schema as {"name", "description", "parameters"}. Raises ConfigError for one without a name."""
    schema = dict(named.schema or getattr(tool, "schema", None) or {})
    schema = dict(schema.get("function", schema))  # verl and OpenAI put it under `function`
    if not isinstance(schema.get("name"), str) or not schema["name"]:
        raise ConfigError(f"tool {named.name!r}: its schema has no name; expected name, description and parameters")
    return {"description": "", "parameters": {"type": "object", "properties": {}}} | schema
