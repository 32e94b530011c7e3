"""On-policy distillation as a loop: the policy samples, the teacher says how likely each token is, and the policy follows it.

After GKD (arXiv 2306.13649). The distance to the teacher is `distillation.distillation_loss` of the recipe.

    python -m grpo_rl.main recipe=teacher/on_policy trainer.schedule=examples/on_policy_distillation.py:train
"""

from grpo_rl.trainer.session import Session


def train(s: Session) -> None:
    for step in s.steps():
        s.sync_weights()
        rollouts = s.select(s.score(s.sample(s.next_prompts())))
        if rollouts:
            batch = s.logprobs(s.logprobs(s.batch(rollouts), of="old"), of="teacher")
            step.log(s.update(s.advantages(batch)))
