"""The reward model over its worker group: its scores of rollouts beside the sampling, and its place in the reward."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from grpo_rl.cluster.roles.trained_roles import Dispatched
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.errors import ClusterError, ConfigError
from grpo_rl.models.heads import load_score_config
from grpo_rl.models.load import load_tokenizer
from grpo_rl.plan.decisions import Plan
from grpo_rl.rewards.combined import REWARD_MODEL
from grpo_rl.rewards.contract import Outcome, RewardFailure, RewardResult
from grpo_rl.rewards.models.rendering import Scorable, ScorableRenderer, tokenizer_for
from grpo_rl.rewards.steps import Decode
from grpo_rl.types import Batch, Rollout

if TYPE_CHECKING:
    from grpo_rl.cluster.processes.worker_group import WorkerGroup

ERROR, INVALID = "reward_model_error", "reward_model_invalid"


@dataclass(slots=True)
class _Job:
    rollout: Rollout
    scores: Future[list[Outcome]] | None = None
    """The results of the call that it is part of, None before the call."""
    place: int = 0


@dataclass(eq=False)
class RewardModelRole:
    """The `rewards.combined.ModelReward` whose work is done by the reward model's ranks.

    A background thread scores the rollouts that have come whenever they fill a forward pass on every rank,
    and the rest as soon as a caller waits.
    """

    name = REWARD_MODEL
    worker_group: WorkerGroup
    renderer: ScorableRenderer
    weight: float
    pass_tokens: int
    max_length: int
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        self._jobs: dict[tuple[str, int], _Job] = {}
        self._queue: list[_Job] = []
        self._queued_tokens = 0
        self._lock = threading.Lock()
        self._calls = ThreadPoolExecutor(1, "reward-model")

    def submit(self, rollout: Rollout) -> None:
        with self._lock:
            key = (rollout.prompt.uid, rollout.sample_index)
            pending = self._jobs.get(key)
            if pending is None or not pending.rollout.same_response(rollout):
                job = self._jobs[key] = _Job(rollout)
                self._queue.append(job)
                self._queued_tokens += len(rollout.prompt.token_ids) + len(rollout.response_ids)
                if self._queued_tokens >= self.pass_tokens * len(self.worker_group):
                    self._call()

    def wait(self, rollouts: Sequence[Rollout]) -> list[Outcome]:
        for rollout in rollouts:
            self.submit(rollout)
        with self._lock:
            self._call()
            keys = [(rollout.prompt.uid, rollout.sample_index) for rollout in rollouts]
            jobs = [self._jobs[key] for key in keys]
            for key in keys:
                self._jobs.pop(key, None)
        # A call to the worker group has a deadline of its own; this one is for what is around it.
        patience_s = 2 * self.worker_group.call_timeout_s
        results = []
        for job in jobs:
            assert job.scores is not None
            if job.scores not in futures.wait([job.scores], patience_s).done:
                raise ClusterError(f"the reward model scored nothing for {patience_s:.0f} s")
            results.append(job.scores.result(0.0)[job.place])
        return results

    def close(self) -> None:
        """Begin no further call; a forward pass that is under way is left behind."""
        self._calls.shutdown(wait=False, cancel_futures=True)

    def _call(self) -> None:
        jobs, self._queue, self._queued_tokens = self._queue, [], 0
        if jobs:
            scores = self._calls.submit(self.score, [job.rollout for job in jobs])
            for place, job in enumerate(jobs):
                job.scores, job.place = scores, place

    def score(self, rollouts: Sequence[Rollout]) -> list[Outcome]:
        rendered = [self.renderer(rollout) for rollout in rollouts]
        results: list[Outcome | None] = [self._without_model(scorable) for scorable in rendered]
        rows = [index for index, result in enumerate(results) if result is None]
        if rows:
            batch, rule = scored_batch([rendered[row] for row in rows]), MicroBatchRule(self.pass_tokens, None)
            import ray

            computed = Dispatched.to(self.worker_group, batch, rule).compute(rule, "scores", {"": "scores_T"})
            try:
                scores_T = computed[""].read()
            except ray.exceptions.RayError as error:
                raise ClusterError(f"the reward model's scores are lost: {type(error).__name__}: {error}") from error
            for row, scores in zip(rows, scores_T.split(batch.trained_lengths_N.tolist()), strict=True):
                results[row] = model_score(rendered[row], scores.tolist())
        return [result for result in results if result is not None]

    def _without_model(self, scorable: Scorable) -> Outcome | None:
        """Return the result of a response that is too long for the model or has no steps; None for all others."""
        if len(scorable.token_ids) > self.max_length:
            return RewardFailure(ERROR, f"too long for it: {len(scorable.token_ids)} tokens, and it takes {self.max_length}")
        # A policy's embedding may have rows for tokens that no tokenizer has, and a random one samples them.
        if self.vocab_size is not None and (largest := max(scorable.token_ids)) >= self.vocab_size:
            return RewardFailure(
                ERROR, f"token {largest} is none of its {self.vocab_size}; rerender=always gives it the text instead"
            )
        return None if scorable.positions else RewardResult(0.0, steps=())


def scored_batch(scorables: Sequence[Scorable]) -> Batch:
    """Return a batch whose trained tokens are those with a score."""
    token_ids: list[int] = []
    positions: list[int] = []
    for scorable in scorables:
        positions += [len(token_ids) + position for position in scorable.positions]
        token_ids += scorable.token_ids
    zeros_N = torch.zeros(len(scorables), dtype=torch.long)
    return Batch(
        prompt_lengths_N=zeros_N,
        response_lengths_N=torch.tensor([len(scorable.token_ids) for scorable in scorables]),
        group_N=torch.arange(len(scorables)),
        token_ids_S=torch.tensor(token_ids),
        rewards_N=zeros_N,
        positions_T=torch.tensor(positions),
        trained_lengths_N=torch.tensor([len(scorable.positions) for scorable in scorables]),
    )


def model_score(scorable: Scorable, scores: Sequence[float]) -> Outcome:
    """Return the one score of a response, or those of its steps with their mean as the response's."""
    if not all(map(math.isfinite, scores)):
        return RewardFailure(INVALID, f"its score is {next(score for score in scores if not math.isfinite(score))}")
    if scorable.step_tokens is None:
        return RewardResult(scores[0])
    mean = math.fsum(scores) / len(scores)
    values = {"min_step": min(scores), "num_steps": float(len(scores))}
    return RewardResult(mean, values, tuple(zip(scorable.step_tokens, scores, strict=True)))


