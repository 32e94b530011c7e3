"""Sampling from a part of the vocabulary: the trainer's log-probs over what the engine sampled from are the engine's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import response_logits, sampled
from rank_processes import VOCAB
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from grpo_rl.data.collate import collate
from grpo_rl.models.forward import PolicyModel
from grpo_rl.models.load import load_config, load_lm
from grpo_rl.rollout.engine import EngineSpec, RolloutEngine
from grpo_rl.rollout.engines import ENGINES
from grpo_rl.rollout.vllm.vllm_engine import VllmEngine
from grpo_rl.types import Batch, Completion, Prompt, Request, Rollout, Sampling
from grpo_rl.workers.sharded_policy import sequences_of

PROMPTS = [(5, 6, 7), (9, 8, 7, 6, 5, 4, 3, 2), (11,), (20, 21, 22, 23, 24)]
CUTS = {
    "top_p of the 20 likeliest": {"top_p": 0.8, "top_k": 20},
    "top_k": {"top_k": 5},
    "top_k beyond the vocabulary": {"top_k": VOCAB + 100, "top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "all three, warmer": {"top_p": 0.9, "top_k": 12, "min_p": 0.05, "temperature": 1.3},
}


@dataclass
class Replica:
    engine: RolloutEngine
    folder: Path
    model: Qwen3ForCausalLM

    def run(self, sampling: dict[str, float], count: int = 16, **more: bool) -> list[tuple[Request, Completion]]:
        requests = [
            Request(f"r{i}", PROMPTS[i % len(PROMPTS)], Sampling(16, ignore_eos=True, seed=100 + i, **sampling, **more))  # type: ignore[arg-type]
            for i in range(count)
        ]
        return run(self.engine, requests)


def run(engine: RolloutEngine, requests: list[Request]) -> list[tuple[Request, Completion]]:
    return list(zip(requests, sampled(engine, requests), strict=True))


@pytest.fixture(scope="module", params=["vllm", "hf"])
def replica(request: pytest.FixtureRequest, tiny_qwen3: Callable[[bool], Path]) -> Iterator[Replica]:
    folder = tiny_qwen3(False)
    engine = ENGINES.get(request.param)(EngineSpec(model_path=str(folder), name=request.param, max_model_len=64))
    yield Replica(engine, folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    engine.close()


def allowed(logits_V: torch.Tensor, sampling: Sampling) -> set[int]:
    """Return the tokens that are left of the distribution, found one by one from the likeliest on."""
    probs = (logits_V.double() / sampling.temperature).softmax(-1).tolist()
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    order = [token for token in order if probs[token] >= sampling.min_p * probs[order[0]]]
    order = order[: sampling.top_k] if sampling.top_k > 0 else order
    total, mass, kept = sum(probs[token] for token in order), 0.0, set()
    for token in order:
        if mass >= sampling.top_p * total:
            break
        kept.add(token)
        mass += probs[token]
    return kept


def batch_of(pairs: list[tuple[Request, Completion]]) -> Batch:
    return collate(
        [
            Rollout(
                prompt=Prompt(str(number), request.prompt_ids, "", "test"),
                sample_index=0,
                response_ids=completion.response_ids,
                rollout_logprobs=completion.logprobs,
                finish_reason=completion.finish_reason,
                versions=completion.versions,
                reward=0.0,
                support=completion.support,
            )
            for number, (request, completion) in enumerate(pairs)
        ]
    )


@torch.no_grad()
def trainer_logprobs(folder: Path, batch: Batch, temperature: float) -> torch.Tensor:
    policy = PolicyModel(load_lm(str(folder), load_config(str(folder))), temperature=temperature, chunk_tokens=50)
    logprobs_T: torch.Tensor = policy(sequences_of(batch, torch.device("cpu"), share_prompts=True)).logprobs_T
    return logprobs_T


@pytest.mark.parametrize("cut", CUTS)
def test_the_support_is_what_the_settings_leave_and_over_it_the_trainers_logprobs_are_the_engines(
    replica: Replica, cut: str
) -> None:
    pairs = replica.run(CUTS[cut], keep_support=True)
    for request, completion in pairs[:4]:
        assert completion.support is not None
        logits = response_logits(replica.model, request.prompt_ids, completion.response_ids)
        supports = np.split(completion.support.token_ids, np.cumsum(completion.support.counts)[:-1])
        for row, ids in zip(logits, supports, strict=True):
            assert len(set(ids)) == len(ids) and set(ids.tolist()) == allowed(row, request.sampling)
    batch, temperature = batch_of(pairs), CUTS[cut].get("temperature", 1.0)
    with_T = trainer_logprobs(replica.folder, batch, temperature) - batch.rollout_logprobs_T
    assert float(with_T.abs().max()) <= 1e-4
    without = batch.replace(support_counts_T=None, support_ids_M=None)
    without_T = trainer_logprobs(replica.folder, without, temperature) - batch.rollout_logprobs_T
    assert float(without_T.exp().mean()) < 0.92, "the ratio is off by what was cut away"


def test_the_support_is_read_out_of_arrays_and_of_each_requests_own_columns(replica: Replica, monkeypatch) -> None:
    """vLLM makes a Python number of each of the 132 entries that a token may have, which takes longer than its step."""
    if isinstance(replica.engine, VllmEngine):

        def one_by_one(*_: Any) -> None:
            raise AssertionError("the entries were appended one by one")

        monkeypatch.setattr("vllm.logprobs.FlatLogprobs.append_fast", one_by_one)
    cuts = [{"top_k": 3}, {"top_k": 20, "top_p": 0.9}]
    mixed = [
        Request(f"mixed{i}", PROMPTS[i], Sampling(16, ignore_eos=True, seed=i, keep_support=True, **cuts[i % 2]))  # type: ignore[arg-type]
        for i in range(4)
    ]
    for request, completion in run(replica.engine, mixed):
        [(_, alone)] = run(replica.engine, [replace(request, request_id=f"alone {request.request_id}")])
        assert alone.support is not None and completion.support is not None
        assert alone.support.counts.tolist() == completion.support.counts.tolist()
        assert alone.support.token_ids.tolist() == completion.support.token_ids.tolist()
        assert alone.logprobs.tolist() == pytest.approx(completion.logprobs.tolist(), abs=1e-5)


def test_a_support_is_returned_only_where_it_is_asked_for_and_something_is_left_out(replica: Replica) -> None:
    assert all(c.support is None for _, c in replica.run({"top_k": 5}, count=2))
    assert all(c.support is None for _, c in replica.run({}, count=2, keep_support=True))
    greedy = replica.run({"temperature": 0.0, "top_k": 5, "top_p": 0.5}, count=2, keep_support=True)
    assert all(c.support is None and len(c.logprobs) == 16 for _, c in greedy)


def test_cut_and_whole_sampling_share_an_engine(replica: Replica) -> None:
    settings = [Sampling(8, top_k=3, seed=1, ignore_eos=True, keep_support=True), Sampling(8, seed=2, ignore_eos=True)]
    (_, cut), (_, whole) = run(replica.engine, [Request(str(i), PROMPTS[0], s) for i, s in enumerate(settings)])
    assert cut.support is not None and cut.support.counts.tolist() == [3] * 8
    assert whole.support is None and len(whole.logprobs) == 8


@pytest.mark.parametrize("fp32", [pytest.param(False, marks=pytest.mark.campaign), True])
def test_logits_of_a_bfloat16_engine_have_float32s_digits_only_with_a_float32_head(
    tiny_qwen3: Callable[[bool], Path], fp32: bool
) -> None:
    spec = EngineSpec(model_path=str(tiny_qwen3(False)), max_model_len=64, dtype="bfloat16", fp32_lm_head=fp32)
    engine = ENGINES.get("vllm")(spec)
    pairs = run(engine, [Request(f"r{i}", PROMPTS[0], Sampling(1, top_k=4, seed=i)) for i in range(40)])
    engine.close()
    logprob_of = {completion.response_ids[0]: completion.logprobs[0] for _, completion in pairs}
    assert len(logprob_of) == 4
    # Gaps between log-probs are gaps between logits; bfloat16 numbers from 1 on are multiples of 1/128.
    gaps = 128 * (torch.tensor(list(logprob_of.values())) - max(logprob_of.values()))
    off_grid = float((gaps - gaps.round()).abs().max())
    assert off_grid > 0.05 if fp32 else off_grid < 1e-3
