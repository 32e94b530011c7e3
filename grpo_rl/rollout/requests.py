"""Names and seeds of requests: the same for a response wherever and whenever it is sampled; and batches of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from grpo_rl.types import GREEDY, Prompt, Rollout, Sampling

if TYPE_CHECKING:
    from grpo_rl.protocols import RolloutPool


def rollout_id(prompt: Prompt, sample: int) -> str:
    """Return what names one rollout in the pool and in the engines."""
    return f"{prompt.uid}/{sample}"


def sampling_of(sampling: Sampling, uid: str, sample: int) -> Sampling:
    """Return how one response is sampled: with a seed of its own, or greedily."""
    if sample == GREEDY:
        return replace(sampling, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0, keep_support=False, seed=None)
    return replace(sampling, seed=sample_seed(sampling.seed, uid, sample))


def sample_seed(seed: int | None, uid: str, sample: int) -> int | None:
    """Return the seed of one response, another for each, the same wherever and whenever it is sampled."""
    if seed is None:
        return None
    digest = hashlib.blake2b(f"{seed}:{uid}:{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def turn_sampling(sampling: Sampling, turn: int, max_tokens: int) -> Sampling:
    """Return how one turn of an episode is sampled: the first as a response of its own would be, the others with further seeds."""
    seed = sampling.seed if turn == 0 else sample_seed(sampling.seed, "turn", turn)
    return replace(sampling, seed=seed, max_tokens=max_tokens)


class WholeBatches:
    """The part that rollout pools share: sampling a whole batch and waiting for it."""

    def generate(
        self: RolloutPool,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        on_finish: Callable[[Rollout], None] | None = None,
        *,
        greedy: bool = False,
    ) -> list[Rollout]:
        """Return the rollouts of `submit`, in its order; each is given to `on_finish` as it ends.

        Raises as `completed` and `on_finish` do; the pool then forgets all of them.
        """
        ids = self.submit(prompts, n, sampling, greedy=greedy)
        finished: dict[str, Rollout] = {}
        try:
            for rollout in self.completed(only=ids):
                finished[rollout_id(rollout.prompt, rollout.sample_index)] = rollout
                if on_finish is not None:
                    on_finish(rollout)
        except BaseException:
            self.forget(ids)
            raise
        self.rest()
        return [finished[one] for one in ids]
