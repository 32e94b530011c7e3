"""`iterate`: in every iteration the reference becomes the policy, the reward model learns, then the policy learns from it.

DeepSeekMath (arXiv 2402.03300), section 4.1.4 and Algorithm 1: the reward model is trained on samples of the newest policy with a
replay of historical data. Here its steps open the iteration instead of closing it, so that the last ones are not made for nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from grpo_rl.algos.scoring_quality import pair_accuracy
from grpo_rl.data.training_rows.pairs import pairs_of_groups
from grpo_rl.registry import needs
from grpo_rl.rewards.combined import REWARD_MODEL, RULE, by_rule
from grpo_rl.trainer.sampled.selection import by_uid
from grpo_rl.trainer.session import Session
from grpo_rl.types import GREEDY, Metrics, Rollout


@needs("actor", "rollout", "rewarder", "reference", "teacher", "critic", "reward_model")
def train(s: Session) -> None:
    """Do the steps of the reward model, then those of the policy: the ones of `sync`, on the model's score alone."""
    settings = s.config.trainer.iterate
    for step in s.steps():
        iteration, trains_policy, number = s.state.get("iterate", [1, False, 0])
        trains_policy = trains_policy or settings.reward_model_steps == 0
        num_steps = settings.steps_per_iteration if trains_policy else settings.reward_model_steps
        number = min(number, num_steps - 1)
        if number == 0 and not (trains_policy and settings.reward_model_steps):
            s.refresh_reference()
        s.sync_weights()
        rollouts = s.score(s.sample(s.next_prompts()))
        if trains_policy:
            step.log(s.train(s.select(rollouts)))
        else:
            step.log(s.train_reward_model(pairs_of_groups(by_rule(rollouts)), iteration))
        step.log(agreement(s.sampled))
        step.log({"iterate/iteration": float(iteration), "iterate/policy_phase": float(trains_policy)})
        if number + 1 < num_steps:
            s.state["iterate"] = [iteration, trains_policy, number + 1]
        elif trains_policy:
            s.state["iterate"] = [iteration + 1, settings.reward_model_steps == 0, 0]
        else:
            s.state["iterate"] = [iteration, True, 0]


def agreement(rollouts: Sequence[Rollout]) -> Metrics:
    """Return `iterate/agreement`: of the pairs of a group that the rules reward differently, the share that the model orders alike."""
    groups = by_uid([rollout for rollout in rollouts if rollout.failure is None and rollout.sample_index != GREEDY])
    pairs = [
        (better.reward_parts[REWARD_MODEL], worse.reward_parts[REWARD_MODEL])
        for group in groups.values()
        for better, worse in itertools.permutations(group, 2)
        if better.reward_parts[RULE] > worse.reward_parts[RULE]
    ]
    if not pairs:
        return {}
    better_P, worse_P = torch.tensor(pairs, dtype=torch.float64).T
    return {"iterate/agreement": pair_accuracy(better_P, worse_P)}
