"""Chat templates of the shapes that model families have, in words of our own, each with a tokenizer whose marks are single tokens.

What matters is how each behaves over several turns: qwen25 appends; qwen3 drops the thoughts of earlier turns and writes empty ones
if thinking is off; llama3 has a header for each role; mistral ends turns with </s>, writes no marks before an answer, and moves
its list of tools to the last user message; gemma calls the assistant `model` and knows no role for tools.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from transformers import PreTrainedTokenizerFast

QWEN25 = """{%- if tools %}<|im_start|>system
Tools:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

QWEN3 = """{%- if tools %}<|im_start|>system
Tools:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- elif m.role == 'assistant' %}
{%- set content = m.content %}
{%- set thought = '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip() %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}<|im_start|>assistant
{% if loop.index0 > ns.last and (loop.last or thought) %}<think>
{{ thought }}
</think>

{% endif %}{{ content }}
{%- for call in m.tool_calls or [] %}
{% if not loop.first or content %}
{% endif %}<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""

LLAMA3 = """<|begin_of_text|>
{%- if tools %}<|start_header_id|>system<|end_header_id|>

{{ tools | tojson }}<|eot_id|>{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>

{{ m.content | tojson }}<|eot_id|>
{%- elif m.tool_calls %}<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>
{%- else %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

MISTRAL = """<s>
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and loop.index0 == ns.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]
{%- elif m.role == 'assistant' and m.tool_calls %}[TOOL_CALLS] [
{%- for call in m.tool_calls %}{{ {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson }}
{%- if call.id | length != 9 %}{{ raise_exception('ids of tool calls have nine characters') }}{% endif %}
{%- endfor %}]</s>
{%- elif m.role == 'assistant' %} {{ m.content }}</s>
{%- elif m.role == 'tool' %}[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]
{%- endif %}
{%- endfor %}"""

GEMMA = """<bos>
{%- for m in messages %}
{%- if m.role not in ['user', 'assistant'] %}{{ raise_exception('roles are user and assistant') }}{% endif %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles alternate') }}{% endif %}<start_of_turn>
{{- 'model' if m.role == 'assistant' else 'user' }}
{{ m.content | trim }}<end_of_turn>
{% endfor %}
{%- if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

REWRITING = """{{ messages | length }} messages
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

MARKS = [
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ),
    *("<|eom_id|>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<bos>", "<start_of_turn>", "<end_of_turn>"),
]
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen25": (QWEN25, "<|im_end|>", {}),
    "qwen3": (QWEN3, "<|im_end|>", {}),
    "qwen3, no thinking": (QWEN3, "<|im_end|>", {"enable_thinking": False}),
    "llama3": (LLAMA3, "<|eot_id|>", {}),
    "mistral": (MISTRAL, "</s>", {}),
    "gemma": (GEMMA, "<end_of_turn>", {}),
}
"""The template, the token that ends a turn, and the template's arguments, by family."""


def tokenizer_of(template: str, end: str) -> Any:
    """A byte-level tokenizer whose words merge within a few letters, so that text can be cut into tokens in several ways."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(a, b) for a in "aeiou1n\u0120\u010a" for b in "nrst1\u010a"]
    vocabulary = {piece: number for number, piece in enumerate([*alphabet, *dict.fromkeys(a + b for a, b in merges)])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s+|[^\s]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = ByteLevelDecoder()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end, pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": [mark for mark in MARKS if mark != end]})
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    tokenizer.chat_template = template
    return tokenizer
