"""A model is written file by file, while its tensors are gathered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_folder, packed_policy
from torch import Tensor
from transformers import AutoModelForCausalLM

from grpo_rl.models import fsdp

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
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2 and files[-1] == f"model-{len(files):05}-of-{len(files):05}.safetensors"
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
