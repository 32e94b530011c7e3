"""Model folders that are refused when they are loaded, and the words of the refusal."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny_models import make_folder

from grpo_rl.config.schema.tree import Config
from grpo_rl.errors import ConfigError
from grpo_rl.models.builtin import build_tokenizer
from grpo_rl.models.load import load_config, load_lm, load_tokenizer
from grpo_rl.plan.model_folder import check_others


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


def test_a_head_that_the_config_ties_and_the_files_do_not_is_refused_by_one_rank_and_by_several(tmp_path):
    untied = make_folder(tmp_path / "untied", "qwen3", tied=False)
    path = with_config(untied, tmp_path / "said to be tied", tie_word_embeddings=True)
    for on_meta in (False, True):
        with pytest.raises(ConfigError, match="says tie_word_embeddings=true, and the files have an LM head that is not"):
            load_lm(path, load_config(path), on_meta=on_meta)
    load_lm(str(untied), load_config(str(untied)))
    # Files that have the embedding twice are those of a tied model.
    tensors = load_file(untied / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, Path(path) / "model.safetensors", metadata={"format": "pt"})
    load_lm(path, load_config(path), on_meta=True)


CONFIG_VALUES = {
    "hidden_size": "many", "num_attention_heads": 0, "num_hidden_layers": -1, "vocab_size": None, "rope_parameters": [1],
    "layer_types": "all", "hidden_act": "no_such", "head_dim": 2.5, "model_type": 7, "dtype": "float7", "rms_norm_eps": "x",
    "architectures": "Qwen3", "eos_token_id": {"a": 1}, "tie_word_embeddings": "perhaps", "intermediate_size": 10**9,
}  # fmt: skip
CONTENTS = {
    "config.json": [b"", b"[]", b"null", b"{", b"\xff\xfe", b"[" * 5000, b'{"model_type": "qwen3", "hidden_size": 1e400}'],
    "model.safetensors": [b"", b"version https://git-lfs.github.com/spec/v1", b"\x05\0\0\0\0\0\0\0null ", b"\xff" * 64],
    "model.safetensors.index.json": [b"", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {"a": "gone.safetensors"}}'],
    "tokenizer.json": [b"", b"{}", b"null", b"[]", b'{"version": "1.0", "model": {"type": "BPE", "vocab": 3, "merges": []}}'],
    "tokenizer_config.json": [b"", b"[]", b'{"tokenizer_class": "NoSuch"}', b'{"model_max_length": "x"}'],
}
REGEX = json.dumps({"type": "Split", "pattern": {"Regex": "(?<=(a+)+$)\\K(*SKIP)["}, "behavior": "Isolated", "invert": False})


def test_a_broken_folder_of_any_role_is_refused_in_a_sentence_and_never_waited_for(folder, tmp_path):
    tokenizer = build_tokenizer(128)
    damages = [("config.json", json.dumps(json.loads((folder / "config.json").read_text()) | {key: value}).encode())
               for key, value in CONFIG_VALUES.items()]  # fmt: skip
    damages += [(name, content) for name, contents in CONTENTS.items() for content in contents]
    teacher = "distillation.teacher_models.t.model_path"
    refused = 0
    for number, (name, content) in enumerate(damages):
        path = Path(with_config(folder, tmp_path / str(number)))
        tokenizer.save_pretrained(path)
        (path / name).write_bytes(content)
        try:
            check_others(teaching(path))
            load_lm(str(path), load_config(str(path)))
            load_tokenizer(str(path))
        except ConfigError as error:
            refused += 1
            assert name in str(error) or str(path) in str(error)
    print(f"{refused} of {len(damages)} refused")
    assert refused >= 25
    path = Path(with_config(folder, tmp_path / "regex"))
    tokenizer.save_pretrained(path)
    content = json.loads((path / "tokenizer.json").read_text()) | {"pre_tokenizer": json.loads(REGEX)}
    (path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="no tokenizer in"):
        load_tokenizer(str(path))
    for name in ("config.json", "model.safetensors", "tokenizer.json", "generation_config.json"):
        path = Path(with_config(folder, tmp_path / f"fifo {name}"))
        (path / name).unlink(missing_ok=True)
        os.mkfifo(path / name)
        with pytest.raises(ConfigError, match=rf"{teacher}={path}: {name} is no regular file"):
            check_others(teaching(path))
    with pytest.raises(ConfigError, match=f"{teacher}=/nosuch: there is no such folder"):
        check_others(teaching(Path("/nosuch")))


def teaching(path: Path) -> Config:
    """A configuration with a teacher in this folder."""
    config = Config()
    own = dataclasses.replace(config.distillation, enabled=True, teacher_models={"t": {"model_path": str(path)}})
    return dataclasses.replace(config, distillation=own)
