"""Heads of one number: which state a critic's value is read from and where it starts; a reward model's scores against transformers'."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import VOCAB, Ragged, make_folder, plain_model
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from grpo_rl.errors import ConfigError
from grpo_rl.models.heads import ScoreModel, ValueModel, load_score_config, load_scorer
from grpo_rl.models.load import load_config, load_lm
from grpo_rl.models.packing import Sequences


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
    model = ValueModel(load_lm(str(folder), load_config(str(folder))))
    for parameter in (model.head.weight, model.head.bias):
        torch.nn.init.normal_(parameter)
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


# ---- scores ----

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}


def scorer(folder: Path) -> ScoreModel:
    return ScoreModel(load_scorer(str(folder), load_score_config(str(folder)))).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("score")
    Qwen3ForSequenceClassification(Qwen3Config(**SIZES, head_dim=8, num_labels=1)).save_pretrained(path)
    return path


def sequences(lengths: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, VOCAB, (length,), generator=generator) for length in lengths]


@torch.no_grad()
def last_scores(model: ScoreModel, ids: list[Tensor]) -> Tensor:
    lengths_N = torch.tensor([len(row) for row in ids])
    return model(Sequences.scored(torch.cat(ids), lengths_N, lengths_N.cumsum(0) - 1, CPU))


@torch.no_grad()
def test_the_score_of_a_sequence_is_that_of_transformers(folder):
    ids = sequences([7, 1, 30, 12])
    plain = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    expected = torch.cat([plain(row[None]).logits[:, 0] for row in ids])
    assert float(expected.std()) > 0.1
    torch.testing.assert_close(last_scores(scorer(folder), ids), expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_scores_at_the_ends_of_steps_are_those_of_the_text_up_to_there(folder):
    model = scorer(folder)
    first, second = sequences([20, 9])
    ends = [3, 11, 19]
    positions_P = torch.tensor([*ends, 20 + 8])
    scores = model(Sequences.scored(torch.cat([first, second]), torch.tensor([20, 9]), positions_P, CPU))
    expected = last_scores(model, [*(first[: end + 1] for end in ends), second])
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)


def test_a_model_that_gives_no_single_score_is_refused_with_the_key_and_what_it_has(tmp_path):
    language_model, two_labels, encoder = tmp_path / "lm", tmp_path / "two", tmp_path / "bert"
    Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)).save_pretrained(language_model)
    Qwen3ForSequenceClassification(Qwen3Config(**SIZES, head_dim=8, num_labels=2)).save_pretrained(two_labels)
    small = BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=9, num_labels=1
    )
    BertForSequenceClassification(small).save_pretrained(encoder)
    for path, said in ((language_model, "Qwen3ForCausalLM"), (two_labels, "2 labels"), (tmp_path / "none", "no such folder")):
        with pytest.raises(ConfigError, match=said) as refused:
            load_score_config(str(path))
        assert str(refused.value).startswith("reward.reward_model.model_path=")
    with pytest.raises(ConfigError, match="causal decoders"):
        load_scorer(str(encoder), load_score_config(str(encoder)))


def test_a_folder_without_the_head_is_refused_and_not_scored_by_noise(tmp_path):
    Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)).save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text().replace("Qwen3ForCausalLM", "Qwen3ForSequenceClassification")
    (tmp_path / "config.json").write_text(text.replace("{", '{"num_labels": 1,', 1))
    with pytest.raises(ConfigError, match=r"score\.weight is not there"):
        scorer(tmp_path)
