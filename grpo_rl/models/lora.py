"""LoRA: low-rank adapters beside frozen linear layers (Hu et al. 2021, arXiv 2106.09685, section 4.1), in
peft's layers.

A layer computes `W x + (alpha / rank) B A x` with trained A ([rank, in]) and B ([out, rank]), which begins at
0. peft renames `q_proj.weight` to `q_proj.base_layer.weight`, with `q_proj.lora_A.default.weight` and
`q_proj.lora_B.default.weight` beside.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from grpo_rl.config.schema.model import ModelConfig
from grpo_rl.errors import CheckpointError, ConfigError
from grpo_rl.frozen import frozen
from grpo_rl.models.sharded_load import name_in_files
from grpo_rl.models.shards import is_first_replica, local_of, rows_of

FOLDER = "lora_adapter"
ALL_LINEAR = "all-linear"
WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
"""peft's names of an adapter's files."""
_KEY = "actor_rollout_ref.model"
A_NAME, B_NAME = ".lora_A.default.weight", ".lora_B.default.weight"
"""The ends of the names of an adapter's two matrices, behind the name of the layer."""
_PLAIN = {
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "modules_to_save": None,
    "fan_in_fan_out": False,
    "rank_pattern": {},
    "alpha_pattern": {},
}
"""Settings of an adapter with the values that they have here; another value is another function."""


@frozen
class Adapters:
    """What a checkpoint has to agree with, beside names and shapes."""

    rank: int
    alpha: int
    targets: tuple[str, ...]
    base: str
    base_digest: str = ""
    """The same however many ranks hold the base model's weights."""

    def check_fits(self, folder: Path, stored: dict[str, Any]) -> None:
        wrong = [
            f"{_KEY}.lora_{name}={stored.get(name)} and not {value}"
            for name, value in (("rank", self.rank), ("alpha", self.alpha))
            if stored.get(name) != value
        ]
        if stored.get("targets") != list(self.targets):
            wrong.append(f"adapters at {len(stored.get('targets', []))} layers and not the same {len(self.targets)}")
        if stored.get("base_digest") != self.base_digest:
            wrong.append(f"a base model with other weights ({stored.get('base')}, now {self.base})")
        if wrong:
            raise CheckpointError(f"{folder} has adapters of another kind: it was written with {', '.join(wrong)}")


def add_adapters(lm: Any, model: ModelConfig) -> None:
    """Freezes all else; values are `initialize`'s. Raises ConfigError for layers that cannot have one."""
    from peft import LoraConfig, inject_adapter_in_model

    refuse_quantized(getattr(lm.config, "quantization_config", None), model)
    targets = list(model.target_modules)
    if ALL_LINEAR in targets and len(targets) > 1:
        raise ConfigError(f"{_KEY}.target_modules={targets}: all-linear stands alone; exclude_modules takes layers out of it")
    if targets == [ALL_LINEAR]:  # by name: peft itself takes the tensors of all experts for linear layers
        head = lm.get_output_embeddings()
        targets = [name for name, module in lm.named_modules() if isinstance(module, nn.Linear) and module is not head]
    settings = LoraConfig(
        r=model.lora_rank,
        lora_alpha=model.lora_alpha,
        target_modules=targets,
        exclude_modules=list(model.exclude_modules) or None,
        task_type="CAUSAL_LM",
    )
    on_meta = next(lm.parameters()).device.type == "meta"
    where = f"{_KEY}.target_modules=[{','.join(model.target_modules)}]"
    try:
        inject_adapter_in_model(settings, lm, low_cpu_mem_usage=on_meta)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{where}: {' '.join(str(error).split())[:300]}") from error
    _check_layers(lm, model, where)
    for name, parameter in lm.named_parameters():
        parameter.requires_grad_(is_adapter(name))


def refuse_quantized(settings: Any, model: ModelConfig) -> None:
    if settings is not None:
        raise ConfigError(
            f"{_KEY}.path={model.path}: its weights are quantized, and LoRA over such weights (QLoRA) is not here; "
            "use the same model in bfloat16 or float32"
        )


