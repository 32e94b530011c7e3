"""The reference's log-probs of rows that stand fixed: computed once for all of them, and kept in a file of the run.

The reference of a run on rows is the initial policy. Before the first step the actor is just that, also in a run that is
about to load a checkpoint, so no other process has to hold those weights. A resumed run reads the file.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from grpo_rl.checkpoint.files import flush, rename, write_file
from grpo_rl.columns import values
from grpo_rl.data.row_set import TrainingRows, TrainingSet
from grpo_rl.errors import DataError
from grpo_rl.faults import fault_point
from grpo_rl.protocols import Actor
from grpo_rl.trainer.sampled.advantage import check_finite
from grpo_rl.types import Batch

if TYPE_CHECKING:
    # The plan looks up the schedule, and need not wait for what draws.
    from grpo_rl.telemetry.terminal.console import Console

PARTS = ("train", "val")
_KEY = "key"


class ReferenceRows:
    """The initial policy's log-prob of every trained token of the rows, by part and row."""

    def __init__(self, rows: TrainingRows, file: Path, key: str, columns: dict[str, Tensor]) -> None:
        self.file, self.key = file, key
        self._sets = {part: found for part in PARTS if (found := getattr(rows, part)) is not None}
        self._columns = columns

    @classmethod
    def prepare(cls, rows: TrainingRows, actor: Actor, file: Path, batch_size: int, console: Console) -> ReferenceRows:
        """Return the log-probs that `file` has, or those of the actor, which must not have been trained yet, and write the file.

        The file is used for the same weights and data only. Raises DivergedError for log-probs that are not finite.
        """
        key = _key(rows, actor)
        found = cls(rows, file, key, {})
        if found._read():
            console.info(f"the reference's log-probs of all rows are in {file}")
            return found
        total = sum(map(len, found._sets.values()))
        with console.progress("computing the reference's log-probs of all rows, once", total=total) as bar:
            for part, data in found._sets.items():
                found._columns |= _computed(part, data, actor, batch_size, bar.advance)
        found._write()
        return found

    def fill(self, part: str, rows: list[int], batch: Batch) -> Batch:
        """Return the batch of these rows of a part with `ref_logprobs_T`. Raises DataError for rows of other tokens than the file's."""
        starts_R, digests_R = self._columns[f"{part}.starts"], self._columns[f"{part}.digests"]
        for row, digest in zip(rows, _digests(batch), strict=True):
            if int(digests_R[row]) != digest:
                raise DataError(
                    f"row {row} of the {part} data has other tokens than when {self.file} was written: the data, the tokenizer or "
                    "the chat template have changed. Remove the file to compute it again"
                )
        logprobs_T = self._columns[f"{part}.logprobs"]
        pieces = [logprobs_T[int(starts_R[row]) : int(starts_R[row + 1])] for row in rows]
        return batch.replace(ref_logprobs_T=torch.cat(pieces))

    def _read(self) -> bool:
        """Read the file; return whether it is there and of these weights and these data."""
        try:
            with safe_open(self.file, framework="pt") as opened:
                if (opened.metadata() or {}).get(_KEY) != self.key:
                    return False
            self._columns = load_file(self.file)
        except (OSError, SafetensorError):
            return False
        return True

    def _write(self) -> None:
        """Write the file; it has its name only once it is whole."""
        fresh = self.file.with_name(f".{self.file.name}.part")
        fresh.unlink(missing_ok=True)
        columns = {name: column.contiguous() for name, column in self._columns.items()}
        write_file(fresh, [save(columns, {_KEY: self.key})])
        rename(fresh, self.file)
        flush(self.file.parent)


def _key(rows: TrainingRows, actor: Actor) -> str:
    """Return what the log-probs depend on beside the tokens, which are compared row by row: the weights and the data."""
    sets: dict[str, Any] = {part: getattr(rows, part) for part in PARTS}
    data = {part: None if found is None else [len(found), found.fingerprint] for part, found in sets.items()}
    return json.dumps({"weights": actor.fingerprint(), "data": data}, sort_keys=True)


def _computed(part: str, data: TrainingSet[Any], actor: Actor, batch_size: int, done: Any) -> dict[str, Tensor]:
    """Return the columns of one part: log-probs back to back, where each row's begin, and a digest of each row's tokens."""
    pieces: list[Tensor] = []
    lengths: list[int] = []
    digests: list[int] = []
    for start in range(0, len(data), batch_size):
        rows = list(range(start, min(start + batch_size, len(data))))
        usable = [row for row in rows if data.usable(row)]
        sizes, marks = dict.fromkeys(rows, 0), dict.fromkeys(rows, 0)
        if usable:
            batch = data.batch(usable)
            logprobs_T = actor.logprobs(batch).float()
            check_finite(batch.replace(ref_logprobs_T=logprobs_T))
            pieces.append(logprobs_T)
            per_row = torch.zeros(len(usable), dtype=torch.long).index_add(0, batch.group_N, batch.trained_lengths_N)
            sizes |= dict(zip(usable, per_row.tolist(), strict=True))
            marks |= dict(zip(usable, _digests(batch), strict=True))
        lengths += sizes.values()
        digests += marks.values()
        fault_point("driver.reference", part=part, row=rows[-1])
        done(len(rows))
    starts = torch.tensor([0, *lengths], dtype=torch.long).cumsum(0)
    logprobs_T = torch.cat(pieces) if pieces else torch.empty(0)
    return {
        f"{part}.logprobs": logprobs_T,
        f"{part}.starts": starts,
        f"{part}.digests": torch.tensor(digests, dtype=torch.long),
    }


def _digests(batch: Batch) -> list[int]:
    """Return a number for each group's tokens, and for which of them are trained: the rows of a batch are its groups, in order."""
    marks_S = torch.zeros(len(batch.token_ids_S), dtype=torch.int64)
    marks_S[batch.positions()] = 1
    columns_S = torch.stack([values(batch.token_ids_S).long(), marks_S], dim=1)
    found = []
    per_group: dict[int, Any] = {}
    for group, tokens in zip(batch.group_N.tolist(), columns_S.split(batch.sequence_lengths_N.tolist()), strict=True):
        digest = per_group.setdefault(group, hashlib.sha256())
        digest.update(len(tokens).to_bytes(8, "little") + tokens.numpy().tobytes())
    for group in sorted(per_group):
        found.append(int.from_bytes(per_group[group].digest()[:8], "little", signed=True))
    return found
