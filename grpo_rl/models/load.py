"""Causal language models from Hugging Face folders, ready for packed sequences."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from torch.utils.checkpoint import checkpoint

from grpo_rl import hub
from grpo_rl.config.schema.model import POLICY_KEY
from grpo_rl.errors import ConfigError, is_panic
from grpo_rl.models import attention
from grpo_rl.models.sharded_load import WeightFiles

GENERATION_FILE = "generation_config.json"

SCALED_LOGITS = ("final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "logits_scaling")
"""Settings that change logits in ways that the LM head and the attention here do not have."""


def load_config(
    path: str, *, trust_remote_code: bool = False, override: dict[str, Any] | None = None, key: str = POLICY_KEY
) -> Any:
    """Return the model's transformers config with `override` applied; `key` is the setting that named the
    folder.

    Raises ConfigError for an unreadable folder, code that was not allowed, unknown override names, and
    features whose log-probs would be wrong here.
    """
    from transformers import AutoConfig

    where = f"{key}={path}"
    is_folder, file = bool(path) and Path(path).is_dir(), Path(path) / "config.json"
    # `name` and `owner/name` may be on a hub; anything else can only be a folder.
    if not is_folder and (not path or path[0] in "/.~" or path.count("/") > 1 or path.endswith("/")):
        raise ConfigError(f"{where}: there is no such folder")
    # Said at once if the hub is switched off; its client tries for long.
    if not (is_folder or constants.HF_HUB_OFFLINE or try_to_load_from_cache(path, "config.json")) and (
        why := hub.why_unreachable()
    ):
        raise ConfigError(f"{where}: no such folder, no such model in the hub's cache on this machine, and {why}")
    try:
        has_code = not trust_remote_code and file.is_file() and "auto_map" in json.loads(file.read_text())
        config = None if has_code else AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever transformers makes of settings of other types
        what = "no model configuration there" if is_folder else "no such folder, and no hub model that could be read"
        raise ConfigError(f"{where}: {what}: {_first_line(error)}") from error
    if has_code:
        raise ConfigError(
            f"{where}: its config.json names Python code of its own (auto_map); "
            f"set {key.rpartition('.')[0]}.trust_remote_code=true if you want that code to run"
        )
    for name, value in (override or {}).items():
        override_field(config, name, value)
    for name in SCALED_LOGITS:
        if getattr(config, name, None) not in (None, 1):
            raise ConfigError(f"{where}: models with {name} are not supported yet")
    return config


def override_field(config: Any, key: str, value: Any) -> None:
    where = f"actor_rollout_ref.model.override_config.{key}"
    if callable(getattr(config, key, len)) or isinstance(getattr(type(config), key, None), property):
        raise ConfigError(f"{where}: {type(config).__name__} has no such field")
    try:
        setattr(config, key, value)
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise ConfigError(f"{where}={value!r}: {' '.join(str(error).split())}") from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def load_lm(path: str, config: Any, *, trust_remote_code: bool = False, on_meta: bool = False, key: str = POLICY_KEY) -> Any:
    from transformers import AutoModelForCausalLM

    if getattr(config, "tie_word_embeddings", False):
        refuse_other_head(path, key)
    lm = packed_model(AutoModelForCausalLM, path, config, trust_remote_code=trust_remote_code, on_meta=on_meta, key=key)
    if not getattr(lm, "_supports_attention_backend", True):
        raise ConfigError(f"{type(lm).__name__} does not let its attention be exchanged, which packed sequences need")
    return lm


def refuse_other_head(path: str, key: str = POLICY_KEY) -> None:
    """Raise ConfigError for a tied head that differs in the files: transformers would take the files'."""
    try:
        files = WeightFiles.find(path)
        differs = files is not None and files.has_other_head()
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError):
        return  # which the reading of the weights says better
    if differs:
        raise ConfigError(
            f"{key}={path}: config.json says tie_word_embeddings=true, and the files have an LM head that is not the embedding; "
            "write false there if that head belongs to the model, or take lm_head.weight out of the files"
        )


