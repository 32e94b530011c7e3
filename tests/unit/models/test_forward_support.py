"""Distributions over the tokens that could be sampled, against a float64 softmax over them, one token at a time."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tiny_models import VOCAB, Ragged, make_folder, packed_policy

from grpo_rl.models.forward import Head, TokenOutputs, _head_columns
from grpo_rl.models.packing import Sequences

RAGGED = Ragged(prompt_lengths=[3, 7, 1, 5], response_lengths=[2, 9, 6, 0], seed=4)
TEMPERATURE = 0.8


def supports() -> list[list[int]]:
    """Return a random set for each trained token, with the token in it; one is the token alone, one is everything."""
    generator = torch.Generator().manual_seed(11)
    sets = []
    for number, target in enumerate(RAGGED.targets_T().tolist()):
        size = 1 if number == 3 else VOCAB if number == 4 else int(torch.randint(2, 12, (), generator=generator))
        others = [token for token in torch.randperm(VOCAB, generator=generator).tolist() if token != target]
        sets.append([*others[: size - 1], target])
    return sets


def sequences(sets: list[list[int]]) -> Sequences:
    batch = RAGGED.batch()
    return Sequences.of(
        batch.token_ids_S,
        batch.sequence_lengths_N,
        batch.positions(),
        batch.trained_lengths_N,
        torch.device("cpu"),
        torch.tensor([len(each) for each in sets]),
        torch.tensor([token for each in sets for token in each], dtype=torch.int32),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("qwen3"), "qwen3", tied=False)


def outputs(folder: Path, chunk_tokens: int) -> tuple[TokenOutputs, dict[str, torch.Tensor]]:
    """All outputs, and the gradient of a weighted sum of them."""
    policy = packed_policy(folder, temperature=TEMPERATURE, chunk_tokens=chunk_tokens)
    out = policy(sequences(supports()), want_entropy=True)
    weight_T = torch.linspace(-1, 1, len(out.logprobs_T))
    (weight_T * (out.logprobs_T + 0.3 * out.entropy_T)).sum().backward()
    return out, {name: parameter.grad for name, parameter in policy.named_parameters()}


def test_logprobs_and_entropies_are_those_of_a_softmax_over_the_allowed_tokens(folder):
    out, _ = outputs(folder, chunk_tokens=5)
    plain = sequences(supports())
    model = packed_policy(folder)
    hidden_TD = model.hidden_TD(plain)
    logits = (hidden_TD.double() @ model.lm.get_output_embeddings().weight.double().T / TEMPERATURE).tolist()
    for row, (allowed, target) in enumerate(zip(supports(), RAGGED.targets_T().tolist(), strict=True)):
        p = {token: math.exp(logits[row][token]) for token in allowed}
        p = {token: value / sum(p.values()) for token, value in p.items()}
        assert float(out.logprobs_T[row].detach()) == pytest.approx(math.log(p[target]), abs=1e-5)
        assert float(out.entropy_T[row].detach()) == pytest.approx(-sum(x * math.log(x) for x in p.values()), abs=1e-5)
    assert float(out.logprobs_T[3].detach()) == 0.0, "the only token that could be sampled is certain"


@pytest.mark.parametrize("column", [0, 1], ids=["logprob", "entropy"])
def test_gradients_are_those_of_finite_differences_and_pass_nothing_to_other_tokens(column):
    torch.manual_seed(0)
    hidden_TD, head_VD = torch.randn(3, 4), torch.randn(7, 4)
    target_T = torch.tensor([2, 0, 6])
    allowed = [[2, 5, 1], [0], [6, 3]]
    row_M = torch.tensor([row for row, each in enumerate(allowed) for _ in each], dtype=torch.int32)
    id_M = torch.tensor([token for each in allowed for token in each], dtype=torch.int32)

    def value(head_VD: torch.Tensor) -> torch.Tensor:
        head = Head(head_VD, None, 0.7, "float32")
        found = _head_columns(head, hidden_TD, target_T, True, None, None, (row_M, id_M))[column]
        return (found * torch.tensor([1.0, -2.0, 0.5])).sum()

    parameter = head_VD.clone().requires_grad_()
    value(parameter).backward()
    assert parameter.grad.isfinite().all()
    assert parameter.grad[4].abs().max() == 0, "token 4 could be sampled nowhere"
    for v, d in [(2, 0), (5, 3), (6, 1), (3, 2), (0, 1)]:
        step = torch.zeros_like(head_VD)
        step[v, d] = 1e-2
        slope = float(value(head_VD + step) - value(head_VD - step)) / 2e-2
        assert float(parameter.grad[v, d]) == pytest.approx(slope, abs=2e-3)
