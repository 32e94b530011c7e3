"""The sampler that draws prompts more often which are neither always nor never solved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from grpo_rl.data.draw_order.sampler import Usable, check_identity, check_size
from grpo_rl.errors import DataError


def weight_of_rate(rate: np.ndarray, floor: float) -> np.ndarray:
    """max(floor, 4p(1-p)): 1 where half of the responses pass, the variance of a 0/1 reward up to a factor.

    A row that was never drawn (NaN) has weight 1. The gradient of a group comes from the differences of its rewards,
    whose variance is p(1-p): Online Difficulty Filtering (arXiv 2504.03380).
    """
    return np.where(np.isnan(rate), 1.0, np.maximum(floor, 4.0 * rate * (1.0 - rate)))


class PassRateSampler:
    """Batches drawn without replacement inside a batch, with probabilities by the latest pass rate of each row.

    Rows may come again in the next batch, or not at all for long: an epoch is as many draws as there are rows. Which
    rows are drawn is a function of the seed, the number of the draw and the pass rates so far (Gumbel top-k,
    arXiv 1903.06059).
    """

    wants_rates = True

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        seed: int,
        floor: float,
        *,
        size_key: str = "data.train_batch_size",
        is_usable: Usable | None = None,
    ) -> None:
        check_size(num_rows, batch_size, size_key)
        self.batch_size = self.least_rows = batch_size
        self._num_rows, self._seed, self._floor = num_rows, seed, floor
        self._is_usable = is_usable
        self._num_draws = self._num_drawn = 0
        self._epoch = self._first_epoch = 0
        self._rates = np.full(num_rows, np.nan)

    @property
    def epoch(self) -> int:
        return self._epoch

    def next_batch(self) -> list[tuple[int, str]]:
        rows: list[int] = []
        for row in self._by_priority():
            if self._is_usable is None or self._is_usable(row):
                rows.append(row)
                if len(rows) == self.batch_size:
                    break
        if len(rows) < self.batch_size:
            raise DataError(
                f"fewer than {self.batch_size} of {self._num_rows} training rows are left, the others are retired or cannot be used"
            )
        self._epoch = self._first_epoch + self._num_drawn // self._num_rows
        batch = [(row, f"d{self._num_draws}-r{row}") for row in rows]
        self._num_draws += 1
        self._num_drawn += self.batch_size
        return batch

    def _by_priority(self) -> Iterator[int]:
        noise = np.random.default_rng((self._seed, self._num_draws)).gumbel(size=self._num_rows)
        keys = -(np.log(weight_of_rate(self._rates, self._floor)) + noise)
        # Nearly always the best few are enough, and finding them is ten times cheaper than ordering a million.
        few = min(2 * self.batch_size + 64, self._num_rows)
        best = np.argpartition(keys, few - 1)[:few]
        yield from best[np.argsort(keys[best], kind="stable")].tolist()
        yield from np.argsort(keys, kind="stable")[few:].tolist()

    def record(self, row: int, rate: float) -> None:
        self._rates[row] = rate

    def metrics(self) -> dict[str, float]:
        seen = self._rates[~np.isnan(self._rates)]
        found = {"data/seen_fraction": len(seen) / self._num_rows}
        return found | ({"data/pass_rate": float(seen.mean())} if len(seen) else {})

    def position(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "first_epoch": self._first_epoch,
            "num_draws": self._num_draws,
            "num_drawn": self._num_drawn,
        }

    def seek(self, position: dict[str, Any]) -> None:
        self._epoch, self._first_epoch = position["epoch"], position["first_epoch"]
        self._num_draws, self._num_drawn = position["num_draws"], position["num_drawn"]

    def state_dict(self) -> dict[str, Any]:
        seen = np.flatnonzero(~np.isnan(self._rates))
        rates = [[row, rate] for row, rate in zip(seen.tolist(), self._rates[seen].tolist(), strict=True)]
        return self.position() | self._identity() | {"rates": rates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_identity(state, self._identity())
        self.seek(state)
        self._rates = np.full(self._num_rows, np.nan)
        for row, rate in state["rates"]:
            self._rates[row] = rate

    def start_after(self, state: dict[str, Any]) -> None:
        self._epoch = self._first_epoch = int(state["epoch"]) + 1
        self._num_draws, self._num_drawn = int(state.get("num_draws", 0)), 0

    def _identity(self) -> dict[str, Any]:
        return {"num_rows": self._num_rows, "shuffle": True, "seed": self._seed, "curriculum": "pass_rate"}
