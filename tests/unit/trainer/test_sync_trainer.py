"""The order of a run: when it samples, validates, saves and resumes."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from real_roles import REFERENCE, VALIDATED, half_right, learnt, row_of

from grpo_rl.columns import values
from grpo_rl.errors import DataError, DivergedError
from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.telemetry.rollout_log import read_rollouts
from grpo_rl.trainer.run import RunLoop
from grpo_rl.types import Counts, Prompt
from grpo_rl.workers.trained_rank import step_optimizer

STEP = ["sync", "sample 2x4", "old", "update"]
VALIDATION = ["sync", "sample 3x1"]
GAE = ("algorithm.adv_estimator=gae", "algorithm.adv_options.whiten=false")


def records_of(run: RunLoop, step: int) -> list[dict[str, Any]]:
    return list(read_rollouts(run.output.run_dir.rollouts / f"step_{step}.jsonl"))


def test_a_step_samples_with_the_newest_weights_compares_and_trains(make_run):
    run, record = make_run(REFERENCE, steps=1)
    run.fit()
    assert record.calls == ["sync", "sample 2x4", "old", "ref", "update"]
    [row] = learnt(run)
    # Every character is a token, and every response has its end.
    data = run.session.train_data
    prompts = [data.prompt(int(uid.rpartition("r")[2]), uid) for uid in record.prompts[0]]
    lengths = [len(half_right(prompt, sample)) + 1 for prompt in prompts for sample in range(4)]
    assert row["reward/mean"] == 0.5 and row["response_length/mean"] == pytest.approx(sum(lengths) / 8)
    # Rewards 1 0 1 0: mean 1/2, sample standard deviation sqrt(1/3).
    assert [record["advantage"] for record in records_of(run, 1)[:2]] == pytest.approx([0.75**0.5, -(0.75**0.5)], rel=1e-5)


def test_an_audit_is_logged_and_changes_nothing_that_is_trained(make_run):
    results, states = [], []
    for words in ((), ("reward.audit=[exact_match]", "reward.audit_share=0.5")):
        run, record = make_run(*words, steps=3)
        torch.manual_seed(0)
        random.seed(0)
        run.fit()
        trained = [(batch.token_ids_S.tolist(), batch.token_advantages().tolist()) for batch in record.trained]
        norms = [row["actor/grad_norm"] for row in learnt(run)[-3:]]
        results.append((trained, norms, record.calls, record.prompts))
        states.append((random.getstate(), torch.get_rng_state().tolist()))
    assert results[0] == results[1] and states[0] == states[1]
    row = learnt(run)[-1]
    assert (row["audit/exact_match/num_prompts"], row["audit/failures"]) == (2.0, 0.0)
    records = [record for record in records_of(run, 3) if "audit/exact_match" in record["reward_parts"]]
    assert len(records) == 4
    assert all(record["reward_parts"]["audit/exact_match"] == record["reward"] for record in records)


def test_remax_samples_a_greedy_response_to_each_prompt_and_trains_on_the_others_alone(make_run):
    run, record = make_run(*VALIDATED, "algorithm.adv_estimator=remax", steps=1, rows=2)
    run.fit()
    assert record.calls == [*VALIDATION, "sync", "sample 2x4 and greedy", "old", "update", *VALIDATION]
    _, row = read_metrics(run.output.run_dir.metrics_file)
    assert row["reward/mean"] == 0.5 and row["reward/greedy_baseline_mean"] == 0.5
    data, records = run.session.train_data, records_of(run, 1)
    prompt_tokens = sum(len(data.prompt(row, "").token_ids) for row in range(2))
    assert row["perf/total_num_tokens"] == 4 * prompt_tokens + sum(record["response_length"] for record in records)
    assert [record["sample"] for record in records] == [0, 1, 2, 3] * 2
    # Rewards 1 0 1 0, minus 1 if the greedy response was right, as that to row 0, and minus 0 if it was not.
    advantages = {uid: [record["advantage"] for record in records if record["uid"] == uid] for uid in record.prompts[1]}
    assert advantages == {"e0-r0": [0.0, -1.0, 0.0, -1.0], "e0-r1": [1.0, 0.0, 1.0, 0.0]}


@pytest.mark.parametrize(("loss", "reference"), [("dpo", True), ("simpo", False)])
def test_groups_become_pairs_which_are_trained_whole_and_without_advantages(make_run, loss, reference):
    def row_1_is_solved(prompt: Prompt, sample: int) -> str:
        return str(prompt.ground_truth) if row_of(prompt) == 1 else half_right(prompt, sample)

    words = (f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}",)
    run, record = make_run(*words, steps=1, rows=2, answers=row_1_is_solved)
    run.fit()
    assert record.calls == ["sync", "sample 2x4", "old", *(["ref"] if reference else []), "update"]
    # The prompt that is always answered right makes no pair.
    [batch] = record.trained
    assert batch.chosen_N.tolist() == [True, False] and batch.rewards_N.tolist() == [1.0, 0.0]
    assert (batch.ref_logprobs_T is not None) == reference
    [row] = learnt(run)
    assert (row["pairs/num_pairs"], row["pairs/tied_fraction"], row["pairs/reward_gap"]) == (1.0, 0.5, 1.0)
    assert row["reward/mean"] == 0.75 and "advantage/abs_mean" not in row
    advantages = [(record["uid"], record["advantage"]) for record in records_of(run, 1)]
    assert [advantage for uid, advantage in advantages if uid == "e0-r0"] == [1.0, -1.0, None, None]
    assert [advantage for uid, advantage in advantages if uid == "e0-r1"] == [None] * 4


def test_validation_comes_before_the_first_step_every_so_often_and_at_the_end(make_run):
    run, record = make_run(*VALIDATED, "trainer.test_freq=2", steps=5)
    run.fit()
    assert record.calls == [*VALIDATION, *STEP, *STEP, *VALIDATION, *STEP, *STEP, *VALIDATION, *STEP, *VALIDATION]
    assert [row["step"] for row in learnt(run) if "val/arithmetic/mean@1" in row] == [0, 2, 4, 5]
    assert all((run.output.run_dir.val / f"step_{step}.jsonl").is_file() for step in (0, 2, 4, 5))


def test_validation_only_trains_nothing_even_after_a_resume_and_takes_the_engines_own_weights_without(make_run):
    run, _ = make_run("trainer.save_freq=1", steps=1)
    run.fit()
    validating = (*VALIDATED, "trainer.val_only=true")
    resumed, record = make_run(*validating, steps=5)
    resumed.resume(run.store.folder / "step_1")
    resumed.fit()
    assert record.calls == ["load", *VALIDATION]
    fresh, record = make_run(*validating, "trainer.experiment_name=fresh", steps=5)
    fresh.fit()
    assert record.calls == ["sample 3x1"] and fresh.roles.actor is None and fresh.store.steps() == []
    [row] = learnt(fresh)
    assert row["step"] == 0 and row["val/arithmetic/mean@1"] == 1.0


def test_a_resumed_run_goes_on_with_the_prompts_the_weights_and_the_controller_that_it_stopped_with(make_run):
    control = ("algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=100")
    words = ("algorithm.use_kl_in_reward=true", *control, "trainer.save_freq=3")
    whole, record = make_run(*words, steps=7)
    whole.fit()
    rows = learnt(whole)
    assert len({row["actor/reward_kl_penalty_coeff"] for row in rows}) > 1

    resumed, again = make_run(*words, steps=7)
    resumed.resume(whole.store.folder / "step_3")
    assert resumed.session.version == 3
    # Steps 6 and 7 belong to the run that is now abandoned.
    assert resumed.store.steps() == [3]
    resumed.fit()
    assert again.prompts == record.prompts[3:] and again.samplings == record.samplings[3:]
    assert learnt(resumed) == rows and [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert resumed.store.steps() == [3, 6, 7]


def test_a_row_that_cannot_be_used_ends_the_run_and_what_was_trained_before_is_saved(make_run):
    run, _ = make_run("trainer.save_freq=10", steps=3)
    sampler = run.session.selection.sampler
    draw, positions = sampler.next_batch, []

    def next_batch():
        positions.append((sampler.epoch, sampler.position))
        batch = draw()
        if len(positions) == 3:
            raise DataError("train.jsonl, line 7: broken JSON")
        return batch

    sampler.next_batch = next_batch
    with pytest.raises(DataError, match="line 7"):
        run.fit()
    assert run.store.steps() == [2] and run.session.version == 2
    # The row comes again: the two batches before it are all that was drawn.
    assert (sampler.epoch, sampler.position) == positions[2]


def test_the_critic_is_asked_before_the_advantages_and_learns_their_returns(make_run):
    run, record = make_run(*GAE, steps=1)
    run.fit()
    assert record.calls == ["sync", "sample 2x4", "old", "values", "update critic", "update"]
    # Rewards 1 0 1 0 at the last token: with gamma = lam = 1 the returns are the outcome on all of them.
    [batch] = record.batches["update critic"]
    outcomes_T = torch.repeat_interleave(batch.rewards_N, batch.response_lengths_N)
    assert batch.rewards_N.tolist() == [1.0, 0.0] * 4 and torch.allclose(batch.returns_T, outcomes_T, atol=1e-5)
    assert torch.allclose(batch.token_advantages(), outcomes_T - values(batch.values_T), atol=1e-5)
    [row] = read_metrics(run.output.run_dir.metrics_file)
    squared_errors_T = (outcomes_T - values(batch.values_T)) ** 2
    assert row["critic/vf_loss"] == pytest.approx(0.5 * float(squared_errors_T.mean()), rel=1e-4)
    assert {"timing_s/values", "timing_s/update_critic"} <= row.keys()


def test_training_ends_in_good_order_when_all_prompts_are_learnt(make_run):
    words = (*VALIDATED, "trainer.save_freq=10", "data.retire_above=0.5")
    run, record = make_run(*words, steps=9)
    run.fit()
    # Half of the responses pass, so that each of the six prompts is sampled once.
    assert record.calls == [*VALIDATION, *STEP, *STEP, *STEP, *VALIDATION, "save"]
    assert any("training ends at step 3 of 9" in warning for warning in record.warnings)
    again, record = make_run(*words, steps=9)
    again.resume(run.store.folder / "step_3")
    again.fit()
    assert record.calls == ["load"]


def test_the_policy_stays_while_the_critic_warms_up(make_run):
    run, record = make_run(*GAE, "trainer.critic_warmup=2", steps=3)
    run.fit()
    warming = ["sync", "sample 2x4", "old", "values", "update critic"]
    assert record.calls == [*warming, *warming, *warming, "update"]
    assert [("actor/loss" in row) for row in learnt(run)] == [False, False, True]


def test_so_many_bad_steps_in_a_row_pass_and_the_next_one_stops_the_run(make_run) -> None:
    run, _ = make_run("trainer.max_nonfinite_steps=2", steps=9)
    actor, update = run.roles.actor, run.roles.actor.update
    actor.update = lambda batch: update(batch) | {"actor/nonfinite": 0.5 * (actor.version in (1, 2, 4, 5, 6))}
    with pytest.raises(DivergedError, match=r"actor not finite in 3 steps in a row \(trainer.max_nonfinite_steps\)"):
        run.fit()
    folder = run.output.run_dir.path
    assert run.step == 6 and not (folder / "nonfinite_step_3.jsonl").exists()
    assert [row["sample"] for row in read_rollouts(folder / "nonfinite_step_6.jsonl")] == [0, 1, 2, 3] * 2


@pytest.mark.parametrize(
    ("loss", "grad_norm", "tokens", "nonfinite", "moves"),
    [
        (1.0, 2.0, 5, 0.0, True),
        (math.nan, 2.0, 5, 1.0, False),
        (1.0, math.inf, 5, 1.0, False),
        (0.0, 0.0, 0, 0.0, False),
    ],
)
def test_weights_and_moments_move_only_by_a_finite_step_on_trained_tokens(
    loss: float, grad_norm: float, tokens: int, nonfinite: float, moves: bool
) -> None:
    weight_D = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight_D], lr=0.1, weight_decay=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    weight_D.grad = torch.full((2,), grad_norm)
    counts = Counts(num_tokens=tokens, num_sequences=1, num_groups=1)
    assert step_optimizer(optimizer, scheduler, counts, loss, grad_norm) == {"same/nonfinite": nonfinite}
    assert (weight_D.tolist() != [1.0, 1.0]) == moves
    assert bool(optimizer.state) == moves
    assert optimizer.param_groups[0]["lr"] == (0.05 if moves else 0.1)
