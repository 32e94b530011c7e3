"""Environments and tools by name, from a user's own file, or as verl's files name them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from grpo_rl.config.recipes import examples
from grpo_rl.errors import ConfigError, Problems, did_you_mean
from grpo_rl.frozen import frozen
from grpo_rl.registry import fits, load_function, out_of_bounds

_TOOLS = "grpo_rl.envs.tools"
ENVIRONMENTS: dict[str, str] = {
    "word_game": f"{examples()}/word_game.py:WordGame",
    "grid_world": f"{examples()}/grid_world.py:GridWorld",
    "arithmetic": f"{examples()}/answers_in_turns.py:ArithmeticInTurns",
    "gsm8k": f"{examples()}/answers_in_turns.py:Gsm8kInTurns",
    "endpoint": "grpo_rl.envs.endpoint:ChatEndpoint",
}
"""A class is imported when it is used."""
TOOLS: dict[str, str] = {
    "calculator": f"{_TOOLS}.number_tools:Calculator",
    "python": f"{_TOOLS}.python_interpreter:PythonInterpreter",
    "search": f"{_TOOLS}.retrieval:Search",
    "check_answer": f"{_TOOLS}.number_tools:CheckAnswer",
}


_OF_VERL = (("execute", "call", "schema, begin, call and close"), ("generate_response", "step", "reset, step and close"))
"""A method by which a class for verl is recognized, the one in its place, and all."""


@frozen
class Named:
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    schema: dict[str, Any] | None = None
    """Takes the place of a tool class's own schema."""


def class_of(name: str, table: Mapping[str, str], kind: str) -> Any:
    """`name` is registered, or `file.py:Class`, `module:Class` or `package.module.Class`."""
    if name in table or ":" in name:
        return load_function(table.get(name, name), kind)
    module, dot, last = name.rpartition(".")  # as verl writes a class
    if dot and last != "py":
        return load_function(f"{module}:{last}", kind)
    raise ConfigError(
        f"unknown {kind} {name!r}.{did_you_mean(name, table)} Known: {', '.join(sorted(table))}; or your own as path/to/file.py:Class"
    )


def made(named: Named, table: Mapping[str, str], kind: str) -> Any:
    """Raises ConfigError for options that the class does not take; of ours the types are known, too."""
    implementation, what = class_of(named.name, table, kind), f"{kind} {named.name!r}"
    for verl_method, method, contract in _OF_VERL:
        if hasattr(implementation, verl_method) and not hasattr(implementation, method):
            raise ConfigError(f"{what}: has `{verl_method}`, as verl's classes; here a {kind} has {contract} (docs/agents.md)")
    if problems := out_of_bounds(what, implementation, named.options):
        raise ConfigError(problems)
    parameters = inspect.signature(implementation).parameters
    try:
        inspect.signature(implementation).bind(**named.options)
        for name, value in named.options.items() if named.name in table else ():
            default = parameters[name].default
            if default is not inspect.Parameter.empty and not fits(value, default):
                raise TypeError(f"{name}={value!r} is not of the type of its default, {default!r}")
    except TypeError as error:
        raise ConfigError(f"{what}: {error}; its options are {', '.join(parameters) or 'none'}") from None
    return implementation(**named.options)


def schema_of(named: Named, tool: Any) -> dict[str, Any]:
    """{"name", "description", "parameters"}"""
    schema = dict(named.schema or getattr(tool, "schema", None) or {})
    schema = dict(schema.get("function", schema))  # verl and OpenAI put it under `function`
    if not isinstance(schema.get("name"), str) or not schema["name"]:
        raise ConfigError(f"tool {named.name!r}: its schema has no name; expected name, description and parameters")
    return {"description": "", "parameters": {"type": "object", "properties": {}}} | schema


# Files in verl's form. A tool file has `tools:`, a list of class_name, config, tool_schema; an interaction file has
# `interaction:`, a list of name, class_name, config (verl's documentation, "Multi-turn Rollout Support" and
# "Interaction System"). Class paths are registered names, or classes of the user's.

_SANDBOX = (
    "python, which runs code in a sandbox of this program, one interpreter per episode: config: {time_s: 5, memory_mb: 512}"
)
_OF_A_SERVER = "a tool of your own that asks the server with the package mcp, as examples/mcp_tool.py:ServerTool does"
CLASSES: dict[str, str] = {
    "Gsm8kTool": "check_answer; its config and schema may stay as they are",
    "SandboxFusionTool": _SANDBOX,
    "CustomSandboxFusionTool": _SANDBOX,
    "SandboxTool": _SANDBOX,
    "SearchTool": "search, which ranks the texts of a local folder: config: {folder: FOLDER, top_k: 3}; there is no retrieval service",
    "MCPBaseTool": _OF_A_SERVER,
    "MCPSearchTool": _OF_A_SERVER,
    "Gsm8kInteraction": "gsm8k; its config may stay as it is",
}
"""By the last part of a class's path in verl."""
_OWN_OF_VERL = ("verl.", "recipe.")


def tools_of(path: str | None, given: Mapping[str, Any]) -> list[Named]:
    """Of a file in verl's form, then the `given` ones."""
    parts = "class_name, config, tool_schema"
    tools = [] if path is None else _named_in(path, "tool_config_path", "tools", "tool", parts)
    for name, options in given.items():
        if options is not None and not isinstance(options, Mapping):
            raise ConfigError(f"tools.{name}={options!r}: expected its options by name, {{option: value}}, or {{}}")
        tools.append(Named(name, dict(options or {})))
    return tools


def interaction_file(path: str) -> Named:
    entries = _named_in(path, "interaction_config_path", "interaction", "environment", "name, class_name, config")
    if len(entries) != 1:
        names = ", ".join(named.name for named in entries) or "none"
        raise ConfigError(
            f"interaction_config_path={path}: a run has one environment, and the file has {len(entries)} interactions: {names}"
        )
    return entries[0]


def _named_in(path: str, key: str, name: str, kind: str, parts: str) -> list[Named]:
    import yaml

    try:
        content = yaml.safe_load(Path(path).expanduser().read_text("utf-8"))
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{key}={path}: {error}") from None
    entries = content.get(name) if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and "class_name" in entry for entry in entries):
        raise ConfigError(f"{key}={path}: expected `{name}:`, a list of entries with {parts}")
    problems = [
        problem
        for number, entry in enumerate(entries)
        for problem in _problems_of(entry, f"{key}={path}: {name}[{number}]", kind)
    ]
    if problems:
        raise ConfigError(problems)
    return [_named(entry) for entry in entries]


def _problems_of(entry: Mapping[str, Any], where: str, kind: str) -> Problems:
    name = str(entry["class_name"])
    if name.startswith(_OWN_OF_VERL) and ":" not in name:
        known = f"a {kind} of your own as path/to/file.py:Class (docs/agents.md), or a registered name"
        instead = CLASSES.get(name.rpartition(".")[2], known)
        yield f"{where}.class_name={name}: a class of verl's, which is not here; write class_name: {instead}"
    for part, expected in (("config", "options by name, or {}"), ("tool_schema", "type and function, or null")):
        if not isinstance(value := entry.get(part), Mapping | None):
            yield f"{where}.{part} is {value!r:.60}; expected {expected}"


def _named(entry: Mapping[str, Any]) -> Named:
    # verl's `type: native` is a tool that is a class, as every tool here.
    options = {str(key): value for key, value in (entry.get("config") or {}).items() if key != "type"}
    return Named(str(entry["class_name"]), options, entry.get("tool_schema"))
