"""The choice of the groups that a step trains on, with rewards written down in the test in place of a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from grpo_rl.config.schema.tree import (
    AlgorithmConfig,
    Config,
    DataConfig,
    FilterGroupsConfig,
    OverlongBufferConfig,
)
from grpo_rl.data.dataset import PromptDataset
from grpo_rl.errors import DataError, FunctionError
from grpo_rl.models.builtin import build_tokenizer
from grpo_rl.trainer.sampled.selection import Selection, metric_of
from grpo_rl.trainer.sampled.trained import penalize_overlong
from grpo_rl.types import Metrics, Prompt, Rollout

FACTORS = {"auto": 1.0}
MIXED, SOLVED, FAILED = [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]


@pytest.fixture(scope="module")
def data() -> PromptDataset:
    config = DataConfig(max_prompt_length=32)
    return PromptDataset(["task:arithmetic?num_rows=6"], config, build_tokenizer(128)).checked()


def config_of(groups: Mapping[str, Any] | None = None, **data: Any) -> Config:
    settings = FilterGroupsConfig() if groups is None else FilterGroupsConfig(enable=True, **groups)
    return Config(
        data=DataConfig(**({"train_batch_size": 2, "shuffle": False} | data)),
        algorithm=AlgorithmConfig(filter_groups=settings),
    )


def answers(scores: Mapping[int, Sequence[float | None]]) -> Callable[[list[Prompt]], list[Rollout]]:
    """A policy whose responses to a row have these scores; None is a reward that failed."""

    def sample(prompts: list[Prompt]) -> list[Rollout]:
        return [
            Rollout(prompt, number, (2,), (-0.5,), "stop", ((0, 1),), reward=score, reward_parts={"auto": score})
            if score is not None
            else Rollout(prompt, number, (2,), (-0.5,), "stop", ((0, 1),), failure="reward_timeout")
            for prompt in prompts
            for number, score in enumerate(scores[int(prompt.uid.rpartition("r")[2])])
        ]

    return sample


class Selected(NamedTuple):
    """The rollouts of a step."""

    trained: list[Rollout]
    sampled: list[Rollout]
    metrics: Metrics


def step(selection: Selection, sample: Callable[[list[Prompt]], list[Rollout]]) -> Selected:
    sampled: list[Rollout] = []

    def draw() -> list[Rollout]:
        drawn = selection.prompts()
        rollouts = sample([prompt for _, prompt in drawn])
        selection.note({prompt.uid: row for row, prompt in drawn}, rollouts)
        sampled.extend(rollouts)
        return rollouts

    trained, metrics = selection.choose(draw(), draw)
    return Selected(trained, sampled, metrics)


def uids(rollouts: Sequence[Rollout]) -> list[str]:
    return list(dict.fromkeys(rollout.prompt.uid for rollout in rollouts))


def test_rollouts_whose_reward_failed_are_sampled_and_not_trained(data):
    selected = step(Selection(config_of(), data, FACTORS), answers({0: [1.0, None, 0.0], 1: [None, None, None]}))
    assert [rollout.reward for rollout in selected.trained] == [1.0, 0.0]
    assert [rollout.reward for rollout in selected.sampled] == [1.0, None, 0.0, None, None, None]


def test_the_pass_rate_of_a_prompt_is_that_of_the_rewards_it_got(data):
    selection = Selection(config_of(retire_above=1.0), data, FACTORS)
    step(selection, answers({0: [1.0, None], 1: [None, None]}))
    assert selection.retired == {0}


def test_groups_without_signal_are_replaced_by_those_of_further_prompts(data):
    sample = answers({0: SOLVED, 1: MIXED, 2: FAILED, 3: SOLVED, 4: MIXED, 5: MIXED})
    selected = step(Selection(config_of({}), data, FACTORS), sample)
    # Row 5 is one group too many, and the last that came.
    assert uids(selected.trained) == ["e0-r1", "e0-r4"]
    assert [rollout.reward for rollout in selected.trained] == MIXED + MIXED
    assert uids(selected.sampled) == [f"e0-r{row}" for row in range(6)]
    assert selected.metrics == {"filter_groups/num_gen_batches": 3.0, "filter_groups/kept_fraction": 0.5}


def test_too_few_groups_with_signal_end_the_run_with_the_numbers_and_the_keys(data):
    selection = Selection(config_of({"max_num_gen_batches": 2}), data, FACTORS)
    sampled: list[int] = []

    def sample(prompts: list[Prompt]) -> list[Rollout]:
        sampled.append(len(prompts))
        return answers({0: MIXED, 1: SOLVED, 2: FAILED, 3: FAILED})(prompts)

    with pytest.raises(DataError, match=r"only 1 of 4 groups had a signal in 2 batches .*max_num_gen_batches"):
        step(selection, sample)
    assert sampled == [2, 2]


def test_without_refilling_only_the_groups_with_signal_are_trained(data):
    selection = Selection(config_of({"refill": False}), data, FACTORS)
    sample = answers({0: SOLVED, 1: MIXED, 2: FAILED, 3: SOLVED})
    first, second = step(selection, sample), step(selection, sample)
    assert uids(first.trained) == ["e0-r1"] and len(first.sampled) == 4
    assert first.metrics == {"filter_groups/num_gen_batches": 1.0, "filter_groups/kept_fraction": 0.5}
    assert second.trained == [] and second.metrics["filter_groups/kept_fraction"] == 0.0


def test_a_penalty_for_length_is_no_signal_in_the_score_but_one_in_the_reward(data):
    prompt = data.prompt(0, "e0-r0")
    rollouts = [
        Rollout(prompt, number, (2,) * length, (0.0,) * length, "stop", ((0, length),), reward=0.1, reward_parts={"auto": 0.1})
        for number, length in enumerate([7, 9])
    ]
    penalize_overlong(rollouts, OverlongBufferConfig(len=7), 10)
    assert [metric_of(rollout, "score", FACTORS) for rollout in rollouts] == [0.1, 0.1]
    assert [metric_of(rollout, "overlong", FACTORS) for rollout in rollouts] == pytest.approx([-4 / 7, -6 / 7])
    assert [metric_of(rollout, "seq_reward", FACTORS) for rollout in rollouts] == pytest.approx([0.1 - 4 / 7, 0.1 - 6 / 7])
    assert not step(Selection(config_of({"refill": False}), data, FACTORS), lambda _: rollouts).trained
    assert step(Selection(config_of({"refill": False, "metric": "seq_reward"}), data, FACTORS), lambda _: rollouts).trained


KEEP = """
def keep(group):
    rewards = [rollout.reward for rollout in group]
    return 0.0 < sum(rewards) / len(rewards) <= 0.5


