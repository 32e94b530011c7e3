"""Facts from a model's folder before loading: its sizes, and whether this run can use it."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import struct
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from grpo_rl.config.convert import show
from grpo_rl.config.derived import Machine, teachers_of
from grpo_rl.config.schema.fields import replaced
from grpo_rl.config.schema.tree import Config
from grpo_rl.data.rows import irregular
from grpo_rl.errors import ConfigError, Problems
from grpo_rl.frozen import frozen
from grpo_rl.models.builtin import PREFIX, get_builtin
from grpo_rl.models.experts import FAMILIES
from grpo_rl.models.load import SCALED_LOGITS, refuse_other_head

Settings = dict[str, Any]  # of a config.json
_ACTOR, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
_PATH = f"{_MODEL}.path"
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Of vLLM's CPU kernels (vLLM 0.32, CPUAttentionBackend.get_supported_head_sizes)."""
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length", "max_seq_length")
"""vLLM's names for the number of positions; the smallest counts."""
_PLAIN_ROPE = (None, "default", "llama3")  # others scale the config's number of positions


@frozen
class ModelSize:
    architecture: str
    hidden: int
    layers: int
    intermediate: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    num_params: int
    tied: bool = False  # embedding and LM head are one
    experts: int = 0  # of each layer; 0 for a dense model
    experts_per_token: int = 0
    expert_intermediate: int = 0

    @property
    def root_params(self) -> int:
        """Embedding, final norm and LM head."""
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def layer_params(self) -> int:
        return (self.num_params - self.root_params) // self.layers

    @property
    def active_params(self) -> int:
        """Parameters in products with each token: the LM head's too, and those of chosen experts."""
        idle = max(0, self.experts - self.experts_per_token) * 3 * self.hidden * self.expert_intermediate * self.layers
        return self.num_params - idle - (0 if self.tied else self.vocab * self.hidden)

    def kv_bytes_per_token(self, width: int) -> int:
        """`width` bytes per number."""
        return 2 * self.layers * self.kv_heads * self.head_dim * width


# ---- can this run use it? ----------------------------------------------------------------------------------


def check_policy(config: Config, machine: Machine) -> None:
    """Raise ConfigError with all in the policy's folder that run or engine will refuse."""
    settings = policy_settings(config)
    if settings is None:
        return
    folder = Path(config.model.path).expanduser()
    problems = [*(_broken_files(folder) if folder.is_dir() else ()), *_engine_refuses(config, machine, settings)]
    if folder.is_dir() and not problems and (settings.get("text_config") or settings).get("tie_word_embeddings"):
        refuse_other_head(str(folder))
    if not config.trainer.val_only:
        problems += _training_refuses(config, settings)
    if problems:
        raise ConfigError(problems)


def check_others(config: Config) -> None:
    """Raise ConfigError for unusable folders of teachers, critic, reward model and tokenizers."""
    policy, scorer = config.model, config.reward.reward_model
    named = {
        f"distillation.teacher_models.{name}.model_path": teacher.model_path for name, teacher in teachers_of(config).items()
    }
    named["critic.model.path"] = config.critic.model.path if config.critic_has_own_model else None
    named["reward.reward_model.model_path"] = scorer.model_path
    problems: list[str] = []
    for key, path in named.items():
        if not path or path.startswith(PREFIX) or path == policy.path:
            continue
        folder = Path(path).expanduser()
        try:
            if folder.is_dir():
                settings = _read_config(folder, key)
                problems += _broken_files(folder, key)
                if not problems and settings.get("tie_word_embeddings") and key != "reward.reward_model.model_path":
                    refuse_other_head(path, key)
            elif path[0] in "/.~":
                problems.append(f"{key}={path}: there is no such folder")
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)


def check_adapters(config: Config) -> None:
    """Raise ConfigError for adapters that the policy cannot have, and adapter folders that do not fit; reads
    no weights. Models with code of their own are checked when the run starts."""
    from transformers import AutoConfig

    from grpo_rl.models import lora
    from grpo_rl.models.load import load_lm

    model, settings = config.model, policy_settings(config)
    if model.lora_adapter_path is not None:
        lora.check_adapter_folder(model)
    if settings is None or "auto_map" in settings:
        return
    lora.refuse_quantized(settings.get("quantization_config"), model)
    lora.add_adapters(load_lm(model.path, AutoConfig.for_model(**settings), on_meta=True), model)


