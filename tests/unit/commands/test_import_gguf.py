"""`grpo-rl import-gguf` on tiny GGUF files that the package gguf writes: the folder, its numbers, and files that are none."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from grpo_rl.commands import import_gguf
from grpo_rl.commands.targets import find_target
from grpo_rl.config.compose import compose
from grpo_rl.errors import ConfigError
from grpo_rl.plan.make import make_plan

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 64, 96, 2, 1, 2
HEAD_DIM = {"llama": 32, "qwen2": 32, "qwen3": 128, "nonesuch": 32}
"""transformers reads no other one of a Qwen3 from GGUF; all that are published have it."""
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
CHARACTERS = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *CHARACTERS, "ab"]


def write_gguf(
    path: Path, family: str = "llama", tied: bool = True, change: Callable[[Any], None] = lambda writer: None
) -> Path:
    """A decoder of two layers with random weights; matrices in Q8_0, the embedding in Q4_1."""
    writer = gguf.GGUFWriter(path, family)
    writer.add_name("Tiny")
    writer.add_license("apache-2.0")
    writer.add_organization("Nobody")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM[family])
    writer.add_value_length(HEAD_DIM[family])
    writer.add_rope_dimension_count(HEAD_DIM[family])
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, *[1] * (len(TOKENS) - 3)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, shape in shapes(family, tied).items():
        values = np.random.default_rng(len(name)).normal(size=shape, scale=0.05).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q4_1 if name == "token_embd.weight" else gguf.GGMLQuantizationType.Q8_0
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def shapes(family: str, tied: bool) -> dict[str, tuple[int, ...]]:
    size = HEAD_DIM[family]
    of_block = {
        "attn_norm.weight": (HIDDEN,),
        "ffn_norm.weight": (HIDDEN,),
        "attn_q.weight": (HEADS * size, HIDDEN),
        "attn_k.weight": (KV_HEADS * size, HIDDEN),
        "attn_v.weight": (KV_HEADS * size, HIDDEN),
        "attn_output.weight": (HIDDEN, HEADS * size),
        "ffn_gate.weight": (INNER, HIDDEN),
        "ffn_up.weight": (INNER, HIDDEN),
        "ffn_down.weight": (HIDDEN, INNER),
    }
    if family == "qwen2":
        rows = {"attn_q": HEADS, "attn_k": KV_HEADS, "attn_v": KV_HEADS}
        of_block |= {f"{name}.bias": (heads * size,) for name, heads in rows.items()}
    if family == "qwen3":
        of_block |= {"attn_q_norm.weight": (size,), "attn_k_norm.weight": (size,)}
    blocks = {f"blk.{block}.{name}": shape for block in range(LAYERS) for name, shape in of_block.items()}
    head = {} if tied else {"output.weight": (len(TOKENS), HIDDEN)}
    return {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,), **blocks, **head}


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("llama", False), ("qwen2", True), ("qwen3", True)])
def test_the_folder_is_the_model_that_transformers_reads_from_the_file(
    family: str, tied: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", family, tied)
    folder = tmp_path / "models" / "tiny"
    assert import_gguf.main([str(file), str(folder)]) == 0
    assert "apache-2.0" in capsys.readouterr().out

    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == family and "quantization_config" not in config and config["dtype"] == "float32"
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf").eval()
    imported = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert imported.config.tie_word_embeddings is tied
    ids = torch.tensor([[1, 40, 50, 60, 2]])
    with torch.no_grad():
        difference = (read(ids).logits - imported(ids).logits).abs().max().item()
    assert difference == 0.0

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.model_max_length) == (2, 2, 256)
    messages = [{"role": "user", "content": "ab c"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<|im_start|>ab c<|im_end|>"
    assert tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids) == ["<|im_start|>", "ab", "Ġ", "c", "<|im_end|>"]
    card = (folder / "README.md").read_text()
    assert "license: apache-2.0" in card and "from Q8_0, Q4_1, F32 to float32" in card and "Nobody" in card


def test_dequantized_weights_are_those_of_the_packages_own_formula(tmp_path: Path) -> None:
    """Q4_1: blocks of 32 numbers, each a 4-bit count of steps `d` above a least value `m`, both float16."""
    file = write_gguf(tmp_path / "tiny.gguf")
    folder = import_gguf.import_gguf(import_gguf.read_header(file), tmp_path / "tiny", "float32")
    embedding = next(tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == "token_embd.weight")
    blocks = embedding.data.reshape(-1, 20)
    step, least = (blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32) for at in (0, 2))
    counts = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1).astype(np.float32)
    wanted = (counts * step + least).reshape(len(TOKENS), HIDDEN)
    weights = load_file(folder / "model.safetensors")
    assert np.array_equal(weights["model.embed_tokens.weight"].numpy(), wanted)
    assert "lm_head.weight" not in weights


def test_bfloat16_is_the_rounded_float32(tmp_path: Path) -> None:
    header = import_gguf.read_header(write_gguf(tmp_path / "tiny.gguf"))
    wide, narrow = (
        load_file(import_gguf.import_gguf(header, tmp_path / dtype, dtype) / "model.safetensors")
        for dtype in import_gguf.DTYPES
    )
    assert AutoConfig.from_pretrained(tmp_path / "bfloat16").dtype == torch.bfloat16
    assert all(torch.equal(wide[name].bfloat16(), tensor) for name, tensor in narrow.items()) and len(wide) == len(narrow)


def broken_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """What each refusal says, and a file that meets it."""
    good = write_gguf(folder / "good.gguf").read_bytes()

    def made(name: str, content: bytes) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    yield "there is no such file", folder / "nothing.gguf"
    yield "GGUF magic invalid", made("text.gguf", b"version https://git-lfs.github.com/spec/v1\n")
    yield "empty file", made("empty.gguf", b"")
    yield "names", made("cut_header.gguf", good[:900])
    yield "names", made("cut_weights.gguf", good[:-4000])
    # Counts of tensors and of settings, eight bytes each behind the magic number and the version.
    endless = (2**62).to_bytes(8, "little")
    yield "names", made("endless_settings.gguf", good[:16] + endless + good[24:])
    yield "names", made("endless_tensors.gguf", good[:8] + endless + good[16:])
    # `general.name`, a string, becomes an array of 2^62 bytes.
    at = good.index(b"general.name") + len(b"general.name")
    array = (9).to_bytes(4, "little") + (0).to_bytes(4, "little") + endless
    yield "names", made("endless_array.gguf", good[:at] + array + good[at + 4 :])
    yield "not supported", write_gguf(folder / "unknown.gguf", "nonesuch")
    yield "layers", rewritten(folder / "layers.gguf", "llama.block_count", 10**6)
    yield "numbers", rewritten(folder / "wide.gguf", "llama.embedding_length", 2**20)
    yield "numbers", rewritten(folder / "deep.gguf", "llama.block_count", LAYERS + 1)
    yield (
        "scaled (yarn)",
        write_gguf(folder / "yarn.gguf", change=lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)),
    )
    yield (
        "numbers",
        write_gguf(
            folder / "llama3.gguf", change=lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(16, dtype=np.float32))
        ),
    )
    yield "weights are missing", write_gguf(folder / "renamed.gguf", change=renamed)


def rewritten(path: Path, key: str, value: int) -> Path:
    """A file whose setting says something else than its tensors do."""

    def change(writer: Any) -> None:
        writer.kv_data[0][key].value = value

    return write_gguf(path, change=change)


def renamed(writer: Any) -> None:
    """As many numbers as the model has, and one tensor under a name that it does not have."""
    tensors = writer.tensors[0]
    tensors["blk.0.other.weight"] = tensors.pop("blk.0.ffn_up.weight")


def test_a_file_that_is_broken_hostile_or_unsupported_is_one_sentence(tmp_path: Path) -> None:
    cases = list(broken_files(tmp_path))
    for says, file in cases:
        with pytest.raises(ConfigError) as refused:
            import_gguf.import_gguf(import_gguf.read_header(file), tmp_path / "folder", "float32")
        assert says in str(refused.value) and str(file) in str(refused.value) and "\n" not in str(refused.value)
        assert not (tmp_path / "folder").exists()
    assert len(cases) == 15


def test_a_folder_that_is_there_is_kept(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    file = write_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(ConfigError, match="is there already"):
        import_gguf.main([str(file), str(tmp_path / "model")])


def test_a_gguf_file_as_the_model_says_which_command_to_use(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    for path in (file, tmp_path):
        with pytest.raises(ConfigError, match=r"grpo-rl import-gguf FILE\.gguf FOLDER"):
            make_plan(compose(["recipe=arithmetic/grpo", f"actor_rollout_ref.model.path={path}"]))
        with pytest.raises(ConfigError, match=r"grpo-rl import-gguf FILE\.gguf FOLDER"):
            find_target(str(path))
