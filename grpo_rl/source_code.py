"""The sources that a process runs, the package's and the user's: SHA-256 of each, and one digest over all."""

from __future__ import annotations

import ast
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

PACKAGE = Path(__file__).parent
DIGITS = 16


def sources(own_files: Iterable[str] = ()) -> dict[str, str]:
    digests = {f"{PACKAGE.name}/{path.relative_to(PACKAGE)}": _sha256(path) for path in sorted(PACKAGE.rglob("*.py"))}
    return digests | user_sources(own_files)


def user_sources(files: Iterable[str]) -> dict[str, str]:
    digests: dict[str, str] = {}
    waiting = list(files)
    while waiting:
        path = Path(name := waiting.pop()).expanduser()
        if name not in digests and os.path.isfile(path):
            digests[name] = _sha256(path)
            waiting += map(str, _imported_beside(path))
    return digests


def _imported_beside(path: Path) -> Iterator[Path]:
    """Yield the modules and packages in a file's folder that the file imports."""
    names: set[str] = set()
    with suppress(SyntaxError, ValueError):  # which the import of the file will show
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {(node.module or "").partition(".")[0], *(alias.name for alias in node.names if node.level)}
    for name in sorted(names - {""}):
        module = path.with_name(f"{name}.py")
        yield from [module] if module.is_file() else sorted((path.parent / name).rglob("*.py"))


def digest(code: Mapping[str, str]) -> str:
    """Return one digest over `sources`. A user's file counts by its name without folders, which may move."""
    lines = sorted(f"{name if name.startswith(f'{PACKAGE.name}/') else Path(name).name} {of}" for name, of in code.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:DIGITS]


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
