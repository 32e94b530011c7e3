"""The transformers engine: batched and one by one, and weights that change while it samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_rl.models import builtin
from grpo_rl.rollout.engine import EngineSpec
from grpo_rl.rollout.hf.hf_engine import HfEngine
from grpo_rl.rollout.weights import pack_buckets
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


def logprobs_of(model, before, completion: Completion, prompt: Sequence[int], keep_cache: bool) -> torch.Tensor:
    """Return the log-probs of the response's tokens under two models: the first sampled the first span, the second the rest."""
    response = completion.response_ids.tolist()
    (_, split), _ = completion.versions
    ids = torch.tensor([[*prompt, *response]])
    old = before(ids).logits[0].log_softmax(-1)
    new = model(ids).logits[0].log_softmax(-1)
    if keep_cache:
        # Prompt and first span, but its last token, which no forward pass has read yet, are in the old model's cache.
        read = len(prompt) + split - 1
        cache = before(ids[:, :read], use_cache=True).past_key_values
        new[read:] = model(ids[:, read:], past_key_values=cache).logits[0].log_softmax(-1)
    rows = torch.arange(len(prompt) - 1, len(prompt) + len(response) - 1)
    of_token = torch.cat([old[rows[:split]], new[rows[split:]]])
    return of_token.gather(-1, torch.tensor(response)[:, None])[:, 0]


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("keep_cache", [True, False])
def test_requests_live_through_an_update_and_every_token_has_the_version_and_logprob_of_its_weights(
    make_engine, folder: Path, batched: bool, keep_cache: bool
) -> None:
    engine = make_engine(batched)
    before, model = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for _ in range(2))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * parameter.std() * torch.randn_like(parameter))
    prompts = {"a": (5, 6, 7), "b": (9, 8, 7, 6, 5), "c": (5, 6, 7), "late": (11, 12)}
    engine.submit([Request(name, prompts[name], Sampling(20, seed=7, ignore_eos=True)) for name in ("a", "b", "c")])
    for _ in range(8):
        assert engine.step() == []
    engine.start_weight_update(3)
    weights = list(pack_buckets(model.state_dict().items(), 1 << 20))
    engine.load_bucket(weights[0])
    assert engine.step() == [], "tensors of two versions are not sampled from"
    for bucket in weights[1:]:
        engine.load_bucket(bucket)
    engine.finish_weight_update(keep_cache)
    found = answers(engine, [Request("late", prompts["late"], Sampling(20, seed=8, ignore_eos=True))])
    assert {name: one.versions for name, one in found.items()} == {
        **dict.fromkeys("abc", ((0, 8), (3, 12))),
        "late": ((3, 20),),
    }
    for name in "abc":
        with torch.no_grad():
            right = logprobs_of(model, before, found[name], prompts[name], keep_cache)
            other = logprobs_of(model, before, found[name], prompts[name], not keep_cache)
        torch.testing.assert_close(torch.tensor(found[name].logprobs), right, atol=5e-5, rtol=0)
        assert (right - other).abs().max() > 1e-3, "what is in the cache shows in the log-probs"
