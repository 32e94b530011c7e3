"""What a run reads before any worker starts: tokenizer, data, rewards."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_rl.algos.advantages.registered import ADVANTAGES
from grpo_rl.cluster import warm_start
from grpo_rl.cluster.roles.model_rewards import ModelRewards
from grpo_rl.cluster.start_roles import decoder
from grpo_rl.config.schema.tree import Config
from grpo_rl.data.dataset import PromptDataset, load_dataset
from grpo_rl.data.sources.bad_rows import BadRows
from grpo_rl.models import builtin
from grpo_rl.models.load import load_config, load_tokenizer
from grpo_rl.registry import needs_of
from grpo_rl.rewards.compose import RewardFunction
from grpo_rl.rewards.runtime.runner import RewardRunner
from grpo_rl.telemetry.console import Console
from grpo_rl.telemetry.rundir import RunDir


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that a user gave, read and found usable."""

    model_folder: str
    """Of an embedded model the one as it is initialised: it has the tokenizer, and no warm start yet."""
    tokenizer: Any
    train_data: PromptDataset
    val_data: PromptDataset | None
    rules: RewardRunner | None
    """None where only models score."""
    models: ModelRewards
    total_steps: int


def read_inputs(config: Config, run_dir: RunDir, console: Console, stack: ExitStack) -> Inputs:
    """What the configuration names. The processes of the rule rewards start here, beside the reading; `stack` ends them.

    Raises ConfigError, DataError and RewardError for what cannot be used.
    """
    path = config.actor_rollout_ref.model.path
    folder = warm_start.unstarted_folder(path) if path.startswith(builtin.PREFIX) else path
    tokenizer = _tokenizer(config, folder)
    train_data, val_data = _data(config, tokenizer, console, run_dir.path)
    models = ModelRewards(config, tokenizer, decoder(tokenizer))
    rules = None
    if config.reward.functions:
        reads_steps = "steps" in needs_of(ADVANTAGES.get(config.algorithm.adv_estimator)) and not models.score_steps
        reward = RewardFunction.from_config(config.reward, decode=decoder(tokenizer) if reads_steps else None)
        data_sources = {*train_data.data_sources, *(val_data.data_sources if val_data else [])}
        reward.check_data_sources(data_sources)
        rules = RewardRunner(reward, config.reward, data_sources=data_sources, log_folder=run_dir.logs)
        stack.callback(rules.close)
    total_steps = num_training_steps(config, len(train_data))
    if rules is not None:
        rules.check_started()
    return Inputs(folder, tokenizer, train_data, val_data, rules, models, total_steps)


def num_training_steps(config: Config, num_rows: int) -> int:
    """`total_training_steps`, or what `total_epochs` of the data make."""
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    return config.trainer.total_epochs * (num_rows // config.data.train_batch_size)


def _tokenizer(config: Config, folder: str) -> Any:
    model = config.actor_rollout_ref.model
    # The model's config first: a folder that cannot be used is refused before anything is read or started.
    load_config(folder, trust_remote_code=model.trust_remote_code, override=model.override_config)
    return load_tokenizer(model.tokenizer_path or folder, trust_remote_code=model.trust_remote_code)


def _data(config: Config, tokenizer: Any, console: Console, folder: Path) -> tuple[PromptDataset, PromptDataset | None]:
    data = config.data
    bad = {part: BadRows(data.on_bad_row, folder / f"bad_rows_{part}.jsonl", console.warn) for part in ("train", "val")}
    with console.progress("reading the data") as bar:
        train = load_dataset(
            data.train_files,
            data,
            tokenizer,
            max_samples=data.train_max_samples,
            bad_rows=bad["train"],
            note=lambda text: bar.advance(0, note=text),
        )
        bar.advance(note=f"train: {train.report}")
        val = None
        if data.val_files:
            # Every validation uses all of these rows, so none can wait for its turn.
            val = load_dataset(
                data.val_files, data, tokenizer, max_samples=data.val_max_samples, whole=True, bad_rows=bad["val"]
            )
            bar.advance(note=f"train: {train.report}; validation: {val.report}")
    if data.curriculum == "difficulty":
        # Read now, so that a row without one is told before anything starts.
        with console.progress("reading the difficulty of every row", total=len(train)) as bar:
            train.difficulty(note=bar.advance)
    return train, val
