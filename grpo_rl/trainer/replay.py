"""What a run has sampled and learns again: pairs of a reward model's earlier iterations, and groups with rare successes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from grpo_rl.checkpoint.files import Files, write_file
from grpo_rl.config.schema.tree import ReplayConfig
from grpo_rl.errors import CheckpointError
from grpo_rl.frozen import frozen
from grpo_rl.rewards.contract import LARGEST_REWARD
from grpo_rl.trainer.sampled.selection import by_uid
from grpo_rl.types import Metrics, Prompt, Rollout

_ROW_BYTES = 4096
_COLUMNS = (
    "sample_index", "response_ids", "rollout_logprobs", "finish_reason", "versions", "reward", "reward_parts", "baseline", "steps", "masked",
)  # fmt: skip
"""What a row of the file has of each response."""


@frozen
class Kept:
    """A group, or the best and the worst of one."""

    since: int  # the step, or the iteration, that learnt them first
    number: int
    rollouts: Sequence[Rollout]

    @classmethod
    def of(cls, since: int, number: int, rollouts: Sequence[Rollout]) -> Kept:
        """Return copies of rollouts, whose tokens lie in a block that is freed when its step is over."""
        copies = []
        for rollout in rollouts:
            ids, logprobs = np.array(rollout.response_ids), np.array(rollout.rollout_logprobs)
            copies.append(replace(rollout, response_ids=ids, rollout_logprobs=logprobs, text=""))
        return cls(since, number, copies)

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Kept:
        """Return what `row` wrote. Raises ValueError for values that no rollout has: a checkpoint may come from somebody else."""
        prompt, rollouts = Prompt(**row["prompt"]), []
        for columns in row["rollouts"]:
            columns["versions"] = tuple(map(tuple, columns["versions"]))
            columns["steps"] = None if columns["steps"] is None else tuple(map(tuple, columns["steps"]))
            rollouts.append(rollout := Rollout(prompt, **columns))
            logprobs_T, lengths = np.asarray(rollout.rollout_logprobs), [length for _, length in rollout.versions]
            for ids_T in map(np.asarray, (prompt.token_ids, rollout.response_ids)):
                if ids_T.ndim != 1 or not len(ids_T) or ids_T.min() < 0:
                    raise ValueError("a prompt or a response has other tokens than whole numbers from 0 on")
            if logprobs_T.shape != (len(rollout.response_ids),) or sum(lengths) != len(logprobs_T) or min(lengths) < 1:
                raise ValueError("a response has other numbers of tokens, versions and log-probs")
            scores = [score for score in (rollout.reward, rollout.baseline) if score is not None]
            numbers = [*scores, *rollout.reward_parts.values(), *(number for step in rollout.steps or () for number in step)]
            types = {type(number) for number in numbers}
            if (
                not np.isfinite(logprobs_T).all()
                or not types <= {int, float}
                or not all(abs(x) <= LARGEST_REWARD for x in numbers)
            ):
                raise ValueError("a log-prob or a reward is no finite number")
        if all(rollout.reward is None for rollout in rollouts):
            raise ValueError("a row has no response with a reward")
        return cls(int(row["since"]), int(row["number"]), rollouts)

    def row(self) -> dict[str, Any]:
        prompt = self.rollouts[0].prompt
        about = {name: _plain(getattr(prompt, name)) for name in ("uid", "token_ids", "text", "data_source")}
        rows = [{name: _plain(getattr(rollout, name)) for name in _COLUMNS} for rollout in self.rollouts]
        return {"since": self.since, "number": self.number, "prompt": about, "rollouts": rows}


class Replay:
    """What was sampled and may be learnt again. Implements `protocols.Saved`."""

    file: ClassVar[str]  # the file of a checkpoint that contains it

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.kept: list[Kept] = []
        self.num_seen = 0
        self._written: Files = {}

    def save(self, folder: Path, in_background: bool = False) -> None:
        """Write all of it, a few megabytes at most, before this returns."""
        head = {"num_seen": self.num_seen}
        lines = [json.dumps(row, ensure_ascii=False) for row in (head, *(group.row() for group in self.kept))]
        data = "\n".join([*lines, ""]).encode("utf-8", "backslashreplace")
        self._written = {self.file: write_file(folder / self.file, [data])}

    def saved(self, wait_s: float) -> Files | None:
        return self._written

    def save_bytes(self) -> int:
        return self.capacity * _ROW_BYTES

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote. Raises CheckpointError if it is missing or broken."""
        try:
            head, *rows = [json.loads(line) for line in (folder / self.file).read_text(encoding="utf-8").splitlines()]
            self.num_seen = int(head["num_seen"])
            self.kept = [Kept.from_row(row) for row in rows]
        except FileNotFoundError:
            raise CheckpointError(
                f"{folder} has no {self.file}: it was written by a run that replays nothing (trainer.iterate or algorithm.replay); "
                "go on with that configuration, or start anew with trainer.resume_mode=disable"
            ) from None
        except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise CheckpointError(f"{folder}: {self.file} cannot be used: {type(error).__name__}: {error}") from error


