"""Iterations: what is trained when, on which reward, and that a run goes on from any step as if nothing had been."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from real_roles import REFERENCE, VALIDATED, learnt

from grpo_rl.rewards.combined import RULE
from grpo_rl.schedules.iterate import agreement
from grpo_rl.telemetry.rollout_log import read_rollouts
from grpo_rl.trainer.replay import PairReplay
from grpo_rl.trainer.run import RunLoop
from grpo_rl.types import Prompt, Rollout

ITERATE = (
    REFERENCE,
    "reward.reward_model.enable=true",
    "reward.reward_model.model_path=builtin:arithmetic",
    "reward.reward_model.train.enable_gradient_checkpointing=false",
    "reward.reward_model.weight=2",
    "trainer.iterate.replay_share=0.5",
    "trainer.iterate.reward_model_steps=2",
    "trainer.iterate.steps_per_iteration=3",
    "trainer.save_freq=1",
    "trainer.schedule=iterate",
)
MODEL, POLICY = ["sync", "sample 2x4", "update reward model"], ["sync", "sample 2x4", "old", "ref", "update"]


def rows_of(run: RunLoop) -> dict[int, dict[str, float]]:
    return {int(row["step"]): row for row in learnt(run)}


def test_an_iteration_refreshes_the_reference_trains_the_reward_model_and_then_the_policy(make_run):
    run, record = make_run(*ITERATE, steps=10, rows=40)
    run.fit()
    calls, rows = [call for call in record.calls if call != "save"], rows_of(run)
    assert calls == ["refresh reference", *MODEL * 2, *POLICY * 3] * 2
    # Half of a batch is replayed as soon as there is an earlier iteration.
    assert [batch.num_rollouts // 2 for batch in record.batches["update reward model"]] == [2, 2, 4, 4]
    assert [rows[step].get("reward_model/replayed_pairs") for step in (1, 2, 3, 6, 7)] == [0.0, 0.0, None, 2.0, 2.0]
    assert [rows[step]["iterate/iteration"] for step in range(1, 11)] == [1.0] * 5 + [2.0] * 5
    assert [rows[step]["iterate/policy_phase"] for step in range(1, 11)] == [0.0, 0.0, 1.0, 1.0, 1.0] * 2
    # The policy is the reference when an iteration begins to train it.
    kl = [abs(rows[step]["actor/kl_loss"]) for step in (3, 5, 8, 10)]
    assert max(kl[0], kl[2]) < 1e-6 < min(kl[1], kl[3])


def test_the_policy_is_trained_on_the_score_alone_and_the_rules_reward_is_logged_beside_it(make_run):
    run, _ = make_run(*ITERATE, steps=3, rows=40)
    run.fit()
    records, row = list(read_rollouts(run.output.run_dir.rollouts / "step_3.jsonl")), rows_of(run)[3]
    assert [record["reward_parts"][RULE] for record in records] == [1.0, 0.0] * 4
    scores = [record["reward_parts"]["reward_model"] for record in records]
    assert [record["reward"] for record in records] == pytest.approx([2 * score for score in scores]), "weight * score"
    for group in (records[:4], records[4:]):
        rewards = [record["reward"] for record in group]
        deviations = [reward - statistics.fmean(rewards) for reward in rewards]
        by_hand = [deviation / (statistics.stdev(rewards) + 1e-6) for deviation in deviations]
        assert [record["advantage"] for record in group] == pytest.approx(by_hand, rel=1e-3, abs=1e-4)
    assert row["reward/by-rule"] == 0.5 and row["reward/reward_model"] == pytest.approx(statistics.fmean(scores))
    assert row["reward/mean"] == pytest.approx(2 * row["reward/reward_model"]) and 0.0 <= row["iterate/agreement"] <= 1.0


def test_the_pairs_are_the_best_and_the_worst_by_the_rules_of_which_the_earlier_samples_count(make_run):
    run, record = make_run(*ITERATE, steps=1, rows=40)
    run.fit()
    [batch] = record.batches["update reward model"]
    assert batch.group_N.tolist() == [0, 0, 1, 1] and batch.chosen_N.tolist() == [True, False] * 2
    lines = (run.output.run_dir.checkpoints / "step_1" / PairReplay.file).read_text().splitlines()
    head, *pairs = map(json.loads, lines)
    assert head == {"num_seen": 2} and pairs[0]["since"] == 1
    assert [[side["reward_parts"][RULE] for side in pair["rollouts"]] for pair in pairs] == [[1.0, 0.0]] * 2
    assert [[side["sample_index"] for side in pair["rollouts"]] for pair in pairs] == [[0, 1]] * 2


def test_validation_measures_the_rules_and_shows_the_models_opinion(make_run):
    run, _ = make_run(*ITERATE, *VALIDATED, steps=1, rows=40)
    run.fit()
    row, records = rows_of(run)[1], list(read_rollouts(run.output.run_dir.val / "step_1.jsonl"))
    assert row["val/arithmetic/mean@1"] == 1.0, "all answers are right"
    scores = [record["reward_parts"]["reward_model"] for record in records]
    assert row["val/arithmetic/reward_model/mean@1"] == pytest.approx(statistics.fmean(scores)) and len(set(scores)) == 3


def saved(folder: Path) -> dict[str, Any]:
    """What a checkpoint holds, without the seconds that its step took."""
    files: dict[str, Any] = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }
    state = json.loads(files["trainer.json"])
    state["unlogged"] = {key: value for key, value in state["unlogged"].items() if not key.startswith(("timing_s/", "perf/"))}
    return files | {"trainer.json": state}


def test_a_run_that_goes_on_after_any_step_does_what_it_would_have_done(make_run):
    words = (*ITERATE, "trainer.iterate.replay_share=0.4")
    whole, _ = make_run(*words, steps=8, rows=40)
    whole.fit()
    checkpoints = whole.output.run_dir.checkpoints
    last, rows = saved(checkpoints / "step_8"), learnt(whole)
    assert {name.partition("/")[0] for name in last} > {"reference", "reward_model", PairReplay.file, "trainer.json"}
    # The later the step, the earlier it is tried: a run that goes on sets later checkpoints aside.
    for step in (6, 4, 2, 1):
        again, _ = make_run(*words, steps=8, rows=40)
        again.resume(checkpoints / f"step_{step}")
        again.fit()
        assert saved(checkpoints / "step_8") == last and learnt(again) == rows, step


def rollouts(rules: Sequence[float], scores: Sequence[float], per_group: int = 2) -> list[Rollout]:
    return [
        Rollout(
            Prompt(f"p{index // per_group}", (1,), "", "test"),
            index % per_group,
            (1, 2),
            (0.0, 0.0),
            "stop",
            ((0, 2),),
            reward=score,
            reward_parts={RULE: rule, "reward_model": score},
        )
        for index, (rule, score) in enumerate(zip(rules, scores, strict=True))
    ]


def test_agreement_compares_within_groups():
    # Group 1 in the right order, group 2 in the wrong one, group 3 equal, group 4 without a difference of the rules.
    found = agreement(rollouts([1, 0, 0, 1, 1, 0, 1, 1], [5.0, 4.0, 1.0, 0.0, 2.0, 2.0, 9.0, 1.0]))
    assert found["iterate/agreement"] == pytest.approx((1 + 0 + 0.5) / 3)
    assert agreement(rollouts([1, 1], [1.0, 2.0])) == {} == agreement([]), "nothing to compare"
