"""Episodes over a real engine and real environment processes: every trained token is one that the engine sampled."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_turns import EngineTurns

from grpo_rl.config.schema.tree import DataConfig
from grpo_rl.data.chat_deltas import ChatDeltas
from grpo_rl.data.collate import collate
from grpo_rl.data.prompts import Renderer
from grpo_rl.envs.environments import ENVIRONMENTS, Named
from grpo_rl.envs.episode_pool import EpisodePool
from grpo_rl.envs.runtime.environment_pool import EnvironmentPool
from grpo_rl.envs.runtime.episode_host import HostSetup
from grpo_rl.models import builtin
from grpo_rl.models.forward import PolicyModel
from grpo_rl.models.load import load_config, load_lm, load_tokenizer
from grpo_rl.rollout.engine import EngineSpec
from grpo_rl.rollout.hf.hf_engine import HfEngine
from grpo_rl.types import Prompt, Rollout, Sampling
from grpo_rl.workers.sharded_policy import sequences_of

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


@pytest.fixture
def make(
    spec: EngineSpec, tokenizer: Any, stop_ids: frozenset[int]
) -> Iterator[Callable[..., tuple[EpisodePool, EngineTurns]]]:
    pools: list[EnvironmentPool] = []

    def build(
        name: str, *, rules: dict[str, Any] | None = None, workers: int = 1, step_timeout_s: float = 20.0, **options: Any
    ):  # type: ignore[no-untyped-def]
        host = HostSetup(Named(name if name in ENVIRONMENTS else f"{HERE}:{name}", options))
        environments = EnvironmentPool(host, workers, step_timeout_s=step_timeout_s)
        pools.append(environments)
        turns = EngineTurns(HfEngine(spec))
        deltas = ChatDeltas(Renderer(DataConfig(), tokenizer), tokenizer, stop_ids)
        quiet = {"quiet_s": 60.0, "max_model_len": LONGEST}
        return EpisodePool(turns, environments, deltas, **quiet | (rules or {})), turns

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


def test_the_trainer_finds_the_engines_logprobs_on_whole_contexts(make, tokenizer: Any, folder: Path) -> None:
    """What the actor recomputes over prompt, turns and context agrees with what each turn was sampled with, to 1e-4."""
    rollouts = make("Echo", turns=4)[0].generate(prompts(tokenizer), 4, SAMPLING)
    for rollout in rollouts:
        rollout.reward = 0.0
    batch = collate(rollouts)
    policy = PolicyModel(load_lm(str(folder), load_config(str(folder))), temperature=1.0)
    with torch.no_grad():
        for share_prompts in (False, True):
            found_T = policy(sequences_of(batch, torch.device("cpu"), share_prompts=share_prompts)).logprobs_T
            assert float((found_T - batch.rollout_logprobs_T).abs().max()) <= 1e-4
    assert max(len(rollout.spans) for rollout in rollouts) == 4
    # The context matters: with other tokens between the turns they are other numbers.
    is_trained_S = torch.zeros(len(batch.token_ids_S), dtype=torch.bool)
    is_trained_S[batch.positions()] = True
    context = (~is_trained_S[batch.response_positions()]).nonzero()[:, 0]
    ids = batch.token_ids_S.clone()
    ids[batch.response_positions()[context]] = 7
    with torch.no_grad():
        other_T = policy(sequences_of(batch.replace(token_ids_S=ids), torch.device("cpu"), share_prompts=False)).logprobs_T
    assert float((other_T - batch.rollout_logprobs_T).abs().max()) > 1e-2


def test_episodes_of_a_killed_process_begin_anew_and_end_as_they_would_have(make, tokenizer: Any, tmp_path: Path) -> None:
    expected = make("Echo")[0].generate(prompts(tokenizer), 2, SAMPLING)
    pool, turns = make("Dying", path=str(tmp_path / "count"), times=2)
    rollouts = pool.generate(prompts(tokenizer), 2, SAMPLING)
    assert [r.response_ids.tolist() for r in rollouts] == [r.response_ids.tolist() for r in expected]
    retries = [int(r.episode.counts.get("retries", 0)) for r in rollouts]
    assert max(retries) >= 1
    for rollout in rollouts:
        check_against_record(rollout, turns)


def test_an_episode_whose_process_dies_every_time_has_failed_and_the_others_have_not(
    make, tokenizer: Any, tmp_path: Path
) -> None:
    pool, _ = make("Dying", path=str(tmp_path / "count"), times=99, rules={"retries": 1})
    rollouts = pool.generate(prompts(tokenizer, 1), 1, Sampling(max_tokens=100, seed=8))
    assert [(r.episode.failure, r.episode.ended) for r in rollouts] == [("environment_error", "failed")]
    assert "SIGKILL" in rollouts[0].episode.failure_cause and "2 attempts" in rollouts[0].episode.failure_cause


def test_a_hanging_environment_truncates_its_episode_and_holds_up_no_other(make, tokenizer: Any) -> None:
    pool, turns = make("Waiting", step_timeout_s=2.0, wait_s=0.0, slow="p0", slow_s=300.0)
    rollouts = pool.generate(prompts(tokenizer), 2, SAMPLING)
    ended = {(r.prompt.uid, r.episode.ended) for r in rollouts}
    assert ("p0", "time") in ended and not any(end == "time" for uid, end in ended if uid != "p0")
    for rollout in rollouts:
        check_against_record(rollout, turns)


def test_an_episode_ends_by_turns_tokens_and_time(make, tokenizer: Any) -> None:
    by_turns, _ = make("Echo", turns=9, rules={"max_turns": 2})
    for rollout in by_turns.generate(prompts(tokenizer), 2, SAMPLING):
        assert rollout.episode.ended in ("turns", "tokens") and len(rollout.episode.turns) <= 2
    by_tokens, turns = make("Echo", turns=99)
    rollouts = by_tokens.generate(prompts(tokenizer), 2, Sampling(max_tokens=50, seed=7))
    assert {r.episode.ended for r in rollouts} == {"tokens"}
    assert all(len(r.response_ids) <= 50 and r.finish_reason == "length" for r in rollouts)
    for rollout in rollouts:
        check_against_record(rollout, turns)
    late, _ = make("Waiting", turns=99, wait_s=0.4, rules={"timeout_s": 1.0})
    rollouts = late.generate(prompts(tokenizer), 1, SAMPLING)
    assert "time" in {r.episode.ended for r in rollouts} <= {"time", "tokens"}


def test_forgotten_episodes_are_over_and_may_be_asked_for_again(make, tokenizer: Any) -> None:
    pool, turns = make("Waiting", wait_s=0.3)
    ids = pool.submit(prompts(tokenizer), 2, SAMPLING)
    assert list(pool.completed(0.2)) == []
    with pytest.raises(ValueError, match="sampled already"):
        pool.submit(prompts(tokenizer, 1), 1, SAMPLING)
    pool.forget(ids)
    assert list(pool.completed()) == [] and pool.environments.num_waiting == 0
    rollouts = pool.generate(prompts(tokenizer), 2, SAMPLING)
    assert len(rollouts) == 6 and {r.episode.ended for r in rollouts} <= {"done", "tokens"}
    assert turns.num_rests == 1


def test_half_a_character_from_an_environment_is_replaced_before_it_is_tokens(make, tokenizer: Any) -> None:
    (rollout,) = make("Outside", content=r'"5\ud83d+\u00005 \ud83d\ude00"')[0].generate(prompts(tokenizer, 1), 1, SAMPLING)
    assert rollout.failure is None and rollout.episode is not None
    said = [message["content"] for message in rollout.episode.messages if message["role"] == "user"]
    assert said[1:] in ([], ["5\ufffd+\ufffd5 \U0001f600"])
    json.dumps(list(rollout.episode.messages), ensure_ascii=False).encode()


def test_a_megabyte_from_an_environment_ends_the_episode_before_it_is_tokens(
    make, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = []
    between = ChatDeltas.between
    monkeypatch.setattr(
        ChatDeltas,
        "between",
        lambda self, messages, **given: longest.append(len(str(messages))) or between(self, messages, **given),
    )
    (rollout,) = make("Outside", content='"1+"', repeat=500_000)[0].generate(prompts(tokenizer, 1), 1, SAMPLING)
    assert rollout.episode is not None and rollout.episode.ended == "tokens" and rollout.failure is None
    assert max(longest, default=0) < 10_000


def test_a_reward_beyond_float32_from_an_environment_fails_the_episode(make, tokenizer: Any) -> None:
    (rollout,) = make("Outside", content='"1"', reward=1e300)[0].generate(prompts(tokenizer, 1), 1, SAMPLING)
    assert rollout.episode is not None and rollout.episode.failure == "environment_error"
    assert "1e+300; a finite number of at most 3.40282e+38 is needed" in str(rollout.episode.failure_cause)
