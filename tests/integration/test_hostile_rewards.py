"""The corpus of hostile responses through reward processes, with every rule that reads mathematics."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_rl.config.schema.tree import RewardConfig
from grpo_rl.errors import RewardError
from grpo_rl.rewards.compose import RewardFunction
from grpo_rl.rewards.runtime.runner import RewardRunner
from grpo_rl.types import Prompt, Rollout
from tests.hostile_responses import CANARY, hostile_responses

TIMEOUT_S, GRACE_S = 2.0, 0.5
TRUTHS = {"math": r"\frac{3}{4}", "countdown": {"target": 98, "numbers": [44, 19, 35]}, "gsm8k": "18"}
RIGHT = {"math": r"\boxed{0.75}", "countdown": "<answer>44 + 19 + 35</answer>", "gsm8k": "#### 18"}


@pytest.fixture(scope="module", params=list(TRUTHS))
def rule(request: pytest.FixtureRequest) -> Iterator[tuple[str, RewardRunner]]:
    config = RewardConfig(functions=[request.param], num_workers=1, timeout_s=TIMEOUT_S)
    runner = RewardRunner(RewardFunction.from_config(config), config, data_sources=["any"])
    yield request.param, runner
    runner.close()


def peak_mib(pid: int) -> float:
    """The most memory that the process has had. What getrusage says of children counts what they were forked from, too."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def test_each_is_scored_0_or_fails_within_its_deadline_and_its_neighbour_is_right(rule: tuple[str, RewardRunner]) -> None:
    name, runner = rule
    CANARY.unlink(missing_ok=True)
    cases = hostile_responses()
    assert len(cases) >= 150
    late, scored, neighbours, peaks = [], [], [], []
    for case, text in cases:
        hostile, good = (
            Rollout(Prompt(uid, (1,), "", "any", TRUTHS[name]), 0, (1,), (0.0,), "stop", ((1, 1),), text=response)
            for uid, response in (("hostile", text), ("good", RIGHT[name]))
        )
        runner.check_started()
        started = time.perf_counter()
        runner.submit(hostile)
        runner.submit(good)
        # One that fails is all that is waited for, which would end a run.
        with contextlib.suppress(RewardError):
            runner.wait([hostile])
        if time.perf_counter() - started > TIMEOUT_S + GRACE_S:
            late.append(case)
        if hostile.failure is None and hostile.reward_parts["acc"] != 0.0:
            scored.append(case)
        runner.wait([good])
        if good.reward != 1.0:
            neighbours.append(case)
        peaks.append(peak_mib(runner.pids[0]))
    assert (late, scored, neighbours) == ([], [], [])
    assert not CANARY.exists()
    assert 0 < max(peaks) < 512
