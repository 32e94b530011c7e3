"""A whole run on episodes through vLLM: contexts of many turns, the engine's log-probs and the trainer's, and its evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from whole_runs import RUN_TIMEOUT_S, Run, arithmetic, command, train

from grpo_rl.models import builtin
from grpo_rl.models.load import load_tokenizer

pytestmark = pytest.mark.timeout(2 * RUN_TIMEOUT_S)
TURNS = "actor_rollout_ref.rollout.multi_turn"
ROOM, MOST_TURNS = 256, 24
ENDS = range(40, 60)
"""Tokens that end a turn of the random model, beside its own."""
GAME = f"""
from grpo_rl.envs.contract import Observation

class Digits:
    async def reset(self, start):
        return Observation()

    async def step(self, turn):
        done = turn.index == {MOST_TURNS - 1}
        digits = sum(letter.isdigit() for letter in turn.text)
        said = ({{"role": "user", "content": f"{{digits}}+{{turn.index}}="}},)
        return Observation(() if done else said, float(digits % 3), done, {{"digits": digits}})

    async def close(self):
        pass
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps of a random model that ends its turns after a few tokens, since many tokens end one."""
    folder = tmp_path_factory.mktemp("episodes")
    model = builtin.build("builtin:arithmetic", folder / "random")
    ends = {"eos_token_id": [load_tokenizer(str(model)).eos_token_id, *ENDS]}
    (model / "generation_config.json").write_text(json.dumps(ends))
    (folder / "game.py").write_text(GAME)
    return train(
        folder,
        "games",
        *arithmetic(
            model,
            "reward.functions=[]",
            f"data.max_response_length={ROOM}",
            "data.train_batch_size=2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        ),
        f"{TURNS}.enable=true",
        f"{TURNS}.environment.name=game.py:Digits",
        f"{TURNS}.environment.num_workers=1",
        "algorithm.adv_estimator=gigpo",
        "algorithm.gamma=0.9",
        "trainer.val_before_train=false",
        "trainer.total_training_steps=2",
    )


def test_the_trainer_finds_vllms_log_probs_behind_contexts_of_many_turns(run: Run) -> None:
    for row in run.steps.values():
        assert row["rollout/logprob_diff_max"] < 1e-4
        assert row["actor/grad_norm"] > 0
        assert row["episode/turns"] > 8 and 0.2 < row["episode/context_token_fraction"] < 0.9
        # Contexts outgrow a block of vLLM's prefix cache, which is 128 tokens long on CPUs: later turns find the earlier ones.
        assert row["episode/cache_hit_fraction"] > 0.1


def test_sampled_tokens_alone_have_log_probs_and_all_of_them_the_weights_of_their_step(run: Run) -> None:
    tokenizer = load_tokenizer(str(run.path / "model"))
    seen = 0
    for step in (1, 2):
        for record in run.rollouts(step):
            episode = record["episode"]
            said = [message["content"] for message in episode["messages"] if message["role"] == "assistant"]
            assert record["weight_version"] == step - 1 and len(said) == len(episode["spans"]) == record["num_turns"]
            assert episode["ended"] == ("done" if record["num_turns"] == MOST_TURNS else "tokens")
            if "token_ids" not in record:
                continue
            ids, logprobs = record["token_ids"], record["token_logprobs"]
            context = set(range(len(ids)))
            for text, (start, length) in zip(said, episode["spans"], strict=True):
                context -= set(range(start, start + length))
                shown = ids[start : start + length - (ids[start + length - 1] in ENDS)]  # a text is without what ended it
                assert tokenizer.decode(shown, skip_special_tokens=True) == text
                assert all(value < 0 for value in logprobs[start : start + length])
            assert context and not any(logprobs[place] for place in context)
            seen += 1
    assert seen


@pytest.mark.campaign
def test_an_evaluation_of_the_run_plays_its_episodes(run: Run, tmp_path: Path) -> None:
    """With the other engine, which takes nothing of the run's own but its game."""
    output, data = tmp_path / "out", "task:arithmetic?split=val&num_rows=2"
    command(run, "eval", str(run.path), "--trust-run", "--engine", "hf", "--data", data, "-n", "2", "--output", str(output))
    [file] = output.glob("models/*/responses.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    played = [line for line in lines if "episode" in line]
    assert len(played) == 4 and all(line["num_turns"] > 3 for line in played)
    for line in played:
        rewards = [message["reward"] for message in line["episode"]["messages"] if message["role"] == "assistant"]
        assert line["reward"] == pytest.approx(sum(reward or 0.0 for reward in rewards))
