"""The doctor: every rule sees its illness, and healthy runs are left in peace."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from grpo_rl.__main__ import COMMANDS, main
from grpo_rl.config.compose import compose
from grpo_rl.config.schema.kinds import Illness
from grpo_rl.telemetry.diagnosis.diagnose import RULES, Alarms, as_text, as_warning, diagnose
from grpo_rl.telemetry.diagnosis.run_record import RunRecord, Series

STEPS = 40
Curve = Callable[[int], float]


def ramp(begin: float, end: float, by: int = STEPS) -> Curve:
    return lambda step: begin + (end - begin) * min(1.0, step / by)


HEALTHY: dict[str, Curve] = {
    "reward/mean": ramp(0.2, 0.8),
    "reward/min": lambda step: 0.0,
    "reward/max": lambda step: 1.0,
    "reward/std": lambda step: 0.4,
    "reward/auto": ramp(0.2, 0.8),
    "reward/timeouts": lambda step: 0.0,
    "reward/errors": lambda step: 0.0,
    "reward/invalid": lambda step: 0.0,
    "reward/dropped": lambda step: 0.0,
    "response_length/clip_ratio": lambda step: 0.05,
    "response_length/mean": ramp(40, 60),
    "prompt_length/max": lambda step: 20.0,
    "advantage/zero_group_fraction": ramp(0.2, 0.5),
    "actor/pg_loss": lambda step: 0.01 * math.sin(step),
    "actor/pg_clipfrac": lambda step: 0.02,
    "actor/ratio_max": lambda step: 1.5,
    "actor/ppo_kl": lambda step: 1e-3,
    "actor/kl_loss": ramp(0.0, 0.2),
    "actor/entropy": ramp(1.2, 0.4),
    "actor/lr": lambda step: 1e-6,
    "actor/grad_norm": lambda step: 0.4 + 0.05 * math.cos(step),
    "actor/nonfinite": lambda step: 0.0,
    "rollout/logprob_diff_mean": lambda step: 1e-6,
    "rollout/trained_token_fraction": lambda step: 1.0,
    "trainer/epoch": lambda step: 0.0,
    "timing_s/step": lambda step: 10.0,
    "timing_s/gen": lambda step: 5.0,
    "timing_s/reward": lambda step: 0.2,
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
    "nothing_trained": run({"rollout/trained_token_fraction": lambda step: 0.0}),
    "reward_never_seen": run(
        {"reward/mean": lambda step: 0.0, "reward/max": lambda step: 0.0, "advantage/zero_group_fraction": lambda step: 1.0}
    ),
    "reward_constant": run(
        {"reward/mean": lambda step: 1.0, "reward/min": lambda step: 1.0, "advantage/zero_group_fraction": lambda step: 1.0}
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
    "memory_nearly_full": run({"perf/host_memory_share": ramp(0.5, 0.99)}),
    "prompts_cut": run(
        {"prompt_length/max": lambda step: 64.0, "prompt_length/mean": lambda step: 63.5, "reward/max": lambda step: 0.0},
        config={"data": CONFIG["data"] | {"truncation": "left"}},
    ),
    "groups_too_easy": run({"advantage/zero_group_fraction": ramp(0.9, 0.98), "reward/mean": lambda step: 0.97}),
    "gradient_spikes": run({"actor/grad_norm": lambda step: 30.0 if step in (9, 20) else 0.4}),
    "restarts": run({"recovery/restarts_total": lambda step: float(step % 4 == 0)}),
}


@pytest.mark.parametrize("name", ILL)
def test_an_illness_is_named_first(name: str) -> None:
    found = diagnose(ILL[name])
    assert found.first is not None and found.first.name == name, as_text(found)


def test_a_learning_rate_that_rounding_loses_is_as_good_as_none() -> None:
    found = diagnose(run({"actor/lr": lambda step: 1e-14})).first
    assert found is not None and found.name == "learning_rate_zero" and "at most 1.0e-14" in found.evidence
    assert diagnose(run({"actor/lr": ramp(1e-6, 0.0)})).is_healthy, "the end of a decay"


def test_every_alarm_that_a_run_can_be_stopped_by_is_a_name_that_the_rules_give() -> None:
    source = Path(__file__).parents[3] / "grpo_rl" / "telemetry" / "diagnosis"
    text = "".join(file.read_text() for file in source.glob("*_rules.py"))
    known = set(get_args(Illness))
    assert set(ILL) <= known
    assert [name for name in known if f'"{name}"' not in text] == []
    named = set(re.findall(r'name="([a-z_]+)"', text))
    assert named - known == {"always_clipped", "loss_is_zero", "validation_noise", "phase_dominates", "idle_pools"}, "notes"


def test_a_healthy_run_gets_no_finding() -> None:
    for healthy in (run(), run(steps=1), run(steps=3), run(arithmetic=[0.2, 0.5, 0.8])):
        found = diagnose(healthy)
        assert found.is_healthy, as_text(found)
        assert "othing is wrong" in as_text(found)


def test_a_few_steps_are_too_few_to_be_called_healthy() -> None:
    short = [{"step": step, "reward/mean": 0.0, "reward/min": 0.0, "reward/max": 0.0} for step in range(5)]
    for records in ([], short[:1], short[:3]):
        found = diagnose(RunRecord({}, records))
        assert found.is_undecided and as_text(found).startswith(f"{found.num_steps} training steps are too few to judge")
    assert not diagnose(RunRecord({}, short)).is_undecided, "no response was ever rewarded"
    healthy = diagnose(run({}))
    assert healthy.is_healthy and not healthy.is_undecided


def test_a_run_that_has_solved_its_task_is_healthy() -> None:
    solved = run(
        {
            "reward/mean": ramp(0.27, 0.99, 20),
            "actor/entropy": ramp(0.9, 0.01, 20),
            "advantage/zero_group_fraction": ramp(0.2, 0.97, 20),
        },
        arithmetic=[0.27, 0.7, 0.95],
    )
    assert diagnose(solved).is_healthy, as_text(diagnose(solved))


def test_a_policy_whose_groups_fall_silent_while_it_learns_nothing_has_collapsed_at_half_of_its_entropy() -> None:
    # The figures of scripts/ill_runs.py, entropy_collapse: a bonus of the wrong sign.
    entropy = [0.182, 0.18, 0.111, 0.084, 0.086, 0.111, 0.074, 0.062, 0.051, 0.02, 0.018, 0.034, 0.029, 0.021, 0.023]
    silent = [0.19, 0.12, 0.62, 0.25, 0.62, 0.75, 0.75, 0.88, 0.81, 1.0, 0.94, 0.81, 0.88, 1.0, 0.88]
    rewards = [0.36, 0.34, 0.23, 0.33, 0.24, 0.3, 0.37, 0.12, 0.13, 0.19, 0.08, 0.38, 0.06, 0.0, 0.22]
    changes: dict[str, Curve | None] = {
        "actor/entropy": lambda step: entropy[step - 1],
        "advantage/zero_group_fraction": lambda step: silent[step - 1],
    }
    stuck = diagnose(run(changes | {"reward/mean": lambda step: rewards[step - 1]}, steps=15))
    assert stuck.first is not None and stuck.first.name == "entropy_collapse", as_text(stuck)
    learning = diagnose(run(changes | {"reward/mean": ramp(0.36, 0.85, 15)}, steps=15))
    assert learning.is_healthy, as_text(learning)


def test_one_spike_that_was_clipped_is_no_finding() -> None:
    # The figures of scripts/ill_runs.py, paradigm/sft: one batch of twelve times the median, clipped at 1, without a trace.
    once: dict[str, Curve | None] = {"actor/grad_norm": lambda step: 11.9 if step == 13 else 0.9}
    assert "gradient_spikes" not in [one.name for one in diagnose(run(once)).findings]
    twice: dict[str, Curve | None] = {"actor/grad_norm": lambda step: 11.9 if step in (5, 13) else 0.9}
    assert "gradient_spikes" in [one.name for one in diagnose(run(twice)).findings]


def test_a_kl_that_grows_from_step_to_step_is_no_step_that_is_too_large() -> None:
    changes: dict[str, Curve | None] = {"reward/mean": ramp(0.5, 0.3)}
    grown = diagnose(run(changes | {"actor/kl_loss": lambda step: 0.02 * step * step}, steps=15))
    assert "learning_rate_too_high" not in [one.name for one in grown.findings]
    sudden = diagnose(run(changes | {"actor/kl_loss": lambda step: 5.9 if step > 1 else 0.0}, steps=15))
    assert sudden.first is not None and sudden.first.name == "learning_rate_too_high"


def test_a_jump_of_a_policy_that_was_becoming_random_is_laid_to_its_entropy() -> None:
    # The figures of scripts/ill_runs.py, entropy_explosion: a bonus larger than the reward.
    entropy = [0.18, 0.22, 0.22, 0.25, 0.33, 0.45, 0.56, 0.62, 0.74, 0.84, 0.96, 1.09, 1.28, 1.33, 1.33]
    kl = [0.0, 0.01, 0.09, 0.26, 0.52, 0.77, 2.34, 2.85, 3.19, 2.98, 3.64, 4.17, 3.68, 4.18, 4.09]
    rewards = [0.36, 0.43, 0.38, 0.46, 0.4, 0.29, 0.09, 0.02, 0.0, 0.03, 0.03, 0.0, 0.02, 0.0, 0.0]
    changes: dict[str, Curve | None] = {
        "actor/entropy": lambda step: entropy[step - 1],
        "actor/kl_loss": lambda step: kl[step - 1],
        "reward/mean": lambda step: rewards[step - 1],
    }
    found = diagnose(run(changes, steps=15))
    assert found.first is not None and found.first.name == "entropy_explosion", as_text(found)


def test_the_cause_of_a_disagreement_is_read_from_the_configuration() -> None:
    differ: dict[str, Curve | None] = {"rollout/logprob_diff_mean": lambda step: 0.2}
    parts = CONFIG["actor_rollout_ref"]
    drops = {"actor_rollout_ref": parts | {"model": {"override_config": {"attention_dropout": 0.5}}}}
    found = diagnose(run(differ, config=drops)).first
    assert found is not None and "attention_dropout=0.5" in found.meaning and "dropout" in found.advice[0]
    coarse = {"actor_rollout_ref": parts | {"rollout": {"n": 4, "dtype": "bfloat16"}}}
    found = diagnose(run(differ, config=coarse)).first
    assert found is not None and "computes in bfloat16, and the trainer in auto" in found.meaning


def test_tokens_without_a_signal_do_not_hide_that_the_others_are_clipped() -> None:
    # The figures of scripts/ill_runs.py, ratio_out_of_range: the clip range of GSPO with ratios of tokens.
    clipped, silent = [0.29, 0.25, 0.21, 0.22, 0.16], [0.19, 0.25, 0.31, 0.31, 0.5]
    changes: dict[str, Curve | None] = {
        "actor/pg_clipfrac": lambda step: clipped[(step - 1) // 3],
        "advantage/zero_group_fraction": lambda step: silent[(step - 1) // 3],
    }
    found = diagnose(run(changes, steps=15)).first
    assert found is not None and found.name == "ratio_out_of_range" and "0.16 of all tokens" in found.evidence
    few = changes | {"actor/pg_clipfrac": lambda step: 0.02, "advantage/zero_group_fraction": lambda step: 0.95}
    assert "ratio_out_of_range" not in [one.name for one in diagnose(run(few, steps=15)).findings]


def test_a_task_that_was_solved_before_training_is_too_easy_even_where_the_reward_still_rises_a_little() -> None:
    # The figures of scripts/ill_runs.py: a reward that nearly every response gets.
    easy = run({"reward/mean": ramp(0.985, 1.0, 15), "advantage/zero_group_fraction": lambda step: 0.97})
    assert (found := diagnose(easy).first) is not None and found.name == "groups_too_easy"


def test_a_reward_model_that_agrees_less_with_the_rule_is_seen() -> None:
    parted = run({"iterate/agreement": ramp(0.9, 0.3)})
    assert (found := diagnose(parted).first) is not None and found.name == "reward_model_hacked"
    assert any("trainer.schedule=iterate" in advice for advice in found.advice)


def test_a_loss_of_zero_is_explained_and_is_no_illness() -> None:
    found = diagnose(run({"actor/pg_loss": lambda step: 3e-9}))
    assert found.is_healthy
    assert [one.name for one in found.findings] == ["loss_is_zero"]


@pytest.mark.parametrize(
    ("phase", "seconds", "key"),
    [
        ("gen", 9.0, "max_num_seqs"),
        ("gen", 7.0, None),
        ("old_logprobs", 6.0, "ppo_mini_batch_size"),
        ("reward", 6.0, "num_workers"),
    ],
)
def test_a_phase_that_takes_most_of_the_time_is_noted_with_the_key_that_shortens_it(
    phase: str, seconds: float, key: str | None
) -> None:
    found = diagnose(run({"timing_s/gen": lambda step: 1.0, f"timing_s/{phase}": lambda step: seconds}))
    notes = [one for one in found.findings if one.name == "phase_dominates"]
    assert found.is_healthy and bool(notes) == (key is not None)
    assert all(key is not None and key in one.advice[0] for one in notes)


def test_every_key_that_is_advised_exists() -> None:
    tree = yaml.safe_load(compose([]).yaml())
    roots = ("actor_rollout_ref", "algorithm", "data", "reward", "trainer", "critic")
    source = Path(__file__).parents[3] / "grpo_rl" / "telemetry" / "diagnosis"
    named = set()
    for file in source.glob("*_rules.py"):
        named |= set(re.findall(rf"(?<![\w./])(?:{'|'.join(roots)})(?:\.[a-z_0-9]+)+", file.read_text()))
    assert len(named) > 15
    missing = [key for key in named if not _has(tree, key) and not key.startswith("trainer.asynchronous")]
    assert not missing


def _has(tree: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return False
        tree = tree[part]
    return True


def test_no_rule_fails_on_a_run_with_one_metric_of_any_kind() -> None:
    keys = {key for record in [run().records[0], *(one.records[0] for one in ILL.values())] for key in record} - {
        "step",
        "time",
    }
    for key in keys:
        for value in (0.0, 1.0, -1.0, 1e9, math.nan, math.inf):
            records = [{"step": step, key: value} for step in range(12)]
            for rule in RULES:
                rule(RunRecord({}, records))


def test_the_ends_of_a_series_and_since_when_something_holds() -> None:
    series = Series([(step, float(step)) for step in range(1, 11)])
    assert (series.first, series.last, series.now) == (1.5, 9.5, 10.0)
    assert [Series([(1, 0.0)] * number).window for number in (1, 4, 10, 100)] == [1, 1, 2, 10]
    assert Series([(1, 0.0), (2, 5.0), (3, 0.0), (4, 5.0), (5, 6.0)]).since(lambda value: value > 1) == 4


def test_entropy_is_estimated_from_logged_rollouts(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    folder.mkdir()
    rows = [{"rollout_logprob_mean": -0.5, "response_length": 3}, {"rollout_logprob_mean": -1.0, "response_length": 1}]
    (folder / "step_4.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "metrics.jsonl").write_text('{"step": 4, "time": 1.0, "reward/mean": 0.5}\n')
    record = RunRecord.of_folder(tmp_path)
    assert record.entropy().points == [(4, pytest.approx((0.5 * 3 + 1.0 * 1) / 4))]


def responses(texts: list[str]) -> list[dict[str, Any]]:
    return [
        {"prompt": "How much is it?", "response": text, "uid": str(number), "reward": 0.0} for number, text in enumerate(texts)
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [("repetition", "and so on and on " * 40), ("language_mixing", "The answer is двадцать пять, I think.")],
)
def test_texts_are_read(tmp_path: Path, name: str, text: str) -> None:
    prose = "".join(chr(97 + (7 * i * i + 3 * i) % 26) for i in range(400))
    (tmp_path / "rollouts").mkdir()
    for step, one in ((1, prose), (40, text)):
        lines = "".join(json.dumps(row) + "\n" for row in responses([one] * 12))
        (tmp_path / "rollouts" / f"step_{step}.jsonl").write_text(lines)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in run().records))
    found = diagnose(RunRecord.of_folder(tmp_path))
    assert found.first is not None and found.first.name == name, as_text(found)


def test_the_command_prints_findings_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in ILL["kl_runaway"].records))
    assert main(["doctor", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "ILL" in shown and "[kl_runaway, since step" in shown and "kl_loss_coef" in shown
    assert main(["doctor", str(tmp_path), "--strict"]) == 1
    capsys.readouterr()
    assert main(["doctor", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["weight"] == "ill"


def test_no_run_and_no_command_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path)]) == 3
    assert "there is no metrics.jsonl" in capsys.readouterr().err
    assert main(["docter"]) == 2
    assert "there is no command 'docter'" in capsys.readouterr().err
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)


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


def test_a_step_without_a_trained_token_is_named_at_once_with_the_share_and_the_key() -> None:
    masked = {"rollout/masked_fraction": 1.0, "rollout/trained_token_fraction": 0.0}
    (found,) = Alarms(CONFIG).see(1, masked)
    assert found.name == "nothing_trained"
    assert "100% of the responses that were cut off" in found.meaning and "rollout_rs" not in found.meaning
    (found,) = Alarms(CONFIG).see(1, masked | {"rollout/masked_fraction": 0.25})
    assert "the 25% of the responses" in found.meaning and "rollout_rs rejects all other tokens" in found.meaning


def test_three_steps_of_equal_groups_raise_an_alarm() -> None:
    alarms = Alarms(CONFIG)
    equal = {"advantage/zero_group_fraction": 1.0, "reward/mean": 0.0, "reward/min": 0.0, "reward/max": 0.0}
    assert [bool(alarms.see(step, equal)) for step in range(1, 6)] == [False, False, True, False, False]
