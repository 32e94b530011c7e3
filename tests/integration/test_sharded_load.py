"""Ranks that read their own rows of a model's files: the values of transformers, and no more than the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import RankProcesses, assert_equal_bits, make_model
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForSequenceClassification

from grpo_rl.algos.objective import Objective
from grpo_rl.config.schema.tree import ModelConfig, OptimConfig, RewardModelTrainConfig
from grpo_rl.models.load import load_config, load_lm
from grpo_rl.models.sharded_load import WeightFiles
from grpo_rl.workers.specs import ActorSpec, PolicySpec, RewardModelSpec, TrainedRewardModelSpec


def actor_of(path: Path) -> ActorSpec:
    policy = PolicySpec(ModelConfig(path=str(path)), temperature=1.0, dtype="float32", train=True)
    return ActorSpec(policy, Objective(), OptimConfig(), 10, seed=1)


def stored(path: Path) -> dict[str, torch.Tensor]:
    """The parameters as transformers reads them, in float32."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return {f"lm.{name}": parameter.detach() for name, parameter in model.named_parameters()}


def make_sharded(folder: Path, *, tied: bool, dtype: torch.dtype) -> Path:
    """Save a model in several files, as large ones are, of these numbers."""
    make_model(folder, tied=tied)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_have_what_transformers_reads_and_read_their_rows_only(ranks, tmp_path, tied, dtype):
    path = make_sharded(tmp_path, tied=tied, dtype=dtype)
    expected = stored(path)
    ranks[2].build(actor_of(path))
    assert_equal_bits(expected, ranks[2].call("parameters")[0])
    for read, held in ranks[2].call("read_bytes"):
        assert 0 < read <= held, "each rank reads what it holds, and a tied head once"
    buffers = dict(load_lm(str(path), load_config(str(path))).named_buffers())
    for there in ranks[2].call("buffers"):
        assert there and all(torch.equal(value, buffers[name.removeprefix("lm.")]) for name, value in there.items())


@pytest.mark.parametrize("has_head", [True, False])
def test_a_reward_model_has_its_head_or_zeros(ranks, tmp_path, has_head):
    path = make_model(tmp_path, tied=False)
    if has_head:
        torch.manual_seed(3)
        config = Qwen3Config.from_pretrained(path, num_labels=1)
        Qwen3ForSequenceClassification(config).save_pretrained(path)
    spec = TrainedRewardModelSpec(RewardModelSpec(str(path), "float32"), RewardModelTrainConfig(), 10, seed=1)
    ranks[2].build(spec)
    parameters = ranks[2].call("parameters")[0]
    assert (torch.count_nonzero(parameters["lm.score.weight"]) > 0) == has_head
    assert torch.count_nonzero(parameters["lm.model.embed_tokens.weight"]) > 0


def test_files_with_other_names_are_left_to_transformers(ranks, tmp_path):
    from safetensors.torch import load_file, save_file

    path = make_model(tmp_path, tied=False)
    expected = stored(path)
    file = path / "model.safetensors"
    # The oldest folders name the body's weights without its prefix.
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    files = WeightFiles.find(str(path))
    assert files is not None and not files.fits(load_lm(str(path), load_config(str(path)), on_meta=True))
    ranks[2].build(actor_of(path))
    assert_equal_bits(expected, ranks[2].call("parameters")[0])


def test_what_does_not_fit_is_refused_with_its_name_as_before(ranks, tmp_path):
    from safetensors.torch import load_file, save_file

    path = make_model(tmp_path, tied=False)
    tensors: dict[str, Any] = load_file(path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(Exception, match=r"model\.norm\.weight is not there"):
        RankProcesses.build(ranks[1], actor_of(path))