def _check_layers(lm: Any, model: ModelConfig, where: str) -> None:
    """Adapters at the LM head are refused because its weight is read without its layer."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import Linear

    adapted = {name: module for name, module in lm.named_modules() if isinstance(module, LoraLayer)}
    ends = {id(lm.get_input_embeddings()): "the embedding", id(lm.get_output_embeddings()): "the LM head"}
    for name, module in adapted.items():
        if id(module) in ends or not isinstance(module, Linear):
            what = ends.get(id(module), "no plain linear layer")
            raise ConfigError(f"{where}: {name} is {what}; adapters are for the linear layers of the blocks")
    if not adapted:
        raise ConfigError(f"{where}: no layer of {type(lm).__name__} is left to have an adapter")
    # peft is content with one name of several that it finds.
    for key, names, among in (
        ("target_modules", model.target_modules, adapted),
        ("exclude_modules", model.exclude_modules, dict(lm.named_modules())),
    ):
        for name in names:
            if name != ALL_LINEAR and not any(f".{layer}".endswith(f".{name}") for layer in among):
                raise ConfigError(f"{_KEY}.{key}: {name} is the end of no such layer's name in {type(lm).__name__}")


def describe(lm: nn.Module, model: ModelConfig) -> Adapters:
    return Adapters(model.lora_rank, model.lora_alpha, tuple(adapted_layers(lm)), model.path, base_digest(lm))


@torch.no_grad()
def initialize(lm: nn.Module, seed: int) -> None:
    """A uniform within 1 / sqrt(in), as peft (He et al. 2015 with a = sqrt(5)); B 0.

    Each A is drawn whole from a seed of its own: the same on any number of ranks.
    """
    for name, layer in adapted_layers(lm).items():
        a_RI, b_OR = factors(layer)
        layer_seed = int.from_bytes(sha256(f"{seed}:{name}".encode()).digest()[:7], "big")
        whole_RI = torch.empty(tuple(a_RI.shape))
        bound = a_RI.shape[1] ** -0.5
        whole_RI.uniform_(-bound, bound, generator=torch.Generator().manual_seed(layer_seed))
        _fill(a_RI, whole_RI)
        local_of(b_OR).zero_()


def _fill(parameter: Any, whole: Tensor) -> None:
    start, stop = rows_of(parameter)
    local_of(parameter).copy_(whole[start:stop])


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A") and hasattr(module, "scaling")}


def factors(layer: Any) -> tuple[Any, Any]:
    return layer.lora_A["default"].weight, layer.lora_B["default"].weight


def scaling(layer: Any) -> float:
    return float(layer.scaling["default"])


def _peft_name(name: str) -> str:
    return "base_model.model." + name.replace(".default.", ".")


def is_adapter(name: str) -> bool:
    return name.endswith((A_NAME, B_NAME))


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    layers = adapted_layers(model).values()
    # peft's own `enable_adapters` also freezes the adapters; 0.21's `LoraLayer.forward` looks at this alone.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@torch.no_grad()
def base_digest(lm: nn.Module) -> str:
    """Of the sum of each frozen tensor's bits in float32; replicas but the first count 0. A collective."""
    frozen = {name_in_files(name): parameter for name, parameter in lm.named_parameters() if not is_adapter(name)}
    sums = [
        local_of(tensor).float().contiguous().view(torch.int32).sum(dtype=torch.int64).item() if is_first_replica(tensor) else 0
        for tensor in frozen.values()
    ]
    total = torch.tensor(sums, device=next(iter(frozen.values())).device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
    pairs = sorted(zip(frozen, total.tolist(), strict=True))
    return sha256(json.dumps(pairs).encode()).hexdigest()


def save_adapter(folder: Path, lm: Any, adapters: Adapters, tensors: dict[str, Tensor]) -> None:
    from peft import LoraConfig

    folder.mkdir(parents=True, exist_ok=True)
    named = {_peft_name(name): tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / WEIGHTS, metadata={"format": "pt"})
    LoraConfig(
        r=adapters.rank,
        lora_alpha=adapters.alpha,
        target_modules=_shortest(lm, adapters.targets),
        task_type="CAUSAL_LM",
        base_model_name_or_path=adapters.base,
        inference_mode=True,
    ).save_pretrained(str(folder))
    # peft writes the layers in the order of a set, another one in every process.
    settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    settings["target_modules"] = sorted(settings["target_modules"])
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _shortest(lm: Any, targets: tuple[str, ...]) -> list[str]:
    last = {name.rpartition(".")[2] for name in targets}
    meant = [name for name, _ in lm.named_modules() if name.rpartition(".")[2] in last]
    return sorted(last) if sorted(meant) == sorted(targets) else sorted(targets)


@torch.no_grad()
def load_adapter(lm: nn.Module, model: ModelConfig) -> None:
    """Fill the adapters from a peft folder, each rank its rows. Raises ConfigError if it does not fit."""
    where, folder = check_adapter_folder(model)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{where}: its weights cannot be read: {error}") from error
    parameters = {_peft_name(name): parameter for name, parameter in lm.named_parameters() if is_adapter(name)}
    missing, extra = sorted(parameters.keys() - tensors.keys()), sorted(tensors.keys() - parameters.keys())
    shapes = sorted(name for name in parameters.keys() & tensors.keys() if parameters[name].shape != tensors[name].shape)
    if missing or extra or shapes:
        raise ConfigError(
            f"{where}: does not fit this model's adapters: missing {missing[:2]}, unknown {extra[:2]}, other shapes {shapes[:2]}; "
            f"{_KEY}.target_modules and exclude_modules have to name the same layers"
        )
    for name, parameter in parameters.items():
        _fill(parameter, tensors[name].float())


def check_adapter_folder(model: ModelConfig) -> tuple[str, Path]:
    """Return its key with value, and the folder. Raises ConfigError if its settings are not the configuration's."""
    where = f"{_KEY}.lora_adapter_path={model.lora_adapter_path}"
    folder = Path(model.lora_adapter_path or "")
    try:
        settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: no {SETTINGS} that could be read there: {error}") from error
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
        raise ConfigError(f"{where}: is no LoRA adapter of peft")
    if not (folder / WEIGHTS).is_file():
        raise ConfigError(f"{where}: has no {WEIGHTS}")
    wrong = [
        f"{_KEY}.{key}={value}, and the adapter has {settings.get(peft_key)}"
        for key, peft_key, value in (("lora_rank", "r", model.lora_rank), ("lora_alpha", "lora_alpha", model.lora_alpha))
        if settings.get(peft_key) != value
    ]
    wrong += [
        f"{key}={settings[key]} is not here" for key, value in _PLAIN.items() if settings.get(key, value) not in (value, None)
    ]
    if wrong:
        raise ConfigError(f"{where}: {'; '.join(wrong)}")
    return where, folder
