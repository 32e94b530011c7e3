"""Other functions score some of each step's responses beside the training, which reads nothing of it."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import numpy as np

from grpo_rl.config.schema.tree import RewardConfig
from grpo_rl.errors import RewardError
from grpo_rl.rewards.combined import JUDGE, CombinedRewarder, ModelReward
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
            rules = RewardRunner(function, audit_config, None if start is None else partial(start, "audit"))
            stack.callback(rules.close)
        if JUDGE in config.audit:
            start_judge = partial(JudgeProcess, JudgeSpec.of(config))
            models.append(JudgeRunner(config.judge, start_judge if start is None else partial(start, JUDGE)))
        self._scorer = CombinedRewarder(rules, models, audit_config)
        stack.callback(self._scorer.close)
        self._share = config.audit_share
        self._chosen: list[Rollout] = []
        self._copies: list[Rollout] = []
        self._found: dict[tuple[str, int], dict[str, float]] = {}

    def submit(self, rollouts: Sequence[Rollout]) -> None:
        self._chosen = sample(rollouts, self._share)
        self._copies = [replace(rollout, reward=None, reward_parts={}, steps=None) for rollout in self._chosen]
        for copy in self._copies:
            self._scorer.submit(copy)

    def logged(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The rollouts as the log has them, with `audit/NAME` among the parts."""
        results = [self._found.get((rollout.prompt.uid, rollout.sample_index)) for rollout in rollouts]
        return [
            rollout if parts is None else replace(rollout, reward_parts=rollout.reward_parts | parts)
            for rollout, parts in zip(rollouts, results, strict=True)
        ]

    def wait(self, warn: Callable[[str], None]) -> Metrics:
        """Metrics of what was submitted; `warn` is called if some of it could not be audited.

        Over prompts, whose audited responses are averaged: `audit/NAME` is a function's mean score,
        `.../reward` the mean trained reward of the same responses, `.../std` and `.../reward_std` their
        standard deviations, `.../correlation` Pearson's between the two.
        """
        self._found = {}
        try:
            audited = self._scorer.wait(self._copies) if self._copies else []
        except RewardError as error:
            warn(f"no response of this step was audited: {error}")
            return {"audit/failures": float(len(self._copies))}
        failures = [(copy.failure, copy.failure_cause or "") for copy in audited if copy.failure is not None]
        if failures:
            warn(f"audit: {summary(failures, len(audited))}")
        pairs: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
        for trained, copy in zip(self._chosen, audited, strict=True):
            if copy.failure is None and trained.reward is not None:
                scores = {name: copy.reward_parts[name] for name in self._scorer.factors}
                self._found[copy.prompt.uid, copy.sample_index] = {f"{PREFIX}{name}": score for name, score in scores.items()}
                for name, score in scores.items():
                    pairs[name][copy.prompt.uid].append((trained.reward, score))
        metrics = {"audit/failures": float(len(failures))}
        for name, by_prompt in pairs.items():
            metrics |= _paired(f"{PREFIX}{name}", np.array([np.mean(group, axis=0) for group in by_prompt.values()]))
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
    places: dict[str, int] = defaultdict(int)
    ordered = []
    for digest, item in sorted(((_digest(item), item) for item in candidates), key=lambda pair: pair[0]):
        ordered.append((places[item.prompt.uid], digest, item))
        places[item.prompt.uid] += 1
    ordered.sort(key=lambda entry: entry[:2])
    return [item for _, _, item in ordered[: math.ceil(share * len(ordered))]]


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
