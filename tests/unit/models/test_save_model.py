"""A model is written file by file, while its tensors are gathered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from tiny_models import make_folder, packed_policy
from torch import Tensor
from transformers import AutoModelForCausalLM

from grpo_rl.checkpoint import files
from grpo_rl.checkpoint.exporting import try_export
from grpo_rl.config.schema.tree import ModelConfig
from grpo_rl.errors import CheckpointError, ConfigError
from grpo_rl.models import fsdp
from grpo_rl.models.builtin import build_tokenizer

SHARD = 8192


class Gather:
    """Stands in for the sharded gather, and counts its tensors."""

    def __init__(self, policy: Any) -> None:
        self.whole = dict(fsdp.named_full_tensors(policy, aliases=False))
        self.count = 0

    def __call__(self, policy: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.whole.items():
            self.count += 1
            yield name, tensor.detach().clone()


@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("qwen3", False), ("qwen3_moe", False)])
def test_the_files_are_those_of_transformers_or_small_ones_of_the_same_tensors(tmp_path: Path, family: str, tied: bool) -> None:
    policy = packed_policy(make_folder(tmp_path / "made", family, tied))
    policy.lm.save_pretrained(tmp_path / "by transformers")
    fsdp.save_model(policy, tmp_path / "one")
    fsdp.save_model(policy, tmp_path / "many", shard_bytes=SHARD)
    for file in ("model.safetensors", "config.json", "generation_config.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "by transformers" / file).read_bytes()
    shards = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 2 and shards[-1] == f"model-{len(shards):05}-of-{len(shards):05}.safetensors"
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "many", dtype=torch.float32).state_dict()
    for name, tensor in policy.lm.state_dict().items():
        assert torch.equal(read[name], tensor), name


def test_a_rank_that_cannot_write_goes_on_gathering_with_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = packed_policy(make_folder(tmp_path / "made", "qwen3", True))
    gather = Gather(policy)
    monkeypatch.setattr(fsdp, "named_full_tensors", gather)

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(fsdp, "save_file", full)
    with pytest.raises(OSError, match="no space left"):
        fsdp.save_model(policy, tmp_path / "many", shard_bytes=SHARD)
    assert gather.count == len(gather.whole)


@pytest.mark.parametrize("settings", [{"temperature": 0.6, "top_p": 0.95}, {"do_sample": False, "num_beams": 1, "top_k": 5}])
def test_generation_settings_that_transformers_refuses_to_write_are_written_as_they_were(tmp_path: Path, settings: Any) -> None:
    made = make_folder(tmp_path / "made", "qwen3", True)
    (made / "generation_config.json").write_text(json.dumps(settings))
    policy = packed_policy(made)
    with pytest.raises(ValueError, match="GenerationConfig is invalid"):
        policy.lm.save_pretrained(tmp_path / "by transformers")
    fsdp.save_model(policy, tmp_path / "ours")
    written = json.loads((tmp_path / "ours" / "generation_config.json").read_text())
    assert {name: written.get(name) for name in settings} == settings
    try_export(str(made), ModelConfig(path=str(made)), build_tokenizer(128))


def test_what_a_tokenizer_cannot_write_is_known_before_the_training(tmp_path: Path) -> None:
    made, tokenizer = make_folder(tmp_path / "made", "qwen3", True), build_tokenizer(128)
    tokenizer.init_kwargs["unwritable"] = object()
    with pytest.raises(ConfigError, match=r"the trained model could not be written: TypeError.*trainer.export_at_end=false"):
        try_export(str(made), ModelConfig(path=str(made)), tokenizer)


def test_a_folder_takes_its_place_when_it_is_whole_and_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with files.whole_folder(target) as fresh:
        (fresh / "config.json").write_text("1")
        assert not target.exists()
    for error in (OSError(28, "No space left on device"), ValueError("this library refuses"), SafetensorError("os error 28")):
        said = rf"cannot write {target}: .*{str(error)[-12:]}.*needs 0.0 MiB, .* are free"
        with pytest.raises(CheckpointError, match=said), files.whole_folder(target, 10) as fresh:
            (fresh / "config.json").write_text("2")
            raise error
    with (
        pytest.raises(CheckpointError, match=r"nothing was written.*needs 9,5[0-9,.]+ MiB"),
        files.whole_folder(target, 10**16),
    ):
        pytest.fail("it was begun")
    assert [path.name for path in tmp_path.iterdir()] == ["model"] and (target / "config.json").read_text() == "1"


def test_every_file_of_an_export_is_on_the_disk_before_the_folder_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, str]] = []
    monkeypatch.setattr(files, "_point", lambda call, path: calls.append((call, path.name)))
    with files.whole_folder(tmp_path / "model") as fresh:
        (fresh / "lora_adapter").mkdir()
        for name in ("config.json", "lora_adapter/adapter_model.safetensors"):
            (fresh / name).write_text("{}")
    flushed = ["adapter_model.safetensors", "config.json", "lora_adapter", "model"]
    assert [call for call, _ in calls] == ["mkdir", *["fsync"] * 4, "rename", "fsync"]
    assert sorted(name for _, name in calls[1:5]) == flushed and calls[5] == ("rename", "model")
