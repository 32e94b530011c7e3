"""Options `data.*`."""

# ruff: noqa: F403, F405

from __future__ import annotations

from typing import Literal

from grpo_rl.config.schema.kinds import *


@frozen
class CustomClsConfig:
    path: str | None = None
    """Python file (or module) with your own data set class for the names in *_files; docs/data.md."""
    name: str | None = None
    """Name of that class."""


@frozen
class DataConfig:
    train_files: list[str] = field(list)
    """Files (parquet, json, jsonl, arrow), folders, `hf:owner/name?split=train`, `task:NAME?option=value`
    (docs/data.md, docs/agents.md)."""
    responses: Literal["policy", "rows", "initial_policy"] = "policy"
    """Source of trained responses. policy: sampled by the current policy; rows: stand in train_files, to be
    learned, or preferred with a loss over pairs; initial_policy: sampled once before training, and kept by
    algorithm.rejection."""
    val_files: list[str] = field(list)
    """Validation data, as train_files. Empty: no validation."""
    val_prompt_files: list[str] = field(list)
    """responses=rows and initial_policy: prompts, as for responses=policy, that every validation answers and scores,
    beside the loss on val_files. Empty: no engine and no reward start."""
    prompt_key: str = "prompt"
    """Column with chat messages (a list of {role, content}) or a plain string."""
    response_key: str = field("response", part="answers")
    """responses=rows: column with the answer, beside prompt_key; a path with dots if inside another column."""
    chosen_key: str = field("chosen", part="pairs")
    """responses=rows, losses over pairs: column with the better answer, a text or messages; prompt_key may be missing
    if both sides begin with the prompt."""
    rejected_key: str = field("rejected", part="pairs")
    """responses=rows, losses over pairs: column with the worse answer, of the same form."""
    messages_key: str = field("messages", part="answers")
    """responses=rows: column with a conversation whose assistant turns are learned, if the row has one."""
    tools_key: str = field("tools", part="answers")
    """responses=rows: optional column with tools for the chat template."""
    enable_thinking_key: str = field("enable_thinking", part="answers")
    """responses=rows: optional column with the chat template's enable_thinking."""
    max_length: Length | None = None
    """responses=rows: longest row in tokens; null: max_prompt_length + max_response_length."""
    reward_fn_key: str = field("data_source", part="source", needs="data_source=null | {data_source} gives it for all rows")
    """Column that chooses the rule-based reward."""
    data_source: str | None = field(None, part="source")
    """The data source of all rows, instead of that column."""
    ground_truth_key: str = field("reward_model.ground_truth", part="source")
    """Column that the reward compares with; a path with dots if it is inside another column."""
    extra_info_key: str = field("extra_info", part="source")
    """Optional column with an object for the reward."""
    system_prompt: str | None = None
    """Goes before the messages of prompts without a system message."""
    continue_final_message: bool = False
    """Final messages of the assistant: false refuses them, as they may be answers; true continues them."""
    chat_template: str | None = None
    """Jinja template, or a file with one, instead of the tokenizer's."""
    custom_cls: CustomClsConfig = field(CustomClsConfig)
    on_bad_row: Literal["error", "skip"] = "error"
    """End the run with the bad row's place, or leave it out and list it in bad_rows_*.jsonl of the run."""
    check_rows: CountOrZero = 50_000
    """Training rows up to which all are checked before the start; else 2,000, and others when drawn."""
    allow_change: bool = field(
        False,
        needs="trainer.resume_mode=auto or resume_path | with trainer.resume_mode=disable nothing is resumed",
    )
    """Resume although the training data changed since the checkpoint, at the beginning of the next epoch."""
    train_batch_size: Prompts = 1024
    """Prompts per training step, each with rollout.n rollouts."""
    gen_batch_size: Prompts | None = field(
        None,
        part="samples",
        needs=[
            "algorithm.filter_groups.enable or responses=initial_policy",
            "algorithm.filter_groups.refill or responses=initial_policy",
        ],
    )
    """Prompts sampled at a time to replace groups without signal, or with responses=initial_policy; null:
    train_batch_size."""
    curriculum: str | None = field(None, part="policy")
    """Your own choice of prompts, `file.py:next_rows`, a function of a Draw (docs/data.md); null: epochs."""
    retire_above: PositiveFraction | None = field(None, part="policy", needs="curriculum=null | {curriculum} chooses the rows")
    """Leave a prompt out of later epochs if this share of its responses passes (ScaleRL: 0.9)."""
    retire_metric: str = field("score", part="policy", needs="retire_above or curriculum")
    """Metric by which a response passes, named as algorithm.filter_groups.metric."""
    retire_score: Factor = field(1.0, part="policy", needs="retire_above or curriculum")
    """Least value of retire_metric that passes."""
    max_prompt_length: Length = field(512, part="lengths")
    """Longest prompt in tokens; for longer ones see filter_overlong_prompts, truncation."""
    max_response_length: Length = field(512, part="lengths")
    """Longest response in tokens; sampling stops there with finish reason `length`."""
    filter_overlong_prompts: bool = False
    """Drop and count rows with longer prompts."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """Refuse longer prompts that were not filtered, or cut tokens off on that side."""
    shuffle: bool = field(True, needs="curriculum=null | {curriculum} chooses the rows")
    """Draw the training rows of every epoch in a new seeded order."""
    seed: Seed = field(1, needs="shuffle=true", harmless=True)
    """Seed of that order."""
    train_weights: list[Positive] | None = field(
        None,
        needs=[
            "curriculum=null | {curriculum} chooses the rows",
            "shuffle=true",
            "responses=policy or rows | what the initial policy sampled is one file",
        ],
    )
    """Weights of the entries of train_files, whose rows have these shares of an epoch, drawn repeatedly if
    need be; null: by number of rows."""
    train_max_samples: CountOrOff = -1
    """Use only the first training rows; -1: all."""
    val_max_samples: CountOrOff = field(-1, needs="val_files")
    """Use only the first validation rows; -1: all."""
    control_tokens_in_text: bool = False
    """Read control tokens in the text of rows, such as <|im_end|>; false: as plain text, and count them."""
    apply_chat_template_kwargs: Options = field(dict)
    """For the tokenizer's apply_chat_template, e.g. {enable_thinking: false}."""
