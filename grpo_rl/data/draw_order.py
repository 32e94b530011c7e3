"""The order in which rows are trained on: seeded per epoch or mixed, resumable to the exact row."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from grpo_rl.config import derived
from grpo_rl.config.schema.tree import Config
from grpo_rl.data.dataset import PromptDataset
from grpo_rl.data.row_set import TrainingSet
from grpo_rl.errors import ConfigError, DataError

Usable = Callable[[int], bool]
"""A function that returns whether a row may be drawn: neither retired nor found unusable."""


class RowOrder(ABC):
    """Draws rows, batch after batch. A draw that fails leaves the position as it was."""

    placed_by: ClassVar[tuple[str, ...]]
    """The attributes that are the position."""

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        shuffle: bool,
        seed: int,
        *,
        size_key: str = "data.train_batch_size",
        is_usable: Usable = lambda row: True,
    ) -> None:
        """`size_key` is the key that set the batch's size. Raises ConfigError for a batch that is larger than the data."""
        if num_rows < batch_size:
            raise ConfigError(
                f"{size_key}={batch_size} is larger than the training data, which has {num_rows} rows: "
                f"give a batch of at most {num_rows}, or more data"
            )
        self.batch_size = self.least_rows = batch_size
        """`least_rows` is the number of rows that must not be retired for another batch."""
        self.epoch = 0
        """The epoch, from 0, of the batch that was drawn last."""
        self._num_rows, self._is_usable = num_rows, is_usable
        self._shuffle, self._seed = shuffle, seed

    @abstractmethod
    def next_batch(self) -> list[tuple[int, str]]:
        """Return `batch_size` pairs of row index and uid, which names the occurrence and ends in `-r` and the row.

        Raises DataError when fewer rows than that can be drawn.
        """

    def place(self) -> dict[str, Any]:
        """Return where it is; small."""
        return copy.deepcopy({name: getattr(self, name) for name in self.placed_by})

    def seek(self, place: dict[str, Any]) -> None:
        """Go back to where `place` was taken."""
        for name in self.placed_by:
            setattr(self, name, copy.deepcopy(place[name]))

    def state_dict(self) -> dict[str, Any]:
        """Return the position and what the order depends on."""
        return self.place() | self._identity()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Raises DataError when the order would be another one."""
        now = self._identity()
        changes = [f"{key} was {state.get(key)}, now {value}" for key, value in now.items() if state.get(key) != value]
        if changes:
            raise DataError(f"cannot resume in the middle of the training data, its order has changed: {'; '.join(changes)}")
        self.seek(state)

    @abstractmethod
    def start_after(self, state: dict[str, Any]) -> None:
        """Begin the epoch after the one of `state`, which may be of other data."""

    def _identity(self) -> dict[str, Any]:
        """Return what the order depends on."""
        return {"num_rows": self._num_rows, "shuffle": self._shuffle, "seed": self._seed, "weights": None}

    def _first_usable(self, rows: Iterator[int]) -> tuple[list[int], int] | None:
        """Return the first usable rows of these, a batch, and how many were looked at; None where there are fewer."""
        found: list[int] = []
        for number, row in enumerate(rows, start=1):
            if self._is_usable(row):
                found.append(row)
                if len(found) == self.batch_size:
                    return found, number
        return None

    def _too_few(self) -> DataError:
        return DataError(
            f"fewer than {self.batch_size} of {self._num_rows} training rows are left, the others are retired or cannot be used"
        )


class EpochOrder(RowOrder):
    """Batches of rows, epoch after epoch; the order is a function of (seed, epoch) and of nothing else.

    Rows left over at the end of an epoch, fewer than a batch, are dropped (verl's `drop_last`). Rows that are not usable when their turn comes
    are skipped.
    """

    placed_by = ("epoch", "position")

    def __init__(self, num_rows: int, batch_size: int, shuffle: bool, seed: int, **options: Any) -> None:
        super().__init__(num_rows, batch_size, shuffle, seed, **options)
        self.position = 0
        self._order = self._order_of(0)

    def next_batch(self) -> list[tuple[int, str]]:
        epoch, position, order = self.epoch, self.position, self._order
        taken = self._first_usable(map(int, order[position:]))
        if taken is None:
            epoch, position, order = epoch + 1, 0, self._order_of(epoch + 1)
            taken = self._first_usable(map(int, order))
        if taken is None:
            raise self._too_few()
        rows, num_looked_at = taken
        self.epoch, self.position, self._order = epoch, position + num_looked_at, order
        return [(row, f"e{epoch}-r{row}") for row in rows]

    def seek(self, place: dict[str, Any]) -> None:
        super().seek(place)
        self._order = self._order_of(self.epoch)

    def start_after(self, state: dict[str, Any]) -> None:
        self.seek({"epoch": int(state["epoch"]) + 1, "position": 0})

    def _order_of(self, epoch: int) -> np.ndarray:
        return order_of(self._num_rows, (self._seed, epoch) if self._shuffle else None)


class MixedOrder(RowOrder):
    """Batches in which each source has its share, draw by draw as even as whole rows allow.

    Every draw adds to each source its weight and takes 1 from the source that then has most and is drawn (smooth weighted
    round-robin): after t draws a source of share w had w·t of them, up to a fraction. Each source goes through its own
    rows in its own seeded order, pass after pass; a small one is repeated while a large one is at its first pass. An
    epoch is as many draws as there are rows in all sources. A source without a usable row is left out.
    """

    placed_by = ("epoch", "first_epoch", "num_drawn", "credits", "passes", "places")

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        batch_size: int,
        shuffle: bool,
        seed: int,
        **options: Any,
    ) -> None:
        super().__init__(sum(sizes), batch_size, shuffle, seed, **options)
        self.least_rows = 1
        self._sizes, self._starts = list(sizes), np.cumsum([0, *sizes])
        self._weights = np.array(weights, dtype=np.float64) / sum(weights)
        self.credits = [0.0] * len(self._sizes)
        self.passes, self.places = [0] * len(self._sizes), [0] * len(self._sizes)
        self.num_drawn = self.first_epoch = 0
        self._orders: dict[int, tuple[int, np.ndarray]] = {}

    def next_batch(self) -> list[tuple[int, str]]:
        before = self.place()
        try:
            batch = self._draw()
        except DataError:
            self.seek(before)
            raise
        self.epoch = self.first_epoch + self.num_drawn // self._num_rows
        self.num_drawn += len(batch)
        return batch

    def _draw(self) -> list[tuple[int, str]]:
        shares = self._weights.copy()
        batch: list[tuple[int, str]] = []
        while len(batch) < self.batch_size:
            if not shares.any():
                raise DataError("no training row is left in any source, all are retired or cannot be used")
            source = int(np.argmax(np.where(shares > 0, self.credits + shares, -np.inf)))
            drawn = self._next_row(source)
            if drawn is None:
                shares[source], self.credits[source] = 0.0, 0.0
                shares = shares / (shares.sum() or 1.0)
                continue
            self.credits = (self.credits + shares).tolist()
            self.credits[source] -= 1.0
            batch.append(drawn)
        return batch

    def _next_row(self, source: int) -> tuple[int, str] | None:
        """The source's next usable row; None where a whole pass has none."""
        for _ in range(self._sizes[source]):
            if self.places[source] == self._sizes[source]:
                self.passes[source], self.places[source] = self.passes[source] + 1, 0
            place, number = self.places[source], self.passes[source]
            row = int(self._starts[source] + self._order(source, number)[place])
            self.places[source] += 1
            if self._is_usable(row):
                return row, f"e{number}-r{row}"
        return None

    def _order(self, source: int, number: int) -> np.ndarray:
        if self._orders.get(source, (-1,))[0] != number:
            seed = (self._seed, source, number) if self._shuffle else None
            self._orders[source] = number, order_of(self._sizes[source], seed)
        return self._orders[source][1]

    def start_after(self, state: dict[str, Any]) -> None:
        self.epoch = self.first_epoch = int(state["epoch"]) + 1
        # Each occurrence of a row has a name of its own: no source may begin a pass that it has begun before.
        first = max([int(number) for number in state.get("passes", [])], default=self.epoch) + 1
        self.passes = [max(first, self.epoch)] * len(self._sizes)

    def _identity(self) -> dict[str, Any]:
        return super()._identity() | {"sizes": self._sizes, "weights": self._weights.tolist()}


def order_of(num_rows: int, seed: tuple[int, ...] | None) -> np.ndarray:
    """Return all rows, shuffled by the seed where there is one."""
    return np.arange(num_rows) if seed is None else np.random.default_rng(seed).permutation(num_rows)


def make_row_order(
    config: Config, dataset: PromptDataset | TrainingSet[Any], is_retired: Callable[[int], bool] | None = None
) -> RowOrder:
    """Return the order in which rows of `dataset` are drawn. Raises ConfigError for a batch larger than the data."""
    data = config.data
    batch_size = derived.gen_batch_size(config)
    options: dict[str, Any] = {
        "size_key": "data.train_batch_size" if data.gen_batch_size is None else "data.gen_batch_size",
        "is_usable": lambda row: not (is_retired is not None and is_retired(row)) and dataset.usable(row),
    }
    if data.train_weights:
        return MixedOrder(dataset.part_sizes, data.train_weights, batch_size, data.shuffle, data.seed, **options)
    return EpochOrder(len(dataset), batch_size, data.shuffle, data.seed, **options)