def forgetful(group):
    keep(group)


def broken(group):
    return group.reward
"""


def test_a_function_of_the_users_chooses_the_groups_and_refilling_asks_it_too(data, tmp_path):
    (tmp_path / "my_filter.py").write_text(KEEP)
    scores = answers({0: SOLVED, 1: [1.0, 0.0, 0.0], 2: [1.0, 1.0, 0.0], 3: FAILED, 4: [1.0, None, 0.0], 5: MIXED})
    metric = f"{tmp_path / 'my_filter.py'}:keep"
    selected = step(Selection(config_of({"metric": metric}), data, FACTORS), scores)
    assert uids(selected.trained) == ["e0-r1", "e0-r4"] and selected.metrics["filter_groups/num_gen_batches"] == 3.0
    filtered = step(Selection(config_of({"metric": metric, "refill": False}), data, FACTORS), scores)
    assert uids(filtered.trained) == ["e0-r1"]
    for name, message in (
        ("forgetful", "returned None"),
        ("broken", r"in .*my_filter.py, line \d+, in broken: return group.reward"),
    ):
        selection = Selection(config_of({"metric": f"{tmp_path / 'my_filter.py'}:{name}"}), data, FACTORS)
        with pytest.raises(FunctionError, match=message):
            step(selection, scores)


NEXT_ROWS = """
def next_rows(draw):
    draw.state["draws"] = draw.state.get("draws", 0) + 1
    rows = range(draw.num_rows) if draw.state["draws"] <= 4 else draw.rng.permutation(draw.num_rows)
    return sorted(rows, key=lambda row: draw.pass_rates.get(row, 0.5))[: draw.size]


def too_few(draw):
    return [0]


def outside(draw):
    return [0, draw.num_rows]


def nothing(draw):
    draw.state["draws"] = 1
