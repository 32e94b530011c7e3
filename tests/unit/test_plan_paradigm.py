"""The plan names the three components of a method, with the gradient coefficient as the options make it."""

from __future__ import annotations

from pathlib import Path

from grpo_rl.config.compose import compose
from grpo_rl.config.derived import Machine
from grpo_rl.plan.decisions import Plan, decide
from grpo_rl.plan.text import components

A = "actor_rollout_ref.actor"
CPU = Machine(num_gpus=0, num_cpus=2, device="cpu")


def rows_of(*words: str) -> dict[str, str]:
    config = compose(list(words) if words and words[0].startswith("recipe=") else ["recipe=arithmetic/grpo", *words]).config
    plan: Plan = decide(config, CPU)
    return dict(components(plan))


def test_grpo_has_the_papers_coefficient() -> None:
    rows = rows_of(f"{A}.kl_loss_coef=0.04", f"{A}.ppo_mini_batch_size=16")
    assert rows["D"] == "8 responses to each prompt, sampled by the policy as it is (data.responses=policy)"
    assert rows["π_rf"] == "auto"
    assert rows["GC"].startswith("= r A, but 0 where A > 0 and r > 1.2")
    assert rows["GC"].endswith("; and - 0.04 (1 - π_ref/π, but 0 where a bound acts)")
    assert rows["gradient"] == "= token-mean of GC ∇log π"


def test_with_one_update_per_batch_the_coefficient_is_the_advantage() -> None:
    assert "r = 1, so it is A" in rows_of(f"{A}.use_kl_loss=false")["GC"]
    assert "r = 1" not in rows_of(f"{A}.ppo_mini_batch_size=16")["GC"]


def test_given_answers_have_the_coefficient_1_and_no_reward() -> None:
    rows = rows_of("recipe=paradigm/sft")
    assert rows["D"] == "the answers that stand in the rows (data.responses=rows)"
    assert rows["π_rf"] == "none: each row is right" and rows["GC"] == "= 1"


def test_iterated_training_is_rewarded_by_the_model_alone() -> None:
    rows = rows_of("recipe=paradigm/iterate", "reward.functions=[arithmetic]", "reward.reward_model.weight=2")
    assert rows["π_rf"] == "2*reward_model alone, trained on samples of the policy that arithmetic labels"
    fixed = ["trainer.iterate.reward_model_steps=0", "~reward.reward_model.train"]
    assert rows_of("recipe=paradigm/iterate", *fixed)["π_rf"] == "reward_model alone"


def test_a_loss_of_the_users_own_has_its_coefficient_from_the_docstring_or_as_a_derivative(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    head = "from grpo_rl.algos.losses.contract import TokenLoss\n\n\n"
    body = "    return TokenLoss(-inputs.advantages_T * inputs.policy_logprobs_T)\n"
    file.write_text(f'{head}def plain(inputs):\n{body}\n\ndef said(inputs):\n    """Mine.\n\n    Gradient: A\n    """\n{body}')
    for name, coefficient in (("plain", "= -∂pg/∂log π"), ("said", "= A")):
        rows = rows_of(f"{A}.policy_loss.loss_mode={file}:{name}", f"{A}.use_kl_loss=false")
        assert rows["GC"] == coefficient
