"""Other functions score some of each step's responses beside the training, which reads nothing of it."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import numpy as np

from grpo_rl.config.schema.tree import RewardConfig
from grpo_rl.errors import RewardError
from grpo_rl.rewards.combined import JUDGE, CombinedRewarder, ModelReward, failures_of
from grpo_rl.rewards.compose import RewardFunction, audit_of
from grpo_rl.rewards.contract import summary
from grpo_rl.rewards.models.judge_question import JudgeSpec
from grpo_rl.rewards.runtime.judge_process import JudgeProcess
from grpo_rl.rewards.runtime.processes import Broken, Done
from grpo_rl.rewards.runtime.runner import JobPool, JudgeRunner, RewardRunner
from grpo_rl.types import GREEDY, Metrics, Rollout

PREFIX = "audit/"


class Audit:
    def __init__(
        self,
        config: RewardConfig,
        function: RewardFunction | None,
        stack: ExitStack,
        start: Callable[[str, Done, Broken], JobPool] | None = None,
    ) -> None:
        """`start` makes the processes of a service from its name; None: on this machine."""
        audit_config = audit_of(config)
        rules, models = None, list[ModelReward]()
        if function is not None:
            rules = RewardRunner(function, audit_config, start and partial(start, "audit"))
            stack.callback(rules.close)
        if JUDGE in config.audit:
            start_judge = partial(start, JUDGE) if start else partial(JudgeProcess, JudgeSpec.of(config))
            models.append(JudgeRunner(config.judge, start_judge))
        self._scorer = CombinedRewarder(rules, models, audit_config)
        stack.callback(self._scorer.close)
        self._share = config.audit_share
        self._pairs: list[tuple[Rollout, Rollout]] = []
        """Trained rollouts, each with the copy that is audited."""
        self._scores: dict[tuple[str, int], dict[str, float]] = {}

    def submit(self, rollouts: Sequence[Rollout]) -> None:
        chosen = sample(rollouts, self._share)
        self._pairs = [(rollout, replace(rollout, reward=None, reward_parts={}, steps=None)) for rollout in chosen]
        for _, copy in self._pairs:
            self._scorer.submit(copy)

    def logged(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The rollouts as the log has them, with `audit/NAME` among the parts."""
        keyed = [((rollout.prompt.uid, rollout.sample_index), rollout) for rollout in rollouts]
        return [
            replace(rollout, reward_parts=rollout.reward_parts | self._scores[key]) if key in self._scores else rollout
            for key, rollout in keyed
        ]

    def wait(self, warn: Callable[[str], None]) -> Metrics:
        """Metrics of what was submitted; `warn` is called if some of it could not be audited.

        Over prompts, whose audited responses are averaged: `audit/NAME` is a function's mean score,
        `.../reward` the mean trained reward of the same responses, `.../std` and `.../reward_std` their
        standard deviations, `.../correlation` Pearson's between the two.
        """
        self._scores = {}
        copies = [copy for _, copy in self._pairs]
        try:
            if copies:
                self._scorer.wait(copies)
        except RewardError as error:
            warn(f"no response of this step was audited: {error}")
            return {"audit/failures": float(len(copies))}
        if failures := failures_of(copies):
            warn(f"audit: {summary(failures, len(copies))}")
        pairs: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
        for trained, copy in self._pairs:
            if copy.failure is None and trained.reward is not None:
                scores = {f"{PREFIX}{name}": copy.reward_parts[name] for name in self._scorer.factors}
                self._scores[copy.prompt.uid, copy.sample_index] = scores
                for name, score in scores.items():
                    pairs[name][copy.prompt.uid].append((trained.reward, score))
        metrics = {"audit/failures": float(len(failures))}
        for name, by_prompt in pairs.items():
            metrics |= _paired(name, np.array([np.mean(group, axis=0) for group in by_prompt.values()]))
        return metrics


def auditing(config: RewardConfig, data_sources: Iterable[str]) -> RewardFunction | None:
    audit_config = audit_of(config)
    if not audit_config.functions:
        return None
    function = RewardFunction.from_config(audit_config, key="audit")
    function.check_data_sources(data_sources)
    return function


def sample(rollouts: Sequence[Rollout], share: float) -> list[Rollout]:
    """A share of the rollouts with a reward, at least one, spread over as many prompts as possible."""
    candidates = [item for item in rollouts if item.reward is not None and item.failure is None and item.sample_index != GREEDY]
    candidates.sort(key=_digest)
    places: dict[str, Iterator[int]] = defaultdict(itertools.count)
    candidates.sort(key=lambda item: next(places[item.prompt.uid]))  # the first of every prompt, then the second ones
    return candidates[: math.ceil(share * len(candidates))]


def _digest(rollout: Rollout) -> bytes:
    return hashlib.blake2b(f"{rollout.prompt.uid}/{rollout.sample_index}".encode(), digest_size=8).digest()


def _paired(name: str, pairs: np.ndarray) -> Metrics:
    """`pairs`: (reward, score) of each prompt, [prompts, 2]."""
    reward, score = pairs.T
    product = reward.std() * score.std()
    correlation = float(np.mean((reward - reward.mean()) * (score - score.mean())) / product) if product > 0 else 0.0
    return {
        name: float(score.mean()),
        f"{name}/std": float(score.std()),
        f"{name}/reward": float(reward.mean()),
        f"{name}/reward_std": float(reward.std()),
        f"{name}/correlation": correlation,
        f"{name}/num_prompts": float(len(pairs)),
    }
