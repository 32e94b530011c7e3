"""The names of metrics in trackers: those of verl's dashboards where the same is measured, else unchanged."""

from __future__ import annotations

from grpo_rl.telemetry.metrics.tracker_names import STEP, tracker_metrics


def named(*names: str) -> list[str]:
    return [name for name in tracker_metrics(3, dict.fromkeys(names, 1.0)) if name != STEP]


def test_scores_are_rewards_too_unless_the_reward_has_a_kl_penalty() -> None:
    assert named("reward/mean") == ["critic/score/mean", "critic/rewards/mean"]
    assert named("reward/max", "actor/reward_kl_penalty") == ["critic/score/max", "actor/reward_kl_penalty"]


def test_validation_is_core_where_it_is_over_responses_and_else_beside_it() -> None:
    of_source = ["mean@4", "best@4", "maj@4", "reward", "response_length", "auto/mean@4"]
    assert named(*(f"val/open/math/{name}" for name in of_source)) == [
        "val-core/open/math/acc/mean@4",
        "val-core/open/math/acc/best@4/mean",
        "val-core/open/math/acc/maj@4/mean",
        "val-aux/open/math/reward",
        "val-aux/open/math/response_length",
        "val-aux/open/math/auto/mean@4",
    ]


def test_a_source_that_begins_as_another_one_keeps_its_own_measures() -> None:
    names = ["val/a/response_length", "val/a/b/response_length", "val/a/b/mean@1", "val/a/mean@1"]
    assert named(*names)[2:] == ["val-core/a/b/acc/mean@1", "val-core/a/acc/mean@1"]


def test_what_verl_does_not_measure_keeps_its_name_and_nothing_is_lost() -> None:
    same = ["actor/kl_loss", "response_length/mean", "timing_s/gen", "val/loss", "reward/auto", "rollout/entropy", "alarm/kl"]
    assert named(*same) == same
    found = tracker_metrics(7, {"reward/std": 0.5, "advantage/abs_mean": 2.0, "trainer/epoch": 1.0})
    assert found == {"critic/score/std": 0.5, "critic/advantages/abs_mean": 2.0, "training/epoch": 1.0, STEP: 7.0}
