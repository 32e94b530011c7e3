"""Distributions over the tokens that could be sampled, against a float64 softmax over them, one token at a time."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tiny_models import VOCAB, Ragged, make_folder, packed_policy

from grpo_rl.models.forward import Head, TokenOutputs, head_columns
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


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("reference"), "qwen3", tied=False, seed=99)


def outputs(folder: Path, reference: Path, chunk_tokens: int) -> tuple[TokenOutputs, dict[str, torch.Tensor]]:
    """All outputs, and the gradient of a weighted sum of them."""
    policy, ref = packed_policy(folder, temperature=TEMPERATURE, chunk_tokens=chunk_tokens), packed_policy(reference)
    given = sequences(supports())
    with torch.no_grad():
        hidden_TD = ref(given, want_hidden=True).hidden_TD
    out = policy(given, want_entropy=True, ref_hidden_TD=hidden_TD, ref_head_VD=ref.lm.get_output_embeddings().weight.detach())
    weight_T = torch.linspace(-1, 1, len(out.logprobs_T))
    (weight_T * (out.logprobs_T + 0.3 * out.entropy_T + 0.2 * out.full_kl_T)).sum().backward()
    return out, {name: parameter.grad for name, parameter in policy.named_parameters()}


def test_logprobs_entropies_and_kls_are_those_of_a_softmax_over_the_allowed_tokens(folder, reference):
    out, _ = outputs(folder, reference, chunk_tokens=5)
    plain = sequences(supports())
    logits = []
    for path in (folder, reference):
        model = packed_policy(path)
        hidden_TD = model(plain, want_hidden=True).hidden_TD
        logits.append((hidden_TD.double() @ model.lm.get_output_embeddings().weight.double().T / TEMPERATURE).tolist())
    for row, (allowed, target) in enumerate(zip(supports(), RAGGED.targets_T().tolist(), strict=True)):
        p, q = ({token: math.exp(of[row][token]) for token in allowed} for of in logits)
        p, q = ({token: value / sum(of.values()) for token, value in of.items()} for of in (p, q))
        assert float(out.logprobs_T[row].detach()) == pytest.approx(math.log(p[target]), abs=1e-5)
        assert float(out.entropy_T[row].detach()) == pytest.approx(-sum(x * math.log(x) for x in p.values()), abs=1e-5)
        assert float(out.full_kl_T[row].detach()) == pytest.approx(sum(p[t] * math.log(p[t] / q[t]) for t in allowed), abs=1e-4)
    assert float(out.logprobs_T[3].detach()) == 0.0, "the only token that could be sampled is certain"


@pytest.mark.parametrize("column", [0, 1, 2], ids=["logprob", "entropy", "full_kl"])
def test_gradients_are_those_of_finite_differences_and_pass_nothing_to_other_tokens(column):
    torch.manual_seed(0)
    hidden_TD, ref_TD, head_VD, ref_VD = torch.randn(3, 4), torch.randn(3, 4), torch.randn(7, 4), torch.randn(7, 4)
    target_T = torch.tensor([2, 0, 6])
    allowed = [[2, 5, 1], [0], [6, 3]]
    row_M = torch.tensor([row for row, each in enumerate(allowed) for _ in each], dtype=torch.int32)
    id_M = torch.tensor([token for each in allowed for token in each], dtype=torch.int32)

    def value(head_VD: torch.Tensor) -> torch.Tensor:
        head, ref_head = (Head(weight_VD, None, 0.7, "float32") for weight_VD in (head_VD, ref_VD))
        asked = {"want_entropy": True, "ref_head": ref_head, "ref_hidden_TD": ref_TD, "support": (row_M, id_M)}
        found = head_columns(head, hidden_TD, target_T, **asked)[column]
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
