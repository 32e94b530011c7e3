"""Options of the data: `data.*`."""

# ruff: noqa: F403, F405, RUF009

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from grpo_rl.config.schema.kinds import *


@dataclass(frozen=True, slots=True)
class CustomClsConfig:
    path: str | None = None
    """Python file (or module) with your own data set class, which gets the names in train_files or val_files; docs/data.md."""
    name: str | None = None
    """Name of your data set class in that file."""


@dataclass(frozen=True, slots=True)
class DataConfig:
    train_files: list[str] = field(list)
    """Training data: files (parquet, json, jsonl, arrow), folders, `hf:owner/name?split=train`, `task:NAME?option=value` (docs/data.md, docs/agents.md)."""
    responses: Literal["policy", "rows", "initial_policy"] = "policy"
    """Source of the trained responses. policy: sampled by the policy as it is, for the prompts in train_files; rows: they stand in train_files, and the policy learns them, or to prefer some to others with a loss over pairs; initial_policy: sampled once, before training, and kept as algorithm.rejection says."""
    val_files: list[str] = field(list)
    """Validation data, like train_files. Empty: no validation."""
    val_prompt_files: list[str] = field(list)
    """responses=rows and initial_policy: prompts in the row format of responses=policy, which are answered and scored at every validation, beside the loss on val_files. Empty: no engine and no reward start."""
    prompt_key: str = "prompt"
    """Column with the chat messages (a list of {role, content}) or a plain string."""
    response_key: str = field("response", part="answers")
    """responses=rows: column with the answer to learn, beside prompt_key; a path with dots if it lies in another column."""
    chosen_key: str = field("chosen", part="pairs")
    """responses=rows, losses over pairs: column with the better answer, a text or chat messages; prompt_key may be missing if both sides begin with the prompt."""
    rejected_key: str = field("rejected", part="pairs")
    """responses=rows, losses over pairs: column with the worse answer, of the same form."""
    messages_key: str = field("messages", part="answers")
    """responses=rows: column with a conversation, whose assistant turns are learnt; rows without it have prompt and response."""
    tools_key: str = field("tools", part="answers")
    """responses=rows: column with the tools that the chat template shows; it may be missing."""
    enable_thinking_key: str = field("enable_thinking", part="answers")
    """responses=rows: column with the chat template's enable_thinking; it may be missing."""
    max_length: Length | None = None
    """responses=rows: longest row in tokens; null: max_prompt_length + max_response_length. What happens to longer ones: filter_overlong_prompts, truncation."""
    reward_fn_key: str = field("data_source", part="source", needs="data_source=null | {data_source} gives it for all rows")
    """Column whose value chooses the rule-based reward."""
    data_source: str | None = field(None, part="source")
    """The data source of all rows, if the data have no column for it; null: take the column."""
    ground_truth_key: str = field("reward_model.ground_truth", part="source")
    """Column with what the reward compares with, a path with dots if it lies in another column."""
    extra_info_key: str = field("extra_info", part="source")
    """Column with an object that is handed to the reward; it may be missing."""
    system_prompt: str | None = None
    """Put before the messages of every prompt that has no system message of its own."""
    continue_final_message: bool = False
    """A prompt whose last message is the assistant's: false refuses the row, for it may hold the answer; true has the policy go on with that message."""
    chat_template: str | None = None
    """Jinja template, or a file with one, in place of the tokenizer's."""
    custom_cls: CustomClsConfig = field(CustomClsConfig)
    on_bad_row: Literal["error", "skip"] = "error"
    """A bad row ends the run with its place, or is left out and listed in the run folder's bad_rows_*.jsonl."""
    check_rows: CountOrZero = 50_000
    """Training data of at most so many rows are checked whole before the start; of more 2,000 rows are, the others when drawn."""
    allow_change: bool = field(
        False,
        needs="trainer.resume_mode=auto or resume_path | with trainer.resume_mode=disable nothing is resumed",
    )
    """Resume although the training data have changed since the checkpoint; the run goes on at the beginning of the next epoch."""
    train_batch_size: Prompts = 1024
    """Prompts per training step. The number of rollouts is this times rollout.n."""
    gen_batch_size: Prompts | None = field(
        None,
        part="samples",
        needs=[
            "algorithm.filter_groups.enable or responses=initial_policy",
            "algorithm.filter_groups.refill or responses=initial_policy",
        ],
    )
    """Prompts sampled at a time while groups without signal are replaced (algorithm.filter_groups), or with responses=initial_policy; null: train_batch_size."""
    curriculum: str | None = field(None, part="policy")
    """Your own choice of the prompts that come next, `file.py:next_rows`, a function of a Draw (docs/data.md); null: shuffled epochs."""
    retire_above: PositiveFraction | None = field(None, part="policy", needs="curriculum=null | {curriculum} chooses the rows")
    """Do not sample a prompt in later epochs once this share of its responses passes, or more (ScaleRL: 0.9); null: sample all."""
    retire_metric: str = field("score", part="policy", needs="retire_above or curriculum")
    """The metric by which a response passes, for retire_above and curriculum: named as algorithm.filter_groups.metric is."""
    retire_score: Factor = field(1.0, part="policy", needs="retire_above or curriculum")
    """The least value of retire_metric with which a response passes."""
    max_prompt_length: Length = field(512, part="lengths")
    """Longest prompt in tokens; what happens to longer ones: filter_overlong_prompts, truncation."""
    max_response_length: Length = field(512, part="lengths")
    """Longest response in tokens; sampling stops there with finish reason `length`."""
    filter_overlong_prompts: bool = False
    """Drop rows whose prompt is longer than max_prompt_length, and say how many."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """The treatment of longer prompts that were not filtered: refuse them, or cut tokens off on that side."""
    shuffle: bool = field(True, needs="curriculum=null | {curriculum} chooses the rows")
    """Draw the training rows of every epoch in a new seeded order."""
    seed: Seed = field(1, needs="shuffle=true")
    """Seed of the order of the training rows."""
    train_weights: list[Positive] | None = field(
        None,
        needs=[
            "curriculum=null | {curriculum} chooses the rows",
            "shuffle=true",
            "responses=policy or rows | what the initial policy sampled is one file",
        ],
    )
    """Weights of the entries of train_files, in their order: an entry has its weight over the sum of all as its share of an epoch's rows, drawn again and again if need be. null: the share of its rows."""
    train_max_samples: CountOrOff = -1
    """Use only the first so many training rows; -1: all."""
    val_max_samples: CountOrOff = field(-1, needs="val_files")
    """Use only the first so many validation rows; -1: all."""
    control_tokens_in_text: bool = False
    """Take control tokens in the text of rows, such as <|im_end|>, for what they are; false: they are plain text, and counted."""
    apply_chat_template_kwargs: dict[str, Any] = field(dict)
    """Passed on to the tokenizer's apply_chat_template, e.g. {enable_thinking: false}."""