def packed_model(
    auto_class: Any, path: str, config: Any, *, trust_remote_code: bool, on_meta: bool, key: str, new: Collection[str] = ()
) -> Any:
    """In float32. Raises ConfigError if weights are missing, but for those in `new`, which are 0 then."""
    attention.register()
    if on_meta:
        config._attn_implementation = attention.ATTENTION_NAME
        with parameters_on_meta():
            return auto_class.from_config(config, trust_remote_code=trust_remote_code, dtype=torch.float32)
    where = f"{key}={path}"
    try:
        lm, report = auto_class.from_pretrained(
            path,
            config=config,
            trust_remote_code=trust_remote_code,
            dtype=torch.float32,
            attn_implementation=attention.ATTENTION_NAME,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:  # whatever transformers makes of broken files
        raise ConfigError(f"{where}: its weights cannot be read: {type(error).__name__}: {_first_line(error)}") from error
    # transformers makes up weights that are not there or do not fit; training would start from noise.
    missing = set(report["missing_keys"])
    made_up = [f"{name} is not there" for name in sorted(missing.difference(new))]
    made_up += [
        f"{name} is {tuple(stored)}, not {tuple(expected)}" for name, stored, expected in sorted(report["mismatched_keys"])
    ]
    if made_up:
        raise ConfigError(f"{where}: {len(made_up)} of its weights do not fit the model's config, e.g. {made_up[0]}")
    for name in missing.intersection(new):
        torch.nn.init.zeros_(lm.get_parameter(name))
    return lm


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Buffers are computed, and a tied head stays tied (accelerate's `init_empty_weights` splits it)."""
    register = nn.Module.register_parameter

    def without_storage(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = without_storage  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except BaseException as error:  # whatever a broken file leads to; a panic in Rust is no Exception
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise ConfigError(f"no tokenizer in {path}: {type(error).__name__}: {_first_line(error)}") from error


def save_lm(lm: Any, folder: Path, state: dict[str, Any]) -> None:
    """Generation settings are written as they were read: transformers refuses some that it only warns of."""
    from transformers import GenerationConfig

    settings = getattr(lm, "generation_config", None)  # a model that only scores has none
    if settings is not None:
        lm.generation_config = GenerationConfig()
    try:
        lm.save_pretrained(folder, state_dict=state)
    finally:
        if settings is not None:
            lm.generation_config = settings
    if settings is not None and lm.can_generate():
        write_generation(settings, folder)


def write_generation(settings: Any, folder: Path) -> None:
    settings.to_json_file(folder / GENERATION_FILE, keys_to_pop=["compile_config"])


def recompute_layers(lm: Any, *, inputs_in_host_memory: bool = False) -> None:
    """Let each decoder layer keep its input only, perhaps in host memory, and compute it again backwards."""
    lm.gradient_checkpointing_enable({"use_reentrant": False})
    if inputs_in_host_memory:
        layer: Any
        for layer in decoder_layers(lm):
            layer._gradient_checkpointing_func = _recomputed_from_host_memory


def _recomputed_from_host_memory(function: Callable[..., Any], *inputs: Any) -> Any:
    # The hooks see what the recomputation itself saves, its inputs. Inside of the layer it has hooks of its own.
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_initialized()):
        return checkpoint(function, *inputs, use_reentrant=False)


def compile_layers(lm: Any) -> None:
    """Compile each decoder layer for sequences of any length, attention left out. Names and hooks stay."""
    attention.register(left_out=True)
    for layer in decoder_layers(lm):
        layer.forward = torch.compile(layer.forward, dynamic=True)


def decoder_layers(lm: Any) -> list[nn.Module]:
    layers = getattr(lm.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ConfigError(f"{type(lm).__name__} has no list of decoder layers that could be sharded")
    return list(layers)
