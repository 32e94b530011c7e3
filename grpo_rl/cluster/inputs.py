"""The inputs of a run that are read before any worker starts: tokenizer, data, rewards."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_rl.cluster import warm_start
from grpo_rl.cluster.roles.model_rewards import ModelRewards
from grpo_rl.cluster.start_roles import decoder
from grpo_rl.config.schema.tree import Config
from grpo_rl.data.dataset import PromptDataset, load_dataset
from grpo_rl.data.sources.bad_rows import BadRows
from grpo_rl.models import builtin
from grpo_rl.models.load import load_config, load_tokenizer
from grpo_rl.plan.decisions import Plan
from grpo_rl.rewards.compose import RewardFunction
from grpo_rl.rewards.runtime.runner import RewardRunner
from grpo_rl.telemetry.console import Console
from grpo_rl.telemetry.rundir import RunDir


@dataclass(frozen=True, slots=True)
class Inputs:
    """All that a user gave, read and found usable."""

    plan: Plan
    """The plan, with the number of rows that the training data turned out to have."""
    model_folder: str
    """The policy's folder; for an embedded model the one with its tokenizer and initial weights, before its warm start."""
    tokenizer: Any
    train_data: PromptDataset | None
    """The training data; None where nothing is trained."""
    val_data: PromptDataset | None
    rules: RewardRunner | None
    """The runner of the reward functions; None where only models score."""
    models: ModelRewards


def read_inputs(plan: Plan, run_dir: RunDir, console: Console, stack: ExitStack) -> Inputs:
    """Read what the configuration names. The processes of the rule rewards start here, beside the reading; `stack` ends them.

    Raises ConfigError, DataError and RewardError for what cannot be used.
    """
    config = plan.config
    path = config.actor_rollout_ref.model.path
    folder = warm_start.unstarted_folder(path) if path.startswith(builtin.PREFIX) else path
    with console.progress("reading the model's settings and its tokenizer"):
        tokenizer = _tokenizer(config, folder)
    train_data, val_data = _data(plan, tokenizer, console, run_dir.path)
    models = ModelRewards(plan, tokenizer, decoder(tokenizer))
    rules = None
    if plan.reward.rules:
        decode = decoder(tokenizer) if plan.reward.steps_from == "rules" else None
        reward = RewardFunction.from_config(config.reward, decode=decode)
        data_sources = {source for data in (train_data, val_data) if data is not None for source in data.data_sources}
        reward.check_data_sources(data_sources)
        rules = RewardRunner(reward, config.reward, data_sources=data_sources, log_folder=run_dir.logs)
        stack.callback(rules.close)
    if rules is not None:
        rules.check_started()
    if train_data is not None:
        plan = plan.with_rows(len(train_data))
    return Inputs(plan, folder, tokenizer, train_data, val_data, rules, models)


def _tokenizer(config: Config, folder: str) -> Any:
    model = config.actor_rollout_ref.model
    # The model's config first: a folder that cannot be used is refused before anything is read or started.
    load_config(folder, trust_remote_code=model.trust_remote_code, override=model.override_config)
    return load_tokenizer(model.tokenizer_path or folder, trust_remote_code=model.trust_remote_code)


def _data(plan: Plan, tokenizer: Any, console: Console, folder: Path) -> tuple[PromptDataset | None, PromptDataset | None]:
    """The training data, None where nothing is trained, and the validation data, None where none is named."""
    data = plan.config.data
    bad = {part: BadRows(data.on_bad_row, folder / f"bad_rows_{part}.jsonl", console.warn) for part in ("train", "val")}
    with console.progress("reading the data") as bar:
        train = val = None
        notes: list[str] = []
        if plan.trains:
            train = load_dataset(
                data.train_files,
                data,
                tokenizer,
                max_samples=data.train_max_samples,
                bad_rows=bad["train"],
                note=lambda text: bar.advance(0, note=text),
            )
            notes.append(f"train: {train.report}")
            bar.advance(note=notes[0])
        if data.val_files:
            # Every validation uses all of these rows, so none can wait for its turn.
            val = load_dataset(
                data.val_files, data, tokenizer, max_samples=data.val_max_samples, whole=True, bad_rows=bad["val"]
            )
            bar.advance(note="; ".join([*notes, f"validation: {val.report}"]))
    if train is not None and data.curriculum == "difficulty":
        # Read now, so that a row without one is refused before anything starts.
        with console.progress("reading the difficulty of every row", total=len(train)) as bar:
            train.difficulty(note=bar.advance)
    return train, val
