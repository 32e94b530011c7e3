"""Rollouts as text for a terminal and as a page of HTML. A model's text is shown, never obeyed."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence
from typing import Any

from grpo_rl.telemetry.rollouts.filters import Record, field
from grpo_rl.telemetry.terminal.text import safe_text

WIDTH = 110
SHORTENED = 1200
"""Characters of a prompt or response that are shown unless the whole is asked for."""

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.05rem; overflow-wrap: anywhere; }
article { border: 1px solid #e4e7eb; border-radius: 8px; margin: 1rem 0; padding: .8rem 1rem; }
pre { background: #f8fafc; border-radius: 6px; margin: .3rem 0; padding: .5rem .7rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.label { color: #7b8794; font-size: .8rem; margin-top: .6rem; }
.facts { display: flex; flex-wrap: wrap; gap: .3rem .5rem; }
.facts span { background: #eef2ff; border-radius: 4px; padding: 0 .45rem; }
.facts .failure { background: #fee2e2; }
"""


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


def as_html(title: str, records: Sequence[Record]) -> str:
    """Return a page of HTML without scripts, without anything from elsewhere; all text is escaped."""
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>{_escaped(title)}</title><style>{STYLE}</style></head><body><h1>{_escaped(title)}</h1>",
    ]
    for record in records:
        spans = "".join(
            f"<span{' class=failure' if name == 'failure' else ''}>{_escaped(name)} <b>{_escaped(value)}</b></span>"
            for name, value in facts(record)
        )
        parts.append(f'<article><div class="facts">{spans}</div>')
        parts += [f'<div class="label">{label}</div><pre>{_escaped(text)}</pre>' for label, text in texts(record)]
        parts.append("</article>")
    return "\n".join([*parts, "</body></html>\n"])


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


def _escaped(text: str) -> str:
    return html.escape(safe_text(text, keep_newlines=True))


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
