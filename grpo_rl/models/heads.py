"""Bodies of language models with a head of one number: the critic's value, and the reward model's score."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from grpo_rl.errors import ConfigError
from grpo_rl.models.forward import PackedModel
from grpo_rl.models.linear import linear
from grpo_rl.models.load import load_config, packed_model
from grpo_rl.models.packing import Sequences

KEY = "reward.reward_model.model_path"


class ValueModel(PackedModel):
    """A float32 linear head on `lm`'s body, which starts at 0: GAE is then the discounted reward to go."""

    def __init__(self, lm: Any) -> None:
        super().__init__(lm.base_model)
        device = next(lm.parameters()).device
        self.head = nn.Linear(int(lm.config.hidden_size), 1, device=device, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, sequences: Sequences) -> Tensor:
        """Return `values_T`. That of a response's first token is that of its prompt."""
        sequences = self.sliced(sequences)
        # A copy, not a view: FSDP hooks the outputs and cannot hook views.
        values_T = self.head(self.hidden_TD(sequences).float())[:, 0].clone()
        return values_T if sequences.slice is None else sequences.slice.whole(values_T)


class ScoreModel(PackedModel):
    """A float32 score at chosen tokens; at the last one it is `...ForSequenceClassification`'s output."""

    def forward(self, sequences: Sequences) -> Tensor:
        """Return one score per entry of `sequences.predict_T`, the flat positions to score."""
        head = self.lm.score
        bias = None if head.bias is None else head.bias.float()
        return linear(self.hidden_TD(sequences).float(), head.weight.float(), bias)[:, 0].clone()


def load_score_config(path: str, *, trust_remote_code: bool = False, trained: bool = False) -> Any:
    """A `trained` one may be a causal LM's, and gets one label. Raises ConfigError without one score."""
    config = load_config(path, trust_remote_code=trust_remote_code, key=KEY)
    architectures = list(getattr(config, "architectures", None) or ["none"])
    if trained and any(name.endswith("ForCausalLM") for name in architectures):
        config.num_labels = 1
        return config
    if not any(_is_classifier(name) for name in architectures):
        raise ConfigError(
            f"{KEY}={path}: its architecture is {', '.join(architectures)}; a reward model is a "
            "...ForSequenceClassification or ...ForTokenClassification"
        )
    if config.num_labels != 1:
        raise ConfigError(f"{KEY}={path}: its head has {config.num_labels} labels; a reward model's has one, the score")
    return config


def load_scorer(path: str, config: Any, *, trust_remote_code: bool = False, on_meta: bool = False) -> Any:
    """On a causal LM's body the head is new and starts at 0. Raises ConfigError if it cannot be one."""
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    by_token = any(name.endswith("ForTokenClassification") for name in config.architectures)
    auto_class = AutoModelForTokenClassification if by_token else AutoModelForSequenceClassification
    new = () if any(_is_classifier(name) for name in config.architectures) else ("score.weight", "score.bias")
    lm = packed_model(auto_class, path, config, trust_remote_code=trust_remote_code, on_meta=on_meta, key=KEY, new=new)
    has_parts = isinstance(getattr(lm.base_model, "layers", None), nn.ModuleList) and isinstance(
        getattr(lm, "score", None), nn.Linear
    )
    if not has_parts or not getattr(lm, "_supports_attention_backend", True):
        raise ConfigError(
            f"{KEY}={path}: {type(lm).__name__}: only causal decoders with a linear head called `score` can be reward models, "
            "such as Qwen, Llama or Mistral"
        )
    return lm


def _is_classifier(name: str) -> bool:
    return name.endswith(("ForSequenceClassification", "ForTokenClassification"))
