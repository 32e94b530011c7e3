"""GRPO as a loop of one's own, on the embedded model: `python examples/rl_loop.py [key=value ...]`.

The same function is a schedule:

    python -m grpo_rl.main recipe=arithmetic/grpo trainer.schedule=examples/rl_loop.py:train
"""

import sys

import grpo_rl
from grpo_rl.trainer.session import Session


def train(s: Session) -> None:
    for step in s.steps():  # resumes, validates, saves, logs, answers signals
        s.sync_weights()
        rollouts = s.score(s.sample(s.next_prompts()))
        if trained := s.select(rollouts):
            batch = s.values(s.logprobs(s.batch(trained)))
            step.log(s.update(s.advantages(batch)))


if __name__ == "__main__":
    with grpo_rl.session("recipe=arithmetic/grpo", *sys.argv[1:]) as session:
        train(session)
