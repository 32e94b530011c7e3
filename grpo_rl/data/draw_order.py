"""The order in which rows are trained on: seeded per epoch, resumable to the exact row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from grpo_rl.config import derived
from grpo_rl.config.schema.tree import Config
from grpo_rl.data.dataset import PromptDataset
from grpo_rl.data.row_set import TrainingSet
from grpo_rl.errors import ConfigError, DataError


class RowOrder:
    """Batches of rows, epoch after epoch; the order is a function of (seed, epoch) and of nothing else.

    Rows left over at the end of an epoch, fewer than a batch, are dropped (verl's `drop_last`). Rows that `is_usable` says
    no to when their turn comes, because they are retired or turn out to be bad, are skipped. A draw that fails leaves the
    position as it was.
    """

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        shuffle: bool,
        seed: int,
        *,
        size_key: str = "data.train_batch_size",
        is_usable: Callable[[int], bool] = lambda row: True,
    ) -> None:
        """`size_key` is the key that set the batch's size. Raises ConfigError for a batch that is larger than the data."""
        if num_rows < batch_size:
            raise ConfigError(
                f"{size_key}={batch_size} is larger than the training data, which has {num_rows} rows: "
                f"give a batch of at most {num_rows}, or more data"
            )
        self.batch_size = batch_size
        self._is_usable = is_usable
        self._identity = {"num_rows": num_rows, "shuffle": shuffle, "seed": seed}
        self.seek(0, 0)

    def seek(self, epoch: int, position: int) -> None:
        """Go to a position in an epoch, the epoch of the batch that is drawn next unless too few rows are left in it."""
        self.epoch, self.position, self._order = epoch, position, self._order_of(epoch)

    @contextmanager
    def rewinding(self) -> Iterator[None]:
        """After a DataError in the body the next draw begins with the same rows again."""
        place = self.epoch, self.position
        try:
            yield
        except DataError:
            self.seek(*place)
            raise

    def next_batch(self) -> list[tuple[int, str]]:
        """Return `batch_size` pairs of row index and uid, which names the occurrence and ends in `-r` and the row.

        Raises DataError when fewer rows than that can be drawn.
        """
        epoch, position, order = self.epoch, self.position, self._order
        taken = self._first_usable(map(int, order[position:]))
        if taken is None:
            epoch, position, order = epoch + 1, 0, self._order_of(epoch + 1)
            taken = self._first_usable(map(int, order))
        if taken is None:
            raise DataError(
                f"fewer than {self.batch_size} of {len(order)} training rows are left, the others are retired or cannot be used"
            )
        rows, num_looked_at = taken
        self.epoch, self.position, self._order = epoch, position + num_looked_at, order
        return [(row, f"e{epoch}-r{row}") for row in rows]

    def state_dict(self) -> dict[str, Any]:
        """Return the position and what the order depends on."""
        return {"epoch": self.epoch, "position": self.position, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Raises DataError when the order would be another one."""
        changes = [f"{key} was {state.get(key)}, now {now}" for key, now in self._identity.items() if state.get(key) != now]
        if changes:
            raise DataError(f"cannot resume in the middle of the training data, its order has changed: {'; '.join(changes)}")
        self.seek(state["epoch"], state["position"])

    def _first_usable(self, rows: Iterator[int]) -> tuple[list[int], int] | None:
        """Return the first usable rows of these, a batch, and how many were looked at; None where there are fewer."""
        found: list[int] = []
        for number, row in enumerate(rows, start=1):
            if self._is_usable(row):
                found.append(row)
                if len(found) == self.batch_size:
                    return found, number
        return None

    def _order_of(self, epoch: int) -> np.ndarray:
        num_rows = self._identity["num_rows"]
        if not self._identity["shuffle"]:
            return np.arange(num_rows)
        return np.random.default_rng((self._identity["seed"], epoch)).permutation(num_rows)


def make_row_order(
    config: Config, dataset: PromptDataset | TrainingSet[Any], is_retired: Callable[[int], bool] = lambda row: False
) -> RowOrder:
    """Return the order in which rows of `dataset` are drawn. Raises ConfigError for a batch larger than the data."""
    data = config.data
    return RowOrder(
        len(dataset),
        derived.gen_batch_size(config),
        data.shuffle,
        data.seed,
        size_key="data.train_batch_size" if data.gen_batch_size is None else "data.gen_batch_size",
        is_usable=lambda row: not is_retired(row) and dataset.usable(row),
    )
