"""`offline`: the policy learns answers, or to prefer some to others, from rows as they stand (`data.responses=rows`)."""

from grpo_rl.registry import needs
from grpo_rl.trainer.rows import named_measures
from grpo_rl.trainer.session import Session


@needs("actor", "rollout", "rewarder", "teacher")
def train(s: Session) -> None:
    """Take one optimizer step on each batch of rows. Engines and rewards run if there are prompts to validate on."""
    for step in s.steps():
        batch = s.logprobs(s.next_rows())
        metrics = s.update(batch)
        measured = {name.removeprefix("actor/"): value for name, value in metrics.items()}
        step.log(named_measures("train", measured, s.objective) | metrics)
        step.log({"train/num_tokens": float(batch.num_trained_tokens)})
