"""The tokens that a reward model reads of a rollout, and the places of its scores."""

from __future__ import annotations

import pytest

from grpo_rl.errors import ConfigError
from grpo_rl.models.builtin import build_tokenizer
from grpo_rl.rewards.models.rendering import ScorableRenderer, split_steps, tokenizer_for
from grpo_rl.types import Prompt, Rollout

POLICY = build_tokenizer(128)
MESSAGES = ({"role": "user", "content": "1+1"},)


def decode(ids):
    return POLICY.decode(list(ids), skip_special_tokens=True)


def rollout(text: str, *, stop: bool = True, messages=MESSAGES) -> Rollout:
    ids = tuple(POLICY(text)["input_ids"]) + ((POLICY.eos_token_id,) if stop else ())
    prompt = Prompt("p", tuple(POLICY("ab")["input_ids"]), "ab", "test", messages=messages)
    return Rollout(prompt, 0, ids, (0.0,) * len(ids), "stop" if stop else "length", ((0, len(ids)),), text=text)


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("one\n\ntwo\n\nthree", [5, 10, 15]),
        ("one\n\ntwo\n\n", [5, 10]),
        ("one", [3]),
        ("\n\none", [5]),
        # Four line breaks are one cut: the second separator belongs to the step before it.
        ("one\n\n\n\ntwo", [7, 10]),
        ("one\n\n   ", [5]),
        ("", []),
        (" \n\n ", []),
    ],
)
def test_a_response_is_cut_after_each_separator_and_white_space_is_no_step(text, ends):
    assert split_steps(text, "\n\n") == ends


def test_with_the_same_tokens_the_last_one_is_scored_or_the_last_of_each_step():
    item = rollout("3\n\n4")
    whole = ScorableRenderer(decode)(item)
    assert whole.token_ids == (*item.prompt.token_ids, *item.response_ids)
    # Two tokens of the prompt, four characters, and the end.
    assert (whole.positions, whole.step_tokens) == ((6,), None)
    steps = ScorableRenderer(decode, separator="\n\n")(item)
    assert (steps.positions, steps.step_tokens) == ((4, 5), (2, 3))


def test_with_another_template_the_messages_are_rendered_anew_and_steps_end_at_the_same_text():
    own = build_tokenizer(128)
    own.chat_template = "Q:{{ messages[0]['content'] }}{% if add_generation_prompt %} A:{% endif %}"
    seen = ScorableRenderer(decode, own, "\n\n")(rollout("3\n\n4"))
    assert own.decode(seen.token_ids) == "Q:1+1 A:3\n\n4<|end|>"
    assert [own.decode(seen.token_ids[: place + 1]) for place in seen.positions] == ["Q:1+1 A:3\n\n", "Q:1+1 A:3\n\n4"]
    assert seen.step_tokens == (2, 3)
    cut_off = ScorableRenderer(decode, own)(rollout("3", stop=False))
    assert own.decode(cut_off.token_ids) == "Q:1+1 A:3" and cut_off.positions == (8,)


def test_rollouts_are_rendered_anew_only_where_tokens_or_template_differ():
    template, words = build_tokenizer(128), build_tokenizer(120)
    template.chat_template = "other"
    assert tokenizer_for(POLICY, build_tokenizer(128), "auto") is None
    assert tokenizer_for(POLICY, template, "auto") is template
    assert tokenizer_for(POLICY, words, "auto") is words
    assert tokenizer_for(POLICY, template, "never") is None
    same = build_tokenizer(128)
    assert tokenizer_for(POLICY, same, "always") is same
    with pytest.raises(ConfigError, match="rerender=never"):
        tokenizer_for(POLICY, words, "never")
