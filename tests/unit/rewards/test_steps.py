"""Steps of a response: from the characters that a reward function names to tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_rl.errors import RewardError
from grpo_rl.rewards.compose import RewardFunction
from grpo_rl.rewards.contract import Component
from grpo_rl.rewards.rules.number_rules import arithmetic_process, written_sum
from grpo_rl.rewards.steps import BLOCK, read_steps, step_ends
from grpo_rl.types import Prompt, Rollout
from tests.unit.rewards.test_compose import score

END = 0


class Bytes:
    """A byte-level tokenizer: every token is some bytes, token 0 the end of the sequence, which has none."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = (b"", *pieces)
        self.token_ids = [*range(1, len(self.pieces)), END]
        self.num_decoded = 0

    def __call__(self, token_ids: Sequence[int]) -> str:
        self.num_decoded += len(token_ids)
        return b"".join(self.pieces[token] for token in token_ids).decode(errors="replace")


def rollout(tokenizer: Bytes) -> Rollout:
    ids = tuple(tokenizer.token_ids)
    return Rollout(Prompt("e0-r3", (1,), "", "test"), 2, ids, (0.0,) * len(ids), "stop", ((1, len(ids)),), text=tokenizer(ids))


def test_a_step_ends_at_the_token_that_holds_its_last_character():
    tokenizer = Bytes(b"ab", b"c", b"def")
    assert step_ends(tokenizer.token_ids, tokenizer, [1, 2, 3, 4, 6]) == [0, 0, 1, 2, 2]
    assert step_ends(tokenizer.token_ids, tokenizer, []) == []


def test_a_character_of_several_tokens_belongs_to_the_last_of_them():
    first, second, third = "中".encode()[:1], "中".encode()[1:2], "中".encode()[2:]
    tokenizer = Bytes(b"a", first, second, third + b"b", "é".encode()[:1], "é".encode()[1:])
    assert tokenizer(tokenizer.token_ids) == "a中bé"
    assert step_ends(tokenizer.token_ids, tokenizer, [1, 2, 3, 4]) == [0, 3, 3, 5]


texts = st.text(st.sampled_from("a1 é中😀\n\ufffd"), min_size=1, max_size=3 * BLOCK)


@given(texts, st.data())
def test_however_the_bytes_are_cut_every_step_ends_where_its_bytes_do(text, data):
    content = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(content) - 1)))) - {len(content)})
    tokenizer = Bytes(*(content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True)))
    ends = sorted(data.draw(st.sets(st.integers(1, len(text)), min_size=1)))
    # The token with the byte before which the next character begins.
    last_bytes = [len(text[:end].encode()) for end in ends]
    expected = [sum(cut < last for cut in cuts) for last in last_bytes]
    found = step_ends(tokenizer.token_ids, tokenizer, ends)
    # A literal replacement character is complete to the eye before its last byte is.
    exact = [text[end - 1] != "\ufffd" for end in ends]
    assert [token for token, certain in zip(found, exact, strict=True) if certain] == [
        token for token, certain in zip(expected, exact, strict=True) if certain
    ]


def test_a_tokenizer_that_drops_the_space_at_the_start_is_searched_from_the_beginning():
    words = [" w" + str(number) for number in range(3 * BLOCK)]

    def decode(token_ids: Sequence[int]) -> str:
        return "".join(words[token] for token in token_ids).removeprefix(" ")

    ids = list(range(len(words)))
    ends = [len(decode(ids[: token + 1])) for token in (0, 70, 130, 190)]
    assert step_ends(ids, decode, ends) == [0, 70, 130, 190]


def test_the_work_grows_with_the_tokens_and_not_with_their_square():
    tokenizer = Bytes(*[b"x"] * 8192)
    assert step_ends(tokenizer.token_ids, tokenizer, list(range(100, 8001, 100))) == list(range(99, 8000, 100))
    # Twice the text, and 80 searches of six halves of a block each.
    assert tokenizer.num_decoded < 2 * 8192 + 80 * 6 * BLOCK + 1000


