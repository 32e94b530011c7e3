"""A checkpoint's manifest: its files with size and SHA-256, and the check that they are still the ones written."""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from grpo_rl.checkpoint import files
from grpo_rl.checkpoint.content import check_content
from grpo_rl.checkpoint.files import Entry, Files
from grpo_rl.errors import CheckpointError, DataError
from grpo_rl.run_files import parsed, read_bytes

MANIFEST = "manifest.json"
STATE = "trainer.json"
FORMAT = 1
_MOST_BYTES = 64 << 20
"""A manifest has some hundred bytes per file; nothing larger is read into memory."""
_NAME = re.compile(r"step_(0|[1-9][0-9]{0,11})")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint of which every file was found to be as it was written."""

    folder: Path
    step: int
    state: dict[str, Any]
    """The controller's part."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a manifest."""

    step: int
    files: Files


def step_of(name: str) -> int | None:
    """The step in a name of ours, `step_` and a number without leading zeros; None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def write_manifest(folder: Path, step: int, entries: Files) -> None:
    """Write the manifest; it carries a digest of itself, for without one a lost line would not be seen."""
    content = {"format": FORMAT, "step": step, "files": {name: list(entry) for name, entry in sorted(entries.items())}}
    text = json.dumps(content | {"sha256": _seal(content)}, indent=1)
    files.write_file(folder / MANIFEST, [text.encode()])


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest, when it is whole. Raises CheckpointError; no other file is touched."""
    try:
        content = parsed(read_bytes(folder / MANIFEST, _MOST_BYTES).decode("utf-8"))
        seal = content.pop("sha256")
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, this program reads {FORMAT}")
        if seal != _seal(content):
            raise ValueError("it is not as it was written")
        entries: Files = {name: (int(size), str(digest)) for name, (size, digest) in content["files"].items()}
        return Manifest(int(content["step"]), entries)
    except (DataError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{folder} is not a checkpoint: its {MANIFEST} cannot be read ({_reason(error)})") from error


def verify(folder: Path, entry_of: Callable[[Path], Entry] = files.entry_of) -> Checkpoint:
    """Return the checkpoint in `folder` after reading every file: each is as it was written, and holds what it should.

    Raises CheckpointError naming the first thing that is not so: a file that is missing, changed or unknown, or a field or
    tensor that cannot be used. Nothing outside the folder is read, whatever the
    manifest names. `entry_of` reads a file.
    """
    manifest = read_manifest(folder)
    named = step_of(folder.name)
    if named is not None and named != manifest.step:
        raise CheckpointError(f"{folder} is the checkpoint of step {manifest.step} under another name")
    for name, entry in manifest.files.items():
        path = _inside(folder, name)
        try:
            if not stat.S_ISREG(path.lstat().st_mode):
                raise CheckpointError(f"{folder}: {name} is missing (something that is no file is in its place)")
            if path.stat().st_size != entry[0] or entry_of(path) != entry:
                raise CheckpointError(f"{folder}: {name} is not the file that was written (size or SHA-256 differs)")
        except FileNotFoundError as error:
            raise CheckpointError(f"{folder}: {name} is missing") from error
        except OSError as error:
            raise CheckpointError(f"{folder}: {name} cannot be read: {_reason(error)}") from error
    extra = unknown_files(folder, manifest)
    if extra:
        raise CheckpointError(f"{folder}: {extra[0]} is in it and not in its {MANIFEST}; move what does not belong there")
    if STATE not in manifest.files:
        raise CheckpointError(f"{folder}: {STATE} is missing")
    return Checkpoint(folder, manifest.step, check_content(folder, manifest.files.keys(), STATE, manifest.step))


def unknown_files(folder: Path, manifest: Manifest) -> list[str]:
    """Return the names in the folder that this program did not write. Folders that hold its files are its own."""
    known = set(manifest.files) | {MANIFEST}
    folders = {str(parent) for name in manifest.files for parent in PurePosixPath(name).parents}
    return [name for name, is_folder in files.walk(folder) if name not in (folders if is_folder else known)]


def _inside(folder: Path, name: str) -> Path:
    """The path of a file of the manifest. Raises CheckpointError where the name, or a link on the way, leads out."""
    parts = name.split("/")
    if "\0" in name or "\\" in name or any(part in ("", ".", "..") for part in parts):
        raise CheckpointError(f"{folder}: the manifest names {name!r}, which is outside the folder")
    path = folder
    for part in parts:
        path = path / part
        if path.is_symlink():
            raise CheckpointError(f"{folder}: {name!r} is a link, which is outside the folder")
    return path


def _seal(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _reason(error: BaseException) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
