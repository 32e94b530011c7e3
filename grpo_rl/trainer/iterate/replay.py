"""The pairs of earlier iterations, some of which are learnt again: a bounded history that is part of every checkpoint.

DeepSeekMath (arXiv 2402.03300, section 4.1.4) trains the reward model on samples of the newest policy with a replay of
historical data, one tenth of each batch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grpo_rl.checkpoint.files import Files, write_file
from grpo_rl.data.training_rows.pairs import Pair
from grpo_rl.errors import CheckpointError
from grpo_rl.types import Rollout

FILE = "replay.jsonl"
"""The file of a checkpoint that contains the history."""
_PAIR_BYTES = 4096


@dataclass(frozen=True, slots=True)
class LabelledPair:
    """A pair, and where it comes from."""

    pair: Pair
    iteration: int
    number: int
    """The number of pairs that the run had made before it."""
    rewards: tuple[float, float]
    """The rule's reward of the chosen and of the rejected response."""
    texts: tuple[str, str]

    @classmethod
    def of(cls, chosen: Rollout, rejected: Rollout, iteration: int, number: int) -> LabelledPair:
        """Return the pair of two rollouts of one group with their labels as rewards."""
        assert chosen.reward is not None and rejected.reward is not None
        # Copied: a rollout's own ids lie in a block that is freed when its step is over, and a replay is later.
        sides = chosen.prompt.token_ids, chosen.response_ids, rejected.response_ids
        prompt_ids, chosen_ids, rejected_ids = (np.array(ids, np.int32) for ids in sides)
        pair = Pair(prompt_ids, chosen_ids, rejected_ids)
        return cls(pair, iteration, number, (chosen.reward, rejected.reward), (str(chosen.text), str(rejected.text)))

    def record(self) -> dict[str, Any]:
        """Return the pair as a row of the file."""
        return {
            "number": self.number,
            "iteration": self.iteration,
            "prompt_ids": self.pair.prompt_ids.tolist(),
            "chosen_ids": self.pair.chosen_ids.tolist(),
            "rejected_ids": self.pair.rejected_ids.tolist(),
            "rewards": list(self.rewards),
            "chosen": self.texts[0],
            "rejected": self.texts[1],
        }

    @classmethod
    def from_record(cls, row: dict[str, Any]) -> LabelledPair:
        """Return the pair that `record` wrote."""
        prompt, chosen, rejected = (np.asarray(row[f"{side}_ids"], np.int32) for side in ("prompt", "chosen", "rejected"))
        rewards = float(row["rewards"][0]), float(row["rewards"][1])
        texts = str(row["chosen"]), str(row["rejected"])
        return cls(Pair(prompt, chosen, rejected), int(row["iteration"]), int(row["number"]), rewards, texts)


class ReplayHistory:
    """A uniform sample, of at most `capacity`, of all pairs that the run has made. Implements `protocols.Saved`.

    Every pair has a priority that follows from the seed and its number, and those of the lowest ones stay: so no iteration is
    forgotten as a whole, and the same run keeps the same pairs wherever it was interrupted.
    """

    def __init__(self, capacity: int, share: float, seed: int) -> None:
        self.capacity, self.share, self.seed = capacity, share, seed
        self.pairs: list[LabelledPair] = []
        self.num_seen = 0
        self.num_beside = 0
        """The new pairs that were learnt since there are pairs to replay beside them."""
        self._written: Files = {}

    def draw(self, num_new: int, iteration: int, step: int) -> list[LabelledPair]:
        """Return pairs of earlier iterations that make up `share` of a batch with so many new ones; none where there are none.

        Nothing is changed: `add` notes that they were learnt. The choice follows from the seed and the step.
        """
        earlier = [pair for pair in self.pairs if pair.iteration < iteration]
        # What rounding holds back from a small batch comes with a later one: the share is right over all of them.
        wanted = min(self._due(self.num_beside + num_new) - self._due(self.num_beside), len(earlier))
        if wanted == 0:
            return []
        chosen = np.random.default_rng([self.seed, step]).choice(len(earlier), size=wanted, replace=False)
        return [earlier[index] for index in sorted(chosen.tolist())]

    def add(self, new: Sequence[LabelledPair], iteration: int) -> None:
        """Take in the new pairs of a batch that was learnt, and forget as many as are too many."""
        if any(pair.iteration < iteration for pair in self.pairs):
            self.num_beside += len(new)
        self.num_seen += len(new)
        self._keep([*self.pairs, *new])

    def _keep(self, pairs: Sequence[LabelledPair]) -> None:
        kept = sorted(pairs, key=lambda pair: _priority(self.seed, pair.number))[: self.capacity]
        self.pairs = sorted(kept, key=lambda pair: pair.number)

    def _due(self, num_new: int) -> int:
        """Return how many pairs are to be replayed beside so many new ones; what is whole up to rounding is whole."""
        return math.floor(num_new * self.share / (1.0 - self.share) + 1e-9)

    # ---- a part of a checkpoint -----------------------------------------------------------------------------

    def save(self, folder: Path) -> Files:
        """Write the history as it is now; pairs never change, so nothing has to be copied before."""
        head = {"num_seen": self.num_seen, "num_beside": self.num_beside}
        lines = [json.dumps(row, ensure_ascii=False) for row in (head, *(pair.record() for pair in self.pairs))]
        self._written = {FILE: write_file(folder / FILE, ["\n".join([*lines, ""]).encode("utf-8", "backslashreplace")])}
        return self._written

    def begin_save(self, folder: Path, check: bool) -> None:
        """Write it, which is done when this returns: a few megabytes at most."""
        self.save(folder)

    def saved(self, wait_s: float) -> Files | None:
        """Return what the last save has written."""
        return self._written

    def save_bytes(self) -> int:
        """Return about how much `save` writes once the history is full."""
        return self.capacity * _PAIR_BYTES

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote. Raises CheckpointError for a checkpoint without it, and for what is no history."""
        try:
            head, *rows = [json.loads(line) for line in (folder / FILE).read_text(encoding="utf-8").splitlines()]
            self.num_seen, self.num_beside = int(head["num_seen"]), int(head["num_beside"])
            self._keep([LabelledPair.from_record(row) for row in rows])
        except FileNotFoundError:
            raise CheckpointError(
                f"{folder} has no {FILE}: it was written by a run that trained no reward model in iterations; go on with that "
                "configuration, or start anew with trainer.resume_mode=disable"
            ) from None
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise CheckpointError(f"{folder}: {FILE} cannot be used: {type(error).__name__}: {error}") from error


def _priority(seed: int, number: int) -> bytes:
    return hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()
