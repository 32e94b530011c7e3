"""The checkpoints of a trained role that has a folder of its own in them: the critic's, the reward model's."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from grpo_rl.checkpoint.files import Files, make_folder, merge
from grpo_rl.cluster.processes.worker_group import WorkerGroup
from grpo_rl.errors import CheckpointError


class SavedRole:
    """The part of `protocols.Trained` that writes and reads a worker group's state in one folder of a checkpoint."""

    folder: ClassVar[str]
    """The name of that folder."""
    absent: ClassVar[str]
    """The error of a checkpoint without it: what it does not have, why, and what to do."""

    worker_group: WorkerGroup

    def save(self, folder: Path) -> Files:
        """Write the state into the role's own folder."""
        make_folder(folder / self.folder)
        return merge(self.worker_group.call("save", str(folder / self.folder)), self.folder)

    def begin_save(self, folder: Path, check: bool) -> None:
        """Begin a `save` of the present state, beside the training; with `check` the files are read back."""
        make_folder(folder / self.folder)
        self.worker_group.call("begin_save", str(folder / self.folder), check)

    def saved(self, wait_s: float) -> Files | None:
        """Return what the save that was begun has written, as the actor does."""
        written = self.worker_group.call("saved", wait_s)
        return None if None in written else merge(written, self.folder)

    def save_bytes(self) -> int:
        """Return about how much `save` writes."""
        return sum(self.worker_group.call("save_bytes"))

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote. Raises CheckpointError for a checkpoint of a run without this role."""
        if not (folder / self.folder).is_dir():
            raise CheckpointError(f"{folder} {self.absent}")
        self.worker_group.call("load", str(folder / self.folder))
