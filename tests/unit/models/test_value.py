"""The critic's model: which hidden state a value is read from, and where it starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import Ragged, make_folder, plain_model
from torch import Tensor

from grpo_rl.models.heads import ValueModel
from grpo_rl.models.load import load_config, load_lm


def value_model(folder: Path, seed: int = 1) -> ValueModel:
    """Return the model as the workers load it, with a head that is not 0."""
    model = ValueModel(load_lm(str(folder), load_config(str(folder))))
    torch.manual_seed(seed)
    torch.nn.init.normal_(model.head.weight)
    torch.nn.init.normal_(model.head.bias)
    return model


def plain_values_T(folder: Path, model: ValueModel, ragged: Ragged) -> Tensor:
    """One sequence after the other through transformers' own attention; the hidden state before each response token."""
    body = plain_model(folder).base_model
    rows = []
    for ids, prompt, response in zip(ragged.ids, ragged.prompt_lengths, ragged.response_lengths, strict=True):
        hidden = body(ids[None]).last_hidden_state[0, prompt - 1 : prompt - 1 + response]
        rows.append(hidden @ model.head.weight[0] + model.head.bias)
    return torch.cat(rows)


@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("llama", False)])
@torch.no_grad()
def test_the_value_of_a_token_is_read_from_the_hidden_state_before_it(tmp_path: Path, family: str, tied: bool) -> None:
    folder = make_folder(tmp_path, family, tied)
    model = value_model(folder)
    ragged = Ragged([3, 1, 5, 2], [4, 2, 0, 1])
    values_T = model(ragged.sequences())
    assert values_T.dtype == torch.float32
    torch.testing.assert_close(values_T, plain_values_T(folder, model, ragged), atol=1e-4, rtol=1e-4)
    assert float(values_T.std()) > 0.1


def test_the_first_step_moves_the_head_alone_and_the_next_the_body_too(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "qwen3", True)
    model = ValueModel(load_lm(str(folder), load_config(str(folder))))
    sequences = Ragged([3, 2], [4, 1]).sequences()
    (model(sequences) - 1).square().sum().backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None and float(p.grad.abs().max()) > 0}
    assert moved == {"head.weight", "head.bias"}
    with torch.no_grad():
        model.head.weight -= 0.01 * model.head.weight.grad
    model.zero_grad()
    (model(sequences) - 1).square().sum().backward()
    assert all(p.grad is not None and float(p.grad.abs().max()) > 0 for p in model.lm.parameters())
