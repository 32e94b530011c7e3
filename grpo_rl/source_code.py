"""The sources that a process runs: the package's own and the user's, each with its SHA-256, and one digest over all."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

PACKAGE = Path(__file__).parent
DIGITS = 16


def sources(own_files: Iterable[str] = ()) -> dict[str, str]:
    """Return the SHA-256 of every source file of the package, and of those of the user's files that are there, by name."""
    digests = {f"{PACKAGE.name}/{path.relative_to(PACKAGE)}": _sha256(path) for path in sorted(PACKAGE.rglob("*.py"))}
    return digests | user_sources(own_files)


def user_sources(files: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of those of a user's files that are there, and of the files beside them that they import."""
    digests: dict[str, str] = {}
    waiting = list(files)
    while waiting:
        path = Path(name := waiting.pop()).expanduser()
        if name not in digests and path.is_file():
            digests[name] = _sha256(path)
            waiting += map(str, _imported_beside(path))
    return digests


def _imported_beside(path: Path) -> Iterator[Path]:
    """Yield the modules and packages in a file's folder that the file imports. What they import is a question to them."""
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
    """Return one digest over `sources`: it changes with every file that is changed, added or renamed.

    Of a user's file the name counts without its folders, because a run may be started from another one.
    """
    lines = sorted(f"{name if name.startswith(f'{PACKAGE.name}/') else Path(name).name} {of}" for name, of in code.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:DIGITS]


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
