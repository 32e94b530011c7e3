"""The doctor: every rule sees its illness, and healthy runs are left in peace."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from grpo_rl.__main__ import main
from grpo_rl.config.schema.fields import leaves
from grpo_rl.config.schema.kinds import Illness
from grpo_rl.telemetry.diagnosis.diagnose import Alarms, as_text, as_warning, diagnose
from grpo_rl.telemetry.diagnosis.rules import ILLNESSES, reward_exploited
from grpo_rl.telemetry.diagnosis.run_record import RunRecord

STEPS = 40
Curve = Callable[[int], float]


def ramp(begin: float, end: float, by: int = STEPS) -> Curve:
    return lambda step: begin + (end - begin) * min(1.0, step / by)


HEALTHY: dict[str, Curve] = {
    "reward/mean": ramp(0.2, 0.8),
    "reward/min": lambda step: 0.0,
    "reward/max": lambda step: 1.0,
    "reward/auto": ramp(0.2, 0.8),
    "reward/timeouts": lambda step: 0.0,
    "reward/errors": lambda step: 0.0,
    "reward/invalid": lambda step: 0.0,
    "response_length/clip_ratio": lambda step: 0.05,
    "response_length/mean": ramp(40, 60),
    "prompt_length/max": lambda step: 20.0,
    "advantage/zero_group_fraction": ramp(0.2, 0.5),
    "actor/pg_clipfrac": lambda step: 0.02,
    "actor/ratio_max": lambda step: 1.5,
    "actor/ppo_kl": lambda step: 1e-3,
    "actor/kl_loss": ramp(0.0, 0.2),
    "actor/entropy": ramp(1.2, 0.4),
    "actor/lr": lambda step: 1e-6,
    "actor/nonfinite": lambda step: 0.0,
    "rollout/logprob_diff_mean": lambda step: 1e-6,
    "rollout/trained_token_fraction": lambda step: 1.0,
    "trainer/epoch": lambda step: 0.0,
}
CONFIG: dict[str, Any] = {
    "data": {"train_batch_size": 8, "max_response_length": 128, "max_prompt_length": 64, "truncation": "error"},
    "actor_rollout_ref": {
        "rollout": {"n": 4},
        "actor": {"optim": {"clip_grad": 1.0}, "kl_loss_coef": 0.001, "entropy_coeff": 0.0},
    },
}


def run(
    changes: dict[str, Curve | None] | None = None,
    steps: int = STEPS,
    config: dict[str, Any] | None = None,
    **validation: list[float],
) -> RunRecord:
    series = HEALTHY | (changes or {})
    records = [
        {"step": step, "time": 0.0} | {key: make(step) for key, make in series.items() if make is not None}
        for step in range(1, steps + 1)
    ]
    for key, values in validation.items():
        name = f"val/{key}/mean@1"
        by_step = {round(index * steps / (len(values) - 1)): value for index, value in enumerate(values)}
        records = [{"step": 0.0, "time": 0.0, name: by_step[0]}, *records]
        for record in records[1:]:
            if record["step"] in by_step:
                record[name] = by_step[int(record["step"])]
    return RunRecord(CONFIG | (config or {}), records)


ILL: dict[str, RunRecord] = {
    "nonfinite": run({"actor/nonfinite": lambda step: float(step == 7)}),
    "learning_rate_zero": run({"actor/lr": lambda step: 0.0}),
    "reward_failures": run({"reward/timeouts": lambda step: 12.0}),
    "tool_fails": run({"episode/tool_calls/sql": ramp(0.5, 2), "episode/tool_errors/sql": ramp(0.5, 2)}, steps=2),
    "nothing_trained": run({"rollout/trained_token_fraction": lambda step: 0.0}),
    "reward_never_seen": run(
        {"reward/mean": lambda step: 0.0, "reward/max": lambda step: 0.0, "advantage/zero_group_fraction": lambda step: 1.0}
    ),
    "reward_constant": run(
        {"reward/mean": lambda step: 1.0, "reward/min": lambda step: 1.0, "advantage/zero_group_fraction": lambda step: 1.0}
    ),
    "reward_exploited": run(
        {
            "audit/strict": ramp(0.5, 0.1, 20),
            "audit/strict/std": lambda step: 0.4,
            "audit/strict/reward": ramp(0.2, 0.9, 20),
            "audit/strict/reward_std": lambda step: 0.4,
            "audit/strict/correlation": ramp(0.8, 0.0, 20),
            "audit/strict/num_prompts": lambda step: 16.0,
        }
    ),
    "sampler_trainer_disagree": run({"rollout/logprob_diff_mean": ramp(0.001, 0.3)}),
    "learning_rate_too_high": run(
        {
            "actor/ppo_kl": lambda step: 6.0 if step == 2 else 0.0,
            "reward/mean": lambda step: 0.3 if step < 3 else 0.0,
            "actor/kl_loss": ramp(0.0, 9.0, 4),
            "actor/entropy": ramp(1.2, 0.0, 4),
        }
    ),
    "truncation": run({"response_length/clip_ratio": ramp(0.2, 0.97), "reward/mean": lambda step: 0.3}),
    "truncation_grows": run({"response_length/clip_ratio": ramp(0.0, 0.97, 20), "response_length/mean": ramp(40, 120, 20)}),
    "validation_falls": run(arithmetic=[0.3, 0.6, 0.5, 0.2]),
    "reward_model_hacked": run({"reward/auto": None, "reward/reward_model": ramp(0.2, 0.9)}, arithmetic=[0.5, 0.6, 0.3, 0.1]),
    "kl_runaway": run({"actor/kl_loss": ramp(0.01, 6.0)}),
    "entropy_explosion": run({"actor/entropy": ramp(1.0, 5.0), "reward/mean": ramp(0.5, 0.1)}),
    "entropy_collapse": run(
        {
            "actor/entropy": ramp(1.2, 0.0, 10),
            "reward/mean": ramp(0.2, 0.3),
            "advantage/zero_group_fraction": ramp(0.2, 1.0, 10),
        }
    ),
    "format_without_answer": run(
        {"reward/auto": lambda step: 0.01, "reward/format": ramp(0.1, 1.0, 20), "reward/mean": ramp(0.1, 0.3)}
    ),
    "memorised": run({"trainer/epoch": ramp(0, 9), "reward/mean": ramp(0.2, 1.0, 20)}, arithmetic=[0.2, 0.3, 0.31]),
    "length_without_reward": run({"response_length/mean": ramp(40, 100), "reward/mean": lambda step: 0.4}),
    "off_policy": run({"staleness/mean": lambda step: 3.0, "rollout_corr/rollout_is_eff_sample_size": ramp(0.9, 0.1)}),
    "ratio_out_of_range": run({"actor/pg_clipfrac": ramp(0.1, 0.7)}),
    "groups_too_hard": run(
        {
            "advantage/zero_group_fraction": ramp(0.6, 0.98),
            "reward/mean": lambda step: 0.05,
            "actor/entropy": lambda step: 1.0,
        }
    ),
    "few_groups_with_signal": run({"advantage/zero_group_fraction": ramp(0.9, 0.95), "reward/mean": lambda step: 0.5}),
    "prompts_cut": run(
        {"prompt_length/max": lambda step: 64.0, "prompt_length/mean": lambda step: 63.5, "reward/max": lambda step: 0.0},
        config={"data": CONFIG["data"] | {"truncation": "left"}},
    ),
    "groups_too_easy": run({"advantage/zero_group_fraction": ramp(0.9, 0.98), "reward/mean": lambda step: 0.97}),
}
JUMPS: dict[str, Curve | None] = {"reward/mean": ramp(0.5, 0.3)}


def listed(*values: float) -> Curve:
    return lambda step: values[step - 1]


# The figures of scripts/ill_runs.py: an entropy bonus of the wrong sign, one larger than the reward, and GSPO's clip range.
STUCK: dict[str, Curve | None] = {
    "actor/entropy": listed(0.18, 0.18, 0.11, 0.08, 0.09, 0.11, 0.07, 0.06, 0.05, 0.02, 0.02, 0.03, 0.03, 0.02, 0.02),
    "advantage/zero_group_fraction": listed(0.2, 0.1, 0.6, 0.2, 0.6, 0.8, 0.8, 0.9, 0.8, 1, 0.9, 0.8, 0.9, 1, 0.9),
}
RANDOM: dict[str, Curve | None] = {
    "actor/entropy": listed(0.18, 0.22, 0.22, 0.25, 0.33, 0.45, 0.56, 0.62, 0.74, 0.84, 0.96, 1.09, 1.28, 1.33, 1.33),
    "actor/kl_loss": listed(0.0, 0.01, 0.09, 0.26, 0.52, 0.77, 2.34, 2.85, 3.19, 2.98, 3.64, 4.17, 3.68, 4.18, 4.09),
    "reward/mean": listed(0.36, 0.43, 0.38, 0.46, 0.4, 0.29, 0.09, 0.02, 0, 0.03, 0.03, 0, 0.02, 0, 0),
}
CLIPPED: dict[str, Curve | None] = {
    "actor/pg_clipfrac": lambda step: (0.29, 0.25, 0.21, 0.22, 0.16)[(step - 1) // 3],
    "advantage/zero_group_fraction": lambda step: (0.19, 0.25, 0.31, 0.31, 0.5)[(step - 1) // 3],
}
SUBTLE: list[tuple[str, RunRecord]] = [
    ("learning_rate_zero", run({"actor/lr": lambda step: 1e-14})),
    ("entropy_collapse", run(STUCK | {"reward/mean": ramp(0.36, 0.2, 15)}, steps=15)),
    ("entropy_explosion", run(RANDOM, steps=15)),
    ("ratio_out_of_range", run(CLIPPED, steps=15)),
    ("learning_rate_too_high", run(JUMPS | {"actor/kl_loss": lambda step: 5.9 if step > 1 else 0.0}, steps=15)),
    ("groups_too_easy", run({"reward/mean": ramp(0.985, 1.0, 15), "advantage/zero_group_fraction": lambda step: 0.97})),
    ("reward_model_hacked", run({"iterate/agreement": ramp(0.9, 0.3)})),
]
HARMLESS = {
    "healthy": run(),
    "one step": run(steps=1),
    "three steps": run(steps=3),
    "validated": run(arithmetic=[0.2, 0.5, 0.8]),
    "the end of a decay": run({"actor/lr": ramp(1e-6, 0.0)}),
    "a policy that learns while its entropy falls": run(STUCK | {"reward/mean": ramp(0.36, 0.85, 15)}, steps=15),
    "a task that is solved": run(
        {
            "reward/mean": ramp(0.27, 0.99, 20),
            "actor/entropy": ramp(0.9, 0.01, 20),
            "advantage/zero_group_fraction": ramp(0.2, 0.97, 20),
        },
        arithmetic=[0.27, 0.7, 0.95],
    ),
}


@pytest.mark.parametrize(("name", "record"), [*ILL.items(), *SUBTLE])
def test_an_illness_is_named_first(name: str, record: RunRecord) -> None:
    found = diagnose(record)
    assert found.findings and found.findings[0].name == name, as_text(found)


@pytest.mark.parametrize("name", HARMLESS)
def test_a_healthy_run_gets_no_finding(name: str) -> None:
    found = diagnose(HARMLESS[name])
    assert not found.findings, as_text(found)


def test_what_a_rule_does_not_mean_is_not_named() -> None:
    grown = run(JUMPS | {"actor/kl_loss": lambda step: 0.02 * step * step}, steps=15)
    assert "learning_rate_too_high" not in [one.name for one in diagnose(grown).findings], "it grows from step to step"
    few = CLIPPED | {"actor/pg_clipfrac": lambda step: 0.02, "advantage/zero_group_fraction": lambda step: 0.95}
    assert "ratio_out_of_range" not in [one.name for one in diagnose(run(few, steps=15)).findings]


def test_every_alarm_that_a_run_can_be_stopped_by_has_its_words() -> None:
    assert set(ILLNESSES) == set(get_args(Illness)) >= set(ILL)


def test_a_few_steps_are_too_few_to_be_called_healthy() -> None:
    short = [{"step": step, "reward/mean": 0.0, "reward/min": 0.0, "reward/max": 0.0} for step in range(5)]
    for records in ([], short[:1], short[:3]):
        found = diagnose(RunRecord({}, records))
        assert found.is_undecided and as_text(found).startswith(f"{found.num_steps} training steps are too few to judge")
    assert not diagnose(RunRecord({}, short)).is_undecided, "no response was ever rewarded"
    healthy = diagnose(run({}))
    assert not healthy.findings and not healthy.is_undecided


def test_every_key_that_is_advised_exists() -> None:
    roots = "actor_rollout_ref|algorithm|data|reward|trainer|critic"
    named = set(re.findall(rf"(?<![\w./])(?:{roots})(?:\.[a-z_0-9]+)+", " ".join(map(str, ILLNESSES.values()))))
    assert len(named) > 15
    assert not [key for key in named if not any(f"{leaf}.".startswith(f"{key}.") for leaf in leaves())]


def test_no_rule_fails_on_a_run_with_one_metric_of_any_kind() -> None:
    for key in {key for record in (run(), *ILL.values()) for key in record.records[0]} - {"step", "time"}:
        for value in (0.0, 1.0, -1.0, 1e9, math.nan, math.inf):
            diagnose(RunRecord({}, [{"step": step, key: value} for step in range(12)]))


def test_loops_are_seen_in_the_texts_of_responses(tmp_path: Path) -> None:
    prose = "".join(chr(97 + (7 * i * i + 3 * i) % 26) for i in range(400))
    (tmp_path / "rollouts").mkdir()
    for step, text in ((1, prose), (40, "and so on and on " * 40)):
        line = json.dumps({"prompt": "How much is it?", "response": text, "uid": "1", "reward": 0.0}) + "\n"
        (tmp_path / "rollouts" / f"step_{step}.jsonl").write_text(12 * line)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in run().records))
    found = diagnose(RunRecord.of_folder(tmp_path))
    assert found.findings and found.findings[0].name == "repetition", as_text(found)


def test_the_command_prints_findings_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in ILL["kl_runaway"].records))
    assert main(["doctor", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "ILL" in shown and "[kl_runaway, since step" in shown and "kl_loss_coef" in shown
    assert main(["doctor", str(tmp_path), "--strict"]) == 1
    capsys.readouterr()
    assert main(["doctor", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["weight"] == "ill"


def test_an_alarm_is_raised_once_in_the_step_in_which_it_begins() -> None:
    records = ILL["kl_runaway"].records
    alarms = Alarms(CONFIG)
    begun = {int(record["step"]): alarms.see(int(record["step"]), record) for record in records}
    raised = {step: [one.name for one in found] for step, found in begun.items() if found}
    assert list(raised.values()) == [["kl_runaway"]]
    step = next(iter(raised))
    assert 5 < step < STEPS
    again = Alarms(CONFIG)
    again.resume([dict(record) | ({"alarm/kl_runaway": 1.0} if record["step"] == step else {}) for record in records[:30]])
    assert [again.see(int(record["step"]), record) for record in records[30:]] == [[]] * (len(records) - 30)
    assert "kl_loss_coef" in as_warning(begun[step][0])


# ---- an exploited reward -----------------------------------------------------------------------------


FORM_WORTH = (0.1, 0.2, 0.5, 1.0)
"""Weights of a part for the form of the answer, beside 1 for the right one."""


def audited(kind: str, seed: int, steps: int, prompts: int) -> RunRecord:
    """Return a run in which each prompt has one audited response. The skill rises from 0.1 to 0.9; gaps open after step 20."""
    draw = np.random.default_rng(seed)
    records = []
    for step in range(1, steps + 1):
        skill, hole = 0.1 + 0.8 * min(1.0, step / 40), min(0.9, 0.12 * max(0, step - 20))
        right = (draw.random(prompts) < skill).astype(float)
        if kind == "stricter":
            reward, score = right, right * (draw.random(prompts) < 0.5)
        elif kind == "noisy":
            reward, score = right, np.where(draw.random(prompts) < 0.1, 1 - right, right)
        elif kind == "partial credit":
            digits = draw.random((prompts, 3)) < np.sqrt(skill)
            reward, score = digits.mean(1), digits.all(1).astype(float)
        elif kind == "another scale":
            reward, score = 10 * right - 3, right / 100
        elif kind == "unrelated":
            reward, score = (draw.random(prompts) < 0.4).astype(float), (draw.random(prompts) < 0.4).astype(float)
        elif kind == "form first":
            form = draw.random(prompts) < 1 / (1 + np.exp(-(step - 20) / 3))
            score = (draw.random(prompts) < 0.1 + 0.2 * step / steps).astype(float)
            reward = score + FORM_WORTH[seed % len(FORM_WORTH)] * form
        else:
            exploit = draw.random(prompts) < hole
            right = (draw.random(prompts) < 0.4).astype(float)
            reward, score = np.maximum(right / 2, exploit), right * ~exploit
        spread = reward.std() * score.std()
        pair = {"": score.mean(), "/std": score.std(), "/reward": reward.mean(), "/reward_std": reward.std()}
        pair["/correlation"] = np.mean((reward - reward.mean()) * (score - score.mean())) / spread if spread else 0.0
        pair["/num_prompts"] = prompts
        records.append({"step": step} | {f"audit/x{key}": float(value) for key, value in pair.items()})
    return RunRecord({}, records)


def first_step(record: RunRecord) -> int | None:
    """Return the step at which the run is first said to exploit its reward."""
    return next((n for n in range(1, len(record.records) + 1) if reward_exploited(RunRecord({}, record.records[:n]))), None)


@pytest.mark.parametrize("prompts", [16, 64])
def test_a_reward_that_is_exploited_is_named_within_ten_steps_of_the_gap(prompts: int) -> None:
    named = [first_step(audited("exploited", seed, 31, prompts)) for seed in range(10)]
    assert all(step is not None and 20 < step <= 30 for step in named), named
    found = reward_exploited(audited("exploited", 0, 31, prompts))
    assert found is not None and 0 < found.since <= 25
    assert "reward 0." in found.evidence and "audit/x 0." in found.evidence and "reward/audit/x is low" in found.advice[0]


@pytest.mark.parametrize("kind", ["stricter", "noisy", "partial credit", "another scale", "unrelated", "form first"])
def test_an_honest_reward_is_left_in_peace_whatever_its_audit_is_like(kind: str) -> None:
    assert [first_step(audited(kind, seed, 60, prompts)) for prompts in (8, 32) for seed in range(4)] == [None] * 8
