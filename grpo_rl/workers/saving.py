"""What actor and critic ranks offer for checkpoints; nothing here is a collective."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from grpo_rl.checkpoint.files import Files
from grpo_rl.checkpoint.rank_files import RankFiles


class Saving:
    """Saving and loading of a trained rank, by calls that its set's controller makes."""

    files: RankFiles

    def save(self, folder: str) -> Files:
        """Write this rank's share of weights, optimizer, scheduler and random state; the files it wrote."""
        self.files.save(Path(folder))
        return self.files.saved() or {}

    def begin_save(self, folder: str, check: bool, texts: Mapping[str, str] | None = None) -> None:
        """Begin to write what `save` would write now; with `check` it is read back. `texts` are rank 0's to write too."""
        self.files.save(Path(folder), check=check, background=True, texts=texts)

    def saved(self, wait_s: float) -> Files | None:
        """The files of the last save; None while they are written, none where this process has not begun one."""
        return self.files.saved(wait_s)

    def save_bytes(self) -> int:
        """About how much `save` writes."""
        return self.files.num_bytes()

    def load(self, folder: str) -> None:
        """Restore what `save` wrote, by any number of ranks."""
        self.files.load(Path(folder))
