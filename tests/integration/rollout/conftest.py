"""Tiny random Qwen3 models, what transformers and the trainer say about them, and engines that are asked and updated."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from rank_processes import make_model
from torch import Tensor
from transformers import PreTrainedModel

from grpo_rl.models.forward import PolicyModel
from grpo_rl.models.packing import Sequences
from grpo_rl.rollout.engine import RolloutEngine
from grpo_rl.rollout.senders import ObjectStoreSender
from grpo_rl.rollout.weights import check_digests
from grpo_rl.types import Completion, Request

EOS = 1


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """Folder of a random Qwen3 with 2 layers, its head tied to the embedding or not."""
    made: dict[bool, Path] = {}

    def make(tied: bool) -> Path:
        if tied not in made:
            # vLLM's attention on CPUs has no kernel for smaller heads.
            sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "max_position_embeddings": 512}
            made[tied] = make_model(tmp_path_factory.mktemp("model"), tied=tied, seed=3, **sizes)
        return made[tied]

    return make


def perturb(model: torch.nn.Module, seed: int) -> None:
    """Give the model other weights."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * parameter.std().nan_to_num(0.1) * torch.randn_like(parameter))


def sampled(engine: RolloutEngine, requests: list[Request]) -> list[Completion]:
    """Completions in the order of the requests."""
    engine.submit(requests)
    ended: dict[str, Completion] = {}
    while engine.num_unfinished:
        ended |= {completion.request_id: completion for completion in engine.step()}
    return [ended[request.request_id] for request in requests]


def send(engine: RolloutEngine, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Bring these tensors to the engine as the next version of its weights."""
    sender = ObjectStoreSender(20_000, verify=True)
    engine.start_weight_update(engine.weight_version + 1)
    for bucket in sender.buckets(tensors):
        engine.load_bucket(bucket)
    engine.finish_weight_update()
    check_digests(sender.sent_digests(), engine.received_digests(), "the engine")


def engine_logprobs(completions: list[Completion]) -> Tensor:
    return torch.cat([torch.tensor(completion.logprobs) for completion in completions])


@torch.no_grad()
def trainer_logprobs(policy: PolicyModel, requests: list[Request], completions: list[Completion]) -> Tensor:
    """What the trainer's packed forward pass says of the sampled tokens."""
    pairs = zip(requests, completions, strict=True)
    rows = [torch.tensor([*request.prompt_ids, *completion.response_ids]) for request, completion in pairs]
    lengths_N = torch.tensor([len(row) for row in rows])
    sampled_N = torch.tensor([len(completion.response_ids) for completion in completions])
    ends = zip(lengths_N.cumsum(0).tolist(), sampled_N.tolist(), strict=True)
    positions_T = torch.cat([torch.arange(end - count, end) for end, count in ends])
    sequences = Sequences.of(torch.cat(rows), lengths_N, positions_T, sampled_N, torch.device("cpu"))
    logprobs_T: Tensor = policy(sequences).logprobs_T
    return logprobs_T


@torch.no_grad()
def response_logits(model: PreTrainedModel, prompt_ids: tuple[int, ...], response_ids: tuple[int, ...]) -> Tensor:
    """Logits [tokens, V] that a plain forward pass gives for each response token."""
    ids = torch.tensor([[*prompt_ids, *response_ids]])
    logits: Tensor = model(ids).logits[0].float()
    return logits[len(prompt_ids) - 1 : -1]
