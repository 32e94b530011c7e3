"""The order in which rows are trained on: seeded per epoch, resumable to the exact row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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

    With `shares`, pairs of an entry's rows and of its weight, an epoch has as many rows as there are, each entry's weight over the
    sum of all of them. An entry's rows are gone through in one permutation after another, from epoch to epoch: none is drawn a
    second time before each of the others was drawn.

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
        shares: Sequence[tuple[int, float]] = (),
    ) -> None:
        """`size_key` is the key that set the batch's size. Raises ConfigError for a batch that is larger than the data."""
        if num_rows < batch_size:
            raise ConfigError(
                f"{size_key}={batch_size} is larger than the training data, which has {num_rows} rows: "
                f"give a batch of at most {num_rows}, or more data"
            )
        self.batch_size = batch_size
        self._is_usable = is_usable
        self._identity: dict[str, Any] = {"num_rows": num_rows, "shuffle": shuffle, "seed": seed}
        self._identity |= {"shares": [list(share) for share in shares]} if shares else {}
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
        drawn, num_looked_at = taken
        self.epoch, self.position, self._order = epoch, position + num_looked_at, order
        occurrences = [divmod(entry, self._identity["num_rows"]) for entry in drawn]
        return [(row, f"e{epoch}{f'.{number}' if number else ''}-r{row}") for number, row in occurrences]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Raises DataError when the order would be another one."""
        changes = [f"{key} was {state.get(key)}, now {new}" for key, new in self._identity.items() if state.get(key) != new]
        if changes:
            raise DataError(f"cannot resume in the middle of the training data, its order has changed: {'; '.join(changes)}")
        self.seek(state["epoch"], state["position"])

    def _first_usable(self, entries: Iterator[int]) -> tuple[list[int], int] | None:
        """Return a batch of the first usable ones, and how many were looked at; None if there are fewer."""
        usable: list[int] = []
        for number, entry in enumerate(entries, start=1):
            if self._is_usable(entry % self._identity["num_rows"]):
                usable.append(entry)
                if len(usable) == self.batch_size:
                    return usable, number
        return None

    def _order_of(self, epoch: int) -> np.ndarray:
        """Return the rows of an epoch, int64; a row that is met for the n-th time in it has n times the number of all rows added."""
        num_rows, shuffle, seed = (self._identity[key] for key in ("num_rows", "shuffle", "seed"))
        if not shuffle:
            return np.arange(num_rows)
        rows: np.ndarray | int = num_rows
        if shares := self._identity.get("shares"):
            weights = np.array([weight for _, weight in shares])
            counts = np.diff(np.rint(np.cumsum(weights) / weights.sum() * num_rows).astype(np.int64), prepend=0)
            firsts = np.cumsum([0, *(size for size, _ in shares)])
            entries = enumerate(zip(shares, counts.tolist(), firsts.tolist(), strict=False))
            rows = np.concatenate(
                [first + self._part(number, size, epoch * count, count) for number, ((size, _), count, first) in entries]
            )
        return np.random.default_rng((seed, epoch)).permutation(rows)

    def _part(self, number: int, size: int, start: int, count: int) -> np.ndarray:
        """Return `count` rows of an entry of `size` rows, those from `start` on in its permutations one after the other."""
        num_rows, seed = self._identity["num_rows"], self._identity["seed"]
        first = start // size
        rounds = range(first, (start + count - 1) // size + 1)
        drawn = [np.random.default_rng((seed, number, turn)).permutation(size) + (turn - first) * num_rows for turn in rounds]
        return np.concatenate(drawn or [np.arange(0)])[start - first * size :][:count]


def make_row_order(
    config: Config, dataset: PromptDataset | TrainingSet[Any], is_retired: Callable[[int], bool] = lambda row: False
) -> RowOrder:
    """Return the order in which rows of `dataset` are drawn.

    Raises ConfigError for a batch larger than the data, and for a weight of an entry without rows.
    """
    data = config.data
    sizes = dataset.entry_sizes()
    if data.train_weights is not None and 0 in sizes:
        raise ConfigError(
            f"data.train_weights: {data.train_files[sizes.index(0)]} has no rows to draw (data.train_max_samples takes the first ones); "
            "leave it out of data.train_files"
        )
    return RowOrder(
        len(dataset),
        derived.gen_batch_size(config),
        data.shuffle,
        data.seed,
        size_key="data.train_batch_size" if data.gen_batch_size is None else "data.gen_batch_size",
        is_usable=lambda row: not is_retired(row) and dataset.usable(row),
        shares=() if data.train_weights is None else list(zip(sizes, data.train_weights, strict=True)),
    )
