"""The supervised schedule: raise the log-probability of demonstrated answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from grpo_rl.errors import DivergedError
from grpo_rl.protocols import Actor
from grpo_rl.types import Batch, Metrics

Demonstration = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt and of the answer to learn."""


def fit(
    actor: Actor,
    demonstrations: Sequence[Demonstration],
    *,
    num_steps: int,
    batch_size: int,
    seed: int,
    on_step: Callable[[int, Metrics], None],
) -> None:
    """Train for `num_steps` steps on batches drawn in a new seeded order every epoch.

    Cross-entropy is REINFORCE with an advantage of 1 on the demonstrated tokens, so an actor whose
    objective is `reinforce` is all that it takes.
    """
    rng = np.random.default_rng(seed)
    order: list[int] = []
    for step in range(num_steps):
        while len(order) < batch_size:
            order += rng.permutation(len(demonstrations)).tolist()
        chosen, order = order[:batch_size], order[batch_size:]
        metrics = actor.update(supervised_batch([demonstrations[i] for i in chosen]))
        if metrics.get("actor/nonfinite"):
            raise DivergedError(f"supervised step {step + 1}: loss or gradient not finite; no weight was changed by it")
        on_step(step, metrics)


def supervised_batch(demonstrations: Sequence[Demonstration]) -> Batch:
    """Return the demonstrations as a batch with advantages of 1."""
    prompt_lengths_N = torch.tensor([len(prompt) for prompt, _ in demonstrations])
    response_lengths_N = torch.tensor([len(answer) for _, answer in demonstrations])
    ones_T = torch.ones(int(response_lengths_N.sum()))
    return Batch(
        prompt_lengths_N=prompt_lengths_N,
        response_lengths_N=response_lengths_N,
        group_N=torch.arange(len(demonstrations)),
        token_ids_S=torch.tensor([token for prompt, answer in demonstrations for token in (*prompt, *answer)]),
        rewards_N=torch.ones(len(demonstrations)),
        # These tokens were not sampled; there is no other policy to compare with.
        rollout_logprobs_T=torch.zeros_like(ones_T),
        advantages_T=ones_T,
    )
