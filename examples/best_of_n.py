"""Best-of-n distillation: each prompt is answered eight times, and the policy learns the best of its own answers.

After BOND (arXiv 2407.14622), whose target is the distribution of the best of n; here it is learnt from samples alone, if they are right.

    python -m grpo_rl.main recipe=arithmetic/grpo actor_rollout_ref.rollout.function=examples/best_of_n.py:play \\
        algorithm.adv_estimator=rft actor_rollout_ref.actor.use_kl_loss=false
"""

from collections import defaultdict

from grpo_rl.trainer.sampled.sampler import Sampler
from grpo_rl.types import Prompt, Rollout

CANDIDATES = 8


def play(sampler: Sampler, prompts: list[Prompt]) -> list[Rollout]:
    """Return the candidate with the highest reward of each prompt, the shortest of equal ones."""
    candidates: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in sampler.score(sampler.sample(prompts, n=CANDIDATES)):
        if rollout.reward is not None:  # None: the reward function has failed
            candidates[rollout.prompt.uid].append(rollout)
    return [max(group, key=lambda rollout: (rollout.reward, -len(rollout.response_ids))) for group in candidates.values()]