def test_rewards_of_steps_are_multiplied_by_the_factor_of_their_function():
    tokenizer = Bytes(b"ab", b"cd")
    assert read_steps([(2, 1.0), [4, 0]], rollout(tokenizer), tokenizer, factor=0.5) == ((0, 0.5), (1, 0.0))
    assert read_steps([], rollout(tokenizer), tokenizer) == ()


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("ab", r"steps is 'ab' \(str\), not a list of \(end, reward\)"),
        (3, r"steps is 3 \(int\)"),
        ([(2, 1.0, 0)], r"step 0 is \(2, 1\.0, 0\), not \(end, reward\)"),
        ([1.0], r"step 0 is 1\.0, not \(end, reward\)"),
        ([(2.0, 1.0)], r"step 0 ends at 2\.0 \(float\)"),
        ([(True, 1.0)], "step 0 ends at True"),
        ([(0, 1.0)], "step 0 ends at character 0; it must be after 0"),
        ([(2, 1.0), (2, 1.0)], "step 1 ends at character 2; it must be after 2"),
        ([(3, 1.0), (2, 1.0)], "step 1 ends at character 2; it must be after 3"),
        ([(5, 1.0)], "at most 4, the length of the response"),
        ([(2, math.nan)], "the reward of step 0 is nan"),
        ([(2, 1.0), (3, math.inf)], "the reward of step 1 is inf"),
        ([(2, "1")], "the reward of step 0 is '1'"),
    ],
)
def test_bad_steps_are_refused_with_function_rollout_step_and_rule(steps, message):
    tokenizer = Bytes(b"ab", b"cd")
    function = RewardFunction([Component("mine", 1.0, lambda **_: {"score": 1.0, "steps": steps})], tokenizer)
    with pytest.raises(RewardError, match=r"reward 'mine' for prompt e0-r3, sample 2: .*" + message):
        score(function, rollout(tokenizer))


@pytest.mark.parametrize("result", [1.0, {"score": 1.0}])
def test_a_reward_without_steps_is_refused_where_they_are_read_with_what_to_return(result):
    tokenizer = Bytes(b"ab")
    components = [Component("mine", 1.0, lambda **_: result)]
    assert score(RewardFunction(components), rollout(tokenizer)).steps is None
    with pytest.raises(
        RewardError, match=r"'mine' for prompt e0-r3, sample 2: it returned no 'steps'.*list of \(end, reward\)"
    ):
        score(RewardFunction(components, tokenizer), rollout(tokenizer))


def test_only_one_function_of_a_sum_may_give_steps_and_the_others_need_not():
    tokenizer = Bytes(b"ab", b"cd")
    steps = Component("steps", 2.0, lambda **_: {"score": 1.0, "steps": [(4, 0.5)]})
    plain = Component("plain", 1.0, lambda **_: 1.0)
    scored = score(RewardFunction([plain, steps], tokenizer), rollout(tokenizer))
    assert scored == (3.0, {"plain": 1.0, "steps": 1.0}, ((1, 1.0),))
    other = Component("other", 1.0, steps.function)
    with pytest.raises(RewardError, match="'steps' and 'other' both return 'steps'"):
        score(RewardFunction([steps, other], tokenizer), rollout(tokenizer))


@pytest.mark.parametrize(
    ("response", "score", "digits", "steps"),
    [
        ("445", 1.0, 1.0, [(1, 1.0), (2, 1.0), (3, 1.0)]),
        ("435", 0.0, 2 / 3, [(1, 1.0), (2, 0.0), (3, 1.0)]),
        ("44", 0.0, 2 / 3, [(1, 1.0), (2, 1.0)]),
        (" 4455 ", 0.0, 3 / 4, [(2, 1.0), (3, 1.0), (4, 1.0), (5, 0.0)]),
        ("", 0.0, 0.0, []),
    ],
)
def test_every_digit_of_a_sum_is_a_step(response, score, digits, steps):
    result = arithmetic_process("arithmetic", response, "445")
    assert (result["score"], result["acc"], result["digits"], result["steps"]) == (score, score, pytest.approx(digits), steps)


@pytest.mark.parametrize(
    ("response", "score", "steps"),
    [
        ("7+5=12\n4+8+1=13\n132", 1.0, [(6, 1.0), (15, 1.0), (19, 1.0)]),
        # The carry is forgotten: the result follows from the columns all the same.
        ("7+5=12\n4+8=12\n122", 0.0, [(6, 1.0), (13, 0.0), (17, 1.0)]),
        # A column without a carry if there is one: the next one follows without it.
        ("7+5=2\n4+8=12\n122", 0.0, [(5, 0.0), (12, 1.0), (16, 1.0)]),
        ("7+5=x\n\n132\n132", 1.0, [(5, 0.0), (10, 1.0), (14, 0.0)]),
        ("132", 1.0, [(3, 0.0)]),
        ("", 0.0, []),
    ],
)
def test_every_line_of_a_written_sum_is_a_step(response, score, steps):
    result = written_sum("rated_sums", response, "7+5=12\n4+8+1=13\n132")
    assert (result["score"], result["acc"], result["steps"]) == (score, score, steps)
