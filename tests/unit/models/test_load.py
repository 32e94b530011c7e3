"""Model folders that are refused when they are loaded, and the words of the refusal."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from tiny_models import make_folder

from grpo_rl.errors import ConfigError
from grpo_rl.models.load import load_config, load_lm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), "qwen3", tied=True)


def with_config(folder: Path, target: Path, **changes: object) -> str:
    """A copy of the folder whose config.json is changed."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))
    return str(target)


@pytest.mark.parametrize("name", ["attention_dropuot", "to_dict", "use_return_dict"])
def test_an_override_that_is_no_field_is_refused(folder, name):
    with pytest.raises(ConfigError, match=f"override_config.{name}: Qwen3Config has no such field"):
        load_config(str(folder), override={name: 0.1})


def test_a_name_on_a_hub_that_cannot_be_reached_is_refused_at_once_by_the_key_that_named_it(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but nobody listens: a connection is refused
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
        with pytest.raises(
            ConfigError, match=r"^critic.model.path=nobody/nothing: .*127.0.0.1 cannot be reached \(Connection refused"
        ):
            load_config("nobody/nothing", key="critic.model.path")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model_type": "no_such_type"}'])
def test_a_folder_whose_config_cannot_be_used_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match="no model configuration there: ") as caught:
        load_config(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field", ["final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "logits_scaling"])
def test_models_whose_logprobs_would_be_wrong_are_refused(folder, tmp_path, field):
    path = with_config(folder, tmp_path / "capped", **{field: 30.0})
    with pytest.raises(ConfigError, match=f"models with {field} are not supported"):
        load_config(path)
    assert load_config(with_config(folder, tmp_path / "one", **{field: 1.0}))


def test_a_folder_without_weights_is_refused(folder, tmp_path):
    path = with_config(folder, tmp_path / "empty")
    (Path(path) / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"its weights cannot be read: .*model\.safetensors"):
        load_lm(path, load_config(path))


def test_no_weight_is_made_up(folder, tmp_path):
    untied = with_config(folder, tmp_path / "untied", tie_word_embeddings=False)
    with pytest.raises(ConfigError, match=r"1 of its weights do not fit .* lm_head.weight is not there"):
        load_lm(untied, load_config(untied))
    with pytest.raises(ConfigError, match=r"embed_tokens.weight is \(37, 32\), not \(50, 32\)"):
        load_lm(str(folder), load_config(str(folder), override={"vocab_size": 50}))