def policy_settings(config: Config) -> Settings | None:
    """Return config.json with override_config applied; None for an unknown embedded model. Raises ConfigError
    if it cannot be read, for a family that transformers lacks, and for a wrong override."""
    model = config.model
    if model.path.startswith(PREFIX):
        try:
            settings = _builtin_settings(model.path)
        except ConfigError:
            return None  # reported by itself
        if model.override_config:
            from transformers import AutoConfig

            from grpo_rl.models.load import override_field

            family = AutoConfig.for_model(settings["model_type"], head_dim=settings["head_dim"])
            for key, value in model.override_config.items():
                override_field(family, key, value)
        return settings | dict(model.override_config)
    folder = Path(model.path).expanduser()
    if folder.is_dir():
        settings = _read_config(folder)
        if _is_plain(settings) and not model.override_config:
            return settings
        if "auto_map" in settings and model.trust_remote_code:
            # The model's own code decides, when the run starts.
            return settings | dict(model.override_config)
    if config.trainer.machine is not None and not folder.is_dir() and (known := known_settings(model.path)):
        return known | dict(model.override_config)
    # transformers takes a second to import.
    from grpo_rl.models.load import load_config

    loaded = load_config(model.path, trust_remote_code=model.trust_remote_code, override=model.override_config)
    return dict(loaded.to_dict())


def _read_config(folder: Path, key: str = _PATH) -> Settings:
    where = f"{key}={folder}: config.json"
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if irregular(path):  # whose reader would wait for ever
            raise ConfigError(f"{key}={folder}: {path.name} is no regular file")
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is no JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{where} holds a {type(settings).__name__}, and not the settings of a model")
    return settings


def _is_plain(settings: Settings) -> bool:
    """Return whether transformers has this causal model's family, without loading transformers."""
    family, names = settings.get("model_type"), settings.get("architectures")
    transformers = importlib.util.find_spec("transformers")
    if transformers is None or transformers.origin is None or "auto_map" in settings or not isinstance(family, str):
        return False
    is_causal = names is None or (isinstance(names, list) and all(str(name).endswith("ForCausalLM") for name in names))
    return is_causal and family.isidentifier() and (Path(transformers.origin).parent / "models" / family).is_dir()


def _broken_files(folder: Path, key: str = _PATH) -> Problems:
    """Yield cut or invalid weight files, an adapter beside them, and broken tokenizer settings."""
    if (folder / "adapter_config.json").is_file():
        # transformers would add it if one process reads the model, and not if ranks read shards.
        yield (
            f"{key}={folder}: has a peft adapter beside the model, and it is not clear whether that belongs to the policy; move "
            "it into a folder of its own, and name that in actor_rollout_ref.model.lora_adapter_path if it does"
        )
    for file in sorted(folder.glob("*.safetensors")):
        numbers_and_bytes, size = _numbers_and_bytes(file), file.stat().st_size
        if numbers_and_bytes is None:
            with file.open("rb") as stream:
                is_pointer = stream.read(40).startswith(b"version https://git-lfs")
            lfs = " (a pointer of git LFS: fetch the file itself with git lfs pull)" * is_pointer
            yield f"{key}={folder}: {file.name} is no safetensors file{lfs}"
        elif size < numbers_and_bytes[1]:
            yield f"{key}={folder}: {file.name} is cut short: it has {size:,} of {numbers_and_bytes[1]:,} bytes"
    index = folder / "model.safetensors.index.json"
    for file in (folder / "tokenizer_config.json", folder / "tokenizer.json", index):
        try:
            content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
            shards = set(content["weight_map"].values()) if file == index and content else set()
        except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
            yield f"{key}={folder}: {file.name} cannot be read: {type(error).__name__}: {error}"
            continue
        if not isinstance(content, dict):
            yield f"{key}={folder}: {file.name} holds a {type(content).__name__}, and not settings"
        for name in sorted(name for name in shards if not (folder / str(name)).is_file()):
            yield f"{key}={folder}: {name}, which {file.name} names, is missing"


