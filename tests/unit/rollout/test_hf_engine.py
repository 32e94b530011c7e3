"""The transformers engine: batched and one by one, and weights that change while it samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from grpo_rl.models import builtin
from grpo_rl.rollout.engine import EngineSpec
from grpo_rl.rollout.hf.hf_engine import HfEngine
from grpo_rl.types import Completion, Request, Sampling


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return builtin.build("builtin:arithmetic", tmp_path_factory.mktemp("model") / "random")


@pytest.fixture(scope="module")
def make_engine(folder: Path) -> Callable[[bool], HfEngine]:
    return lambda batched: HfEngine(EngineSpec(str(folder), 48, name="hf", batched=batched, max_num_seqs=4))


def answers(engine: HfEngine, *waves: Sequence[Request]) -> dict[str, Completion]:
    """Each wave comes one step after the one before."""
    found: list[Completion] = []
    for wave in waves:
        engine.submit(wave)
        found += engine.step()
    while engine.num_unfinished:
        found += engine.step()
    assert len({completion.request_id for completion in found}) == len(found)
    return {completion.request_id: completion for completion in found}


def some_requests(**sampling: float) -> list[Request]:
    """Prompts of 3, 6 and 9 tokens, some of them twice, and responses of 4 to 7."""
    prompts = [tuple(range(5, 8 + 3 * (i % 3))) for i in range(7)]
    return [Request(f"r{i}", prompts[i], Sampling(4 + i % 4, seed=100 + i, **sampling)) for i in range(7)]  # type: ignore[arg-type]


def test_without_batches_a_response_is_bit_equal_alone_and_beside_any_others(make_engine) -> None:
    engine, requests = make_engine(False), some_requests()
    alone = {request.request_id: answers(engine, [request])[request.request_id] for request in requests}
    assert answers(engine, requests) == alone
    assert answers(engine, requests[4:], requests[2:3], [*requests[:2], requests[3]]) == alone
    assert len({tuple(completion.response_ids) for completion in alone.values()}) > 1


def test_in_a_batch_every_request_samples_what_it_samples_alone(make_engine) -> None:
    requests = some_requests(top_k=5, keep_support=True)
    alone = answers(make_engine(False), requests)
    for waves in ([requests], [requests[4:], requests[2:3], [*requests[:2], requests[3]]]):
        together = answers(make_engine(True), *waves)
        assert together.keys() == alone.keys()
        for name, completion in together.items():
            assert completion.response_ids.tolist() == alone[name].response_ids.tolist()
            assert completion.finish_reason == alone[name].finish_reason
            np.testing.assert_allclose(completion.logprobs, alone[name].logprobs, atol=2e-5)
            assert completion.support.counts.tolist() == alone[name].support.counts.tolist()


def test_a_batch_runs_the_model_once_per_token_and_once_per_length_of_prompt(make_engine, monkeypatch) -> None:
    engine, shapes = make_engine(True), []
    forward = engine._model.forward

    def counted(*args, input_ids, **kwargs):
        shapes.append(tuple(input_ids.shape))
        return forward(*args, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(engine._model, "forward", counted)
    prompts = [(5, 6, 7), (5, 6, 7), (8, 6, 7), (5, 6)]
    engine.submit([Request(f"r{i}", ids, Sampling(3, seed=i, ignore_eos=True)) for i, ids in enumerate(prompts)])
    while engine.num_unfinished:
        engine.step()
    # The prompt that comes twice is read once.
    assert shapes == [(1, 2), (2, 3), (4, 1), (4, 1)]
