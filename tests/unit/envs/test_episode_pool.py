"""Episodes over a real engine and real environment processes: every trained token is one that the engine sampled."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_turns import EngineTurns

from grpo_rl.config.schema.tree import DataConfig
from grpo_rl.data.collate import collate, with_tokens
from grpo_rl.data.prompts import Renderer
from grpo_rl.envs.chat_deltas import ChatDeltas
from grpo_rl.envs.environments import Named
from grpo_rl.envs.episode_pool import EpisodePool, EpisodeRules
from grpo_rl.envs.runtime.environment_pool import EnvironmentPool, PoolSetup
from grpo_rl.envs.runtime.episode_host import HostSetup
from grpo_rl.models import builtin
from grpo_rl.models.load import load_tokenizer
from grpo_rl.rollout.engine import EngineSpec
from grpo_rl.rollout.hf.hf_engine import HfEngine
from grpo_rl.types import Prompt, Rollout, Sampling

HERE = Path(__file__).parent / "played_environments.py"
LONGEST = 160


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that ends its turns after some eight tokens: many tokens are ends of a turn."""
    folder = builtin.build("builtin:arithmetic", tmp_path_factory.mktemp("model") / "random")
    tokenizer = load_tokenizer(str(folder))
    ends = [tokenizer.eos_token_id, *range(40, 56)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


@pytest.fixture(scope="module")
def spec(folder: Path) -> EngineSpec:
    return EngineSpec(str(folder), LONGEST, name="hf", max_num_seqs=16)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def stop_ids(folder: Path) -> frozenset[int]:
    return frozenset(json.loads((folder / "generation_config.json").read_text())["eos_token_id"])


Play = Callable[..., tuple[list[Rollout], EngineTurns, EpisodePool]]


@pytest.fixture
def make(
    spec: EngineSpec, tokenizer: Any, stop_ids: frozenset[int]
) -> Iterator[Callable[..., tuple[EpisodePool, EngineTurns]]]:
    pools: list[EnvironmentPool] = []

    def build(
        name: str, *, rules: dict[str, Any] | None = None, workers: int = 1, step_timeout_s: float = 20.0, **options: Any
    ):  # type: ignore[no-untyped-def]
        host = HostSetup(Named(f"{HERE}:{name}", options))
        environments = EnvironmentPool(PoolSetup(host, workers, step_timeout_s=step_timeout_s))
        pools.append(environments)
        turns = EngineTurns(HfEngine(spec))
        deltas = ChatDeltas(Renderer(DataConfig(), tokenizer), tokenizer, stop_ids)
        quiet = {"quiet_s": 60.0, "max_model_len": LONGEST}
        return EpisodePool(turns, environments, deltas, EpisodeRules(**quiet | (rules or {}))), turns

    yield build
    for pool in pools:
        pool.close()


def prompts(tokenizer: Any, number: int = 3) -> list[Prompt]:
    found = []
    for i in range(number):
        messages = ({"role": "user", "content": f"{i}+{i}="},)
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        found.append(Prompt(f"p{i}", ids, text, "test", extra_info={"row": i}, messages=messages))
    return found


SAMPLING = Sampling(max_tokens=100, seed=7)


def check_against_record(rollout: Rollout, turns: EngineTurns) -> None:
    """Fails unless the sampled tokens are the engine's completions, one after the other, each behind exactly its own context."""
    assert rollout.episode is not None
    ids, logprobs = np.asarray(rollout.response_ids), np.asarray(rollout.rollout_logprobs)
    whole = np.concatenate([rollout.prompt.token_ids, ids])
    for number, (start, length) in enumerate(rollout.spans):
        attempt = int(rollout.episode.counts.get("retries", 0))
        name = f"{rollout.prompt.uid}/{rollout.sample_index}#{attempt}/turn-{number}/0"
        request, completion = turns.record[name]
        np.testing.assert_array_equal(request.prompt_ids, whole[: len(rollout.prompt.token_ids) + start])
        np.testing.assert_array_equal(completion.response_ids, ids[start : start + length])
        np.testing.assert_array_equal(completion.logprobs, logprobs[start : start + length])
    is_context = np.ones(len(ids), dtype=bool)
    for start, length in rollout.spans:
        is_context[start : start + length] = False
    assert not logprobs[is_context].any()
    assert sum(number for _, number in rollout.versions) == sum(length for _, length in rollout.spans)


def test_episodes_are_the_engines_own_tokens_with_context_between_them(make, tokenizer: Any) -> None:
    pool, turns = make("Echo")
    rollouts = pool.generate(prompts(tokenizer), 4, SAMPLING)
    assert [(r.prompt.uid, r.sample_index) for r in rollouts] == [(f"p{i}", j) for i in range(3) for j in range(4)]
    assert any(len(r.spans) == 3 for r in rollouts)
    for rollout in rollouts:
        check_against_record(rollout, turns)
        assert rollout.text == "\n\n".join(m["content"] for m in rollout.episode.messages if m["role"] == "assistant")
        if rollout.episode.ended == "done":
            assert [turn.reward for turn in rollout.episode.turns] == [1.0, 2.0, 3.0]
    assert turns.num_rests == 1
    again = make("Echo", workers=2)[0].generate(prompts(tokenizer), 4, SAMPLING)
    assert [r.response_ids.tolist() for r in again] == [r.response_ids.tolist() for r in rollouts]


def test_the_context_is_what_the_template_writes_of_the_conversation(make, tokenizer: Any, stop_ids: frozenset[int]) -> None:
    rollouts = make("Echo", opening="and")[0].generate(prompts(tokenizer), 2, SAMPLING)
    for rollout in rollouts:
        assert rollout.episode is not None
        ids = rollout.response_ids.tolist()
        for number, (before, after) in enumerate(zip(rollout.spans, rollout.spans[1:], strict=False)):
            said = [m for m in rollout.episode.messages if m["role"] == "user"][number]["content"]
            expected = tokenizer(f"<|user|>{said}<|assistant|>", add_special_tokens=False)["input_ids"]
            assert ids[sum(before) : after[0]] == expected
            assert ids[sum(before) - 1] in stop_ids
        assert "<|user|>and<|assistant|>" in rollout.prompt.text


def test_only_sampled_tokens_are_trained(make, tokenizer: Any) -> None:
    pool, turns = make("Echo")
    rollouts = pool.generate(prompts(tokenizer), 4, SAMPLING)
    for rollout in rollouts:
        rollout.reward, rollout.steps = 1.0, tuple((turn.end - 1, turn.reward) for turn in rollout.episode.turns if turn.reward)
    batch = with_tokens(collate(rollouts))
    sampled = np.concatenate([turns.record[f"{r.prompt.uid}/{r.sample_index}#0/turn-{n}/0"][1].response_ids for r in rollouts for n in range(len(r.spans))])  # fmt: skip
    logprobs = np.concatenate([turns.record[f"{r.prompt.uid}/{r.sample_index}#0/turn-{n}/0"][1].logprobs for r in rollouts for n in range(len(r.spans))])  # fmt: skip
    assert batch.num_trained_tokens == len(sampled) < int(batch.response_lengths_N.sum())
    np.testing.assert_array_equal(batch.token_ids_S[batch.positions_T].numpy(), sampled)
    np.testing.assert_array_equal(batch.rollout_logprobs_T.numpy(), logprobs)
    ends = batch.step_ends_K + (batch.trained_lengths_N.cumsum(0) - batch.trained_lengths_N).repeat_interleave(
        batch.num_steps_N
    )
    lengths = [length for r in rollouts for _, length in r.spans]
    rewarded = [turn.reward is not None for r in rollouts for turn in r.episode.turns]
    assert ends.tolist() == [end - 1 for end, has in zip(np.cumsum(lengths).tolist(), rewarded, strict=True) if has]
