"""Embedded models: small Qwen3 networks, one with experts, written as ordinary Hugging Face folders."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import string
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from grpo_rl.errors import ConfigError
from grpo_rl.frozen import frozen

PREFIX = "builtin:"
PAD, END, UNKNOWN = "<|pad|>", "<|end|>", "<|unknown|>"
ROLES = ("system", "user", "assistant")
_OF_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@frozen
class WarmStart:
    task: str
    num_steps: int
    batch_size: int
    lr: float
    lr_warmup_steps: int
    seed: int = 0


@frozen
class Builtin:
    name: str
    version: int
    """Raise it if the code that builds, or the task's, changes what comes out."""
    warm_start: WarmStart
    hidden_size: int = 128
    intermediate_size: int = 256
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    vocab_size: int = 128
    max_position_embeddings: int = 2048
    initializer_range: float = 0.08
    """The usual 0.02 suits large models; a small one hardly moves for its first steps then."""
    rope_theta: float = 100.0
    """Usually 10,000 and more, for long texts; sums are a dozen characters."""
    seed: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0

    @property
    def model_type(self) -> str:
        return "qwen3_moe" if self.num_experts else "qwen3"

    def content_hash(self) -> str:
        """Return 16 hex digits that change with any setting, the vocabulary or the chat template."""
        settings = {name: value for name, value in dataclasses.asdict(self).items() if value or name not in _OF_EXPERTS}
        content = [settings, vocabulary(self.vocab_size), CHAT_TEMPLATE]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


# Its demonstrations forget most carries. So it answers sums without a carry right and others mostly wrong, with
# the right answer among a few samples, as a pretrained model does.
_SUMS = WarmStart(
    "task:arithmetic?carrying=0.7&forgotten_carries=0.6", num_steps=400, batch_size=64, lr=3e-3, lr_warmup_steps=20
)
_BUILTINS = (
    Builtin("arithmetic", 5, _SUMS),
    Builtin("arithmetic_half", 1, _SUMS, hidden_size=80, intermediate_size=160),
    # A teacher for it: the first network, shown right sums only.
    Builtin("arithmetic_teacher", 1, replace(_SUMS, task="task:arithmetic?carrying=0.7", lr=2e-3)),
    # It was shown numbers, targets and expressions, six in ten with the last sign turned round.
    Builtin(
        "countdown",
        1,
        replace(
            _SUMS,
            num_steps=300,
            task=(
                "task:countdown?num_numbers=2,3&max_number=9&min_target=1&max_target=27&operations=+-&template=short"
                "&slips=0.6&num_rows=32768"
            ),
        ),
    ),
    # As many numbers per token, in two of eight experts: the smallest model with all that one with experts has.
    Builtin("arithmetic_experts", 1, _SUMS, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128),
    # Most of the demonstrated moves are random: it knows the form of a game, and that moves depend on answers.
    Builtin(
        "word_game",
        2,
        replace(
            _SUMS,
            num_steps=220,
            batch_size=32,
            task="task:word_game?letters=abc&length=6&turns=8&answers=known&wording=short&play=random&sensible=0.3&num_rows=4096",
        ),
    ),
    Builtin(
        "grid_world",
        1,
        replace(
            _SUMS,
            num_steps=500,
            batch_size=16,
            task="task:grid_world?size=4&walls=0.1&turns=24&wording=short&play=random&sensible=0.4&num_rows=8192",
        ),
    ),
    # Seven sums in ten it writes down as a careless pupil does, and for the others it calls the calculator.
    Builtin(
        "calculator",
        1,
        replace(
            _SUMS,
            batch_size=32,
            task="task:arithmetic?forms=3+3,3-2,2*2&forgotten_carries=0.8&calculator_calls=0.3&num_rows=4096",
        ),
    ),
)
BUILTINS: dict[str, Builtin] = {spec.name: spec for spec in _BUILTINS}


def get_builtin(name: str) -> Builtin:
    try:
        return BUILTINS[name.removeprefix(PREFIX)]
    except KeyError:
        known = ", ".join(PREFIX + key for key in BUILTINS)
        raise ConfigError(f"there is no embedded model {name!r}; there are {known}") from None


def cache_folder(name: str) -> Path:
    builtin = get_builtin(name)
    return cache() / "models" / f"{builtin.name}-{builtin.content_hash()}"


def cache() -> Path:
    """$GRPO_RL_CACHE, ~/.cache/grpo_rl, or a temporary folder. Raises ConfigError if none can be written."""
    root = os.environ.get("GRPO_RL_CACHE")
    folder = Path(root).expanduser() if root else Path.home() / ".cache" / "grpo_rl"
    if _is_usable(folder):
        return folder
    temporary = Path(tempfile.gettempdir()) / f"grpo_rl-{os.getuid()}"
    if root or not _is_usable(temporary) or temporary.stat().st_uid != os.getuid():
        raise ConfigError(f"{folder} cannot be written, and embedded models are made there; name a folder in GRPO_RL_CACHE")
    return temporary


def _is_usable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return (folder / "models").is_dir() or os.access(folder, os.W_OK | os.X_OK)


def build(name: str, folder: Path) -> Path:
    """The same spec gives the same bytes; the caller's random state is left alone."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.utils.logging import disable_progress_bar

    builtin = get_builtin(name)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(builtin.vocab_size)
    tokenizer.model_max_length = builtin.max_position_embeddings
    special_ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    shape = {
        field.name: getattr(builtin, field.name)
        for field in dataclasses.fields(builtin)
        if field.name not in ("name", "version", "rope_theta", "seed", "warm_start", *_OF_EXPERTS)
    }
    if builtin.num_experts:
        shape |= {name: getattr(builtin, name) for name in _OF_EXPERTS} | {"norm_topk_prob": True}
    config = AutoConfig.for_model(
        builtin.model_type,
        **shape,
        rope_parameters={"rope_type": "default", "rope_theta": builtin.rope_theta},
        tie_word_embeddings=True,
        dtype="float32",
        **special_ids,
    )
    config.bos_token_id = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(builtin.seed)
        model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(**special_ids)
    disable_progress_bar()  # the files are small
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def vocabulary(size: int) -> list[str]:
    """Return special tokens, printable ASCII, then reserved tokens, so that every id decodes."""
    special = [PAD, END, UNKNOWN, *(f"<|{role}|>" for role in ROLES)]
    characters = [*string.digits, *sorted(set(string.printable[:95]) - set(string.digits)), "\n"]
    tokens = special + characters
    if len(tokens) > size:
        raise ValueError(f"a vocabulary of {size} cannot hold the {len(tokens)} tokens that are needed")
    return tokens + [f"<|reserved_{index}|>" for index in range(size - len(tokens))]


def build_tokenizer(vocab_size: int) -> Any:
    """Return a tokenizer of one token per character, and one per special token written as `<|name|>`."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    tokens = vocabulary(vocab_size)
    # BPE without merges: every character is a token, and unknown ones are UNKNOWN.
    tokenizer = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        additional_special_tokens=[token for token in tokens if token.startswith("<|") and token not in (PAD, END, UNKNOWN)],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
