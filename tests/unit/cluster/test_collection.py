"""The collection before training: files that are complete or not there, and a killed run that goes on to the same bytes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from grpo_rl.cluster.collection import Collection, summary_of
from grpo_rl.config.schema.tree import (
    ActorRolloutRefConfig,
    AlgorithmConfig,
    Config,
    DataConfig,
    ModelConfig,
    RejectionConfig,
    RolloutConfig,
)
from grpo_rl.data.dataset import PromptDataset
from grpo_rl.models.builtin import build_tokenizer
from grpo_rl.telemetry.terminal.console import Console
from grpo_rl.types import Metrics, Prompt, Rollout, Sampling

N = 3


class Killed(BaseException):
    """The end of the process."""


class Pool:
    """Engines whose answer follows from seed, prompt and sample alone; they die before part number `dies_at`."""

    def __init__(self, dies_at: int | None = None) -> None:
        self.asked: list[list[str]] = []
        self.dies_at = dies_at

    def generate(self, prompts: list[Prompt], n: int, sampling: Sampling, on_finish: Any) -> list[Rollout]:
        if len(self.asked) == self.dies_at:
            raise Killed
        self.asked.append([prompt.uid for prompt in prompts])
        rollouts = []
        for number, prompt in enumerate(prompts):
            for sample in range(n):
                text = str(((sampling.seed or 0) + number + sample) % 4)
                rollouts.append(Rollout(prompt, sample, [5 + int(text), 1], [0.0, 0.0], "stop", ((0, 2),), text=text))
                on_finish(rollouts[-1])
        return rollouts


class Odd:
    """A reward of 1 for odd answers."""

    factors: dict[str, float] = {"odd": 1.0}  # noqa: RUF012

    def submit(self, rollout: Rollout) -> None:
        pass

    def wait(self, rollouts: list[Rollout]) -> list[Rollout]:
        return [dataclasses.replace(r, reward=float(int(r.text) % 2)) for r in rollouts]


def config_of(**rejection: Any) -> Config:
    return Config(
        data=DataConfig(train_files=["task:arithmetic?split=train&num_rows=8"], gen_batch_size=3, max_response_length=4),
        actor_rollout_ref=ActorRolloutRefConfig(model=ModelConfig(path="builtin:arithmetic"), rollout=RolloutConfig(n=N)),
        algorithm=AlgorithmConfig(rejection=RejectionConfig(**rejection)),
    )


def collection_of(folder: Path, pairs: bool = False, **rejection: Any) -> Collection:
    config = config_of(**rejection)
    return Collection(config, prompts_of(config), folder, folder / "model", pairs=pairs)


def collect(folder: Path, pool: Pool, pairs: bool = False, **rejection: Any) -> Metrics:
    collection = collection_of(folder, pairs, **rejection)
    if not collection.is_begun:
        collection.begin()
    collection.run(pool, Odd(), Console(), lambda _: None)  # type: ignore[arg-type]
    return collection.checked()[0]


def prompts_of(config: Config) -> PromptDataset:
    return PromptDataset(config.data.train_files, config.data, build_tokenizer(128)).checked()


def test_a_collection_writes_the_rows_and_what_became_of_all_responses(tmp_path: Path) -> None:
    pool = Pool()
    metrics = collect(tmp_path / "collected", pool, max_per_prompt=1)
    assert [len(part) for part in pool.asked] == [3, 3, 2], "prompts are answered in parts, each once"
    rows = [json.loads(line) for line in (tmp_path / "collected/train.jsonl").read_text().splitlines()]
    assert rows and all(int(row["response"]) % 2 and row["reward"] == 1.0 for row in rows)
    assert metrics["collect/kept"] == len(rows) == len({row["prompt"] for row in rows})
    assert (metrics["collect/prompts"], metrics["collect/sampled"]) == (8, 8 * N)
    correct = metrics["collect/kept"] + metrics["collect/duplicates"] + metrics["collect/over_the_cap"]
    assert metrics["collect/reward_mean"] == pytest.approx(correct / (8 * N))
    assert metrics["collect/kept_share"] == pytest.approx(len(rows) / (8 * N))
    assert sorted(path.name for path in (tmp_path / "collected").iterdir()) == ["settings.json", "summary.json", "train.jsonl"]


@pytest.mark.parametrize("pairs", [False, True])
def test_a_killed_collection_goes_on_with_the_part_that_is_missing_and_ends_in_the_same_bytes(
    tmp_path: Path, pairs: bool
) -> None:
    collect(tmp_path / "whole", Pool(), pairs=pairs)
    with pytest.raises(Killed):
        collect(tmp_path / "killed", Pool(dies_at=2), pairs=pairs)
    assert summary_of(tmp_path / "killed") is None and not (tmp_path / "killed/train.jsonl").exists()
    pool = Pool()
    collect(tmp_path / "killed", pool, pairs=pairs)
    assert pool.asked == [["row-6", "row-7"]]
    for name in ("train.jsonl", "summary.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    columns = json.loads((tmp_path / "whole/train.jsonl").read_text().splitlines()[0]).keys()
    assert ({"chosen", "rejected"} <= columns) == pairs


def test_what_was_sampled_with_other_settings_is_not_taken_over(tmp_path: Path) -> None:
    collect(tmp_path, Pool(), max_per_prompt=1)
    assert collection_of(tmp_path, max_per_prompt=1).is_begun
    assert not collection_of(tmp_path, max_per_prompt=2).is_begun
    assert not collection_of(tmp_path, max_per_prompt=1, min_reward=0.5).is_begun
