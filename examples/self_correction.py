"""Self-correction in two turns: the policy answers, is asked again, and is rewarded for its last answer.

After SCoRe (arXiv 2409.12917), section 4. Both answers are trained; the request between them is context.

    python -m grpo_rl.main recipe=arithmetic/grpo actor_rollout_ref.rollout.function=examples/self_correction.py:play \
        data.max_response_length=24
"""

from dataclasses import replace

from grpo_rl.trainer.sampled.sampler import Sampler
from grpo_rl.types import Prompt, Rollout


def play(sampler: Sampler, prompts: list[Prompt]) -> list[Rollout]:
    """Return conversations of two answers, whose reward is that of the second."""
    first = sampler.sample(prompts, sampling=replace(sampler.sampling, max_tokens=8))
    questions = [
        rollout.prompt.messages[-1]["content"] if rollout.prompt.messages else rollout.prompt.text for rollout in first
    ]
    rollouts = sampler.next_turn(first, questions)  # a model that knows more words is asked to look for its mistake
    for rollout in rollouts:
        assert rollout.episode is not None
        rollout.text = str(rollout.episode.messages[-1]["content"])
    return rollouts
