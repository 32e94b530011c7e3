"""Results from lines of responses: the numbers of validation, tables, and what is compared."""

from __future__ import annotations

import pytest

from grpo_rl.evaluation.evaluation_results import (
    as_json,
    differences_table,
    results_of,
    shown_metrics,
    table,
)


def line(reward: float | None, answer: float | None = None, *, source: str = "sums", failure: str | None = None) -> dict:
    parts = {"acc": reward} if reward is not None else {}
    parts |= {"answer": answer} if answer is not None else {}
    return {
        "data_source": source,
        "reward": reward,
        "reward_parts": parts,
        "failure": failure,
        "response_length": 4,
        "finish_reason": "stop",
    }


GROUPS = {
    0: [line(1.0, 7), line(0.0, 8), line(0.0, 8), line(1.0, 7)],  # a tie: 7 is right, 8 is not
    1: [line(1.0, 5), line(1.0, 5), line(1.0, 5), line(0.0, 6)],
    2: [line(None, failure="reward_timeout"), line(0.0, 1), line(0.0, 2), line(0.0, 2)],
}


def test_the_numbers_of_a_source_by_hand() -> None:
    [found] = results_of([GROUPS])
    means = {name: estimates[0].mean for name, estimates in found.metrics.items()}
    assert means["mean@4"] == pytest.approx((2 / 4 + 3 / 4 + 0) / 3)
    assert means["pass@1"] == pytest.approx(means["mean@4"])
    assert means["pass@2"] == pytest.approx((5 / 6 + 1 + 0) / 3)
    assert means["pass@4"] == pytest.approx(2 / 3)
    assert means["maj@4"] == pytest.approx((0.5 + 1 + 0) / 3)
    assert found.num_prompts == 3 and found.failures == [1] and found.lengths == [4.0] and found.binary


def test_sources_are_apart_and_together() -> None:
    groups = {0: [line(1.0)], 1: [line(0.0, source="words")], 2: [line(0.0, source="words")]}
    found = {one.source: one for one in results_of([groups])}
    assert list(found) == ["sums", "words", "all sources"]
    assert [one.num_prompts for one in found.values()] == [1, 2, 3]
    assert found["all sources"].metrics["mean@1"][0].mean == pytest.approx(1 / 3)
    assert "maj@1" not in found["sums"].metrics


def test_a_table_has_a_row_for_each_model_and_each_difference() -> None:
    better = {row: [line(1.0, 1)] * 4 for row in GROUPS}
    [found] = results_of([GROUPS, better])
    header, rows = table(found, ["before", "after"])
    assert header == ["", "before", "after"]
    assert [row[0] for row in rows] == [
        *("mean@4", "pass@2", "pass@4", "maj@4"),
        *("tokens per response", "cut at the limit", "failed rewards"),
    ]
    assert rows[0][2] == "1.000 [1.000, 1.000]" and rows[-1][1:] == ["1", "0"]
    header, rows = differences_table(found, ["before", "after"])
    assert header == ["minus before", "after"] and rows[0][1].startswith("+0.583 [")
    # Three prompts differ: 2 of 8 signs.
    assert rows[0][1].endswith("p=0.250")
    content = as_json([found], ["before", "after"])[0]
    assert content["metrics"]["mean@4"]["after"]["mean"] == 1.0
    assert content["differences to before"]["mean@4"]["after"]["p"] == pytest.approx(0.25)


def test_values_that_are_no_accuracies_are_marked() -> None:
    [found] = results_of([{0: [line(0.5), line(0.25)], 1: [line(1.0), line(0.0)]}])
    assert not found.binary and "pass@1" in shown_metrics(found)
    [lower] = results_of([{0: [line(0.5), line(0.25)], 1: [line(1.0), line(0.0)]}], pass_at=0.5)
    assert found.metrics["pass@2"][0].mean == 0.5 and lower.metrics["pass@2"][0].mean == 1.0
