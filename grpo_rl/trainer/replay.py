"""What a run has sampled and learns again: pairs of a reward model's earlier iterations, and groups with rare successes.

Both are parts of a checkpoint, a file with one JSON row for each.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from grpo_rl.checkpoint.files import Files, write_file
from grpo_rl.config.schema.tree import ReplayConfig
from grpo_rl.data.training_rows.pairs import Pair
from grpo_rl.errors import CheckpointError
from grpo_rl.types import Metrics, Prompt, Rollout

_ROW_BYTES = 4096
"""About the bytes of a row in a checkpoint."""

Kept = TypeVar("Kept")


class Replay(Generic[Kept]):
    """What was sampled and may be learnt again. Implements `protocols.Saved`."""

    file: ClassVar[str]
    """The file of a checkpoint that contains it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.kept: list[Kept] = []
        self._written: Files = {}

    @abstractmethod
    def head(self) -> dict[str, Any]:
        """Return the file's first row: what is counted beside what is kept."""

    @abstractmethod
    def record(self, one: Kept) -> dict[str, Any]:
        """Return what is kept as a row of the file."""

    @abstractmethod
    def restore(self, head: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
        """Become what `head` and `record` wrote."""

    def save(self, folder: Path) -> Files:
        """Write all of it as it is now; what is kept never changes, so nothing has to be copied before."""
        lines = [json.dumps(row, ensure_ascii=False) for row in (self.head(), *map(self.record, self.kept))]
        data = "\n".join([*lines, ""]).encode("utf-8", "backslashreplace")
        self._written = {self.file: write_file(folder / self.file, [data])}
        return self._written

    def begin_save(self, folder: Path, check: bool) -> None:
        """Write it, which is done when this returns: a few megabytes at most."""
        self.save(folder)

    def saved(self, wait_s: float) -> Files | None:
        return self._written

    def save_bytes(self) -> int:
        """Return about how much `save` writes once it is full."""
        return self.capacity * _ROW_BYTES

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote. Raises CheckpointError for a checkpoint without it, and for what is none."""
        try:
            head, *rows = [json.loads(line) for line in (folder / self.file).read_text(encoding="utf-8").splitlines()]
            self.restore(head, rows)
        except FileNotFoundError:
            raise CheckpointError(
                f"{folder} has no {self.file}: it was written by a run that replays nothing (trainer.iterate or algorithm.replay); "
                "go on with that configuration, or start anew with trainer.resume_mode=disable"
            ) from None
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise CheckpointError(f"{folder}: {self.file} cannot be used: {type(error).__name__}: {error}") from error


# ---- the pairs of earlier iterations ---------------------------------------------------------------------------------


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

    @classmethod
    def from_record(cls, row: dict[str, Any]) -> LabelledPair:
        """Return the pair of a row of the file."""
        prompt, chosen, rejected = (np.asarray(row[f"{side}_ids"], np.int32) for side in ("prompt", "chosen", "rejected"))
        rewards = float(row["rewards"][0]), float(row["rewards"][1])
        texts = str(row["chosen"]), str(row["rejected"])
        return cls(Pair(prompt, chosen, rejected), int(row["iteration"]), int(row["number"]), rewards, texts)


class ReplayHistory(Replay[LabelledPair]):
    """A uniform sample, of at most `capacity`, of all pairs that the run has made.

    Every pair has a priority that follows from the seed and its number, and those of the lowest ones stay: so no iteration is
    forgotten as a whole, and the same run keeps the same pairs wherever it was interrupted.
    """

    file = "replay.jsonl"

    def __init__(self, capacity: int, share: float, seed: int) -> None:
        super().__init__(capacity)
        self.share, self.seed = share, seed
        self.num_seen = 0
        self.num_beside = 0
        """The new pairs that were learnt since there are pairs to replay beside them."""

    def draw(self, num_new: int, iteration: int, step: int) -> list[LabelledPair]:
        """Return pairs of earlier iterations that make up `share` of a batch with so many new ones; none where there are none.

        Nothing is changed: `add` notes that they were learnt. The choice follows from the seed and the step.
        """
        earlier = [pair for pair in self.kept if pair.iteration < iteration]
        # What rounding holds back from a small batch comes with a later one: the share is right over all of them.
        wanted = min(self._due(self.num_beside + num_new) - self._due(self.num_beside), len(earlier))
        if wanted == 0:
            return []
        chosen = np.random.default_rng([self.seed, step]).choice(len(earlier), size=wanted, replace=False)
        return [earlier[index] for index in sorted(chosen.tolist())]

    def add(self, new: Sequence[LabelledPair], iteration: int) -> None:
        """Take in the new pairs of a batch that was learnt, and forget as many as are too many."""
        if any(pair.iteration < iteration for pair in self.kept):
            self.num_beside += len(new)
        self.num_seen += len(new)
        self._keep([*self.kept, *new])

    def _keep(self, pairs: Sequence[LabelledPair]) -> None:
        kept = sorted(pairs, key=lambda pair: _priority(self.seed, pair.number))[: self.capacity]
        self.kept = sorted(kept, key=lambda pair: pair.number)

    def _due(self, num_new: int) -> int:
        """Return how many pairs are to be replayed beside so many new ones; what is whole up to rounding is whole."""
        return math.floor(num_new * self.share / (1.0 - self.share) + 1e-9)

    def head(self) -> dict[str, Any]:
        return {"num_seen": self.num_seen, "num_beside": self.num_beside}

    def record(self, one: LabelledPair) -> dict[str, Any]:
        return {
            "number": one.number,
            "iteration": one.iteration,
            "prompt_ids": one.pair.prompt_ids.tolist(),
            "chosen_ids": one.pair.chosen_ids.tolist(),
            "rejected_ids": one.pair.rejected_ids.tolist(),
            "rewards": list(one.rewards),
            "chosen": one.texts[0],
            "rejected": one.texts[1],
        }

    def restore(self, head: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
        self.num_seen, self.num_beside = int(head["num_seen"]), int(head["num_beside"])
        self._keep([LabelledPair.from_record(row) for row in rows])


def _priority(seed: int, number: int) -> bytes:
    return hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()


# ---- groups with rare successes --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RareGroup:
    """A group of which few responses have the highest reward, with the log-probs of the policy that sampled it."""

    step: int
    """The step that trained it first."""
    rollouts: list[Rollout]


class GroupReplay(Replay[RareGroup]):
    """The groups with rare successes of the last steps; they are trained again in place of groups without a signal.

    A group keeps its rewards, so that its advantages stay those of a whole group, and its tokens keep their sampler's log-probs: the
    ratio, and its clip, are against the policy that sampled them. RLEP (arXiv 2507.07451) and ARPO (arXiv 2505.16282) replay
    successes; here whole groups are replayed, for a bounded time, and a step never has more groups than without.
    """

    file = "replayed_groups.jsonl"

    def __init__(self, config: ReplayConfig, batch_size: int, n: int) -> None:
        super().__init__(config.max_age * batch_size * n)
        self.max_age, self.max_success, self.batch_size = config.max_age, config.max_success, batch_size
        self.most = math.floor(config.share * batch_size + 1e-9)
        """The most groups that are replayed in a step."""

    def of_step(self, step: int) -> list[RareGroup]:
        """Return the groups that this step may replay, the newest first."""
        return sorted((one for one in self.kept if step - one.step <= self.max_age), key=lambda one: -one.step)[: self.most]

    def fill(self, trained: Sequence[Rollout], step: int) -> tuple[list[Rollout], Metrics]:
        """Return what the step trains: groups without a signal are replaced by kept ones, the newest first, while there are any.

        Of the step's own groups those with rare successes are kept from now on.
        """
        groups: dict[str, list[Rollout]] = {}
        for rollout in trained:
            groups.setdefault(rollout.prompt.uid, []).append(rollout)
        useful = [group for group in groups.values() if _has_signal(group)]
        replayed = self.of_step(step)[: max(0, self.batch_size - len(useful))]
        self.kept = [one for one in self.kept if step - one.step <= self.max_age]
        # In the places of the others: where a step has several mini-batches, each has its share of both.
        others = [old.rollouts for old in replayed]
        filled = [others.pop(0) if others and not _has_signal(group) else group for group in groups.values()] + others
        rare = [group for group in useful if _success(group) <= self.max_success]
        self.kept += [RareGroup(step, [_copied(rollout) for rollout in group]) for group in rare]
        ages = [step - one.step for one in replayed]
        metrics = {"replay/groups": float(len(replayed)), "replay/kept": float(len(self.kept))}
        if ages:
            metrics["replay/age_mean"] = sum(ages) / len(ages)
        return [rollout for group in filled for rollout in group], metrics

    def head(self) -> dict[str, Any]:
        return {"max_age": self.max_age}

    def record(self, one: RareGroup) -> dict[str, Any]:
        prompt = one.rollouts[0].prompt
        about = {
            "uid": prompt.uid,
            "token_ids": prompt.token_ids.tolist(),
            "text": prompt.text,
            "data_source": prompt.data_source,
        }
        rows = [{name: _plain(getattr(rollout, name)) for name in _COLUMNS} for rollout in one.rollouts]
        return {"step": one.step, "prompt": about, "rollouts": rows}

    def restore(self, head: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
        self.kept = []
        for row in rows:
            prompt = Prompt(**row["prompt"])
            rollouts = [Rollout(prompt, **one) for one in row["rollouts"]]
            for rollout in rollouts:
                rollout.versions = tuple((int(version), int(number)) for version, number in rollout.versions)
                rollout.steps = (
                    None if rollout.steps is None else tuple((int(end), float(reward)) for end, reward in rollout.steps)
                )
            self.kept.append(RareGroup(int(row["step"]), rollouts))


_COLUMNS = (
    "sample_index", "response_ids", "rollout_logprobs", "finish_reason", "versions", "reward", "reward_parts", "baseline", "steps", "masked",
)  # fmt: skip
"""What a row has of each response; its text is not trained."""


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _has_signal(group: Sequence[Rollout]) -> bool:
    return len({rollout.reward for rollout in group}) > 1


def _success(group: Sequence[Rollout]) -> float:
    """Return the share of a group's responses that have its highest reward."""
    rewards = [rollout.reward for rollout in group if rollout.reward is not None]
    return rewards.count(max(rewards)) / len(rewards)


def _copied(rollout: Rollout) -> Rollout:
    """Return a rollout that holds its own tokens: others lie in a block that is freed when its step is over."""
    ids, logprobs = np.array(rollout.response_ids, np.int32), np.array(rollout.rollout_logprobs, np.float32)
    return replace(rollout, response_ids=ids, rollout_logprobs=logprobs, text="")
