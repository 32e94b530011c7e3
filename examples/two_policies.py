"""A game of two policies that learn from each other: whose answer comes closer to the result wins.

Two sessions in one loop, each with weights, engines and a run's folder of its own: `python examples/two_policies.py`.
"""

import sys

import grpo_rl
from grpo_rl.trainer.session import Session
from grpo_rl.types import Rollout

GAME = "recipe=arithmetic/grpo", "data.val_files=[]", "trainer.test_freq=-1", "trainer.total_training_steps=10"
OTHERWISE_SAMPLED = "actor_rollout_ref.rollout.seed=1"
"""Without it both would begin as one policy that gives the same answers."""


def distance(rollout: Rollout) -> float:
    """Return how far the answer is from the result; infinity if it is no number."""
    text = str(rollout.text).strip()
    return abs(int(text) - int(rollout.prompt.ground_truth)) if text.isascii() and text.isdigit() else float("inf")


def train(first: Session, second: Session) -> None:
    """Both draw the same prompts, because they have the same rows and seed."""
    for steps in zip(first.steps(), second.steps(), strict=True):
        players = first, second
        for player in players:
            player.sync_weights()
        sampled = [player.sample(player.next_prompts()) for player in players]
        for mine, other in zip(*sampled, strict=True):
            mine.reward = float(distance(mine) < distance(other))
            other.reward = float(distance(other) < distance(mine))
        for player, step, rollouts in zip(players, steps, sampled, strict=True):
            if trained := player.select(player.score(rollouts)):
                step.log(player.update(player.advantages(player.values(player.logprobs(player.batch(trained))))))


if __name__ == "__main__":
    with (
        grpo_rl.session(*GAME, "trainer.experiment_name=first", *sys.argv[1:]) as first,
        grpo_rl.session(*GAME, OTHERWISE_SAMPLED, "trainer.experiment_name=second", *sys.argv[1:]) as second,
    ):
        train(first, second)
