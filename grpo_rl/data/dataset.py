"""Prompts of a data set: rows read, rendered with the chat template, tokenized, and held compactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from grpo_rl.config.schema import DataConfig
from grpo_rl.data.files import Source, read_file
from grpo_rl.data.rows import Example, example
from grpo_rl.data.tasks.registry import PREFIX as TASK_PREFIX
from grpo_rl.data.tasks.registry import task_rows
from grpo_rl.errors import ConfigError, DataError
from grpo_rl.types import Prompt

TOKENIZED_AT_ONCE = 1024
SET_BY_US = ("conversation", "tokenize", "add_generation_prompt", "return_dict", "return_tensors")


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What became of the rows that were read."""

    num_rows: int
    """Rows in the files, after max_samples."""
    num_dropped: int
    """Rows left out because their prompt is longer than max_prompt_length."""
    num_truncated: int
    """Rows whose prompt was cut to max_prompt_length."""
    longest_prompt: int
    """Tokens of the longest prompt as read."""

    def __str__(self) -> str:
        text = f"{self.num_rows - self.num_dropped} prompts, longest as read {self.longest_prompt} tokens"
        if self.num_dropped:
            text += f", {self.num_dropped} of {self.num_rows} rows dropped as too long"
        if self.num_truncated:
            text += f", {self.num_truncated} prompts cut"
        return text


class PromptDataset:
    """All prompts of a data set, rendered and tokenized; the tokens lie in one flat array."""

    def __init__(self, examples: list[Example], texts: list[str], ids: list[list[int]], report: LoadReport) -> None:
        self.report = report
        self._rows = [
            (
                text,
                row.data_source,
                row.ground_truth,
                row.extra_info,
                None if isinstance(row.prompt, str) else tuple(row.prompt),
            )
            for text, row in zip(texts, examples, strict=True)
        ]
        self._offsets = np.cumsum([0, *map(len, ids)])
        self._token_ids = np.fromiter(chain.from_iterable(ids), dtype=np.int32, count=int(self._offsets[-1]))

    def __len__(self) -> int:
        return len(self._rows)

    def prompt(self, row_index: int, uid: str) -> Prompt:
        """Row `row_index` as a Prompt that is called `uid` in this run."""
        text, data_source, ground_truth, extra_info, messages = self._rows[row_index]
        token_ids = self._token_ids[self._offsets[row_index] : self._offsets[row_index + 1]]
        return Prompt(uid, tuple(token_ids.tolist()), text, data_source, ground_truth, extra_info, messages)

    @property
    def data_sources(self) -> list[str]:
        """The different values of data_source, sorted: what an `auto` reward must know."""
        return sorted({row[1] for row in self._rows})


def load_dataset(files: Sequence[str], config: DataConfig, tokenizer: Any, *, max_samples: int) -> PromptDataset:
    """The rows of all `files`, in order, as prompts; of these the first `max_samples` (-1: all).

    A file is .parquet, .json or .jsonl in verl's row format, or `task:NAME?option=value`. Prompts longer
    than `max_prompt_length` are dropped, cut or refused, as `filter_overlong_prompts` and `truncation`
    say. Raises DataError with file, row and column, and ConfigError for a task or template option.
    """
    if not files:
        raise DataError("no data files are given")
    sources = [_open(name) for name in files]
    places = [(source, index) for source in sources for index in range(len(source.rows))]
    places = places if max_samples < 0 else places[:max_samples]
    examples = [example(source, index, config.prompt_key, config.reward_fn_key) for source, index in places]
    where = [source.where(index) for source, index in places]
    texts = _render(examples, where, tokenizer, config.apply_chat_template_kwargs)
    ids = _tokenize(examples, texts, tokenizer)
    for place, row in zip(where, ids, strict=True):
        if not row:
            raise DataError(f"{place}: column {config.prompt_key!r} has no tokens")
    return _fit(examples, texts, ids, where, config, tokenizer)


