"""Random episodes over every family of chat templates: what is trained is the engine's own record, token for token."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from chat_templates import FAMILIES, tokenizer_of
from engine_turns import EngineTurns
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import ScriptedEngine, ScriptedEnvironments, answered

from grpo_rl.config.schema.tree import DataConfig
from grpo_rl.data.chat_deltas import ChatDeltas
from grpo_rl.data.collate import collate
from grpo_rl.data.prompts import Renderer
from grpo_rl.envs.episode_pool import EpisodePool, Playing
from grpo_rl.types import Prompt, Sampling

TEXTS = ["", "no", "in 11 turns\n", "\n\n 1", "<think>hm</think> as", "caf\u00e9 \u4f60\u597d", "end <|im_end|> </s>", " "]


@pytest.fixture(scope="module")
def families() -> dict[str, tuple[ChatDeltas, Any, frozenset[int]]]:
    found = {}
    for name, (template, end, kwargs) in FAMILIES.items():
        tokenizer = tokenizer_of(template, end)
        stops = frozenset(tokenizer.convert_tokens_to_ids([end, "<|endoftext|>"]))
        found[name] = (
            ChatDeltas(Renderer(DataConfig(apply_chat_template_kwargs=kwargs), tokenizer), tokenizer, stops),
            tokenizer,
            stops,
        )
    return found


def play(deltas: ChatDeltas, tokenizer: Any, stops: frozenset[int], role: str, seed: int, support: bool):  # type: ignore[no-untyped-def]
    choose = random.Random(seed)
    lengths = {uid: choose.randint(1, 5) for uid in ("a", "b", "c")}

    def answer(start: Mapping[str, Any], turn: Mapping[str, Any] | None) -> Mapping[str, Any]:
        own = random.Random(f"{start['uid']}{start['seed']}{turn and turn['index']}")
        if turn is None:
            return answered()
        messages = [{"role": role, "content": own.choice(TEXTS)} for _ in range(own.randint(1, 2) if role == "tool" else 1)]
        for number, message in enumerate(messages):
            if role == "tool":
                message |= {"name": "add", "tool_call_id": f"call{number:05d}"}
        return answered(messages, own.choice([None, 0.5, 1.0]), done=turn["index"] + 1 >= lengths[start["uid"]], calls=1)

    engine = ScriptedEngine(range(len(tokenizer)), sorted(stops), seed)
    turns, environments = EngineTurns(engine), ScriptedEnvironments(answer, seed)  # type: ignore[arg-type]
    pool = EpisodePool(turns, environments, deltas, max_model_len=300, max_turns=4)  # type: ignore[arg-type]
    prompts = []
    for uid in lengths:
        messages = ({"role": "user", "content": f"play {uid}"},)
        shown = deltas.prompt(messages)
        prompts.append(Prompt(uid, shown.token_ids, shown.text, "test", messages=messages))
    sampling = Sampling(max_tokens=choose.choice([12, 60, 200]), seed=seed, top_k=4 if support else -1, keep_support=support)
    return pool.generate(prompts, 2, sampling), turns, environments


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=12)
@given(seed=st.integers(0, 10**6), support=st.booleans())
def test_the_trained_tokens_are_the_engines_record(families, family: str, role: str, seed: int, support: bool) -> None:
    if (family, role) == ("gemma", "tool"):
        return
    deltas, tokenizer, stops = families[family]
    rollouts, turns, environments = play(deltas, tokenizer, stops, role, seed, support)
    assert not environments.open and len(environments.ended) == 6
    sampled, logprobs, supports = [], [], []
    for rollout in rollouts:
        assert rollout.episode is not None
        rollout.reward = 0.0
        records = [
            turns.record[f"{rollout.prompt.uid}/{rollout.sample_index}#0/turn-{n}/0"] for n in range(len(rollout.episode.turns))
        ]
        before = [*rollout.prompt.token_ids.tolist()]
        ids = rollout.response_ids.tolist()
        for (request, completion), (start, length) in zip(records, rollout.spans, strict=True):
            # Each turn was sampled behind exactly the tokens that the trainer sees before it.
            assert request.prompt_ids.tolist() == before + ids[:start]
            assert completion.num_tokens == length
            sampled += completion.response_ids.tolist()
            logprobs += completion.logprobs.tolist()
            supports += [] if completion.support is None else completion.support.token_ids.tolist()
        assert len(ids) == sum(rollout.spans[-1])
        assert tuple(v for _, c in records for v in c.versions) and sum(n for _, n in rollout.versions) == sum(
            c.num_tokens for _, c in records
        )
        assert rollout.episode.ended in ("done", "turns", "tokens")
        assert rollout.episode.counts["calls"] == len(records)
    batch = collate(rollouts)
    assert batch.token_ids_S[batch.positions()].tolist() == sampled
    np.testing.assert_array_equal(batch.rollout_logprobs_T.numpy(), np.array(logprobs, np.float32))
    if support:
        assert batch.support_ids_M.tolist() == supports
    # A choice of rollouts keeps them too.
    chosen = collate(rollouts).select([4, 1])
    starts = np.cumsum([0, *(sum(length for _, length in r.spans) for r in rollouts)])
    assert chosen.token_ids_S[chosen.positions()].tolist() == sampled[starts[4] : starts[5]] + sampled[starts[1] : starts[2]]


@pytest.mark.parametrize(("max_tokens", "max_model_len", "room"), [(20, 100, 14), (20, 12, 3), (20, 9, 0)])
def test_an_episode_ends_at_its_own_limit_or_at_the_models_positions(max_tokens: int, max_model_len: int, room: int) -> None:
    playing = Playing("e", Prompt("e", np.array([1, 2, 3], np.int32), "text", "test"), 0, Sampling(max_tokens=max_tokens), 1)
    playing.add_context(np.arange(6))
    assert playing.room(max_model_len) == room


def test_equal_states_have_equal_numbers_and_without_a_state_the_messages_are_it() -> None:
    playing = Playing("e", Prompt("e", np.array([1], np.int32), "text", "test"), 0, Sampling(max_tokens=9), 1)

    def number(state: str | None, *contents: str) -> int:
        playing.comes_to(state, [{"role": "user", "content": content} for content in contents])
        return playing.state

    assert number("here", "a") == number("here", "b") != number("there", "a")
    assert number(None, "a") == number(None, "a") != number(None, "b")
    assert len({number(None), number(None, ""), number(None, "a", "b"), number(None, "ab")}) == 4
    assert number("a grid of ten by ten cells") == -4175360491201906180  # the same on every machine
