"""The rollout worker: an engine that samples in its own thread while others call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_rl.errors import ClusterError, ConfigError
from grpo_rl.rollout.engine import EngineSpec
from grpo_rl.rollout.weights import WeightTransferError
from grpo_rl.types import Completion, Request, Sampling
from grpo_rl.workers.rollout import RolloutWorker

START_S = 120.0

FAULTY = str(Path(__file__).with_name("faulty_engine.py"))


@pytest.fixture(scope="module")
def make_spec(tiny_qwen3: Callable[[bool], Path]) -> Callable[[str], EngineSpec]:
    def make(name: str) -> EngineSpec:
        return EngineSpec(str(tiny_qwen3(True)), 320, name=name, max_num_seqs=8, verify_checksum=True)

    return make


@pytest.fixture(scope="module")
def worker(make_spec: Callable[[str], EngineSpec]) -> Iterator[RolloutWorker]:
    worker = RolloutWorker(make_spec("hf"), START_S, START_S)
    yield worker
    worker.close()


def requests_for(tag: str, count: int, max_tokens: int = 8) -> list[Request]:
    return [Request(f"{tag}-{i}", (5 + i, 6, 7), Sampling(max_tokens, seed=i, ignore_eos=True)) for i in range(count)]


def poll_all(worker: RolloutWorker, count: int) -> list[Completion]:
    ended: list[Completion] = []
    deadline = time.monotonic() + 60
    while len(ended) < count:
        assert time.monotonic() < deadline
        ended += worker.poll(timeout_s=10)
    return ended


def test_what_was_submitted_is_polled_exactly_once(worker: RolloutWorker) -> None:
    requests = requests_for("once", 20)
    worker.submit(requests)
    ended = poll_all(worker, 20)
    assert sorted(completion.request_id for completion in ended) == sorted(request.request_id for request in requests)
    assert worker.poll(timeout_s=0.01) == []


def test_a_patient_poll_returns_what_ends_within_its_time_together_and_at_once_where_no_more_can_come(
    worker: RolloutWorker,
) -> None:
    requests = [one for length in (2, 20, 40) for one in requests_for(f"{length}", 2, max_tokens=length)]
    worker.submit(requests)
    began = time.monotonic()
    ended = worker.poll(timeout_s=60, longest_batch_s=50, enough=32)
    assert len(ended) == 6 and time.monotonic() - began < 40
    worker.submit([*requests_for("short", 2, max_tokens=2), *requests_for("long", 2, max_tokens=150)])
    assert {one.request_id for one in worker.poll(timeout_s=60, longest_batch_s=50, enough=2)} == {"short-0", "short-1"}
    assert {one.request_id for one in poll_all(worker, 2)} == {"long-0", "long-1"}


def test_a_callers_mistake_is_raised_to_the_caller_and_the_worker_goes_on(worker: RolloutWorker) -> None:
    with pytest.raises(ValueError, match="empty prompt"):
        worker.submit([Request("empty", (), Sampling(1))])
    with pytest.raises(WeightTransferError, match="no weight update to finish"):
        worker.finish_weight_update()
    worker.submit(requests_for("fine", 2))
    assert len(poll_all(worker, 2)) == 2


class CountingWorker(RolloutWorker):
    """A worker that counts the steps of its engine."""

    num_steps = 0

    def _step(self, engine: Any) -> None:
        super()._step(engine)
        self.num_steps += 1


def test_an_error_in_a_step_loses_no_response_that_ended_and_is_raised_by_every_later_call(
    make_spec: Callable[[str], EngineSpec],
) -> None:
    worker = CountingWorker(make_spec(f"{FAULTY}:fails_in_third_step"), START_S, START_S)
    worker.submit([*requests_for("short", 1, max_tokens=1), *requests_for("long", 1, max_tokens=9)])
    deadline = time.monotonic() + 60
    while worker.num_steps < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [completion.request_id for completion in worker.poll(timeout_s=0)] == ["short-0"]
    with pytest.raises(ClusterError, match="FloatingPointError: logits are not finite") as caught:
        worker.poll(timeout_s=30)
    assert isinstance(caught.value.__cause__, FloatingPointError)
    with pytest.raises(ClusterError, match="logits are not finite"):
        worker.submit(requests_for("more", 1))
    worker.close()


def test_an_engine_that_cannot_start_raises_its_own_error(make_spec: Callable[[str], EngineSpec]) -> None:
    with pytest.raises(MemoryError, match="no room for the cache"):
        RolloutWorker(make_spec(f"{FAULTY}:cannot_start"), START_S, START_S)
    with pytest.raises(ConfigError, match="unknown rollout engine 'vlm'"):
        RolloutWorker(make_spec("vlm"), START_S, START_S)


def test_a_call_that_the_engine_does_not_get_to_names_itself_at_its_deadline_and_a_closed_worker_refuses_calls(
    make_spec: Callable[[str], EngineSpec],
) -> None:
    worker = RolloutWorker(make_spec(f"{FAULTY}:steps_slowly"), START_S, 0.5)
    worker.submit(requests_for("slow", 1))
    with pytest.raises(ClusterError, match=r"did not answer received_digests within 0\.5 s"):
        worker.received_digests()
    worker.close()
    worker.close()
    with pytest.raises(ClusterError, match="closed"):
        worker.submit(requests_for("late", 1))
    with pytest.raises(ClusterError, match="closed"):
        worker.poll(timeout_s=5)
