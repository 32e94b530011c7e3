"""Dynamic sampling as a loop: prompts are sampled until enough groups have different rewards (DAPO, arXiv 2503.14476, section 3.2).

    python -m grpo_rl.main recipe=arithmetic/grpo trainer.schedule=examples/dynamic_sampling.py:train

`algorithm.filter_groups.enable=true` is the same as a key, with bounds and metrics.
"""

from grpo_rl.trainer.session import Session
from grpo_rl.types import Rollout

MOST_DRAWS = 10


def train(s: Session) -> None:
    size = s.config.data.train_batch_size
    for step in s.steps():
        s.sync_weights()
        groups: dict[str, list[Rollout]] = {}
        for _ in range(MOST_DRAWS):
            for rollout in s.select(s.score(s.sample(s.next_prompts()))):
                groups.setdefault(rollout.prompt.uid, []).append(rollout)
            groups = {uid: group for uid, group in groups.items() if len({rollout.reward for rollout in group}) > 1}
            if len(groups) >= size:
                break
        step.log(s.train([rollout for group in list(groups.values())[:size] for rollout in group]))
