"""Rollouts as text for a terminal. A model's text is shown, never obeyed."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from grpo_rl.telemetry.rollouts.filters import Record, field
from grpo_rl.telemetry.terminal.text import safe_text

WIDTH = 110
SHORTENED = 1200
"""Characters of a prompt or response that are shown unless the whole is asked for."""


def as_text(title: str, records: Sequence[Record], *, full: bool = False) -> str:
    """Return one block of text per rollout: facts, prompt, ground truth, response.

    Every character that a terminal would obey is escaped.
    """
    blocks = [safe_text(title)]
    for record in records:
        lines = ["-" * WIDTH, *_facts(record)]
        for label, text in texts(record):
            shown = safe_text(text, limit=None if full else SHORTENED, keep_newlines=True)
            for number, part in enumerate(shown.split("\n")):
                lines += _wrapped(label if number == 0 else "", part)
        blocks.append("\n".join(lines))
    return "\n".join(blocks)


def facts(record: Record) -> list[tuple[str, str]]:
    """Return reward, components, advantage and the other short facts, in the order in which they are shown."""
    names = ["reward", "failure", *record.get("reward_parts", {}), "advantage", "baseline"]
    names += ["ended", "turns", "finish_reason", "response_length", "data_source", "uid", "sample"]
    return [(name, _short(value)) for name in names if (value := field(record, name)) is not None]


def texts(record: Record) -> list[tuple[str, str]]:
    """Return prompt, ground truth, response or the turns of an episode, and why there is no score, with their labels."""
    truth, cause = record.get("ground_truth"), record.get("failure_cause")
    pairs = [("prompt", str(record.get("prompt", "")))]
    if truth is not None:
        pairs.append(("truth", str(truth)))
    pairs += _turns(record["episode"]) if record.get("episode") else [("response", str(record.get("response", "")))]
    return pairs if cause is None else [*pairs, ("cause", str(cause))]


def _turns(episode: Record) -> list[tuple[str, str]]:
    """Return the conversation of an episode; assistant turns, whose tokens are trained, have a `*`."""
    return [
        ("turn *" if message.get("role") == "assistant" else str(message.get("role", "")), str(message.get("content", "")))
        for message in episode.get("messages", ())
    ]


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _facts(record: Record) -> list[str]:
    words = "  ".join(safe_text(f"{name}={value}").replace(" ", "\u00a0") for name, value in facts(record))
    lines = textwrap.wrap(words, WIDTH - 10, break_on_hyphens=False, break_long_words=False)
    return [" " * 10 + line.replace("\u00a0", " ") for line in lines]


def _wrapped(label: str, text: str) -> list[str]:
    indent = " " * 10
    return textwrap.wrap(
        safe_text(text),
        width=WIDTH,
        initial_indent=f"{label:<10}",
        subsequent_indent=indent,
        drop_whitespace=False,
        replace_whitespace=False,
        break_on_hyphens=False,
    ) or [f"{label:<10}".rstrip()]
