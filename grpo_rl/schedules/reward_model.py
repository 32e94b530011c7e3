"""`reward_model`: a reward model learns from pairs or rated steps in files; there is no policy, and no engine."""

from grpo_rl.registry import needs
from grpo_rl.trainer.session import Session


@needs("reward_model")
def train(s: Session) -> None:
    """Take one optimizer step of the reward model on each batch of rows."""
    settings = s.config.reward.reward_model.train
    names = ("loss", "accuracy", "margin") if settings.loss == "bradley_terry" else ("loss", "accuracy")
    for step in s.steps():
        metrics = s.update_reward_model(s.next_rows())
        step.log({f"train/{name}": metrics[f"reward_model/{name}"] for name in names} | metrics)
