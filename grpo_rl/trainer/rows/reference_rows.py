"""The reference's log-probs of rows that stand fixed: computed once for all of them.

The reference of a run on rows is the initial policy. Before the first step the actor is just that, also in a run that is
about to load a checkpoint, so no other process has to hold those weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_rl.data.row_set import TrainingRows, TrainingSet
from grpo_rl.faults import fault_point
from grpo_rl.protocols import Actor
from grpo_rl.trainer.sampled.advantage import check_finite
from grpo_rl.types import Batch

if TYPE_CHECKING:
    # The plan looks up the schedule, and need not wait for what draws.
    from grpo_rl.telemetry.terminal.console import Console


class ReferenceRows:
    """The initial policy's log-prob of every trained token of the rows, by part (`train`, `val`) and row."""

    def __init__(self, rows: TrainingRows, actor: Actor, batch_size: int, console: Console) -> None:
        """Compute them with the actor, which must not have been trained yet. Raises DivergedError for log-probs that are not finite."""
        sets = {part: found for part, found in (("train", rows.train), ("val", rows.val)) if found is not None}
        total = sum(map(len, sets.values()))
        with console.progress("computing the reference's log-probs of all rows, once", total=total) as bar:
            self._columns = {part: _computed(part, data, actor, batch_size, bar.advance) for part, data in sets.items()}

    def fill(self, part: str, rows: list[int], batch: Batch) -> Batch:
        """Return the batch of these rows of a part with `ref_logprobs_T`."""
        logprobs_T, starts_R = self._columns[part]
        pieces = [logprobs_T[int(starts_R[row]) : int(starts_R[row + 1])] for row in rows]
        return batch.replace(ref_logprobs_T=torch.cat(pieces))


def _computed(part: str, data: TrainingSet[Any], actor: Actor, batch_size: int, done: Any) -> tuple[Tensor, Tensor]:
    """Return the log-probs of one part back to back, and where each row's begin."""
    pieces: list[Tensor] = []
    lengths: list[int] = []
    for start in range(0, len(data), batch_size):
        rows = list(range(start, min(start + batch_size, len(data))))
        usable = [row for row in rows if data.usable(row)]
        sizes = dict.fromkeys(rows, 0)
        if usable:
            batch = data.batch(usable)
            logprobs_T = actor.logprobs(batch).float()
            check_finite(batch.replace(ref_logprobs_T=logprobs_T))
            pieces.append(logprobs_T)
            per_row = torch.zeros(len(usable), dtype=torch.long).index_add(0, batch.group_N, batch.trained_lengths_N)
            sizes |= dict(zip(usable, per_row.tolist(), strict=True))
        lengths += sizes.values()
        fault_point("driver.reference", part=part, row=rows[-1])
        done(len(rows))
    return torch.cat(pieces) if pieces else torch.empty(0), torch.tensor([0, *lengths], dtype=torch.long).cumsum(0)