class PairReplay(Replay):
    """A uniform sample of all pairs that the run has made: those with the lowest hashes of seed and number."""

    file = "replay.jsonl"

    def __init__(self, capacity: int, share: float, seed: int) -> None:
        super().__init__(capacity)
        self.share, self.seed = share, seed

    def draw(self, num_new: int, iteration: int, step: int) -> list[Sequence[Rollout]]:
        """Return pairs of earlier iterations, as far as there are any, that make up `share` of a batch.

        Number, rounded at random, and choice follow from seed and step.
        """
        pairs, rng = [pair.rollouts for pair in self.kept if pair.since < iteration], np.random.default_rng([self.seed, step])
        num_drawn = min(int(num_new * self.share / (1.0 - self.share) + rng.random()), len(pairs))
        if not num_drawn:
            return []
        return [pairs[index] for index in sorted(rng.choice(len(pairs), size=num_drawn, replace=False).tolist())]

    def add(self, new: Sequence[Sequence[Rollout]], iteration: int) -> None:
        """Take in the new pairs of a batch, and forget as many as are too many."""
        pairs = [*self.kept, *(Kept.of(iteration, number, pair) for number, pair in enumerate(new, self.num_seen))]
        self.num_seen += len(new)
        pairs.sort(key=lambda pair: hashlib.blake2b(f"{self.seed}:{pair.number}".encode(), digest_size=8).digest())
        self.kept = sorted(pairs[: self.capacity], key=lambda pair: pair.number)


class GroupReplay(Replay):
    """The groups with rare successes of the last steps, to be trained in place of those without a signal.

    A group keeps its rewards, and so its advantages, and its sampler's log-probs, which ratio and clip
    compare with. RLEP (arXiv 2507.07451) and ARPO (arXiv 2505.16282) replay successes; here whole groups, for
    a bounded time.
    """

    file = "replayed_groups.jsonl"

    def __init__(self, config: ReplayConfig, batch_size: int, n: int) -> None:
        super().__init__(config.max_age * batch_size * n)
        self.max_age, self.max_success, self.batch_size = config.max_age, config.max_success, batch_size
        self.most = math.floor(config.share * batch_size + 1e-9)

    def of_step(self, step: int) -> list[Kept]:
        """Return the groups that this step may replay, the newest first."""
        groups = [group for group in self.kept if step - group.since <= self.max_age]
        return sorted(groups, key=lambda group: -group.since)[: self.most]

    def fill(self, trained: Sequence[Rollout], step: int) -> tuple[list[Rollout], Metrics]:
        """Return the groups to train, kept ones, the newest first, in place of those without a signal; and
        metrics.
        """
        groups = list(by_uid(trained).values())
        useful = [group for group in groups if _has_signal(group)]
        replayed = self.of_step(step)[: max(0, self.batch_size - len(useful))]
        # In the others' places, so that each of several mini-batches has its share of both.
        spare = [group.rollouts for group in replayed]
        filled = [spare.pop(0) if spare and not _has_signal(group) else group for group in groups] + spare
        self.kept = [group for group in self.kept if step - group.since <= self.max_age]
        for group in useful:
            rewards = [rollout.reward for rollout in group if rollout.reward is not None]
            if rewards.count(max(rewards)) / len(rewards) <= self.max_success:
                self.kept.append(Kept.of(step, 0, group))
        metrics = {"replay/groups": float(len(replayed)), "replay/kept": float(len(self.kept))}
        if replayed:
            metrics["replay/age_mean"] = sum(step - group.since for group in replayed) / len(replayed)
        return [rollout for group in filled for rollout in group], metrics


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _has_signal(group: Sequence[Rollout]) -> bool:
    return len({rollout.reward for rollout in group}) > 1
