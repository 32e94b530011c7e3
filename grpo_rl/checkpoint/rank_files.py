"""One rank's part of a checkpoint: written at once, or copied and written by a thread while the training goes on."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from grpo_rl.checkpoint import policy_state
from grpo_rl.checkpoint.files import Files, entry_of, not_written, write_file
from grpo_rl.checkpoint.tensors import HostMemory
from grpo_rl.errors import CheckpointError
from grpo_rl.models import fsdp
from grpo_rl.models.forward import PackedModel

NICER = 4
"""The niceness that a writing thread adds to that of a training one. More would hold up the training: the writing thread
needs the interpreter's lock for moments, and a thread with less right to a busy core gives the lock back late."""


class RankFiles:
    """Saves and loads a trained rank, or without an optimizer a frozen one. Nothing here is a collective."""

    def __init__(
        self,
        policy: PackedModel,
        optimizer: torch.optim.Optimizer | None,
        scheduler: torch.optim.lr_scheduler.LambdaLR | None,
        rank: int,
        patience_s: float,
    ) -> None:
        """`patience_s` is how long a new save waits for the thread of one that was given up, and an optimizer step for a copy."""
        self.policy, self.rank, self.patience_s = policy, rank, patience_s
        self.training = None if optimizer is None or scheduler is None else (optimizer, scheduler)
        self._memory = HostMemory()
        self._copied = threading.Event()
        self._copied.set()
        if optimizer is not None:
            optimizer.register_step_pre_hook(self.wait_for_copy)
        self._thread: threading.Thread | None = None
        self._outcome: Files | CheckpointError | None = None

    def save(
        self, folder: Path, *, check: bool = False, background: bool = False, texts: Mapping[str, str] | None = None
    ) -> None:
        """Write this rank's files into `folder`; in the background, a thread does it all while the training goes on.

        What it writes is the state of this moment: an optimizer step waits until it is copied. With `check` files are
        read back. `texts` are files that rank 0 writes beside its own. `saved` returns the outcome. Raises CheckpointError
        when an earlier save does not end.
        """
        if self._thread is not None:
            self._thread.join(self.patience_s)
            if self._thread.is_alive():
                raise CheckpointError(f"the save before the one into {folder} is still writing; is the disk hanging?")
        self._outcome = self._thread = None
        fsdp.reshard(self.policy)
        share = policy_state.take(self.policy, self.training, self.rank)
        texts = texts if texts and self.rank == 0 else {}
        if not background:
            self._write(folder, share, texts, check)
            return
        self._copied.clear()
        # The thread takes the share out of the list: its tensors can be freed as soon as they are copied.
        arguments = (folder, [share], texts, check, _Moment.of(share))
        self._thread = threading.Thread(target=self._copy_and_write, args=arguments, name="checkpoint", daemon=True)
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
        """Return about how many bytes `save` writes."""
        return policy_state.state_bytes(self.policy, frozen=self.training is None)

    def load(self, folder: Path) -> None:
        """Restore what ranks of any number wrote into `folder`."""
        self.wait_for_copy()
        fsdp.reshard(self.policy)
        policy_state.load(folder, self.policy, self.training, self.rank)

    def wait_for_copy(self, *_: Any) -> None:
        """Wait for a running copy; to be called before anything changes what is being copied."""
        if not self._copied.wait(self.patience_s):
            raise CheckpointError(
                f"the state of rank {self.rank} was not copied for its checkpoint within {self.patience_s:.0f} s"
            )

    def _copy_and_write(
        self, folder: Path, state: list[policy_state.Share], texts: Mapping[str, str], check: bool, moment: _Moment
    ) -> None:
        try:
            with moment.copying():
                share = policy_state.copied(state.pop(), self._memory)
        except Exception as error:
            self._outcome = CheckpointError(f"cannot copy what {folder} is to hold: {type(error).__name__}: {error}")
            return
        finally:
            self._copied.set()
        _step_back()
        self._write(folder, share, texts, check)

    def _write(self, folder: Path, share: policy_state.Share, texts: Mapping[str, str], check: bool) -> None:
        """Write the files and keep the outcome for `saved`, errors included: in a thread nothing else would see them."""
        try:
            entries = {name: write_file(folder / name, [text.encode()]) for name, text in texts.items()}
            entries |= policy_state.write(folder, share)
            for name, entry in entries.items() if check else ():
                if entry_of(folder / name) != entry:
                    raise OSError(5, f"{name} does not read back as it was written")
            self._outcome = entries
        except OSError as error:
            self._outcome = not_written(folder, error, policy_state.share_bytes(share))
        except Exception as error:
            self._outcome = CheckpointError(f"cannot write {folder}: {type(error).__name__}: {error}")


class _Moment:
    """A point in a GPU's main stream; a copy that another thread makes waits for the work before it."""

    def __init__(self, device: torch.device | None) -> None:
        self.device, self.event = device, None
        if device is not None:
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(device))

    @staticmethod
    def of(share: policy_state.Share) -> _Moment:
        """Return the present point of the stream of the GPU that holds the share; an empty one where no GPU does."""
        parts = (*share.weights.values(), *share.moments.values())
        return _Moment(next((part.tensor.device for part in parts if part.tensor.is_cuda), None))

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Make copies inside wait for that point, and for nothing that the training starts after it."""
        if self.event is None:
            yield
            return
        stream = torch.cuda.Stream(self.device)
        stream.wait_event(self.event)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()


def _step_back() -> None:
    """Raise this thread's niceness; only Linux has one for each thread, so elsewhere nothing changes."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.nice(NICER)
