"""The sizes of common open models by their name on the hub: what their config.json says, so that a plan needs no model.

Facts only: numbers from the models' published config.json files. A folder's own file, or one in the hub's cache, comes first.
"""

from __future__ import annotations

import functools
import re
from typing import Any

_COLUMNS = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_OTHER = {
    "1m", "awq", "gptq", "gguf", "int4", "int8", "fp8",
    "mxfp4", "bnb", "4bit", "8bit", "vl", "mlx", "embedding", "reranker",
}  # fmt: skip
"""Words of a name that make another model of it: quantised, longer, or of another kind."""
ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
}
"""Families by the names of their classes; their parameters can be counted: attention of queries, keys, values and output, a gated MLP or
experts of such."""

# Per line: the names that share the sizes, `*` for what may follow (`Qwen2.5-7B*` is also Qwen2.5-7B-Instruct), then family, hidden
# size, layers, intermediate size, attention heads, key-value heads, size of a head, vocabulary, tied embeddings (1), positions, and
# for mixtures of experts: number of experts, experts of a token, intermediate size of an expert.
_TABLE = """
Qwen/Qwen2.5-0.5B*,Qwen/Qwen2.5-Coder-0.5B*            qwen2  896 24  4864 14  2  64 151936 1  32768
Qwen/Qwen2.5-1.5B*,Qwen/Qwen2.5-Coder-1.5B*            qwen2 1536 28  8960 12  2 128 151936 1  32768
Qwen/Qwen2.5-Math-1.5B*                                qwen2 1536 28  8960 12  2 128 151936 1   4096
Qwen/Qwen2.5-3B*,Qwen/Qwen2.5-Coder-3B*                qwen2 2048 36 11008 16  2 128 151936 1  32768
Qwen/Qwen2.5-7B*,Qwen/Qwen2.5-Coder-7B*                qwen2 3584 28 18944 28  4 128 152064 0  32768
Qwen/Qwen2.5-Math-7B*                                  qwen2 3584 28 18944 28  4 128 152064 0   4096
Qwen/Qwen2.5-14B*,Qwen/Qwen2.5-Coder-14B*              qwen2 5120 48 13824 40  8 128 152064 0  32768
Qwen/Qwen2.5-32B*,Qwen/Qwen2.5-Coder-32B*              qwen2 5120 64 27648 40  8 128 152064 0  32768
Qwen/Qwen2.5-72B*                                      qwen2 8192 80 29568 64  8 128 152064 0  32768
Qwen/QwQ-32B*                                          qwen2 5120 64 27648 40  8 128 152064 0  40960
Qwen/Qwen3-0.6B*                                       qwen3 1024 28  3072 16  8 128 151936 1  40960
Qwen/Qwen3-1.7B*                                       qwen3 2048 28  6144 16  8 128 151936 1  40960
Qwen/Qwen3-4B*                                         qwen3 2560 36  9728 32  8 128 151936 1  40960
Qwen/Qwen3-8B*                                         qwen3 4096 36 12288 32  8 128 151936 0  40960
Qwen/Qwen3-14B*                                        qwen3 5120 40 17408 40  8 128 151936 0  40960
Qwen/Qwen3-32B*                                        qwen3 5120 64 25600 64  8 128 151936 0  40960
Qwen/Qwen3-4B-*-2507                                   qwen3 2560 36  9728 32  8 128 151936 1 262144
Qwen/Qwen3-30B-A3B*                                qwen3_moe 2048 48  6144 32  4 128 151936 0  40960 128 8  768
Qwen/Qwen3-30B-A3B-*-2507,Qwen/Qwen3-Coder-30B-A3B* qwen3_moe 2048 48 6144 32  4 128 151936 0 262144 128 8  768
Qwen/Qwen3-235B-A22B*                              qwen3_moe 4096 94 12288 64  4 128 151936 0  40960 128 8 1536
Qwen/Qwen3-235B-A22B-*-2507                        qwen3_moe 4096 94 12288 64  4 128 151936 0 262144 128 8 1536
meta-llama/Llama-3.2-1B*                               llama 2048 16  8192 32  8  64 128256 1 131072
meta-llama/Llama-3.2-3B*                               llama 3072 28  8192 24  8 128 128256 1 131072
meta-llama/Meta-Llama-3-8B*                            llama 4096 32 14336 32  8 128 128256 0   8192
meta-llama/Llama-3.1-8B*,meta-llama/Meta-Llama-3.1-8B* llama 4096 32 14336 32  8 128 128256 0 131072
meta-llama/Meta-Llama-3-70B*                           llama 8192 80 28672 64  8 128 128256 0   8192
meta-llama/Llama-3.1-70B*,meta-llama/Llama-3.3-70B*    llama 8192 80 28672 64  8 128 128256 0 131072
meta-llama/Llama-3.1-405B*                             llama 16384 126 53248 128 8 128 128256 0 131072
deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B              qwen2 1536 28  8960 12  2 128 151936 0 131072
deepseek-ai/DeepSeek-R1-Distill-Qwen-7B                qwen2 3584 28 18944 28  4 128 152064 0 131072
deepseek-ai/DeepSeek-R1-Distill-Qwen-14B               qwen2 5120 48 13824 40  8 128 152064 0 131072
deepseek-ai/DeepSeek-R1-Distill-Qwen-32B               qwen2 5120 64 27648 40  8 128 152064 0 131072
deepseek-ai/DeepSeek-R1-Distill-Llama-8B               llama 4096 32 14336 32  8 128 128256 0 131072
deepseek-ai/DeepSeek-R1-Distill-Llama-70B              llama 8192 80 28672 64  8 128 128256 0 131072
deepseek-ai/DeepSeek-R1-0528-Qwen3-8B                  qwen3 4096 36 12288 32  8 128 151936 0 131072
mistralai/Mistral-7B-v0.1,mistralai/Mistral-7B-Instruct-v0.1,mistralai/Mistral-7B-Instruct-v0.2 mistral 4096 32 14336 32 8 128 32000 0 32768
mistralai/Mistral-7B-v0.3,mistralai/Mistral-7B-Instruct-v0.3 mistral 4096 32 14336 32 8 128 32768 0 32768
mistralai/Mistral-Nemo-*-2407                        mistral 5120 40 14336 32  8 128 131072 0 131072
mistralai/Mistral-Small-24B-*                        mistral 5120 40 32768 32  8 128 131072 0  32768
mistralai/Mixtral-8x7B-*                             mixtral 4096 32 14336 32  8 128  32000 0  32768 8 2 14336
google/gemma-3-270m*                             gemma3_text  640 18  2048  4  1 256 262144 1  32768
google/gemma-3-1b-*                              gemma3_text 1152 26  6912  4  1 256 262144 1  32768
microsoft/Phi-3.5-mini-instruct                         phi3 3072 32  8192 32 32  96  32064 0 131072
microsoft/Phi-4-mini-*                                  phi3 3072 32  8192 24  8 128 200064 1 131072
microsoft/phi-4,microsoft/Phi-4-reasoning*              phi3 5120 40 17920 40 10 128 100352 0  16384
allenai/OLMo-2-0425-1B*                                olmo2 2048 16  8192 16 16 128 100352 0   4096
allenai/OLMo-2-1124-7B*                                olmo2 4096 32 11008 32 32 128 100352 0   4096
allenai/OLMo-2-1124-13B*                               olmo2 5120 40 13824 40 40 128 100352 0   4096
allenai/OLMo-2-0325-32B*                               olmo2 5120 64 27648 40  8 128 100352 0   4096
allenai/OLMoE-1B-7B-*                                  olmoe 2048 16  1024 16 16 128  50304 0   4096 64 8 1024
ByteDance-Seed/Seed-OSS-36B-*                       seed_oss 5120 64 27648 80  8 128 155136 0 524288
HuggingFaceTB/SmolLM2-135M*                            llama  576 30  1536  9  3  64  49152 1   8192
HuggingFaceTB/SmolLM2-360M*                            llama  960 32  2560 15  5  64  49152 1   8192
HuggingFaceTB/SmolLM2-1.7B*                            llama 2048 24  8192 32 32  64  49152 1   8192
TinyLlama/TinyLlama-1.1B-*                             llama 2048 22  5632 32  4  64  32000 0   2048
"""


