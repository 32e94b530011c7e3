"""Facts from a model's folder before anything is loaded: its sizes, and whether this run can use it at all."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_rl.config.convert import show
from grpo_rl.config.derived import Machine, critic_has_own_model, longest_sequence
from grpo_rl.config.schema.tree import Config
from grpo_rl.errors import ConfigError
from grpo_rl.models.builtin import PREFIX, get_builtin
from grpo_rl.models.experts import FAMILIES
from grpo_rl.models.load import SCALED_LOGITS
from grpo_rl.plan.known_models import ARCHITECTURES, known_settings

_PATH = "actor_rollout_ref.model.path"
_OVERRIDE = "actor_rollout_ref.model.override_config"
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of an attention head that vLLM's CPU kernels take (vLLM 0.32, CPUAttentionBackend.get_supported_head_sizes)."""
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length", "max_seq_length")
"""Names under which vLLM finds the number of positions of a model; the smallest one counts."""
_PLAIN_ROPE = (None, "default", "llama3")
"""Rotary embeddings whose config contains the number of positions; others scale it, each in its own way."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes of a decoder that memory depends on."""

    architecture: str
    hidden: int
    layers: int
    intermediate: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    num_params: int
    tied: bool = False
    """True where embedding and LM head are one."""
    experts: int = 0
    """Experts of each layer of a mixture; 0 for a dense model."""
    experts_per_token: int = 0
    expert_intermediate: int = 0

    @property
    def root_params(self) -> int:
        """Return the parameters outside of the layers: embedding, final norm and LM head."""
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def layer_params(self) -> int:
        """Return the parameters of one layer."""
        return (self.num_params - self.root_params) // self.layers

    @property
    def active_params(self) -> int:
        """Return the parameters whose products each token takes part in: the LM head's, and of experts only the chosen ones'."""
        idle = max(0, self.experts - self.experts_per_token) * 3 * self.hidden * self.expert_intermediate * self.layers
        return self.num_params - idle - (0 if self.tied else self.vocab * self.hidden)

    def kv_bytes_per_token(self, width: int) -> int:
        """Return the bytes of keys and values of one token in all layers, `width` bytes per number."""
        return 2 * self.layers * self.kv_heads * self.head_dim * width


# ---- can this run use it? ----------------------------------------------------------------------------------


def check_policy(config: Config, machine: Machine) -> None:
    """Raise ConfigError with everything in the policy's folder that this run, or its engine, is certain to refuse.

    A name on the hub is asked for its config.json only, and where the hub cannot be reached that is the problem.
    """
    settings = policy_settings(config)
    if settings is None:
        return
    folder = Path(config.actor_rollout_ref.model.path).expanduser()
    problems = [*(_broken_files(folder) if folder.is_dir() else ()), *_engine_refuses(config, machine, settings)]
    problems += [*_drops_at_random(config, settings), *refusals(config, settings)]
    problems += _heads_do_not_split(config, settings)
    if problems:
        raise ConfigError(problems)


def check_adapters(config: Config) -> None:
    """Raise ConfigError for adapters that the policy cannot have, and for an adapter folder that does not fit; no weight is read.

    Makes the model without storage. A model with code of its own is looked at when the run starts.
    """
    from transformers import AutoConfig

    from grpo_rl.models import lora
    from grpo_rl.models.load import load_lm

    model, settings = config.actor_rollout_ref.model, policy_settings(config)
    if model.lora_adapter_path is not None:
        lora.check_adapter_folder(model)
    if settings is None or "auto_map" in settings:
        return
    lora.refuse_quantized(settings.get("quantization_config"), model)
    lora.add_adapters(load_lm(model.path, AutoConfig.for_model(**settings), on_meta=True), model)


