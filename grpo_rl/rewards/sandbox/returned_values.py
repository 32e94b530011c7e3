"""A function's return value from a sandbox as plain data: bytes that may be forged are read without trust."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

DEEPEST = 200
"""Nesting of a returned value."""
MOST_ALIKE = 50
"""Values of one hash in a set."""


def decode(value: bytes) -> Any:
    """Return the value that `candidate.encode` wrote, of exact built-in types. Raises ValueError for anything else."""
    try:
        return _decode(json.loads(value.decode("ascii"), parse_constant=_no_constant), 0)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a value: {error}") from error


_PLAIN: dict[str, Callable[[Any], Any]] = {"i": lambda text: int(text, 16), "f": float, "b": bytes.fromhex}
_CONTAINERS = {"l": list, "t": tuple, "s": set}


def _decode(node: Any, depth: int) -> Any:
    if depth > DEEPEST:
        raise ValueError(f"nested more than {DEEPEST} deep")
    if not isinstance(node, list):
        if isinstance(node, dict):
            raise ValueError("an object")
        return node
    tag, items = node[0] if node else None, node[1:]
    if not isinstance(tag, str):
        raise ValueError("a list without a tag")
    if tag in _PLAIN:
        (text,) = items
        return _PLAIN[tag](text)
    values = [_decode(item, depth + 1) for item in items]
    if tag == "c":
        return complex(*values)
    if tag == "d":
        check_hashes(values[::2])
        return dict(zip(values[::2], values[1::2], strict=True))
    if tag not in _CONTAINERS:
        raise ValueError(f"tag {tag!r}")
    if tag == "s":
        check_hashes(values)
    return _CONTAINERS[tag](values)


def check_hashes(values: Sequence[Any]) -> None:
    """Raise ValueError where so many values share a hash that a set of them would take time quadratic in their number."""
    hashes = sorted(map(hash, values))
    if any(first == later for first, later in zip(hashes, hashes[MOST_ALIKE:], strict=False)):
        raise ValueError(f"more than {MOST_ALIKE} values with one hash")


def _no_constant(text: str) -> Any:
    raise ValueError(text)
