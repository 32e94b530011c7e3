"""Trainings on pairs whose controller is killed by kill -9: the same command ends with the bits of the undisturbed one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oracles
import pytest
from oracles import Training
from tiny_run import STEPS

END_S = 300.0
pytestmark = [pytest.mark.campaign, pytest.mark.timeout(1200)]
IN_REFERENCE = "driver.reference:kill9@part=train,n=2,once"
IN_UPDATE = "driver.phase:kill9@step=3,phase=update_actor,once"
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode=dpo"
ROWS = [
    "data.responses=rows",
    "data.train_files=task:arithmetic?carrying=1&forgotten_carries=1&num_rows=32",
    "data.chosen_key=reward_model.ground_truth",
    "data.rejected_key=extra_info.demonstration",
]


def words_for_rows(run_words: list[str]) -> list[str]:
    """The tiny run's words without those of sampling."""
    gone = ("actor_rollout_ref.rollout.", "reward.", "data.train_files=")
    return [*(word for word in without_kl(run_words) if not word.startswith(gone)), LOSS, *ROWS]


def without_kl(words: list[str]) -> list[str]:
    """These words without that of the KL term, which losses over pairs do not have."""
    return [word for word in words if "kl_loss_coef" not in word]


def killed_and_undisturbed(
    training: Callable[..., Training], words: list[str], *faults: str
) -> tuple[Training, list[int], list[str]]:
    """A training that is started until it ends by itself, its exit codes, and the two hashes to compare."""
    calm = training("calm", words)
    assert calm.start().wait(END_S) == 0, calm.describe()
    broken = training("broken", words, ";".join(faults))
    codes = []
    for _ in range(len(faults) + 1):
        codes.append(broken.start().wait(END_S))
    assert codes[-1] == 0, broken.describe()
    hashes = [oracles.state_hash(run.path, STEPS) for run in (calm, broken)]
    assert oracles.learnt(calm.path) == oracles.learnt(broken.path)
    return broken, codes, hashes


def test_dpo_on_rows_killed_in_the_reference_pass_and_in_a_step(training: Any, run_words: list[str]) -> None:
    broken, codes, hashes = killed_and_undisturbed(training, words_for_rows(run_words), IN_REFERENCE, IN_UPDATE)
    assert [fired["fault"] for fired in broken.fired()] == [IN_REFERENCE, IN_UPDATE]
    assert codes == [-9, -9, 0] and hashes[0] == hashes[1]
    # A start without a checkpoint begins a new log, and sets the earlier one aside.
    logs = sorted(broken.path.rglob("console.log"), key=lambda log: log.stat().st_mtime)
    said = " ".join(" ".join(log.read_text() for log in logs).split())
    # The killed pass left no half of a file: the second start computed all of it, and the last one read it.
    assert said.count("computing the reference's log-probs of all rows, once ...") == 2
    assert said.count("computing the reference's log-probs of all rows, once: ") == 1
    assert said.count("the reference's log-probs of all rows are in") == 1
    assert (broken.path / "reference_logprobs.safetensors").is_file()


def test_online_dpo_killed_in_a_step(training: Any, run_words: list[str]) -> None:
    words = [
        *without_kl(run_words),
        LOSS,
        "reward.functions=[length]",
        "reward.function_kwargs={length: {target: 4, slack: 9}}",
    ]
    broken, codes, hashes = killed_and_undisturbed(training, words, IN_UPDATE)
    assert codes == [-9, 0] and hashes[0] == hashes[1]
    rows = oracles.read_metrics(broken.path / "metrics.jsonl")
    assert [row["step"] for row in rows if row.get("pairs/num_pairs", 0) > 0], "a run without pairs would compare nothing"
