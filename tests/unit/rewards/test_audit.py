"""The audit of a reward: which responses are chosen, what is measured of them, and that training never sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from grpo_rl.config.schema.tree import RewardConfig
from grpo_rl.errors import ConfigError
from grpo_rl.rewards.audit import Audit, auditing, sample
from grpo_rl.types import GREEDY, Prompt, Rollout

FUNCTIONS = """
def strict(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == ground_truth)


def breaks(data_source, solution_str, ground_truth, extra_info):
    return 1 / 0


def odd_breaks(data_source, solution_str, ground_truth, extra_info):
    return 1 / 0 if solution_str == "5" else 1.0
"""


def rollouts(num_prompts: int = 4, n: int = 4, text: str = "4") -> list[Rollout]:
    return [
        Rollout(
            Prompt(f"p{prompt}", (1,), "2+2=", "test", "4"), number, (1,), (0.0,), "stop", ((0, 1),), text=text, reward=prompt + number / 10
        )
        for prompt in range(num_prompts)
        for number in range(n)
    ]  # fmt: skip


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def audit(stack: ExitStack, tmp_path: Path, *names: str, share: float = 1.0) -> Audit:
    (tmp_path / "own.py").write_text(FUNCTIONS)
    config = RewardConfig(audit=[f"{tmp_path}/own.py:{name}" for name in names], audit_share=share, on_failure="stop")
    return Audit(config, auditing(config, ["test"]), stack)


def test_a_share_is_spread_over_the_prompts_and_chosen_by_name() -> None:
    given = rollouts()
    given[0].reward, given[5].failure = None, "reward_error"
    given.append(Rollout(given[0].prompt, GREEDY, (1,), (0.0,), "stop", ((0, 1),), reward=1.0))
    for share, counts in ((0.01, [1]), (0.28, [1, 1, 1, 1]), (0.5, [2, 2, 2, 1]), (1.0, [4, 4, 3, 3])):
        chosen = sample(given, share)
        by_prompt = [sum(one.prompt.uid == uid for one in chosen) for uid in ("p0", "p1", "p2", "p3")]
        assert sorted(filter(None, by_prompt), reverse=True) == counts
        assert all(one.reward is not None and one.failure is None and one.sample_index != GREEDY for one in chosen)
        again = sample(given[::-1], share)
        assert {id(one) for one in again} == {id(one) for one in chosen}


def test_pairs_of_reward_and_audit_are_measured_over_prompts_and_no_rollout_changes(stack: ExitStack, tmp_path: Path) -> None:
    given = rollouts(num_prompts=2, n=2)
    given[3].text = "5"
    before = [(one.reward, dict(one.reward_parts), one.failure) for one in given]
    tried = audit(stack, tmp_path, "strict")
    tried.submit(given)
    warnings: list[str] = []
    found = tried.wait(warnings.append)
    # Prompts' means: rewards 0.05 and 1.05, audits 1 and 0.5.
    assert found == pytest.approx({
        "audit/failures": 0.0, "audit/strict": 0.75, "audit/strict/std": 0.25, "audit/strict/reward": 0.55,
        "audit/strict/reward_std": 0.5, "audit/strict/correlation": -1.0, "audit/strict/num_prompts": 2.0,
    })  # fmt: skip
    assert [(one.reward, dict(one.reward_parts), one.failure) for one in given] == before and not warnings
    assert [one.reward_parts for one in tried.logged(given)] == [{"audit/strict": value} for value in (1.0, 1.0, 1.0, 0.0)]


def test_an_audit_that_fails_is_counted_and_stops_nothing(stack: ExitStack, tmp_path: Path) -> None:
    given, warnings = rollouts(num_prompts=2, n=2), list[str]()
    given[3].text = "5"
    some = audit(stack, tmp_path, "odd_breaks")
    some.submit(given)
    found = some.wait(warnings.append)
    assert found["audit/failures"] == 1.0 and found["audit/odd_breaks"] == 1.0 and "1 of 4 rewards failed" in warnings[0]
    none = audit(stack, tmp_path, "breaks")
    none.submit(given)
    assert none.wait(warnings.append) == {"audit/failures": 4.0} and "no response of this step was audited" in warnings[1]
    assert none.logged(given) == given


def test_a_name_that_is_unknown_and_options_of_audits_are_checked_before_the_start(stack: ExitStack, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward\.audit: unknown reward function 'exact_macht'"):
        auditing(RewardConfig(audit=["exact_macht"]), ["test"])
    config = RewardConfig(functions=["auto"], audit=["exact_match"], function_kwargs={"exact_match": {"ignore_case": False}})
    tried = Audit(config, auditing(config, ["test"]), stack)
    tried.submit(rollouts())
    assert tried.wait(print)["audit/exact_match"] == 1.0
