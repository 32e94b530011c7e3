"""One rank's part of a checkpoint: written at once, or by a thread from a copy while the training goes on."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from grpo_rl.checkpoint import policy_state
from grpo_rl.checkpoint.files import Files, entry_of, not_written
from grpo_rl.errors import CheckpointError
from grpo_rl.models import fsdp
from grpo_rl.models.forward import PackedModel

GIVEN_UP_S = 60.0
"""How long a new save waits for the thread of one that was given up."""


class RankFiles:
    """Saves and loads a trained rank. Nothing here is a collective."""

    def __init__(
        self,
        policy: PackedModel,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LambdaLR,
        rank: int,
    ) -> None:
        self.policy, self.optimizer, self.scheduler, self.rank = policy, optimizer, scheduler, rank
        self._thread: threading.Thread | None = None
        self._outcome: Files | CheckpointError | None = None

    def save(self, folder: Path, *, check: bool = False, background: bool = False) -> None:
        """Write this rank's files into `folder`; in the background, only their copy in memory is made before this returns.

        With `check` they are read back. `saved` tells how it went. Raises CheckpointError when an earlier save does not end.
        """
        if self._thread is not None:
            self._thread.join(GIVEN_UP_S)
            if self._thread.is_alive():
                raise CheckpointError(f"the save before the one into {folder} is still writing; is the disk hanging?")
        self._outcome = self._thread = None
        fsdp.reshard(self.policy)
        share = policy_state.take(self.policy, self.optimizer, self.scheduler, self.rank, copy=background)
        if not background:
            self._write(folder, share, check)
            return
        self._thread = threading.Thread(target=self._write, args=(folder, share, check), name="checkpoint", daemon=True)
        self._thread.start()

    def saved(self, wait_s: float = 0.0) -> Files | None:
        """The files that the last `save` wrote; None when it is not done within `wait_s`; none where nothing was saved here.

        Raises CheckpointError when they could not be written.
        """
        if self._thread is not None:
            self._thread.join(wait_s)
            if self._thread.is_alive():
                return None
            self._thread = None
        outcome = self._outcome
        if isinstance(outcome, CheckpointError):
            raise outcome
        return outcome or {}

    def num_bytes(self) -> int:
        """About how much `save` writes."""
        return policy_state.state_bytes(self.policy)

    def load(self, folder: Path) -> None:
        """Restore what ranks of any number wrote into `folder`."""
        fsdp.reshard(self.policy)
        policy_state.load(folder, self.policy, self.optimizer, self.scheduler, self.rank)

    def _write(self, folder: Path, share: policy_state.Share, check: bool) -> None:
        """Set the outcome. Whatever goes wrong is told by `saved`: a thread has nobody else to tell."""
        try:
            entries = policy_state.write(folder, share)
            for name, entry in entries.items() if check else ():
                if entry_of(folder / name) != entry:
                    raise OSError(5, f"{name} does not read back as it was written")
            self._outcome = entries
        except OSError as error:
            self._outcome = not_written(folder, error, policy_state.share_bytes(share))
        except Exception as error:
            self._outcome = CheckpointError(f"cannot write {folder}: {type(error).__name__}: {error}")
