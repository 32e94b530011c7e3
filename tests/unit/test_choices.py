"""The choices of conf/: each can be planned, sets several keys, and says where its numbers come from."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from compositions import compose

from grpo_rl.config import choices, recipes
from grpo_rl.config.derived import Machine
from grpo_rl.config.schema.fields import flat, leaves
from grpo_rl.plan.make import make_plan

CPU = Machine(num_gpus=0, num_cpus=2, device="cpu")
CHOICES = [
    (group, name) for group in choices.groups([recipes.conf()]) if group != "recipe"
    for name in choices.options([recipes.conf()], group)
]  # fmt: skip
NEEDS = {("schedule", "iterate"): ["reward.reward_model.model_path=builtin:arithmetic"]}


def text(group: str, name: str) -> str:
    return (recipes.conf() / group / f"{name}.yaml").read_text()


@pytest.mark.parametrize(("group", "name"), CHOICES)
def test_a_choice_sets_several_keys_of_the_schema_and_algorithms_name_their_paper(group: str, name: str) -> None:
    content = text(group, name)
    keys = flat(yaml.safe_load(content))
    assert content.startswith("# @package _global_\n") and len(keys) > 1 and set(keys) <= set(leaves())
    assert group != "algorithm" or "arXiv" in content
    composed = compose([f"{group}={name}", *NEEDS.get((group, name), ())] if group != "logger" else [])
    assert group in ("model", "data") or composed.recipe_is_default


@pytest.mark.parametrize("name", [name for group, name in CHOICES if group == "algorithm"])
def test_an_algorithm_is_planned_for_the_embedded_model_with_the_files_numbers(name: str) -> None:
    composed = compose([f"algorithm={name}"])
    assert make_plan(composed, CPU).render()
    expected = flat(yaml.safe_load(text("algorithm", name)))
    saved = flat(composed.resolved)
    assert {key: saved[key] for key in expected} == {key: _number(value) for key, value in expected.items()}


def _number(value: object) -> object:
    """YAML 1.1 reads 3e-4 as text."""
    return float(value) if isinstance(value, str) and value[0].isdigit() else value


def test_choices_are_put_together_and_a_recipe_and_words_win(tmp_path: Path) -> None:
    words = ["model=arithmetic", "data=arithmetic", "algorithm=dapo", "schedule=async", "cluster=two_cores"]
    words += ["data.train_batch_size=32", "actor_rollout_ref.actor.ppo_mini_batch_size=32"]
    composed = compose(words)
    assert composed.recipe is None and not composed.recipe_is_default
    assert composed.config.trainer.asynchronous.max_staleness == 2 and composed.config.algorithm.filter_groups.enable
    assert compose([*words, "trainer.asynchronous.max_staleness=1"]).config.trainer.asynchronous.max_staleness == 1
    (tmp_path / "my.yaml").write_text("actor_rollout_ref: {actor: {clip_ratio_high: 0.3}}\n")
    assert compose([*words, f"recipe={tmp_path}/my.yaml"]).config.actor_rollout_ref.actor.clip_ratio_high == 0.3
