"""Checkpoints on disk (docs/checkpoints.md): complete or not there, verified before use, the newest good one first."""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_rl.checkpoint import files
from grpo_rl.checkpoint.files import Files
from grpo_rl.checkpoint.manifest import STATE, Checkpoint, read_manifest, step_of, unknown_files, verify, write_manifest
from grpo_rl.errors import CheckpointError
from grpo_rl.faults import fault_point
from grpo_rl.frozen import frozen

_OURS = re.compile(r"\.(writing|removing|replaced)_(step_[0-9]+)_[0-9a-f]{8}")


@frozen
class Draft:
    store: CheckpointStore
    step: int
    folder: Path
    """Temporary; it gets the checkpoint's name when all files are there."""
    needed: int
    state: bytes = b"{}"


class CheckpointStore:
    """The `checkpoints/` folder of a run, in which one process writes at a time.

    A power cut leaves a checkpoint complete or absent: its files are flushed before the manifest is written,
    the manifest before the rename, the parent folder after it. An earlier checkpoint of the same name moves
    aside first and is removed last; `_tidy` brings it back. Only what was written here is ever removed.
    """

    def __init__(self, folder: Path, keep: int | None = None, warn: Callable[[str], None] = lambda _: None) -> None:
        self.folder = folder
        self.keep = keep
        self.best: tuple[int, ...] = ()
        """The steps of the best validations: the first that is there is kept."""
        self.warn = warn
        """Called with each thing that was left alone, and the reason."""

    def begin(self, step: int, state: dict[str, Any], needed: int = 0) -> Draft:
        """Raises CheckpointError, with nothing written, if fewer than the `needed` bytes are free."""
        draft = Draft(self, step, self.folder / _temporary("writing", f"step_{step}"), needed, json.dumps(state).encode())
        with self.writing(draft):
            self._tidy()
            files.make_room(self.folder, needed)
            files.make_folder(draft.folder)
            fault_point("ckpt.before_write")
        return draft

    @contextmanager
    def writing(self, draft: Draft) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.abandon(draft)
            if isinstance(error, OSError):
                raise files.not_written(self.folder / f"step_{draft.step}", error, draft.needed) from error
            raise

    def publish(self, draft: Draft, written: Files) -> Path | None:
        """Return where an earlier checkpoint of the name is now. Files not in `written` are flushed here."""
        final, replaced = self.folder / f"step_{draft.step}", None
        state = {STATE: files.write_file(draft.folder / STATE, [draft.state])}
        write_manifest(draft.folder, draft.step, self._entries(draft, written | state))
        files.flush(draft.folder)
        fault_point("ckpt.before_rename")
        if final.exists() or final.is_symlink():
            if self._is_ours(final):
                replaced = self.folder / _temporary("replaced", final.name)
                files.rename(final, replaced)
            else:
                self.warn(f"{final} was not written by this run; it is now {self._set_aside(final)}")
        files.rename(draft.folder, final)
        files.flush(self.folder)
        fault_point("ckpt.after_rename")
        return replaced

    def clear(self, newest: int, replaced: Path | None) -> None:
        """Remove all but the best and the `keep` newest; `warn` names what cannot be removed."""
        unwanted = [] if replaced is None else [replaced]
        if self.keep is not None:
            steps = self.steps()
            best = next((step for step in self.best if step in steps), None)
            older = [self.folder / f"step_{step}" for step in steps if step not in (newest, best)]
            unwanted += older[: max(0, len(older) - self.keep + 1)]
        for folder in unwanted:
            if not self._is_ours(folder):
                self.warn(f"{folder} is kept: it is damaged, or holds files that this program has not written")
                continue
            going = folder
            if folder != replaced:
                going = self.folder / _temporary("removing", folder.name)
                try:
                    # Half removed under its old name it would be taken for a damaged checkpoint.
                    files.rename(folder, going)
                    files.flush(self.folder)
                except OSError as error:
                    self.warn(f"{folder} is kept: {error}")
                    continue
            self._remove(going)

    def abandon(self, draft: Draft) -> None:
        """The next start removes what cannot be removed now."""
        self._remove(draft.folder)

    def latest(self, on_bad: Callable[[str], None]) -> Checkpoint | None:
        """`on_bad` gets the reason for each newer checkpoint. Raises CheckpointError if none is good."""
        try:
            self._tidy()
        except OSError as error:
            self.warn(f"leftovers in {self.folder} stay: {error}")
        steps = self.steps()
        for step in reversed(steps):
            folder = self.folder / f"step_{step}"
            try:
                if folder.is_symlink():
                    raise CheckpointError(f"{folder} is a link: not one of this run's checkpoints")
                return verify(folder)
            except CheckpointError as error:
                on_bad(str(error))
        if steps:
            raise CheckpointError(
                f"none of the {len(steps)} checkpoints in {self.folder} is intact; start anew with trainer.resume_mode=disable"
            )
        return None

    def steps(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        steps = (step_of(path.name) for path in self.folder.iterdir())
        return sorted(step for step in steps if step is not None)

    def set_aside_after(self, step: int) -> list[Path]:
        """Rename the checkpoints of later steps, and return their new places: a run goes on from `step`."""
        moved = [self._set_aside(self.folder / f"step_{later}") for later in self.steps() if later > step]
        if moved:
            files.flush(self.folder)
        return moved

    @staticmethod
    def _entries(draft: Draft, written: Files) -> Files:
        entries, present = dict(written), dict(files.walk(draft.folder))
        for name, is_folder in present.items():
            path = draft.folder / name
            if name not in written:
                files.flush(path)
                if not is_folder:
                    entries[name] = files.entry_of(path)
            elif (size := path.lstat().st_size) != written[name][0]:
                raise OSError(5, f"{name} has {size} bytes, {written[name][0]} were written")
        if missing := written.keys() - present.keys():
            raise OSError(5, f"{min(missing)} was written and is not there")
        return entries

    def _is_ours(self, folder: Path) -> bool:
        try:
            return not folder.is_symlink() and not unknown_files(folder, read_manifest(folder))
        except (CheckpointError, OSError):
            return False

    def _set_aside(self, folder: Path) -> Path:
        places = (self.folder / f"aside_{number}_{folder.name}" for number in itertools.count(1))
        place = next(place for place in places if not place.exists() and not place.is_symlink())
        files.rename(folder, place)
        return place

    def _tidy(self) -> None:
        """Undo what a process that died while saving left half done."""
        for path in sorted(self.folder.glob(".*")):
            match = _OURS.fullmatch(path.name)
            if match is None or path.is_symlink() or not path.is_dir():
                continue
            final = self.folder / match[2]
            if match[1] == "replaced" and not final.exists():
                files.rename(path, final)
                files.flush(self.folder)
            else:
                self._remove(path)

    def _remove(self, folder: Path) -> None:
        try:
            if folder.exists():
                files.remove_tree(folder)
        except OSError as error:
            self.warn(f"{folder} could not be removed: {error}; the next start tries again")


def _temporary(kind: str, name: str) -> str:
    """A new name: a writer that was given up may still be writing into an earlier one."""
    return f".{kind}_{name}_{secrets.token_hex(4)}"
