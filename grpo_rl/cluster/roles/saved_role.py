"""The checkpoints of a role whose ranks have a state: the actor's, the critic's, the reward model's, a moving reference's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from grpo_rl.checkpoint.files import Files, make_folder, merge
from grpo_rl.cluster.processes.worker_group import WorkerGroup
from grpo_rl.errors import CheckpointError


class SavedRole:
    """The part of `protocols.Trained` that writes and reads a worker group's state in a checkpoint."""

    folder: ClassVar[str] = ""
    """The role's folder in a checkpoint; empty for the checkpoint itself."""
    absent: ClassVar[str] = ""
    """The error of a checkpoint without that folder: what it does not have, why, and what to do."""
    own_file: ClassVar[str | None] = None
    """The file with the state that the role has in the controller; None where it has none."""

    worker_group: WorkerGroup

    def own_state(self) -> dict[str, Any]:
        """Return the state that the role has in the controller."""
        return {}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Go on from what `own_state` returned."""

    def save(self, folder: Path, check: bool = False, in_background: bool = False) -> None:
        """Write the present state, or begin to, beside the training; with `check` the files are read back."""
        if self.folder:
            make_folder(folder / self.folder)
        own = ({self.own_file: json.dumps(self.own_state())},) if self.own_file else ()
        self.worker_group.call("save", str(folder / self.folder), check, in_background, *own)

    def saved(self, wait_s: float) -> Files | None:
        """Return what the last `save` has written; None when it has not ended within `wait_s`.

        Raises CheckpointError when it failed.
        """
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
        if self.own_file is not None:
            self.load_own_state(json.loads((folder / self.own_file).read_text()))
