from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from grpo_rl.envs.contract import ToolCall
from grpo_rl.errors import ConfigError
from grpo_rl.registry import Registry
from grpo_rl.rewards.rules.structured_rules import first_problem, schema_validator

FORMATS: Registry[Callable[[str], Iterable[Any]]] = Registry("tool-call format")
"""A format returns each call of a turn, whose special tokens are in the text: {"name": ..., "arguments":
{...}}, the same as JSON, or the ValueError that says what is wrong. A user's parser may raise ValueError for
the whole turn."""

_THOUGHTS = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)
_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_LLAMA = "<|python_tag|>"
_LLAMA_END = re.compile(r"(<\|eo[tm]_id\|>|<\|end_of_text\|>)\s*\Z")


_OWN_PARSER = "a parser of your own as file.py:function"
INSTEAD: dict[str, str] = {
    "retool": f"hermes, which verl's ReTool recipe has; a model that writes <code> blocks needs {_OWN_PARSER}",
    "llama3": "llama3_json",
    "gpt-oss": _OWN_PARSER,
    "qwen3_coder": _OWN_PARSER,
    "pythonic": _OWN_PARSER,
    "deepseekv3": _OWN_PARSER,
}
"""For the names of other formats of verl and its engines."""


def check_format(name: str) -> None:
    if name in INSTEAD:
        raise ConfigError(f"format={name}: is not here; use {INSTEAD[name]}")
    FORMATS.get(name)


def parse(name: str, text: str) -> tuple[tuple[ToolCall, ...], tuple[str, ...]]:
    """The calls, and what is wrong with those that cannot be read; inside of thoughts is no call."""
    calls: list[ToolCall] = []
    malformed: list[str] = []
    try:
        for value in FORMATS.get(name)(_THOUGHTS.sub("", text)):
            try:
                calls.append(_call(value, len(calls)))
            except (ValueError, RecursionError) as error:
                malformed.append(_cause(error))
    except ValueError as error:
        malformed.append(str(error) or "the tool call cannot be read")
    return tuple(calls), tuple(malformed)


def spoken(name: str, text: str) -> str:
    """Beside the calls; nothing for formats whose calls are the whole turn."""
    return _HERMES.sub("", text).strip() if name in ("hermes", "qwen", "qwen25") else ""


def _call(value: Any, number: int) -> ToolCall:
    if isinstance(value, ValueError):
        raise value
    if isinstance(value, str):
        value = _json(value)
    if not isinstance(value, Mapping):
        raise ValueError(f"a tool call is a JSON object with name and arguments, not {value!r:.60}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError(f"the tool call {value!r:.60} has no name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # OpenAI's form: JSON inside of JSON
        arguments = _json(arguments)
    if not isinstance(arguments, Mapping):
        raise ValueError(f"the arguments of {name} are {arguments!r:.60}, not a JSON object")
    return ToolCall(name, dict(arguments), f"call{number:05d}")  # Mistral's templates want nine letters and digits


@FORMATS.register("hermes", "qwen", "qwen25")
def hermes(text: str) -> Iterator[Any]:
    """Calls between <tool_call> and </tool_call>, as Hermes and Qwen models write them.

    `qwen` and `qwen25` are SGLang's names, which verl's examples use.
    """
    for body, end in _HERMES.findall(text):
        yield body if end else ValueError("a <tool_call> is not closed by </tool_call>")


@FORMATS.register("llama3_json")
def llama3_json(text: str) -> Iterator[Any]:
    """A turn that is nothing but JSON objects, separated by `;`, as Llama 3 models write them."""
    text = _LLAMA_END.sub("", text.strip()).strip()
    tagged = text.startswith(_LLAMA)
    text = text.removeprefix(_LLAMA).strip()
    if not tagged and not text.startswith("{"):
        return
    decoder, place = json.JSONDecoder(), 0
    while place < len(text):
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the tool call is no JSON: {_cause(error)}") from None
        yield value
        while place < len(text) and text[place] in "; \n\t":
            place += 1


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the tool call is no JSON: {_cause(error)}") from None


def _cause(error: Exception) -> str:
    return "it is nested too deep" if isinstance(error, RecursionError) else str(error)


def argument_problem(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str | None:
    """By the tool's JSON schema. Raises ValueError for a bad one."""
    problem = first_problem(schema_validator(json.dumps(schema.get("parameters") or {}, sort_keys=True)), dict(arguments))
    return None if problem is None else f"{schema['name']}: {problem}"