def _dropouts(settings: Settings) -> dict[str, float]:
    return {name: value for name, value in settings.items() if "drop" in name and isinstance(value, float) and value > 0}


def with_shared_prompts(config: Config, settings: Settings | None) -> Config:
    """Decide `use_prefix_grouper`: true, unless the model drops at random."""
    if config.actor.use_prefix_grouper is not None:
        return config
    return replaced(config, {f"{_ACTOR}.use_prefix_grouper": not _dropouts(settings or {})})


def _engine_refuses(config: Config, machine: Machine, settings: Settings) -> Problems:
    """Yield what vLLM would refuse after a start of most of a minute."""
    rollout = config.rollout
    starts = config.samples_answers and rollout.name == "vllm"
    if not starts or {"hf_overrides", "max_model_len"} & set(rollout.engine_kwargs.get("vllm", {})):
        return
    text = settings.get("text_config") or settings
    known, limit, longest = positions_of(text), rollout.max_model_len, config.longest_sequence
    may_be_longer = os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0") not in ("", "0")
    if known is not None and (limit or longest) > known[1] and not may_be_longer:
        key = "actor_rollout_ref.rollout.max_model_len" if limit else "data.max_prompt_length + data.max_response_length"
        yield (
            f"{key}={limit or longest}: more tokens than the model has positions, {known[0]}={known[1]} in its config.json; at most "
            f"{known[1]}"
        )
    heads, parallel = text.get("num_attention_heads"), rollout.tensor_model_parallel_size
    if not isinstance(heads, int) or heads < 1:
        return
    if heads % parallel:
        yield (
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={parallel}: must divide the {heads} attention heads of "
            f"{config.model.path}"
        )
    head_dim = text.get("head_dim") or text.get("hidden_size", 0) // heads
    latent = any("lora_rank" in name or name.startswith("qk_") for name in text)  # multi-head latent attention
    if machine.device == "cpu" and not latent and isinstance(head_dim, int) and head_dim not in (0, *CPU_HEAD_SIZES):
        model = config.model
        where = f"override_config.head_dim={head_dim}" if "head_dim" in model.override_config else f"path={model.path}"
        yield (
            f"{_MODEL}.{where}: its attention heads have size {head_dim}, and vLLM's CPU kernels take {', '.join(map(str, CPU_HEAD_SIZES))}; "
            "another model, or actor_rollout_ref.rollout.name=hf, which samples with any"
        )


def positions_of(text: Settings) -> tuple[str, int] | None:
    """Return name and value of the setting that bounds a sequence; None if uncertain, as with scaled rotary
    embeddings. The smallest of those that vLLM reads (vLLM 0.32,
    ModelArchConfigConvertorBase.derive_max_model_len_and_key)."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    is_nested = not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values())
    if is_nested or (rope.get("rope_type") or rope.get("type")) not in _PLAIN_ROPE or text.get("model_max_length"):
        return None
    limits = [(name, text[name]) for name in _POSITIONS if isinstance(text.get(name), int)]
    return min(limits, key=lambda pair: pair[1], default=None)


# ---- its sizes ---------------------------------------------------------------------------------------------


def model_size(path: str) -> ModelSize | None:
    """Return the sizes; None if only loading shows them (unknown names, other families)."""
    if path.startswith(PREFIX):
        return _from_settings(_builtin_settings(path), None)
    folder = Path(path).expanduser()
    try:
        settings: Settings | None = _read_config(folder)
    except ConfigError:
        settings = None if folder.is_dir() else known_settings(path)
    return None if settings is None else _from_settings(settings.get("text_config") or settings, stored_params(folder))


def stored_params(folder: Path) -> int | None:
    """Return the numbers in a folder's safetensors files, by their headers; None without readable ones."""
    files = [_numbers_and_bytes(file) for file in folder.glob("*.safetensors")]
    return None if None in files else sum(file[0] for file in files if file is not None) or None


