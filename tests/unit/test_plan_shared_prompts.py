"""Shared prompts are decided in the plan: on, unless the model drops at random in training."""

from __future__ import annotations

import pytest

from grpo_rl.config.compose import compose
from grpo_rl.config.derived import Machine
from grpo_rl.errors import ConfigError
from grpo_rl.plan.make import make_plan

MACHINE = Machine(num_cpus=2, num_gpus=0, device="cpu")
DROPS = "actor_rollout_ref.model.override_config={attention_dropout: 0.1}"
KEY = "actor_rollout_ref.actor.use_prefix_grouper"


def shares(*words: str) -> bool | None:
    return make_plan(compose(list(words)), MACHINE).config.actor_rollout_ref.actor.use_prefix_grouper


def test_prompts_are_shared_unless_the_model_drops_at_random() -> None:
    assert shares() is True
    assert shares(f"{KEY}=false") is False
    assert shares(DROPS) is False
    assert shares(DROPS, f"{KEY}=false") is False


def test_sharing_beside_dropout_is_refused_where_it_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"training drops at random \(attention_dropout=0.1\)"):
        shares(DROPS, f"{KEY}=true")
