import numpy as np
import pytest

from grpo_rl.data.collate import collate
from grpo_rl.errors import RewardError
from grpo_rl.types import Prompt, Rollout, Support


def rollout(uid, prompt_ids, response_ids, reward, logprobs=None, text="same text"):
    return Rollout(
        prompt=Prompt(uid, tuple(prompt_ids), text, "test"),
        sample_index=0,
        response_ids=tuple(response_ids),
        rollout_logprobs=tuple(-0.5 for _ in response_ids) if logprobs is None else tuple(logprobs),
        finish_reason="stop",
        versions=((1, len(response_ids)),),
        reward=reward,
    )


def test_columns_hold_the_rollouts_back_to_back_in_their_order():
    rollouts = [rollout("b", [1, 2], [3], 1.0, [-0.1]), rollout("a", [4], [5, 6], 0.0, [-0.2, -0.3])]
    rollouts += [rollout("b", [1, 2], [7], 0.5, [-0.4]), rollout("a", [4], [], 0.0)]
    rollouts[1].finish_reason = "length"
    batch = collate(rollouts)
    assert batch.prompt_lengths_N.tolist() == [2, 1, 2, 1]
    assert batch.response_lengths_N.tolist() == [1, 2, 1, 0]
    assert batch.token_ids_S.tolist() == [1, 2, 3, 4, 5, 6, 1, 2, 7, 4]
    assert batch.rewards_N.tolist() == [1.0, 0.0, 0.5, 0.0]
    assert batch.rollout_logprobs_T.tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4])
    assert batch.group_N.tolist() == [0, 1, 0, 1]
    assert batch.truncated_N.tolist() == [False, True, False, False]
    assert batch.select([2, 3]).token_ids_S.tolist() == [1, 2, 7, 4] and batch.counts().num_sequences == 3


def sampled_from(sets):
    return Support(np.array([len(s) for s in sets], dtype=np.int32), np.array([i for s in sets for i in s], dtype=np.int32))


def test_what_the_tokens_were_sampled_from_becomes_sizes_and_ids():
    one, empty, two = rollout("a", [1], [5, 6], 0.0), rollout("a", [1], [], 0.0), rollout("b", [1], [7], 1.0)
    one.support, two.support = sampled_from([[5, 9], [6]]), sampled_from([[3, 7, 8]])
    batch = collate([one, empty, two])
    assert batch.support_counts_T.tolist() == [2, 1, 3]
    assert batch.support_ids_M.tolist() == [5, 9, 6, 3, 7, 8]
    assert batch.select([2, 1]).support_ids_M.tolist() == [3, 7, 8]
    assert collate([rollout("a", [1], [5], 0.0)]).support_ids_M is None


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ([[5, 9]], "3 tokens were sampled from 2 sets"),
        ([[5], [5]], "not among those it was sampled from"),
        (None, "some do not"),
    ],
)
def test_a_support_that_does_not_fit_the_tokens_is_refused(sets, message):
    one, other = rollout("a", [1], [5, 6], 0.0), rollout("a", [1], [7], 0.0)
    one.support, other.support = None if sets is None else sampled_from(sets), sampled_from([[7]])
    with pytest.raises(ValueError, match=message):
        collate([one, other])


@pytest.mark.parametrize(
    ("reward", "logprobs", "message"), [(None, None, "a, sample 0, has no reward"), (0.0, [-0.1], "2 tokens and 1 log-probs")]
)
def test_a_rollout_without_reward_or_logprobs_is_refused(reward, logprobs, message):
    with pytest.raises(ValueError, match=message):
        collate([rollout("a", [1], [2, 3], reward, logprobs)])


def test_parts_of_the_reward_become_columns_where_they_are_asked_for():
    rollouts = [rollout("a", [1], [2], 1.0), rollout("a", [1], [3], 0.0)]
    for number, each in enumerate(rollouts):
        each.reward_parts = {"gsm8k": 1.0 - number, "gsm8k/acc": 9.0, "format": 0.5}
    batch = collate(rollouts, ["format", "gsm8k"])
    assert batch.reward_parts_NP.tolist() == [[0.5, 1.0], [0.5, 0.0]]
    assert batch.select([1]).reward_parts_NP.tolist() == [[0.5, 0.0]]
    assert collate(rollouts).reward_parts_NP is None
    for item, right in zip(rollouts, (1.0, 0.0), strict=True):
        item.reward_parts = {"compute_score": 0.5, "compute_score/right": right}
    assert collate(rollouts, parts=("right", "compute_score")).reward_parts_NP.tolist() == [[1.0, 0.5], [0.0, 0.5]]
    with pytest.raises(RewardError, match="0 parts called 'wrong'"):
        collate(rollouts, parts=("wrong",))


def test_baselines_and_steps_become_columns_where_the_rollouts_have_them():
    rollouts = [rollout("a", [1], [2, 3], 1.0), rollout("a", [1], [4], 0.0), rollout("a", [1], [5, 6], 0.0)]
    assert collate(rollouts).baselines_N is None and collate(rollouts).step_ends_K is None
    for each, steps in zip(rollouts, [((0, 1.0), (1, 0.5)), (), ((1, 0.25),)], strict=True):
        each.baseline, each.steps = 0.75, steps
    batch = collate(rollouts)
    assert batch.baselines_N.tolist() == [0.75, 0.75, 0.75]
    assert batch.num_steps_N.tolist() == [2, 0, 1]
    assert (batch.step_ends_K.tolist(), batch.step_rewards_K.tolist()) == ([0, 1, 1], [1.0, 0.5, 0.25])


@pytest.mark.parametrize(("column", "value"), [("baseline", 1.0), ("steps", ())])
def test_a_batch_of_which_only_some_rollouts_can_be_compared_is_refused(column, value):
    rollouts = [rollout("a", [1], [2], 1.0), rollout("b", [1], [3], 0.0)]
    setattr(rollouts[0], column, value)
    with pytest.raises(ValueError, match=rf"rollout b, sample 0, has no {column}"):
        collate(rollouts)