def _open(name: str) -> Source:
    if name.startswith(TASK_PREFIX):
        return Source(name, task_rows(name))
    return read_file(name)


def _render(examples: list[Example], where: list[str], tokenizer: Any, options: dict[str, Any]) -> list[str]:
    """Each prompt as the text that the model sees."""
    taken = sorted(set(options) & set(SET_BY_US))
    if taken:
        raise ConfigError(f"data.apply_chat_template_kwargs: {', '.join(taken)} is set by the program")
    texts = []
    for row, place in zip(examples, where, strict=True):
        if isinstance(row.prompt, str):
            texts.append(row.prompt)
            continue
        if getattr(tokenizer, "chat_template", None) is None:
            raise DataError(
                f"{place}: the prompt is a list of chat messages, but the tokenizer has no chat template; "
                f"take an instruction-tuned model, or plain strings as prompts"
            )
        texts.append(_apply_template(row.prompt, place, tokenizer, options))
    return texts


def _apply_template(messages: list[dict[str, str]], place: str, tokenizer: Any, options: dict[str, Any]) -> str:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    except (TemplateError, TypeError, ValueError) as error:
        raise DataError(f"{place}: the chat template refuses the messages: {error}") from error


def _tokenize(examples: list[Example], texts: list[str], tokenizer: Any) -> list[list[int]]:
    """Token ids per row; a rendered template brings its own special tokens, a plain string gets the tokenizer's."""
    ids: list[list[int]] = [[] for _ in texts]
    for is_plain in (False, True):
        rows = [index for index, row in enumerate(examples) if isinstance(row.prompt, str) == is_plain]
        for start in range(0, len(rows), TOKENIZED_AT_ONCE):
            part = rows[start : start + TOKENIZED_AT_ONCE]
            encoded = tokenizer([texts[index] for index in part], add_special_tokens=is_plain)["input_ids"]
            for index, token_ids in zip(part, encoded, strict=True):
                ids[index] = token_ids
    return ids


def _fit(
    examples: list[Example], texts: list[str], ids: list[list[int]], where: list[str], config: DataConfig, tokenizer: Any
) -> PromptDataset:
    """The data set with every prompt at most `max_prompt_length` tokens long."""
    limit = config.max_prompt_length
    too_long = {index for index, row in enumerate(ids) if len(row) > limit}
    longest = max(map(len, ids))
    if too_long and config.filter_overlong_prompts:
        kept = [index for index in range(len(ids)) if index not in too_long]
        if not kept:
            raise DataError(
                f"no rows are left: all {len(ids)} prompts are longer than data.max_prompt_length={limit} (longest: {longest})"
            )
        report = LoadReport(len(ids), len(too_long), 0, longest)
        return PromptDataset([examples[i] for i in kept], [texts[i] for i in kept], [ids[i] for i in kept], report)
    if too_long and config.truncation == "error":
        first = min(too_long)
        raise DataError(
            f"{where[first]}: the prompt has {len(ids[first])} tokens, more than data.max_prompt_length={limit}, as have "
            f"{len(too_long) - 1} other rows (longest: {longest}). Raise max_prompt_length, drop such rows with "
            f"data.filter_overlong_prompts=true, or cut them with data.truncation=left, right or middle"
        )
    for index in too_long:
        ids[index] = truncate(ids[index], limit, config.truncation)
        texts[index] = tokenizer.decode(ids[index])
    return PromptDataset(examples, texts, ids, LoadReport(len(ids), 0, len(too_long), longest))


def truncate(token_ids: list[int], limit: int, side: str) -> list[int]:
    """`limit` of the tokens: `left` and `right` cut off that side, `middle` keeps both ends (the right one longer if odd)."""
    if side == "left":
        return token_ids[-limit:]
    if side == "right":
        return token_ids[:limit]
    head = limit // 2
    return token_ids[:head] + token_ids[head - limit :]
