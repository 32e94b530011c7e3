"""A checkpoint's policy as an ordinary Hugging Face folder, written by this process alone: no Ray, no ranks."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from grpo_rl.checkpoint.files import flush, refusals, whole_folder
from grpo_rl.checkpoint.manifest import read_manifest, verify
from grpo_rl.checkpoint.rank_files import load_weights
from grpo_rl.config.schema.model import POLICY_KEY, ModelConfig
from grpo_rl.errors import CheckpointError, ConfigError, DataError
from grpo_rl.run_files import read_json

MARK = "export.json"
"""Written last: the step, and the digest of the manifest of the exported checkpoint."""


def is_exported(checkpoint: Path, folder: Path) -> bool:
    try:
        return bool(read_json(folder / MARK)["manifest"] == read_manifest(checkpoint).seal)
    except (CheckpointError, DataError, KeyError, TypeError):
        return False


def export_policy(checkpoint: Path, base: str, model: Mapping[str, Any], target: Path) -> Path:
    """Write the policy of a checkpoint to `target`, a new folder or an export of before, and return it.

    `base` is the folder of the model that the run began with; `model` is `actor_rollout_ref.model`. The
    weights are float32, the same to the bit as the run's own export. Adapters are merged, and in a peft
    folder inside. Raises CheckpointError if the checkpoint or `target` cannot be used; ConfigError for a
    base.
    """
    from grpo_rl.models import fsdp, load, lora
    from grpo_rl.models.forward import PolicyModel

    verify(checkpoint)
    own_code = bool(model.get("trust_remote_code"))
    config = load.load_config(base, trust_remote_code=own_code, override=model.get("override_config"))
    lm = load.load_lm(base, config, trust_remote_code=own_code)
    names = ("lora_rank", "lora_alpha", "target_modules", "exclude_modules")
    settings = ModelConfig(path=base, **{name: model[name] for name in names if name in model})
    if settings.lora_rank:
        lora.add_adapters(lm, settings)
    policy = PolicyModel(lm)
    if settings.lora_rank:
        policy.adapters = lora.describe(lm, settings)
    load_weights(checkpoint, policy)
    tokenizer = load.load_tokenizer(model.get("tokenizer_path") or base, trust_remote_code=own_code)
    if target.exists() and not (target / MARK).is_file():
        raise CheckpointError(f"{target} is there and is no export; give another folder")
    with whole_folder(target, sum(parameter.nbytes for parameter in lm.parameters())) as fresh:
        fsdp.save_model(policy, fresh)
        if policy.adapters is not None:
            tensors = {name: tensor for name, tensor in policy.lm.state_dict().items() if lora.is_adapter(name)}
            lora.save_adapter(fresh / lora.FOLDER, policy.lm, policy.adapters, tensors)
        tokenizer.save_pretrained(fresh)
        mark = {"step": int(checkpoint.name.removeprefix("step_")), "manifest": read_manifest(checkpoint).seal}
        (fresh / MARK).write_text(json.dumps(mark) + "\n", encoding="utf-8")
    return target


def cast(folder: Path, dtype: str) -> None:
    """Write an exported folder's weights anew in this type. Raises CheckpointError."""
    from safetensors.torch import load_file, save_file

    target_dtype: torch.dtype = getattr(torch, dtype)
    with refusals(folder):
        for file in sorted(folder.rglob("*.safetensors")):
            tensors = load_file(file)
            small = {
                name: tensor.to(target_dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()
            }
            fresh = file.with_name(f".{file.name}")
            save_file(small, fresh, metadata={"format": "pt"})
            flush(fresh)
            os.replace(fresh, file)
        config, index = folder / "config.json", folder / "model.safetensors.index.json"
        if config.is_file():
            config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": dtype}, indent=2, sort_keys=True) + "\n")
        if index.is_file():
            content = json.loads(index.read_text())
            content["metadata"]["total_size"] = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
            index.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def try_export(base: str, model: ModelConfig, tokenizer: Any) -> None:
    """Write an exported folder without weights, and remove it, before the training. Raises ConfigError."""
    from transformers import GenerationConfig

    from grpo_rl.models import load

    config = load.load_config(base, trust_remote_code=model.trust_remote_code, override=model.override_config)
    try:
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            if (Path(base) / load.GENERATION_FILE).is_file():
                load.write_generation(GenerationConfig.from_pretrained(base), Path(folder))
            tokenizer.save_pretrained(folder)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{POLICY_KEY}={base}: the trained model could not be written: {type(error).__name__}: {error}. Mend the "
            "file that it names, or set trainer.export_at_end=false"
        ) from error
