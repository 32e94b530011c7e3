"""Whatever is mistyped is refused with its key and the rule; nothing that is right is."""

from __future__ import annotations

from pathlib import Path

import pytest
from bad_configs import BAD, BAD_RECIPES
from config_tools import CPU

from grpo_rl.config import overrides
from grpo_rl.config.checks.all_rules import check
from grpo_rl.config.compose import compose
from grpo_rl.config.convert import show
from grpo_rl.errors import ConfigError
from grpo_rl.plan.make import refusals


def refusal(words: list[str]) -> list[str]:
    # What is wrong with a word by itself is part of what composing refuses, and costs a hundredth of it.
    if problems := overrides.read(words).problems:
        return problems
    try:
        config = compose(words).config
    except ConfigError as error:
        return error.problems
    return list(check(config, CPU))


def refusal_with_functions(words: list[str]) -> list[str]:
    """The refusal of the plan, which looks up the functions that are named too; it takes ten times as long."""
    return refusals(compose(words).config, CPU)


@pytest.mark.parametrize(("words", "key", "said"), BAD, ids=[show(words)[:60] for words, _, _ in BAD])
def test_a_bad_configuration_is_refused_with_its_key_and_the_rule(words: list[str], key: str, said: str) -> None:
    problems = refusal(words)
    if not any(key in problem and said in problem for problem in problems):
        problems = refusal_with_functions(words)
    assert any(key in problem and said in problem for problem in problems), problems


@pytest.mark.parametrize(("text", "said"), BAD_RECIPES, ids=[show(text)[:40] for text, _ in BAD_RECIPES])
def test_a_hostile_recipe_is_refused_and_runs_nothing(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        compose(["recipe=mine.yaml"])
    assert said in str(caught.value)
    assert not Path("CANARY").exists()


def test_problems_of_words_values_and_between_keys_are_told_together() -> None:
    words = [
        "trainer.save_frq=1",
        "actor_rollout_ref.rollout.n=eight",
        "data.train_batch_size=33",
    ]
    words += ["actor_rollout_ref.actor.ppo_mini_batch_size=32"]
    words += ["trainer.project_name=${oc.env:NO_SUCH_VARIABLE}", "trainer.experiment_name=../x"]
    with pytest.raises(ConfigError) as caught:
        compose(words)
    text = str(caught.value)
    for said in ("save_frq", "n=eight", "must be a multiple", "not found", "folder below"):
        assert said in text


def test_a_line_that_may_follow_from_another_problem_is_not_told() -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["actor_rollout_ref.actor.ppo_mini_batch_size=x", "data.train_batch_size=33"])
    assert len(caught.value.problems) == 1


def test_a_value_of_the_environment_is_not_shown_in_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY_TOKEN", "canary-93b1f0")
    with pytest.raises(ConfigError) as caught:
        compose(["actor_rollout_ref.rollout.n=${oc.env:CANARY_TOKEN}"])
    assert "canary-93b1f0" not in str(caught.value)
