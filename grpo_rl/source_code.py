"""The sources that a process runs: the package's own and the user's, each with its SHA-256, and one digest over all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

PACKAGE = Path(__file__).parent
DIGITS = 16


def sources(own_files: Iterable[str] = ()) -> dict[str, str]:
    """Return the SHA-256 of every source file of the package, and of those of the user's files that are there, by name."""
    found = {f"{PACKAGE.name}/{path.relative_to(PACKAGE)}": _sha256(path) for path in sorted(PACKAGE.rglob("*.py"))}
    return found | {name: _sha256(path) for name in own_files if (path := Path(name).expanduser()).is_file()}


def digest(code: Mapping[str, str]) -> str:
    """Return one digest over `sources`: it changes with every file that is changed, added or renamed.

    Of a user's file the name counts without its folders, because a run may be started from another one.
    """
    lines = sorted(f"{name if name.startswith(f'{PACKAGE.name}/') else Path(name).name} {of}" for name, of in code.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:DIGITS]


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