def policy_settings(config: Config) -> dict[str, Any] | None:
    """Return the policy's config.json with override_config applied; None for an embedded model that does not exist.

    Raises ConfigError for one that cannot be read, for a family that transformers does not have, and for an override of a
    field that the family lacks or of the wrong type.
    """
    model = config.actor_rollout_ref.model
    if model.path.startswith(PREFIX):
        try:
            settings = _builtin_settings(model.path)
        except ConfigError:
            return None  # reported by itself
        return _overridden(settings, model.override_config) if model.override_config else settings
    folder = Path(model.path).expanduser()
    if folder.is_dir():
        settings = _read_config(folder)
        if _is_plain(settings) and not model.override_config:
            return settings
        if "auto_map" in settings and model.trust_remote_code:
            # The model's own code decides; it runs when the run starts, and not for a plan.
            return settings | dict(model.override_config)
    if config.trainer.machine is not None and not folder.is_dir() and (known := known_settings(model.path)):
        return known | dict(model.override_config)  # planned for another machine, where the model need not be
    # transformers takes a second to import: only where its own checks are needed.
    from grpo_rl.models.load import load_config

    loaded = load_config(model.path, trust_remote_code=model.trust_remote_code, override=model.override_config)
    return dict(loaded.to_dict())


def _overridden(settings: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    """An embedded model's settings with the override. Raises ConfigError for a field that its family does not have."""
    from transformers import AutoConfig

    from grpo_rl.models.load import override_field

    config = AutoConfig.for_model(settings["model_type"], head_dim=settings["head_dim"])
    for key, value in override.items():
        override_field(config, key, value)
    return settings | override


def _read_config(folder: Path) -> dict[str, Any]:
    where = f"{_PATH}={folder}: config.json"
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is no JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{where} holds a {type(settings).__name__}, and not the settings of a model")
    return settings


def _is_plain(settings: dict[str, Any]) -> bool:
    """Return whether it is a causal language model of a family in transformers, without loading transformers."""
    family, names = settings.get("model_type"), settings.get("architectures")
    transformers = importlib.util.find_spec("transformers")
    if transformers is None or transformers.origin is None or "auto_map" in settings or not isinstance(family, str):
        return False
    is_causal = names is None or (isinstance(names, list) and all(str(name).endswith("ForCausalLM") for name in names))
    return is_causal and family.isidentifier() and (Path(transformers.origin).parent / "models" / family).is_dir()


def _broken_files(folder: Path) -> Iterator[str]:
    """Weight files that are cut short or are none, an adapter beside them, and a tokenizer's settings that are no JSON."""
    if (folder / "adapter_config.json").is_file():
        # transformers would add it to the model where one process reads the whole, and ranks that read shards would not.
        yield (
            f"{_PATH}={folder}: has a peft adapter beside the model, and it is not clear whether that belongs to the policy; move "
            "it into a folder of its own, and name that in actor_rollout_ref.model.lora_adapter_path if it does"
        )
    for file in sorted(folder.glob("*.safetensors")):
        try:
            header, start = _header(file)
            end = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (OSError, ValueError, LookupError, TypeError, struct.error):
            lfs = " (a pointer of git LFS: fetch the file itself with git lfs pull)" if _is_pointer(file) else ""
            yield f"{_PATH}={folder}: {file.name} is no safetensors file{lfs}"
            continue
        if file.stat().st_size < end:
            yield f"{_PATH}={folder}: {file.name} is cut short: it has {file.stat().st_size:,} of {end:,} bytes"
    settings = folder / "tokenizer_config.json"
    try:
        if settings.is_file():
            json.loads(settings.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        yield f"{_PATH}={folder}: tokenizer_config.json cannot be read: {error}"


def _is_pointer(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(40).startswith(b"version https://git-lfs")


def _drops_at_random(config: Config, settings: dict[str, Any]) -> Iterator[str]:
    """Yield a problem for dropout beside shared prompts: each response's prompt would have drawn what is dropped for itself."""
    drops = _dropouts(settings)
    if drops and config.actor_rollout_ref.actor.use_prefix_grouper and not config.trainer.val_only:
        shown = ", ".join(f"{name}={value:g}" for name, value in drops.items())
        yield (
            f"{_PATH}={config.actor_rollout_ref.model.path}: training drops at random ({shown}), which responses that share "
            "their prompt's states cannot do each for itself; set actor_rollout_ref.actor.use_prefix_grouper=false, or these to "
            "0 in actor_rollout_ref.model.override_config"
        )


def _heads_do_not_split(config: Config, settings: dict[str, Any]) -> Iterator[str]:
    """Yield a problem for attention heads that the ranks which compute a pass together cannot share evenly."""
    parts, text = config.actor_rollout_ref, settings.get("text_config") or settings
    heads = text.get("num_attention_heads")
    sizes = {
        "actor_rollout_ref.actor": parts.actor.ulysses_sequence_parallel_size,
        "actor_rollout_ref.ref": parts.ref.ulysses_sequence_parallel_size or 1,
    }
    if not critic_has_own_model(config):
        sizes["critic"] = config.critic.ulysses_sequence_parallel_size
    for role, size in sizes.items():
        if isinstance(heads, int) and heads > 0 and heads % size:
            fits = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
            yield (
                f"{role}.ulysses_sequence_parallel_size={size}: must divide the {heads} attention heads of {parts.model.path}, of "
                f"which each rank computes its part; possible: {fits}"
            )


def _dropouts(settings: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in settings.items() if "drop" in name and isinstance(value, float) and value > 0}


def with_shared_prompts(config: Config, settings: dict[str, Any] | None) -> Config:
    """Return the configuration with `use_prefix_grouper` decided: true, unless a model with these settings drops at random."""
    parts = config.actor_rollout_ref
    if parts.actor.use_prefix_grouper is not None:
        return config
    shares = not _dropouts(settings or {})
    actor = replace(parts.actor, use_prefix_grouper=shares)
    return replace(config, actor_rollout_ref=replace(parts, actor=actor))


def _engine_refuses(config: Config, machine: Machine, settings: dict[str, Any]) -> Iterator[str]:
    """Yield what vLLM would refuse after it has started, which takes most of a minute."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "vllm" or {"hf_overrides", "max_model_len"} & set(rollout.engine_kwargs.get("vllm", {})):
        return
    text = settings.get("text_config") or settings
    yield from _too_long(config, text)
    heads, parallel = text.get("num_attention_heads"), rollout.tensor_model_parallel_size
    if not isinstance(heads, int) or heads < 1:
        return
    if heads % parallel:
        yield (
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={parallel}: must divide the {heads} attention heads of "
            f"{config.actor_rollout_ref.model.path}"
        )
    head_dim = text.get("head_dim") or text.get("hidden_size", 0) // heads
    latent = any("lora_rank" in name or name.startswith("qk_") for name in text)  # multi-head latent attention has no such size
    if machine.device == "cpu" and not latent and isinstance(head_dim, int) and head_dim not in (0, *CPU_HEAD_SIZES):
        key = f"{_OVERRIDE}.head_dim" if "head_dim" in config.actor_rollout_ref.model.override_config else None
        where = f"{key}={head_dim}" if key else f"{_PATH}={config.actor_rollout_ref.model.path}"
        yield (
            f"{where}: its attention heads have size {head_dim}, and vLLM's CPU kernels take {', '.join(map(str, CPU_HEAD_SIZES))}; "
            "another model, or actor_rollout_ref.rollout.name=hf, which samples with any"
        )


def _too_long(config: Config, text: dict[str, Any]) -> Iterator[str]:
    """Yield a problem for sequences of more tokens than the model has positions."""
    known, asked, longest = positions_of(text), config.actor_rollout_ref.rollout.max_model_len, longest_sequence(config)
    if known is None or (asked or longest) <= known[1] or os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0") not in ("", "0"):
        return
    key = "actor_rollout_ref.rollout.max_model_len" if asked else "data.max_prompt_length + data.max_response_length"
    yield (
        f"{key}={asked or longest}: more tokens than the model has positions, {known[0]}={known[1]} in its config.json; at most "
        f"{known[1]}"
    )


def positions_of(text: dict[str, Any]) -> tuple[str, int] | None:
    """Return the name and value of the setting that bounds a sequence; None where that is not certain.

    Without a scaled rotary embedding it is the smallest of those that vLLM looks at (vLLM 0.32,
    ModelArchConfigConvertorBase.derive_max_model_len_and_key).
    """
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    is_nested = not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values())
    if is_nested or (rope.get("rope_type") or rope.get("type")) not in _PLAIN_ROPE or text.get("model_max_length"):
        return None
    found = [(name, text[name]) for name in _POSITIONS if isinstance(text.get(name), int)]
    return min(found, key=lambda pair: pair[1], default=None)


# ---- its sizes ---------------------------------------------------------------------------------------------


def model_size(path: str) -> ModelSize | None:
    """Return the sizes of the model at `path`; None where only loading it shows them (names that are not known, other families)."""
    if path.startswith(PREFIX):
        return _from_settings(_builtin_settings(path), None)
    folder = Path(path).expanduser()
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        settings = None if folder.is_dir() else known_settings(path)
    return (
        _from_settings(settings.get("text_config") or settings, stored_params(folder)) if isinstance(settings, dict) else None
    )


def stored_params(folder: Path) -> int | None:
    """Return how many numbers the folder's safetensors files hold, by their headers; None without any, or with broken ones."""
    total = 0
    for file in folder.glob("*.safetensors"):
        try:
            header, _ = _header(file)
            total += sum(math.prod(entry["shape"]) for entry in header.values())
        except (OSError, ValueError, LookupError, TypeError, struct.error):
            return None
    return total or None


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """The description of a safetensors file's tensors, and where their data starts: after 8 bytes of length and the JSON."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(min(length, file.stat().st_size)))
    header.pop("__metadata__", None)
    return header, 8 + length


def _builtin_settings(path: str) -> dict[str, Any]:
    builtin = get_builtin(path)
    return {name: getattr(builtin, name) for name in builtin.__slots__} | {
        "model_type": builtin.model_type,
        "tie_word_embeddings": True,
    }


def _from_settings(config: dict[str, Any], num_params: int | None) -> ModelSize | None:
    try:
        hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
        heads, intermediate = int(config["num_attention_heads"]), int(config["intermediate_size"])
        vocab = int(config["vocab_size"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or hidden // heads)
        experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
        chosen = int(config.get("num_experts_per_tok") or 0) if experts else 0
        wide = int(config.get("moe_intermediate_size") or intermediate) if experts else 0
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    architecture = str(config.get("model_type", "?"))
    size = ModelSize(architecture, hidden, layers, intermediate, vocab, heads, kv_heads, head_dim, num_params or 0)
    tied = bool(config.get("tie_word_embeddings", architecture.startswith("gemma")))
    size = replace(size, tied=tied, experts=experts, experts_per_token=chosen, expert_intermediate=wide)
    if num_params is None:
        num_params = _counted_params(size, config)
    return None if num_params is None else replace(size, num_params=num_params)


def _counted_params(size: ModelSize, config: dict[str, Any]) -> int | None:
    """Return the parameters of a decoder of a known family: attention, gated MLP or experts with their router, norms, embeddings."""
    if size.architecture not in ARCHITECTURES:
        return None
    queries, keys = size.heads * size.head_dim, size.kv_heads * size.head_dim
    attention = size.hidden * (queries + 2 * keys) + queries * size.hidden
    if config.get("attention_bias", size.architecture in ("qwen2", "seed_oss")):
        attention += queries + 2 * keys
    if size.architecture in ("qwen3", "qwen3_moe", "gemma3_text"):
        attention += 2 * size.head_dim
    elif size.architecture in ("olmo2", "olmoe"):
        attention += queries + keys  # norms over all heads
    mlp = 3 * size.hidden * size.intermediate
    if size.experts:
        mlp = size.experts * 3 * size.hidden * size.expert_intermediate + size.hidden * size.experts
    layer = attention + mlp + (4 if size.architecture == "gemma3_text" else 2) * size.hidden
    return size.layers * layer + size.root_params


# ---- families: which can be trained here ----------------------------------------------------------------------------


_ACTOR = "actor_rollout_ref.actor"
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names under which config.json has the number of experts of a layer."""
_ATTENTION_LAYERS = ("full_attention", "sliding_attention")
_MIXERS = ("mamba", "rwkv", "recurrent", "jamba", "bamba", "zamba", "xlstm", "lfm2", "falcon_h1", "nemotron_h", "minimax")
"""Parts of the names of families that carry a state from token to token beside attention, or in its place."""
_SINKS = ("gpt_oss",)
_OWN_POSITIONS = ("gpt2", "gptj", "opt", "bloom", "mpt", "codegen", "gpt_bigcode", "gpt_neo", "xglm")
"""Families whose layers have no list `layers`, or whose positions are a bias of attention (ALiBi)."""


def num_experts(settings: dict[str, Any]) -> int:
    """Return the number of experts of a layer, 0 for a model without; `settings` is a config.json."""
    text = settings.get("text_config") or settings
    counts = [text.get(name) for name in _EXPERTS]
    return max((count for count in counts if isinstance(count, int)), default=0)


def refusals(config: Config, settings: dict[str, Any]) -> Iterator[str]:
    """Yield what keeps the policy with these settings from being trained, and keys for experts that it lacks."""
    if config.trainer.val_only:
        return
    path = f"{_PATH}={config.actor_rollout_ref.model.path}"
    text = settings.get("text_config") or settings
    family, experts = str(text.get("model_type")), num_experts(settings)
    kinds = sorted({str(kind) for kind in text.get("layer_types") or ()} - set(_ATTENTION_LAYERS))
    if kinds or any(part in family for part in _MIXERS):
        what = f"layers of the kind {', '.join(kinds)}" if kinds else "layers that carry a state from token to token"
        yield f"{path}: {family} has {what}, which would mix the sequences of a packed pass; take a model with attention only"
    elif family in _SINKS:
        yield f"{path}: {family} has attention sinks, which the attention of packed sequences lacks; its log-probs would be wrong"
    elif family in _OWN_POSITIONS or text.get("alibi"):
        yield f"{path}: models of the family {family} cannot be packed here; Llama, Mistral, Qwen, Gemma 3 and Phi 3 can"
    elif experts > 1 and family not in FAMILIES:
        yield f"{path}: of models with experts, {' and '.join(FAMILIES)} can be trained; this one is {family} (docs/moe.md)"
    for name in SCALED_LOGITS:
        if text.get(name) not in (None, 1, 1.0):
            yield f"{path}: models with {name} cannot be trained here, and this one has {name}={text[name]}"
    # What the trainer's attention has not: a window that is shorter than the sequences.
    window, longest = text.get("sliding_window"), longest_sequence(config)
    windowed = text.get("use_sliding_window") is not False and "sliding_attention" in (
        text.get("layer_types") or ["sliding_attention"]
    )
    if isinstance(window, int) and windowed and longest > window:
        yield (
            f"data.max_prompt_length + data.max_response_length = {longest}: more than the {window} tokens of the sliding window "
            f"of {path}, which the trainer's attention has not; at most {window}"
        )
    actor = config.actor_rollout_ref.actor
    if experts < 2:
        for key, value in (
            ("router_aux_loss_coef", actor.router_aux_loss_coef),
            ("router_replay.mode", actor.router_replay.mode),
        ):
            if value not in (0, None, "disabled"):
                yield f"{_ACTOR}.{key}={show(value)}: is for models with experts, and {path} has none; leave it out"
        return
    if (size := actor.ulysses_sequence_parallel_size) > 1:
        yield (
            f"{_ACTOR}.ulysses_sequence_parallel_size={size}: {path} has experts, whose tokens are counted and replayed by rank; "
            "set it to 1 and lower ppo_max_token_len_per_gpu"
        )
    if actor.fsdp_config.use_torch_compile:
        yield f"{_ACTOR}.fsdp_config.use_torch_compile=true: {path} has experts, whose layers have other shapes in every pass; leave it out"
