"""Rewards of reasoning steps: from characters of the response, which a reward function sees, to tokens.

`steps` is a list of (end, reward); `solution_str[:end]` ends with the step. A step's reward goes to the first
token up to which the decoded response contains all of the step. The response's own tokens are decoded; the
text is never tokenized again, as that may give other tokens than were sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

from grpo_rl.rewards.contract import RewardFailure, number_of

if TYPE_CHECKING:  # types imports torch, which a reward process does without
    from grpo_rl.types import Rollout

Step = tuple[int, float]
"""The index of a step's last token in the response, and its reward."""
Decode = Callable[[Sequence[int]], str]

NO_STEPS = (
    "it returned no 'steps', and algorithm.adv_estimator reads the rewards of reasoning steps; return a dict with 'score' and "
    "'steps', a list of (end, reward) with end counting the characters of solution_str up to the step's end"
)
BLOCK = 64
UNFINISHED = "\ufffd"
"""The character to which the bytes of an incomplete one decode."""


def read_steps(steps: Any, rollout: Rollout, decode: Decode, factor: float = 1.0) -> tuple[Step, ...]:
    """Steps on tokens, their rewards times `factor`.

    Raises ValueError unless these are pairs of an end in the text, each after the last, and a finite reward.
    """
    if not isinstance(steps, Sequence) or isinstance(steps, str | bytes):
        raise ValueError(f"steps is {steps!r} ({type(steps).__name__}), not a list of (end, reward)")
    ends: list[int] = []
    rewards: list[float] = []
    num_characters = len(str(rollout.text))
    for number, step in enumerate(steps):
        if not isinstance(step, Sequence) or isinstance(step, str | bytes) or len(step) != 2:
            raise ValueError(f"step {number} is {step!r}, not (end, reward)")
        end, reward = step
        if not isinstance(end, Integral) or isinstance(end, bool):
            raise ValueError(f"step {number} ends at {end!r} ({type(end).__name__}), not at a number of characters")
        try:
            rewards.append(factor * number_of(reward, f"the reward of step {number}"))
            number_of(rewards[-1], f"the reward of step {number} times {factor:g}")
        except RewardFailure as failure:
            raise ValueError(str(failure)) from None
        previous_end = ends[-1] if ends else 0
        if not previous_end < int(end) <= num_characters:
            raise ValueError(
                f"step {number} ends at character {end}; it must be after {previous_end}, where the one before ends, "
                f"and at most {num_characters}, the length of the response"
            )
        ends.append(int(end))
    return tuple(zip(step_ends(rollout.response_ids.tolist(), decode, ends), rewards, strict=True))


def step_ends(token_ids: Sequence[int], decode: Decode, ends: Sequence[int]) -> list[int]:
    """Index of the token that completes the last character before each of `ends`, which ascend.

    Exact with byte-level tokenizers, in linear time. Raises ValueError for an end beyond the text.
    """
    text = decode(token_ids)
    if ends and ends[-1] > len(text):
        raise ValueError(f"a step ends at character {ends[-1]}; the tokens make {len(text)}")
    step_places: list[int] = []
    stop = reached = 0
    for end in ends:
        while end > reached:
            start, chars, stop, reached = _block(token_ids, decode, text, stop, reached)
        # The shortest run of tokens whose text begins with the step; longer runs do so too.
        low, high = start + 1, stop
        while low < high:
            middle = (low + high) // 2
            if decode(token_ids[start:middle])[: end - chars] == text[chars:end]:
                high = middle
            else:
                low = middle + 1
        step_places.append(low - 1)
    return step_places


def _block(token_ids: Sequence[int], decode: Decode, text: str, start: int, chars: int) -> tuple[int, int, int, int]:
    """Tokens from `start` that decode alone as in `text` and end with a complete character; else all tokens.

    Returns where they begin and end: tokens and characters before each place.
    """
    size = BLOCK
    while start + size < len(token_ids):
        for stop in range(start + size, min(start + size + 4, len(token_ids))):
            # A block that is cut inside a character decodes to a mark for it, or to other text: up to 4 bytes, up to 4 tries.
            piece = decode(token_ids[start:stop])
            if not piece.endswith(UNFINISHED) and text.startswith(piece, chars):
                return start, chars, stop, chars + len(piece)
        size *= 2
    # Some tokenizers treat the first token differently (they drop its space): then only all tokens together decode right.
    if decode(token_ids[start:]) != text[chars:]:
        start = chars = 0
    return start, chars, len(token_ids), len(text)
