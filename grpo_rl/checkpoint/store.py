"""Checkpoints on disk: complete or not there, verified before use, the newest good one first."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_rl.errors import CheckpointError

MANIFEST = "manifest.json"
_NAME = re.compile(r"step_(\d+)")


class CheckpointStore:
    """The `checkpoints/` folder of a run.

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
        temporary = self.folder / f".writing_step_{step}_{os.getpid()}"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            write(temporary)
            (temporary / "trainer.json").write_text(json.dumps(state))
            files = sorted(path for path in temporary.rglob("*") if path.is_file())
            manifest = {str(path.relative_to(temporary)): [path.stat().st_size, _digest(path)] for path in files}
            (temporary / MANIFEST).write_text(json.dumps({"step": step, "files": manifest}, indent=1))
            for path in (*files, temporary / MANIFEST, temporary):
                _flush(path)
            if final.exists():
                # The same step again, after a resume from an earlier one: the new one takes its place.
                shutil.rmtree(final)
            temporary.rename(final)
            _flush(self.folder)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            free = shutil.disk_usage(self.folder if self.folder.exists() else self.folder.parent).free
            raise CheckpointError(f"cannot write {final}: {error} ({free / 2**30:.1f} GiB are free there)") from error
        self._purge()
        return final

    def latest(self, on_bad: Callable[[str], None]) -> Path | None:
        """The newest checkpoint that is complete and intact; `on_bad` is told of each newer one passed over.

        Raises CheckpointError when there are checkpoints and none of them is good.
        """
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

    def _purge(self) -> None:
        if self.keep is not None:
            for step in self.steps()[: -self.keep]:
                shutil.rmtree(self.folder / f"step_{step}", ignore_errors=True)


def verify(folder: Path) -> dict[str, Any]:
    """The controller's state of a checkpoint whose every file is as it was written.

    Raises CheckpointError naming the first file that is missing or changed.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files = {str(name): (int(size), str(digest)) for name, (size, digest) in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder} is not a checkpoint: its {MANIFEST} cannot be read ({error})") from error
    root = folder.resolve()
    for name, (size, digest) in files.items():
        path = (root / name).resolve()
        if not path.is_relative_to(root):
            raise CheckpointError(f"{folder}: the manifest names {name!r}, which is outside the folder")
        if not path.is_file():
            raise CheckpointError(f"{folder}: {name} is missing")
        if path.stat().st_size != size or _digest(path) != digest:
            raise CheckpointError(f"{folder}: {name} is not the file that was written (size or SHA-256 differs)")
    if "trainer.json" not in files:
        raise CheckpointError(f"{folder}: trainer.json is missing")
    return json.loads((folder / "trainer.json").read_text())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
