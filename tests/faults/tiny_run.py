"""The training that whole-run tests break: a random model of two layers, two replicas, a reference, four steps."""

from __future__ import annotations

from pathlib import Path

STEPS, SAVED_EVERY, BATCH_SIZE, SAMPLES = 4, 2, 4, 4
BAD_STEP = 3
BAD_GRADIENT = f"actor.update.loss:nan@step={BAD_STEP}"
"""Armed in all of these trainings, so that one is like the other: the update of this step is left out."""


def words(model: Path) -> list[str]:
    """The command's words."""
    policy = "actor_rollout_ref"
    return [
        f"{policy}.model.path={model}",
        "data.train_files=task:arithmetic?split=train&num_rows=32",
        f"data.train_batch_size={BATCH_SIZE}",
        "data.max_prompt_length=16",
        "data.max_response_length=12",
        "reward.functions=[format]",
        f"{policy}.actor.ppo_mini_batch_size={BATCH_SIZE}",
        f"{policy}.actor.ppo_micro_batch_size_per_gpu=8",
        f"{policy}.actor.use_dynamic_bsz=false",
        f"{policy}.actor.kl_loss_coef=0.1",
        f"{policy}.actor.entropy_coeff=0.01",
        f"{policy}.actor.optim.lr=1e-3",
        f"{policy}.rollout.n={SAMPLES}",
        f"{policy}.rollout.name=hf",
        f"{policy}.rollout.hf.batched=false",
        f"{policy}.rollout.nnodes=1",
        f"{policy}.rollout.n_gpus_per_node=2",
        # With one processor every role has one thread in every schedule: sums depend on the number of threads.
        "ray_kwargs.ray_init.num_cpus=1",
        "trainer.heartbeat_s=2",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.save_freq={SAVED_EVERY}",
        "trainer.grace_s=60",
    ]


def two_workers(words: list[str]) -> list[str]:
    """The same training with one replica and without a reference, which starts sooner."""
    absent = ("kl_loss_coef=", "rollout.nnodes=", "rollout.n_gpus_per_node=")
    return [*(word for word in words if not any(key in word for key in absent)), "actor_rollout_ref.actor.use_kl_loss=false"]
