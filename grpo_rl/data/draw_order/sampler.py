"""The order in which rows are trained on: seeded per epoch, and resumable to the exact row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from grpo_rl.errors import ConfigError, DataError

Usable = Callable[[int], bool]
"""A function that returns whether a row may be drawn: neither retired nor found unusable."""


class Sampler(Protocol):
    """A sampler draws rows, batch after batch. Where drawing fails, nothing has moved on."""

    batch_size: int
    wants_rates: bool
    """True where the sampler draws by pass rates, and so has to get them."""
    least_rows: int
    """Fewest rows that must not be retired for another batch."""

    @property
    def epoch(self) -> int:
        """The epoch, from 0, of the batch that was drawn last."""
        ...

    def next_batch(self) -> list[tuple[int, str]]:
        """`batch_size` pairs of row index and uid, which names the occurrence and ends in `-r` and the row.

        Raises DataError when fewer rows than that can be drawn.
        """
        ...

    def record(self, row: int, rate: float) -> None:
        """Take in the share of its responses that passed."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return what decides which rows come next, for the log; nothing where the seed alone does."""
        ...

    def position(self) -> dict[str, Any]:
        """Return where it is; small."""
        ...

    def seek(self, position: dict[str, Any]) -> None:
        """Go back to where `position` was taken."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position, what was recorded, and what the order depends on."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Raises DataError when the order would be another one."""
        ...

    def start_after(self, state: dict[str, Any]) -> None:
        """Begin the epoch after the one of `state`, which may be of other data."""
        ...


class PromptSampler:
    """Batches of rows, epoch after epoch; the order is a function of (seed, epoch, difficulty) and of nothing else.

    With a `difficulty` per row the easiest come first in every epoch, and equals in a seeded order. Rows left over at the
    end of an epoch, fewer than a batch, are dropped (verl's `drop_last`). Rows that are not `is_usable` when their turn
    comes are skipped. `size_key` is the key that set the batch's size.
    """

    wants_rates = False

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        shuffle: bool,
        seed: int,
        *,
        size_key: str = "data.train_batch_size",
        is_usable: Usable | None = None,
        difficulty: np.ndarray | None = None,
    ) -> None:
        check_size(num_rows, batch_size, size_key)
        self.batch_size = self.least_rows = batch_size
        self._num_rows, self._shuffle, self._seed = num_rows, shuffle, seed
        self._is_usable = is_usable
        self._difficulty = difficulty
        self._epoch = self._position = 0
        self._order = self._order_of(0)

    @property
    def steps_per_epoch(self) -> int:
        return self._num_rows // self.batch_size

    @property
    def epoch(self) -> int:
        return self._epoch

    def next_batch(self) -> list[tuple[int, str]]:
        taken = self._take(self._order, self._position)
        epoch, order = self._epoch, self._order
        if taken is None:
            epoch += 1
            order = self._order_of(epoch)
            taken = self._take(order, 0)
        if taken is None:
            raise DataError(
                f"fewer than {self.batch_size} of {self._num_rows} training rows are left, the others are retired or cannot be used"
            )
        rows, self._position = taken
        self._epoch, self._order = epoch, order
        return [(row, f"e{epoch}-r{row}") for row in rows]

    def _take(self, order: np.ndarray, position: int) -> tuple[list[int], int] | None:
        """The next rows of this order and the position after them; None where fewer than a batch are left."""
        rows: list[int] = []
        for place in range(position, self._num_rows):
            row = int(order[place])
            if self._is_usable is None or self._is_usable(row):
                rows.append(row)
                if len(rows) == self.batch_size:
                    return rows, place + 1
        return None

    def record(self, row: int, rate: float) -> None:
        """Record nothing: the order does not depend on pass rates."""

    def metrics(self) -> dict[str, float]:
        return {}

    def position(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "position": self._position}

    def seek(self, position: dict[str, Any]) -> None:
        self._epoch, self._position = position["epoch"], position["position"]
        self._order = self._order_of(self._epoch)

    def state_dict(self) -> dict[str, Any]:
        return self.position() | self._identity()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_identity(state, self._identity())
        self.seek(state)

    def start_after(self, state: dict[str, Any]) -> None:
        self.seek({"epoch": int(state["epoch"]) + 1, "position": 0})

    def _identity(self) -> dict[str, Any]:
        order = "none" if self._difficulty is None else "difficulty"
        return {"num_rows": self._num_rows, "shuffle": self._shuffle, "seed": self._seed, "curriculum": order}

    def _order_of(self, epoch: int) -> np.ndarray:
        return order_of(self._num_rows, (self._seed, epoch) if self._shuffle else None, self._difficulty)


def order_of(num_rows: int, seed: tuple[int, ...] | None, difficulty: np.ndarray | None) -> np.ndarray:
    """All rows: shuffled by the seed, where there is one, and then the easiest first, rows without a difficulty last."""
    order = np.arange(num_rows) if seed is None else np.random.default_rng(seed).permutation(num_rows)
    return order if difficulty is None else order[np.argsort(difficulty[order], kind="stable")]


def check_size(num_rows: int, batch_size: int, size_key: str) -> None:
    """Raise ConfigError for a batch that is larger than the data."""
    if num_rows < batch_size:
        raise ConfigError(
            f"{size_key}={batch_size} is larger than the training data, which has {num_rows} rows: "
            f"give a batch of at most {num_rows}, or more data"
        )


def check_identity(state: dict[str, Any], identity: dict[str, Any]) -> None:
    """Raise DataError where what the order depends on is not what it was when `state` was taken."""
    # A state of before there were curricula and weights was taken without.
    before = {"curriculum": "none", "weights": None} | state
    now = {"weights": None} | identity
    changes = [f"{key} was {before.get(key)}, now {value}" for key, value in now.items() if before.get(key) != value]
    if changes:
        raise DataError(f"cannot resume in the middle of the training data, its order has changed: {'; '.join(changes)}")