"""


def test_a_curriculum_chooses_by_pass_rates_and_a_restored_one_goes_on_alike(data, tmp_path):
    (tmp_path / "my_order.py").write_text(NEXT_ROWS)
    config = config_of(curriculum=f"{tmp_path / 'my_order.py'}:next_rows")
    sample = answers({0: SOLVED, 1: SOLVED, 2: FAILED, 3: SOLVED, 4: FAILED, 5: SOLVED})
    original, restored = (Selection(config, data, FACTORS) for _ in range(2))
    drawn = [[int(uid.rpartition("r")[2]) for uid in uids(step(original, sample).sampled)] for _ in range(4)]
    # Rows that nobody has answered count as one half; of each draw the rows that fail stay in front.
    assert drawn == [[0, 1], [2, 3], [2, 4], [2, 4]]
    assert original.sampler.epoch == 1 and original.sampler.state == {"draws": 4}
    restored.load_state_dict(json.loads(json.dumps(original.state_dict())))
    for _ in range(3):
        assert uids(step(original, sample).sampled) == uids(step(restored, sample).sampled)


@pytest.mark.parametrize("name", ["too_few", "outside", "nothing"])
def test_a_curriculum_that_returns_something_else_is_told_what_it_returns(name, data, tmp_path):
    (tmp_path / "my_order.py").write_text(NEXT_ROWS)
    selection = Selection(config_of(curriculum=f"{tmp_path / 'my_order.py'}:{name}"), data, FACTORS)
    with pytest.raises(FunctionError, match=r"it returns 2 row numbers from 0 to 5"):
        selection.prompts()


def test_prompts_of_named_rows_have_names_of_their_own_and_leave_the_order_as_it_is(data):
    selection = Selection(config_of(), data, FACTORS)
    assert [prompt.uid for _, prompt in selection.prompts([4, 4])] == ["s0-r4", "s1-r4"]
    assert [prompt.uid for _, prompt in selection.prompts()] == ["e0-r0", "e0-r1"]
    restored = Selection(config_of(), data, FACTORS)
    restored.load_state_dict(json.loads(json.dumps(selection.state_dict())))
    assert [prompt.uid for _, prompt in restored.prompts([0])] == ["s2-r0"]
    with pytest.raises(ValueError, match="there is no row 6: the training data have 6 rows"):
        selection.prompts([6])


# ---- prompts that are learnt ------------------------------------------------------------------------------


def test_learnt_prompts_are_not_drawn_in_later_epochs(data):
    selection = Selection(config_of(retire_above=0.5), data, FACTORS)
    sample = answers({0: MIXED, 1: FAILED, 2: FAILED, 3: SOLVED, 4: FAILED, 5: FAILED})
    steps = [step(selection, sample) for _ in range(5)]
    assert [uids(selected.trained) for selected in steps] == [
        ["e0-r0", "e0-r1"],
        ["e0-r2", "e0-r3"],
        ["e0-r4", "e0-r5"],
        ["e1-r1", "e1-r2"],
        ["e1-r4", "e1-r5"],
    ]
    assert [selected.metrics["data/retired_fraction"] for selected in steps[:3]] == [1 / 6, 2 / 6, 2 / 6]
    assert not selection.exhausted


def test_fewer_prompts_than_a_batch_are_the_end_of_the_data(data):
    selection = Selection(config_of(retire_above=0.9), data, FACTORS)
    sample = answers({0: SOLVED, 1: SOLVED, 2: SOLVED, 3: SOLVED, 4: SOLVED, 5: FAILED})
    ends = [step(selection, sample) and selection.exhausted for _ in range(3)]
    assert ends == [False, False, True]
    with pytest.raises(DataError, match="fewer than 2 of 6 training rows are left"):
        step(selection, sample)


@pytest.mark.parametrize("steps_before", range(5))
def test_a_restored_selection_draws_what_the_original_does(data, steps_before):
    config = config_of({"metric": "auto"}, retire_above=0.9, shuffle=True)
    sample = answers({0: MIXED, 1: MIXED, 2: FAILED, 3: MIXED, 4: SOLVED, 5: MIXED})
    original, restored = (Selection(config, data, FACTORS) for _ in range(2))
    for _ in range(steps_before):
        step(original, sample)
    restored.load_state_dict(json.loads(json.dumps(original.state_dict())))
    for _ in range(6):
        ours, theirs = step(original, sample), step(restored, sample)
        assert uids(ours.sampled) == uids(theirs.sampled)
        assert uids(ours.trained) == uids(theirs.trained) and ours.metrics == theirs.metrics
