import hashlib
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_rl.errors import ConfigError
from grpo_rl.models import builtin
from grpo_rl.models.builtin import build, get_builtin


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build("builtin:arithmetic", tmp_path_factory.mktemp("model") / "arithmetic")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def test_the_folder_is_loaded_by_the_ordinary_auto_classes(folder, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert len(tokenizer) == model.config.vocab_size and model.config.vocab_size % 64 == 0
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.dtype == torch.float32


def test_the_chat_template_marks_the_roles_and_opens_the_answer(tokenizer):
    messages = [
        {"role": "system", "content": "add"},
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2"},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|system|>add<|user|>1+1=<|assistant|>2<|end|>"
    opened = tokenizer.apply_chat_template(messages[1:2], tokenize=False, add_generation_prompt=True)
    assert opened == "<|user|>1+1=<|assistant|>"


def test_building_again_gives_the_same_weights_and_leaves_the_callers_random_state_alone(folder, tmp_path):
    def digest(path):
        return hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()

    torch.manual_seed(123)
    expected = torch.rand(3)
    torch.manual_seed(123)
    again = build("arithmetic", tmp_path / "again")
    assert torch.equal(torch.rand(3), expected)
    assert digest(again) == digest(folder)


def test_an_unknown_embedded_model_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="no embedded model 'builtin:gsm8k'; there are builtin:arithmetic"):
        get_builtin("builtin:gsm8k")


def test_embedded_models_are_made_among_temporary_files_where_the_home_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRPO_RL_CACHE", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "file").touch()  # a home below a file can be made by nobody, root included
    monkeypatch.setenv("HOME", str(tmp_path / "file" / "home"))
    assert builtin.cache() == tmp_path / f"grpo_rl-{os.getuid()}"
    monkeypatch.setenv("GRPO_RL_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(
        ConfigError, match="cannot be written, and embedded models are made there; name a folder in GRPO_RL_CACHE"
    ):
        builtin.cache()