def known_settings(name: str) -> dict[str, Any] | None:
    """Return the sizes of a model on the hub, as its config.json names them; None for one that is not in the table.

    Of several entries that fit, the longest one is meant: `Qwen/Qwen2.5-Math-7B*` before a shorter one.
    """
    if _OTHER & set(re.split(r"[-_./]", name.lower())):
        return None
    fitting = [(len(pattern), row) for pattern, row in _rows() if _fits(name, pattern)]
    if not fitting:
        return None
    family, *numbers = max(fitting)[1]
    sizes = [int(number) for number in numbers]
    settings: dict[str, Any] = {"model_type": family, "architectures": [ARCHITECTURES[family]]}
    if family != "olmo2":  # whose files are float32
        settings["dtype"] = "bfloat16"
    settings |= dict(zip(_COLUMNS, sizes, strict=False))
    settings |= {"vocab_size": sizes[6], "tie_word_embeddings": bool(sizes[7]), "max_position_embeddings": sizes[8]}
    if len(sizes) > 9:
        settings |= {"num_local_experts" if family == "mixtral" else "num_experts": sizes[9], "num_experts_per_tok": sizes[10]}
        settings |= {"moe_intermediate_size": sizes[11]} if family == "qwen3_moe" else {}
    return settings


def known_names() -> tuple[str, ...]:
    """Return the names in the table, with `*` where more may follow."""
    return tuple(pattern for pattern, _ in _rows())


@functools.cache
def _rows() -> tuple[tuple[str, tuple[str, ...]], ...]:
    rows = [(line.split()[0].split(","), tuple(line.split()[1:])) for line in _TABLE.strip().splitlines()]
    return tuple((pattern, row) for patterns, row in rows for pattern in patterns)


def _fits(name: str, pattern: str) -> bool:
    """Return whether a name is the pattern's. What follows a size begins with `-`: Qwen3-4B is not part of Qwen3-4Bx."""
    name, pattern = name.lower(), pattern.lower()
    start, star, end = pattern.partition("*")
    if not star:
        return name == pattern
    rest = name.removeprefix(start)
    return name.startswith(start) and rest.endswith(end) and (not rest or start.endswith("-") or rest.startswith("-"))
