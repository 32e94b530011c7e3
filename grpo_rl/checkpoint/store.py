"""Checkpoints on disk: complete or not there, verified before use, the newest good one first."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_rl.errors import CheckpointError
from grpo_rl.faults import fault_point

MANIFEST = "manifest.json"
STATE = "trainer.json"
_NAME = re.compile(r"step_(0|[1-9][0-9]*)")
_WRITING, _REPLACED = ".writing_", ".replaced_"


class CheckpointStore:
    """The `checkpoints/` folder of a run, in which one process writes at a time.

    A checkpoint is written into a temporary folder, described by a manifest with the size and SHA-256 of
    every file, flushed, and given its name by one rename. A folder without its manifest is no checkpoint.
    """

    def __init__(self, folder: Path, keep: int | None = None) -> None:
        self.folder = folder
        self.keep = keep

    def save(self, step: int, write: Callable[[Path], None], state: dict[str, Any]) -> Path:
        """The folder of a new checkpoint: `write` fills it, `state` (JSON) is the controller's part.

        Raises CheckpointError when it cannot be written; earlier checkpoints are untouched then.
        """
        final = self.folder / f"step_{step}"
        temporary = self.folder / f"{_WRITING}{final.name}"
        try:
            self._tidy()
            temporary.mkdir(parents=True)
            fault_point("ckpt.before_write")
            write(temporary)
            (temporary / STATE).write_text(json.dumps(state))
            _seal(temporary, step)
            fault_point("ckpt.before_rename")
            self._publish(temporary, final)
            fault_point("ckpt.after_rename")
        except OSError as error:
            free = shutil.disk_usage(self.folder if self.folder.exists() else self.folder.parent).free
            raise CheckpointError(f"cannot write {final}: {error} ({free / 2**30:.1f} GiB are free there)") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self._purge(step)
        return final

    def latest(self, on_bad: Callable[[str], None]) -> Path | None:
        """The newest checkpoint that is complete and intact; `on_bad` is told of each newer one passed over.

        Raises CheckpointError when there are checkpoints and none of them is good.
        """
        self._tidy()
        steps = self.steps()
        for step in reversed(steps):
            folder = self.folder / f"step_{step}"
            try:
                verify(folder)
                return folder
            except CheckpointError as error:
                on_bad(str(error))
        if steps:
            raise CheckpointError(
                f"none of the {len(steps)} checkpoints in {self.folder} is intact; start anew with trainer.resume_mode=disable"
            )
        return None

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are there, ascending."""
        if not self.folder.is_dir():
            return []
        matches = (_NAME.fullmatch(path.name) for path in self.folder.iterdir() if (path / MANIFEST).is_file())
        return sorted(int(match[1]) for match in matches if match)

    def set_aside_after(self, step: int) -> list[Path]:
        """Rename the checkpoints of later steps, and return their new places: a run that goes on from `step` makes its own.

        Left where they are, they would be taken for the newest ones of the run.
        """
        moved = []
        for later in self.steps():
            if later > step:
                folder = self.folder / f"step_{later}"
                places = (self.folder / f"aside_{number}_{folder.name}" for number in itertools.count(1))
                moved.append(folder.rename(next(place for place in places if not place.exists())))
        return moved

    def _publish(self, temporary: Path, final: Path) -> None:
        """Give the finished folder its name. One of that name, from before, stays until the new one is in its place."""
        replaced = self.folder / f"{_REPLACED}{final.name}"
        if final.exists():
            final.rename(replaced)
        temporary.rename(final)
        _flush(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)

    def _tidy(self) -> None:
        """Undo what a process that died while saving left half done."""
        for path in list(self.folder.iterdir()) if self.folder.is_dir() else ():
            if path.name.startswith(_REPLACED) and not (self.folder / path.name.removeprefix(_REPLACED)).exists():
                path.rename(self.folder / path.name.removeprefix(_REPLACED))
            elif path.name.startswith((_WRITING, _REPLACED)):
                shutil.rmtree(path, ignore_errors=True)

    def _purge(self, newest: int) -> None:
        """Remove all but the newest `keep`, of which `newest` is always one."""
        if self.keep is not None:
            others = [step for step in self.steps() if step != newest]
            for step in others[: max(0, len(others) - self.keep + 1)]:
                shutil.rmtree(self.folder / f"step_{step}", ignore_errors=True)


def _seal(folder: Path, step: int) -> None:
    """Write the manifest of what is in the folder, and flush everything to the disk."""
    entries = sorted(folder.rglob("*"))
    files = [path for path in entries if path.is_file()]
    manifest = {str(path.relative_to(folder)): [path.stat().st_size, _digest(path)] for path in files}
    (folder / MANIFEST).write_text(json.dumps({"step": step, "files": manifest}, indent=1))
    for path in (*entries, folder / MANIFEST, folder):
        _flush(path)


def verify(folder: Path) -> dict[str, Any]:
    """The controller's state of a checkpoint whose every file is as it was written.

    Raises CheckpointError naming the first file that is missing or changed.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files = {str(name): (int(size), str(digest)) for name, (size, digest) in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder} is not a checkpoint: its {MANIFEST} cannot be read ({error})") from error
    for name, (size, digest) in files.items():
        path = folder / name
        if _leads_out(folder.resolve(), name):
            raise CheckpointError(f"{folder}: the manifest names {name!r}, which is outside the folder")
        try:
            if not path.is_file():
                raise CheckpointError(f"{folder}: {name} is missing")
            if path.stat().st_size != size or _digest(path) != digest:
                raise CheckpointError(f"{folder}: {name} is not the file that was written (size or SHA-256 differs)")
        except OSError as error:
            raise CheckpointError(f"{folder}: {name} cannot be read: {error.strerror or error}") from error
    if STATE not in files:
        raise CheckpointError(f"{folder}: {STATE} is missing")
    return json.loads((folder / STATE).read_text())


def _leads_out(root: Path, name: str) -> bool:
    try:
        return not (root / name).resolve().is_relative_to(root)
    except (OSError, ValueError):  # a loop of links, a name with a NUL byte
        return True


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
