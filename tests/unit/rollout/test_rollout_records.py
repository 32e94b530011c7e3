"""Requests and completions of an engine: arrays, versions by token, text, and the order of a weight update."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_rl.errors import WeightVersionError
from grpo_rl.models import builtin
from grpo_rl.rollout.engine import EngineSpec
from grpo_rl.rollout.requests import check_versions
from grpo_rl.rollout.weights import WeightBucket, WeightTransferError, WeightUpdate, pack_buckets
from grpo_rl.types import Completion, Prompt, Request, Rollout, Sampling, Versions, extended
from grpo_rl.workers.rollout import RolloutWorker

START_S = 120.0

# ---- versions ------------------------------------------------------------------------------------------


def test_versions_are_run_length_encoded_as_tokens_come() -> None:
    versions: Versions = ()
    for version, tokens in ((3, 1), (3, 2), (4, 0), (5, 1), (5, 4)):
        versions = extended(versions, version, tokens)
    assert versions == ((3, 3), (5, 5))
    rollout = Rollout(Prompt("u", (1,), "?", "test"), 0, (2,) * 8, (0.0,) * 8, "stop", versions)
    assert rollout.oldest_version == 3
    assert Rollout(rollout.prompt, 0, (), (), "abort", ()).oldest_version is None


def completion(*versions: tuple[int, int], tokens: int = 4) -> Completion:
    return Completion("p/0", (1,) * tokens, (0.0,) * tokens, "stop", versions)


def test_tokens_may_be_as_old_as_the_bound_and_never_newer_than_the_weights() -> None:
    check_versions(completion((7, 4)), version=7, max_staleness=0)
    check_versions(completion((5, 1), (6, 1), (7, 2)), version=7, max_staleness=2)
    with pytest.raises(WeightVersionError, match="p/0 was sampled with weights of version 5, the actor's are 7, and at most 1"):
        check_versions(completion((5, 1), (7, 3)), version=7, max_staleness=1)
    with pytest.raises(WeightVersionError, match=r"weights of version 6, the actor's are 7$"):
        check_versions(completion((7, 3), (6, 1)), version=7, max_staleness=0)
    with pytest.raises(WeightVersionError, match="weights of version 8, the actor's are 7"):
        check_versions(completion((8, 4)), version=7, max_staleness=3)
    with pytest.raises(WeightVersionError, match="has 4 tokens, and weight versions for 3"):
        check_versions(completion((7, 3)), version=7, max_staleness=0)


def test_an_update_starts_while_requests_are_unfinished_only_where_the_engine_can_take_it() -> None:
    with pytest.raises(WeightTransferError, match="weights 1 cannot start: 2 requests are unfinished"):
        WeightUpdate({"w": ()}).start(1, num_unfinished=2)
    update = WeightUpdate({"w": ()}, in_flight=True)
    update.start(1, num_unfinished=2)
    assert update.active
    update.receive(WeightBucket(("w",), ("float32",), ((),)))
    update.finish()
    assert update.version == 1


# ---- the worker ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return builtin.build("builtin:arithmetic", tmp_path_factory.mktemp("model") / "random")


def poll_all(worker: RolloutWorker, count: int) -> list[Completion]:
    found: list[Completion] = []
    deadline = time.monotonic() + 60
    while len(found) < count:
        assert time.monotonic() < deadline
        found += worker.poll(timeout_s=5)
    return found


def test_responses_come_with_their_text_without_special_tokens(folder: Path) -> None:
    worker = RolloutWorker(EngineSpec(str(folder), 64, name="hf"), START_S, START_S)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    try:
        worker.submit([Request(f"r{i}", (5, 6, 7), Sampling(40, seed=i, temperature=3.0)) for i in range(30)])
        found = poll_all(worker, 30)
    finally:
        worker.close()
    texts = [one.text for one in found]
    assert texts == [tokenizer.decode(one.response_ids.tolist(), skip_special_tokens=True) for one in found]
    assert len(set(texts)) > 10
    assert texts != [tokenizer.decode(one.response_ids.tolist()) for one in found], "some have special tokens"


class CountingWorker(RolloutWorker):
    """A worker that counts the steps of its engine."""

    num_steps = 0

    def _step(self, engine: Any) -> None:
        super()._step(engine)
        self.num_steps += 1


def test_a_worker_samples_nothing_between_the_start_and_the_end_of_an_update_and_then_goes_on(folder: Path) -> None:
    worker = CountingWorker(EngineSpec(str(folder), 512, name="hf"), START_S, START_S)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    try:
        assert worker.updates_in_flight()
        worker.submit([Request(f"r{i}", (5, 6, 7), Sampling(400, seed=i, ignore_eos=True)) for i in range(3)])
        deadline = time.monotonic() + 60
        while worker.num_steps < 3:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        worker.start_weight_update(4)
        steps = worker.num_steps
        time.sleep(0.3)
        for bucket in pack_buckets(model.state_dict().items(), 1 << 18):
            worker.load_bucket(bucket)
        assert worker.num_steps == steps and worker.poll(timeout_s=0.01) == []
        assert worker.finish_weight_update() == 4
        found = poll_all(worker, 3)
    finally:
        worker.close()
    assert {one.versions for one in found} == {((0, steps), (4, 400 - steps))}
