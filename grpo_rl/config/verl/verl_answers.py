"""Answers for the keys of verl that are not in the schema.

A launch command written for verl (FSDP + vLLM) runs here as it is wherever its meaning exists. Some keys have
one value that is right here: that value is accepted and nothing else. Keys that bear only on speed, memory or logs are
accepted with a note that they have no meaning here. All others say what to use instead. `null` is accepted for each
of them: it means "not set".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from grpo_rl.config.convert import show
from grpo_rl.config.verl.keys import ANSWERS, Answer


def answer_for(key: str) -> Answer | None:
    """Return the answer for `key` or for the nearest group that it lies in; None where verl has no such key."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        answer = ANSWERS.get(".".join(parts[:length]))
        if answer is not None:
            # What is right for a whole group of one value is not right for a key inside it.
            return answer if length == len(parts) else Answer(answer.advice, hint=answer.hint)
    return None


def refusals(key: str, value: Any, where: str = "") -> list[str] | None:
    """Return why verl's `key` cannot have `value` here: one line per refused key, none if it is right.

    `value` may be a mapping of keys below `key`. None means that verl has no such key either.
    """
    problems: list[str] = []
    for leaf, entry in _flatten(key, value):
        answer = answer_for(leaf)
        if answer is None:
            return None
        if answer.hint or _is_right(entry, answer):
            continue
        if answer.accepts:
            right = " or ".join(show(right) for right in answer.accepts)
            problems.append(f"{leaf}={show(entry)}: only {right} is possible here{where}: {answer.advice}")
        else:
            problems.append(f"{leaf}: a key of verl's that is not here{where}: {answer.advice}")
    return problems


def notes(key: str, value: Any, where: str = "") -> list[str]:
    """Return one line per key of verl's below `key` that is taken and that means nothing here."""
    found = ((leaf, entry, answer_for(leaf)) for leaf, entry in _flatten(key, value))
    return [
        f"{leaf}={show(entry)}: has no meaning here{where}: {answer.advice}"
        for leaf, entry, answer in found
        if answer is not None and answer.hint and not _is_right(entry, answer)
    ]


def _is_right(value: Any, answer: Answer) -> bool:
    return value is None or any(_same(value, right) for right in answer.accepts)


def _flatten(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, entry in value.items():
            yield from _flatten(f"{key}.{name}", entry)
    else:
        yield key, value


def _same(value: Any, right: Any) -> bool:
    """Return whether two values are equal in any spelling: True and "true", 1 and 1.0 and "1"; but True is not 1."""
    if isinstance(right, bool) or isinstance(value, bool):
        return str(value).lower() == str(right).lower()
    if isinstance(right, int | float):
        try:
            return float(value) == right
        except (TypeError, ValueError):
            return False
    return bool(str(value) == right)
