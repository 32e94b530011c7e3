"""`one_step_off`: the next batch is sampled while this one is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo_rl.registry import samples_ahead

if TYPE_CHECKING:
    from grpo_rl.trainer.session import Session


@samples_ahead(versions=1)
def train(s: Session) -> None:
    """Train every batch by the policy after the one that sampled it, the first one by its own.

    A batch is sampled as a whole with the same weights, whatever the timing.
    """
    batch_size = s.config.data.train_batch_size
    for step in s.steps():
        if not s.num_in_flight:  # nothing was sampled beside an earlier training
            s.sync_weights()
        s.submit(batch_size)
        rollouts = s.completed()
        s.sync_weights()
        trained = s.select(s.score(rollouts))
        s.submit(batch_size)
        step.log(s.train_beside_sampling(trained))
        if step.validates:  # new weights would come into the batch that is being sampled
            s.finish_sampling()