def prepare_reward_model(plan: Plan, folder: str, tokenizer: Any, decode: Decode) -> Callable[[WorkerGroup], RewardModelRole]:
    """Read config and tokenizer of the reward model in `folder`; return what makes the role over its processes.

    One that is trained may start as a causal LM. Raises ConfigError for what cannot be a reward model of this policy.
    """
    config, trained = plan.config, plan.trains_reward_model
    reward_model, key = config.reward.reward_model, f"reward.reward_model.model_path={config.reward.reward_model.model_path}"
    model_config = load_score_config(folder, trust_remote_code=reward_model.trust_remote_code, trained=trained)
    its_tokenizer = load_tokenizer(reward_model.tokenizer_path or folder, trust_remote_code=reward_model.trust_remote_code)
    rendered_by = tokenizer_for(tokenizer, its_tokenizer, reward_model.rerender)
    if rendered_by is not None and trained:
        raise ConfigError(
            f"{key}: is trained on the policy's own tokens, and would score others, of its own tokenizer or chat template; start "
            "from a model with the policy's, or set reward.reward_model.rerender=never"
        )
    longest = config.data.max_prompt_length + config.data.max_response_length
    limit = getattr(model_config, "max_position_embeddings", None) or reward_model.max_token_len_per_gpu
    if rendered_by is None and limit < longest:
        raise ConfigError(
            f"{key}: takes at most {limit} tokens, and a rollout may have "
            f"data.max_prompt_length + data.max_response_length = {longest}"
        )
    # A shell hands on backslash and n where a line break was meant, and so does Hydra.
    separator = None if reward_model.step_separator is None else reward_model.step_separator.replace("\\n", "\n")
    return partial(
        RewardModelRole,
        renderer=ScorableRenderer(decode, rendered_by, separator),
        weight=reward_model.weight,
        pass_tokens=reward_model.max_token_len_per_gpu,
        max_length=min(limit, reward_model.max_token_len_per_gpu),
        vocab_size=getattr(model_config, "vocab_size", None),
    )
