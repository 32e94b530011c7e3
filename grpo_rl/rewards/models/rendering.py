from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from grpo_rl.control_words import ControlWords, unmarked
from grpo_rl.errors import ConfigError
from grpo_rl.frozen import frozen
from grpo_rl.rewards.steps import Decode, step_ends
from grpo_rl.types import Rollout


@frozen
class Scorable:
    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    """The last token of each step, or of the sequence."""
    step_tokens: tuple[int, ...] | None
    """Of each position, an index into the response; None for one score per response."""


class ScorableRenderer:
    """Without `tokenizer` the tokens are the policy's own.

    With one, the prompt's messages are rendered with its chat template (a plain prompt stays as it is); the
    response's text follows, and the end-of-sequence token if the response ended by itself.
    """

    def __init__(self, decode: Decode, tokenizer: Any = None, separator: str | None = None) -> None:
        self.decode = decode
        self.tokenizer, self._words = tokenizer, ControlWords(tokenizer)
        self.separator = separator

    def __call__(self, rollout: Rollout) -> Scorable:
        ends = None if self.separator is None else split_steps(str(rollout.text), self.separator)
        step_tokens = None if ends is None else tuple(step_ends(rollout.response_ids.tolist(), self.decode, ends))
        if self.tokenizer is None:
            prompt_ids: Sequence[int] = rollout.prompt.token_ids.tolist()
            response_ids: Sequence[int] = rollout.response_ids.tolist()
            places = step_tokens
        else:
            prompt_ids = self._prompt_ids(rollout)
            response_ids, starts = self._response_ids(rollout)
            # The token that holds a step's last character is the last one that begins before the step's end.
            places = None if ends is None else tuple(bisect_left(starts, end) - 1 for end in ends)
        token_ids = (*prompt_ids, *response_ids)
        if places is None:
            return Scorable(token_ids, (len(token_ids) - 1,), None)
        return Scorable(token_ids, tuple(len(prompt_ids) + place for place in places), step_tokens)

    def _prompt_ids(self, rollout: Rollout) -> Sequence[int]:
        messages = rollout.prompt.messages
        if messages is None:
            return self._words.ids(self._words.marked(rollout.prompt.text), add_special_tokens=True)
        marked = self._words.marked(list(messages))
        return self._words.ids(self.tokenizer.apply_chat_template(marked, tokenize=False, add_generation_prompt=True))

    def _response_ids(self, rollout: Rollout) -> tuple[list[int], list[int]]:
        """Tokens, and the character at which each begins."""
        text = self._words.marked(str(rollout.text))
        encoded = self._words.encode(text, add_special_tokens=False, return_offsets_mapping=True)
        token_ids = list(encoded["input_ids"])
        starts = [len(unmarked(text[:start])) for start, _ in encoded["offset_mapping"]]
        if rollout.finish_reason == "stop" and self.tokenizer.eos_token_id is not None:
            token_ids.append(self.tokenizer.eos_token_id)
        return token_ids, starts


def split_steps(text: str, separator: str) -> list[int]:
    """Characters up to and including the separator after each step; white space is no step."""
    ends: list[int] = []
    start = 0
    while start < len(text):
        place = text.find(separator, start)
        end = len(text) if place < 0 else place + len(separator)
        if text[start : end if place < 0 else place].strip():
            ends.append(end)
        elif ends and place >= 0:
            ends[-1] = end
        start = end
    return ends


def tokenizer_for(policy: Any, scorer: Any, rerender: str) -> Any | None:
    """None if the policy's tokens can be read as they are.

    Raises ConfigError for tokens that would mean something else, and for a tokenizer that cannot render.
    """
    key = "reward.reward_model.rerender"
    same_tokens = policy.get_vocab() == scorer.get_vocab()
    same_template = policy.chat_template == scorer.chat_template
    if rerender == "never":
        if not same_tokens:
            raise ConfigError(
                f"{key}=never: the reward model's vocabulary is not the policy's, so the policy's tokens mean nothing to it; auto"
            )
        return None
    if rerender == "auto" and same_tokens and same_template:
        return None
    if not getattr(scorer, "is_fast", False):
        raise ConfigError(
            f"{key}={rerender}: needs a fast tokenizer, which says where each token begins; it is {type(scorer).__name__}"
        )
    return scorer