def _numbers_and_bytes(file: Path) -> tuple[int, int] | None:
    """Return the numbers and the bytes of a safetensors file as its header has them; None if it is unreadable.

    8 bytes are the length of the header, a JSON object; then come the data.
    """
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(min(length, file.stat().st_size)))
        header.pop("__metadata__", None)
        numbers = sum(math.prod(entry["shape"]) for entry in header.values())
        return numbers, 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error):
        return None


def _builtin_settings(path: str) -> Settings:
    model = get_builtin(path)
    return asdict(model) | {"model_type": model.model_type, "tie_word_embeddings": True}


def _from_settings(config: Settings, num_params: int | None) -> ModelSize | None:
    family = str(config.get("model_type", "?"))
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    try:
        heads = int(config["num_attention_heads"])
        size = ModelSize(
            architecture=family,
            hidden=int(config["hidden_size"]),
            layers=int(config["num_hidden_layers"]),
            intermediate=int(config["intermediate_size"]),
            vocab=int(config["vocab_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
            num_params=num_params or 0,
            tied=bool(config.get("tie_word_embeddings", family.startswith("gemma"))),
            experts=int(experts),
            experts_per_token=int(config.get("num_experts_per_tok") or 0) if experts else 0,
            expert_intermediate=int(config.get("moe_intermediate_size") or config["intermediate_size"]) if experts else 0,
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    if num_params is None:
        num_params = _counted_params(size, config)
    return None if num_params is None else replace(size, num_params=num_params)


def _counted_params(size: ModelSize, config: Settings) -> int | None:
    """Count a known family's parameters: attention, gated MLP or experts with router, norms, embeddings."""
    if size.architecture not in _COUNTED:
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


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # of a layer
_ATTENTION_LAYERS = ("full_attention", "sliding_attention")
_MIXERS = ("mamba", "rwkv", "recurrent", "jamba", "bamba", "zamba", "xlstm", "lfm2", "falcon_h1", "nemotron_h", "minimax")
"""Parts of the names of families that carry a state from token to token."""
_OWN_POSITIONS = ("gpt2", "gptj", "opt", "bloom", "mpt", "codegen", "gpt_bigcode", "gpt_neo", "xglm")
"""Layers not in a list `layers`, or positions as a bias of attention (ALiBi)."""


def _training_refuses(config: Config, settings: Settings) -> Problems:
    """Yield what keeps a policy with this config.json from being trained as configured."""
    actor, path, text = config.actor, f"{_PATH}={config.model.path}", settings.get("text_config") or settings
    if (drops := _dropouts(settings)) and actor.use_prefix_grouper:
        listed = ", ".join(f"{name}={value:g}" for name, value in drops.items())
        yield (
            f"{path}: training drops at random ({listed}), which responses that share their prompt's states cannot do each for itself; "
            f"set {_ACTOR}.use_prefix_grouper=false, or these to 0 in {_MODEL}.override_config"
        )
    counts = [text.get(name) for name in _EXPERTS]
    family, experts = str(text.get("model_type")), max((count for count in counts if isinstance(count, int)), default=0)
    kinds = sorted({str(kind) for kind in text.get("layer_types") or ()} - set(_ATTENTION_LAYERS))
    if kinds or any(part in family for part in _MIXERS):
        what = f"layers of the kind {', '.join(kinds)}" if kinds else "layers that carry a state from token to token"
        yield f"{path}: {family} has {what}, which would mix the sequences of a packed pass; take a model with attention only"
    elif family == "gpt_oss":
        yield f"{path}: {family} has attention sinks, which the attention of packed sequences lacks; its log-probs would be wrong"
    elif family in _OWN_POSITIONS or text.get("alibi"):
        yield f"{path}: models of the family {family} cannot be packed here; Llama, Mistral, Qwen, Gemma 3 and Phi 3 can"
    elif experts > 1 and family not in FAMILIES:
        yield f"{path}: of models with experts, {' and '.join(FAMILIES)} can be trained; this one is {family} (docs/models.md)"
    for name in SCALED_LOGITS:
        if text.get(name) not in (None, 1, 1.0):
            yield f"{path}: models with {name} cannot be trained here, and this one has {name}={text[name]}"
    # The trainer's attention has no sliding window.
    window, longest = text.get("sliding_window"), config.longest_sequence
    slides = text.get("use_sliding_window") is not False and "sliding_attention" in (
        text.get("layer_types") or ["sliding_attention"]
    )
    if isinstance(window, int) and slides and longest > window:
        yield (
            f"data.max_prompt_length + data.max_response_length = {longest}: more than the {window} tokens of the sliding window "
            f"of {path}, which the trainer's attention has not; at most {window}"
        )
    heads, sequence_ranks = text.get("num_attention_heads"), actor.ulysses_sequence_parallel_size
    split = {_ACTOR: sequence_ranks, "actor_rollout_ref.ref": config.ref.ulysses_sequence_parallel_size or 1}
    if not config.critic_has_own_model:
        split["critic"] = config.critic.ulysses_sequence_parallel_size
    for role, ranks in split.items():
        if isinstance(heads, int) and heads > 0 and heads % ranks:
            fits = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
            yield (
                f"{role}.ulysses_sequence_parallel_size={ranks}: must divide the {heads} attention heads of {config.model.path}, of "
                f"which each rank computes its part; possible: {fits}"
            )
    if experts < 2:
        expert_settings = {"router_aux_loss_coef": actor.router_aux_loss_coef, "router_replay.mode": actor.router_replay.mode}
        for key, value in expert_settings.items():
            if value not in (0, None, "disabled"):
                yield f"{_ACTOR}.{key}={show(value)}: is for models with experts, and {path} has none; leave it out"
        return
    if sequence_ranks > 1:
        yield (
            f"{_ACTOR}.ulysses_sequence_parallel_size={sequence_ranks}: {path} has experts, whose tokens are counted and replayed by rank; "
            "set it to 1 and lower ppo_max_token_len_per_gpu"
        )
    if actor.fsdp_config.use_torch_compile:
        yield f"{_ACTOR}.fsdp_config.use_torch_compile=true: {path} has experts, whose layers have other shapes in every pass; leave it out"


# ---- the sizes of common open models by their name on the hub --------------------------------------------------------
# Facts from published config.json files, so that a plan needs no model; a folder's or cached file comes
# first.

_OTHER = {
    "1m", "awq", "gptq", "gguf", "int4", "int8", "fp8",
    "mxfp4", "bnb", "4bit", "8bit", "vl", "mlx", "embedding", "reranker",
}  # fmt: skip
"""Words in a name that make it another model: quantised, longer, of another kind."""
_COLUMNS, *_ROWS = [
    line.split() for line in Path(__file__).with_name("known_models.txt").read_text().splitlines() if line[0] != "#"
]
KNOWN = {pattern: row[1:] for row in _ROWS for pattern in row[0].split(",")}
"""Family and sizes by name; `*` if more may follow."""
_COUNTED = {family for family, *_ in KNOWN.values()}
"""Families whose parameters can be counted: attention with output, a gated MLP or experts."""


def known_settings(name: str) -> Settings | None:
    """Return a hub model's sizes, named as in config.json; None if it is not in the table. The longest
    fitting entry counts. What follows a size begins with `-`: Qwen3-4B is not part of Qwen3-4Bx."""
    fitting = []
    for pattern in KNOWN:
        start, star, end = (re.escape(part) for part in pattern.partition("*"))
        suffix = "" if not star else ".*" if start.endswith("-") else "(-.*)?"
        if re.fullmatch(start + suffix + end, name, re.IGNORECASE):
            fitting.append(pattern)
    if not fitting or _OTHER & set(re.split(r"[-_./]", name.lower())):
        return None
    family, *numbers = KNOWN[max(fitting, key=len)]
    settings: Settings = {"model_type": family} | dict(zip(_COLUMNS[2:], map(int, numbers), strict=False))
    settings["tie_word_embeddings"] = bool(settings["tie_word_embeddings"])
    if family != "olmo2":  # whose files are float32
        settings["dtype"] = "bfloat16"
    if family == "mixtral":
        settings["num_local_experts"] = settings.pop("num_experts")
    return settings
