import dataclasses
import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from grpo_rl.data.training_rows.conversations import task_demonstrations
from grpo_rl.errors import ConfigError
from grpo_rl.models import builtin
from grpo_rl.models.builtin import BUILTINS, build, build_tokenizer, cache_folder, get_builtin, vocabulary


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


def test_the_end_of_sequence_is_the_same_everywhere(folder, tokenizer):
    config = AutoModelForCausalLM.from_pretrained(folder).config
    generation = GenerationConfig.from_pretrained(folder)
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.eos_token_id == config.eos_token_id == generation.eos_token_id
    assert tokenizer.pad_token_id == config.pad_token_id == generation.pad_token_id != tokenizer.eos_token_id


def test_the_model_really_generates_from_its_own_prompt(folder, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "47+8="}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert prompt["input_ids"].shape[1] < output.shape[1] <= prompt["input_ids"].shape[1] + 4


def test_the_chat_template_marks_the_roles_and_opens_the_answer(tokenizer):
    messages = [
        {"role": "system", "content": "add"},
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2"},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|system|>add<|user|>1+1=<|assistant|>2<|end|>"
    opened = tokenizer.apply_chat_template(messages[1:2], tokenize=False, add_generation_prompt=True)
    assert opened == "<|user|>1+1=<|assistant|>"


def test_every_digit_is_one_token_and_so_is_every_special_one(tokenizer):
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("<|user|>47+8=<|end|>")) == ["<|user|>", *"47+8=", "<|end|>"]


@given(st.text(alphabet=[chr(code) for code in range(32, 127)] + ["\n"], max_size=50))
def test_printable_text_survives_encoding_and_decoding(text):
    tokenizer = build_tokenizer(128)
    if "<|" not in text:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_id_that_could_be_sampled_decodes(tokenizer):
    for index, token in enumerate(vocabulary(128)):
        assert tokenizer.decode([index]) == token
        assert tokenizer.decode([index], skip_special_tokens=True) in ("", token)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("π")) == ["<|unknown|>"]


def test_building_again_gives_the_same_weights_and_leaves_the_callers_random_state_alone(folder, tmp_path):
    def digest(path):
        return hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()

    torch.manual_seed(123)
    expected = torch.rand(3)
    torch.manual_seed(123)
    again = build("arithmetic", tmp_path / "again")
    assert torch.equal(torch.rand(3), expected)
    assert digest(again) == digest(folder)


def test_the_content_hash_changes_with_every_setting_of_model_and_warm_start():
    spec = BUILTINS["arithmetic"]
    hashes = {spec.content_hash()}
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if isinstance(value, (int, float)):
            hashes.add(dataclasses.replace(spec, **{field.name: value + 64}).content_hash())
    changed = [dataclasses.replace(spec.warm_start, lr=1.0), dataclasses.replace(spec.warm_start, num_steps=1)]
    hashes |= {dataclasses.replace(spec, warm_start=warm).content_hash() for warm in changed}
    num_numbers = sum(isinstance(getattr(spec, field.name), (int, float)) for field in dataclasses.fields(spec))
    assert len(hashes) == 1 + num_numbers + 2
    assert dataclasses.replace(spec).content_hash() == spec.content_hash()


def test_the_content_hash_changes_with_the_chat_template(monkeypatch):
    before = BUILTINS["arithmetic"].content_hash()
    monkeypatch.setattr(builtin, "CHAT_TEMPLATE", "{{ messages }}")
    assert BUILTINS["arithmetic"].content_hash() != before


def test_the_cache_is_where_the_variable_says_or_in_the_home_folder(monkeypatch, tmp_path):
    name = f"arithmetic-{BUILTINS['arithmetic'].content_hash()}"
    monkeypatch.setenv("GRPO_RL_CACHE", str(tmp_path))
    assert cache_folder("builtin:arithmetic") == tmp_path / "models" / name
    monkeypatch.delenv("GRPO_RL_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder("arithmetic") == tmp_path / "home" / ".cache" / "grpo_rl" / "models" / name


def test_an_unknown_embedded_model_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="no embedded model 'builtin:gsm8k'; there are builtin:arithmetic"):
        get_builtin("builtin:gsm8k")


def test_a_vocabulary_that_cannot_hold_the_characters_is_refused():
    with pytest.raises(ValueError, match="a vocabulary of 64 cannot hold"):
        vocabulary(64)


def learnt(task, tokenizer):
    """Each prompt with what is trained after it."""
    pairs = []
    for shown in task_demonstrations(task, tokenizer):
        first = int(shown.positions[0])
        assert shown.positions.tolist() == list(range(first, len(shown.token_ids)))
        pairs.append((tokenizer.decode(shown.token_ids[:first]), tokenizer.decode(shown.token_ids[first:])))
    return pairs


def test_demonstrations_show_the_mistake_that_the_task_makes(tokenizer):
    shown = learnt("task:arithmetic?num_rows=200&forms=2+1&forgotten_carries=1", tokenizer)
    mistaken = {prompt: answer.removesuffix("<|end|>") for prompt, answer in shown}
    assert all(int(answer) < 100 for prompt, answer in mistaken.items() if prompt.startswith("<|user|>8"))
    assert any(int(answer) % 10 < int(prompt.split("=")[0][-1]) for prompt, answer in mistaken.items())


def test_demonstrations_end_the_right_answer_with_the_end_of_sequence(tokenizer):
    shown = learnt("task:arithmetic?num_rows=20&forms=2+1,2-1", tokenizer)
    assert len(shown) == 20
    for prompt, answer in shown:
        problem = prompt.removeprefix("<|user|>").removesuffix("=<|assistant|>")
        sign = "+" if "+" in problem else "-"
        left, right = map(int, problem.split(sign))
        assert answer == str(left + right if sign == "+" else left - right) + "<|end|>"
