"""What each role is built from: settings of the policy reach every role that computes what it samples."""

from __future__ import annotations

import pytest
from compositions import compose

from grpo_rl.cluster.role_specs import actor_spec, rank_of
from grpo_rl.config.derived import Machine
from grpo_rl.plan.make import make_plan
from grpo_rl.workers.specs import PolicySpec

R, M = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
WORDS = [
    *("recipe=arithmetic/grpo", "actor_rollout_ref.ref.fsdp_config.param_offload=false", "trainer.seed=7"),
    *(f"{M}.lm_head_chunk_tokens=123", "algorithm.adv_estimator=gae"),
    *("distillation.enabled=true", "distillation.teacher_models={t: {model_path: builtin:arithmetic}}"),
]


def policies(*words: str) -> dict[str, PolicySpec]:
    """Return what the ranks of each role compute with."""
    plan = make_plan(compose([*WORDS, *words]), Machine(0, 2, "cpu"))
    actor = actor_spec(plan, "folder")
    built = {"actor": actor.policy}
    for name in ("reference", "teacher", "critic"):
        _, spec, _ = rank_of(name, plan, actor, "")  # type: ignore[arg-type]
        built[name] = spec.model if name == "critic" else spec[0]
    return built


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_every_role_that_says_what_the_policy_samples_does_so_at_its_temperature(temperature: float) -> None:
    found = policies(f"{R}.temperature={temperature}")
    shown = {name: policy.temperature for name, policy in found.items()}
    print(shown)
    assert shown == dict.fromkeys(("actor", "reference", "teacher", "critic"), temperature)


def test_settings_of_the_model_and_the_seed_reach_every_role_that_is_the_same_model() -> None:
    found = policies()
    for name in ("reference", "teacher"):
        for setting in ("lm_head_chunk_tokens", "lm_head_precision", "flash_attention"):
            assert getattr(found[name].model, setting) == getattr(found["actor"].model, setting), (name, setting)
        assert found[name].share_prompts == found["actor"].share_prompts and found[name].seed == 7
    assert found["reference"].model.path == found["critic"].model.path == "folder" != found["teacher"].model.path
    assert [found[name].train for name in found] == [True, False, False, True]
