"""Tool files and interaction files in verl's form, read as tools and environments of this program.

A tool file has `tools:`, a list of class_name, config, tool_schema; an interaction file has `interaction:`, a list of name,
class_name, config (verl's documentation, "Multi-turn Rollout Support" and "Interaction System"). Class paths are registered names,
or classes of the user's; classes of verl's own are answered with what does their work here. The options that verl's files give
to such a class are taken, so that the class path is all that has to change.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_rl.envs.environments import Named
from grpo_rl.errors import ConfigError

_SANDBOX = "python, which runs code in a sandbox of this program, one interpreter per episode; its config may stay as it is"
CLASSES: dict[str, str] = {
    "Gsm8kTool": "check_answer; its config and schema may stay as they are",
    "SandboxFusionTool": _SANDBOX,
    "CustomSandboxFusionTool": _SANDBOX,
    "SandboxTool": _SANDBOX,
    "SearchTool": "search, which ranks the texts of a local folder: config: {folder: FOLDER, topk: 3}; there is no retrieval service",
    "MCPBaseTool": "mcp with config: {command: [...], tool: NAME}, one entry for each tool of a server",
    "MCPSearchTool": "mcp with config: {command: [...], tool: NAME}, one entry for each tool of a server",
    "Gsm8kInteraction": "gsm8k; its config may stay as it is",
}
"""The class names to write in place of verl's classes, by the last part of their paths."""
_OWN_OF_VERL = ("verl.", "recipe.")
RENAMED: dict[str, dict[str, str]] = {
    "python": {"default_timeout": "time_s", "memory_limit_mb": "memory_mb"},
    "search": {"topk": "top_k"},
}
"""Options of verl's tools that have another name here, by the tool that stands in their place."""
WITHOUT_MEANING: dict[str, tuple[str, ...]] = {
    # Limits and the place of a remote service. The calls of a run are limited by max_parallel_calls and by its processes.
    "python": ("sandbox_fusion_url", "num_workers", "enable_global_rate_limit", "rate_limit", "default_language"),
    "search": ("num_workers", "rate_limit", "timeout"),
}
"""Options of verl's tools that say how a service is reached, and of which nothing is left where there is no service."""


def tools_of(path: str | None, given: Mapping[str, Any]) -> list[Named]:
    """Return the tools of a file in verl's form, where there is one, then the `given` ones with their options by name.

    Raises ConfigError for a file that cannot be read or has another form, and for options that are no mapping.
    """
    found = [] if path is None else tools_file(Path(path).expanduser())
    for name, options in given.items():
        if options is not None and not isinstance(options, Mapping):
            raise ConfigError(f"tools.{name}={options!r}: expected its options by name, {{option: value}}, or {{}}")
        found.append(Named(name, dict(options or {})))
    return found


def tools_file(path: Path) -> list[Named]:
    """Return the tools of a file, in its order. Raises ConfigError, with all problems, for another form or a class of verl's."""
    entries = _entries(path, "tool_config_path", "tools", "class_name, config, tool_schema")
    found: list[Named] = []
    problems: list[str] = []
    for number, entry in enumerate(entries):
        where = f"tool_config_path={path}: tools[{number}]"
        schema = entry.get("tool_schema")
        if schema is not None and not isinstance(schema, Mapping):
            problems.append(f"{where}.tool_schema is {schema!r:.60}; expected type and function, or null")
        elif (named := _named(entry, where, "tool", problems)) is not None:
            found.append(Named(named.name, named.options, None if schema is None else dict(schema)))
    if problems:
        raise ConfigError(problems)
    return found


def interaction_file(path: str) -> Named:
    """Return the environment of an interaction file. Raises ConfigError for another form, and for more than one interaction."""
    file = Path(path).expanduser()
    entries = _entries(file, "interaction_config_path", "interaction", "name, class_name, config")
    where = f"interaction_config_path={path}"
    if len(entries) != 1:
        names = ", ".join(str(entry.get("name", "?")) for entry in entries) or "none"
        raise ConfigError(f"{where}: a run has one environment, and the file has {len(entries)} interactions: {names}")
    problems: list[str] = []
    named = _named(entries[0], f"{where}: interaction[0]", "environment", problems)
    if named is None:
        raise ConfigError(problems)
    return named


def _entries(path: Path, key: str, name: str, parts: str) -> list[dict[str, Any]]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{key}={path}: {error}") from None
    entries = content.get(name) if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all(isinstance(one, dict) and "class_name" in one for one in entries):
        raise ConfigError(f"{key}={path}: expected `{name}:`, a list of entries with {parts}")
    return entries


def _named(entry: Mapping[str, Any], where: str, kind: str, problems: list[str]) -> Named | None:
    """Return what an entry names; None, with one more of `problems`, for a class of verl's and for options that are no mapping."""
    name, given = str(entry["class_name"]), entry.get("config")
    last = name.rpartition(".")[2]
    if name.startswith(_OWN_OF_VERL) and ":" not in name:
        instead = CLASSES.get(last, f"a {kind} of your own as path/to/file.py:Class (docs/agents.md), or a registered name")
        problems.append(f"{where}.class_name={name}: a class of verl's, which is not here; write class_name: {instead}")
        return None
    if given is not None and not isinstance(given, Mapping):
        problems.append(f"{where}.config is {given!r:.60}; expected options by name, or {{}}")
        return None
    # `type: native` says in verl that the tool is a class of its own, as every one is here.
    dropped = ("type", *WITHOUT_MEANING.get(name, ()))
    renamed = RENAMED.get(name, {})
    if (language := (given or {}).get("default_language", "python")) != "python" and name == "python":
        problems.append(f"{where}.config.default_language={language!r}: the tool python runs python only")
        return None
    return Named(name, {renamed.get(str(key), str(key)): value for key, value in (given or {}).items() if key not in dropped})
