"""Teachers in the plan: its page, their memory, and what is refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_rl.config.compose import compose
from grpo_rl.config.derived import Machine
from grpo_rl.errors import ConfigError
from grpo_rl.models import builtin
from grpo_rl.plan.make import make_plan

CPU = Machine(0, 2, "cpu")
T, L = "distillation.teacher_models", "distillation.distillation_loss"


def test_the_page_has_the_source_the_teacher_its_coefficient_and_its_memory() -> None:
    plan = make_plan(compose(["recipe=teacher/on_policy"]), CPU)
    page = " ".join(plan.render().split())
    assert "64 prompts x 1 responses" in page and "sampled by the policy as it is" in page
    assert "π_rf none: the teacher's distribution is the goal" in page
    assert "teacher teacher_model: builtin:arithmetic_teacher (1 frozen rank in the actor's pool)" in page
    assert "A = 1 (log τ - log π)" in page and "reference not started" in page
    memory = {need.role: need.num_bytes for need in plan.memory}
    assert 0 < memory["teacher"] < memory["actor"] and plan.role("teacher") is not None
    more = make_plan(compose(["recipe=teacher/on_policy", f"{T}.other.model_path=builtin:arithmetic"]), CPU)
    assert {need.role: need.num_bytes for need in more.memory}["teacher"] > memory["teacher"]
    added = ["actor_rollout_ref.rollout.n=4", f"{L}.use_task_rewards=true", f"{L}.distillation_loss_coef=0.3"]
    both = make_plan(compose(["recipe=teacher/gkd", *added]), CPU)
    assert "loss = avg(pg) + 0.3·avg(D)" in " ".join(both.render().split())
    own = make_plan(compose(["recipe=teacher/gkd", "distillation.nnodes=1", "distillation.n_gpus_per_node=2"]), CPU)
    assert own.role("teacher").num_workers == 2 == own.pool("teacher").devices_per_node  # type: ignore[union-attr]


REFUSED: list[tuple[list[str], str]] = [
    (["distillation.enabled=false"], "needs distillation.enabled=true"),
    ([f"{T}.teacher_model.path=x"], "unknown key. There are: model_path"),
    ([f"{T}.teacher_model.model_path=null"], "teaches nothing"),
    ([f"{T}.teacher_model.ema_decay=2"], "ema_decay=2: is out of range"),
    ([f"{T}.teacher_model.ema_decay=0.9"], "this teacher has a model_path"),
    ([f"{L}.loss_mode=k3"], "loss_mode=k1, or use_policy_gradient=false"),
    ([f"{L}.use_policy_gradient=false"], "has no gradient from the teacher"),
    ([f"{L}.topk=8"], "looks at the sampled token alone"),
    ([f"{L}.jsd_beta=0.1"], "needs distillation.distillation_loss.loss_mode=jsd"),
    ([f"{L}.distillation_loss_coef=2"], "learns from teachers alone"),
    (["algorithm.adv_estimator=rloo"], "learns from teachers alone"),
    (
        ["actor_rollout_ref.actor.policy_loss.loss_mode=dpo", "actor_rollout_ref.rollout.n=4"],
        "a teacher teaches single responses",
    ),
    (["actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov"], "chooses tokens by the advantages of rewards"),
    (["distillation.teacher_key=index"], "a teacher's key is a data_source"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_what_a_teacher_does_not_go_with_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_plan(compose(["recipe=teacher/on_policy", *words]), CPU)
    assert message in str(error.value)


def test_a_teacher_with_other_tokens_is_refused_with_the_first_of_them(tmp_path: Path) -> None:
    folder = builtin.build("arithmetic", tmp_path / "teacher")
    words = ["recipe=teacher/on_policy", f"{T}.teacher_model.model_path={folder}"]
    make_plan(compose(words), CPU)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["8"], vocabulary["9"] = vocabulary["9"], vocabulary["8"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError) as error:
        make_plan(compose(words), CPU)
    assert "its token 14 is '9', and the policy's is '8'" in str(error.value)
