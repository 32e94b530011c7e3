"""Responses that are there already, as models for `eval`: logs of rollouts, files of `generate`, rows to be scored.

A line with a `reward` is taken as it is. A row without one has its responses, one or a list, in the column
`data.response_key`, as verl's main_eval reads them, and is scored by the configured reward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_rl.errors import DataError
from grpo_rl.evaluation.response_file import Record

if TYPE_CHECKING:
    from grpo_rl.config.schema.tree import Config
    from grpo_rl.telemetry.terminal.console import Console
    from grpo_rl.types import Rollout

_SUFFIXES = (".jsonl", ".json", ".parquet", ".zst")
PromptKey = tuple[str, str]
"""A prompt's uid or row, and its text."""
PromptGroups = dict[PromptKey, list[Record]]


def is_response_file(text: str) -> bool:
    """Return whether `text` names a file of responses and no model."""
    path = Path(text).expanduser()
    return path.suffix in _SUFFIXES and path.is_file()


def read_groups(path: Path, config: Config, logs: Path, console: Console) -> PromptGroups:
    """Return the scored responses to each prompt in a file. Raises DataError for one that cannot be used.

    Every prompt has equally many, as pass@k needs; RewardError, ConfigError where they are scored now and cannot be.
    """
    rows = _rows(path)
    if not rows:
        raise DataError(f"{path}: has no rows")
    if all("reward" in row for row in rows):
        groups: PromptGroups = defaultdict(list)
        for number, row in enumerate(rows):
            _check(row, f"{path}, row {number}")
            groups[(str(row["uid"]), str(row["prompt"]))].append(row)
        groups = dict(groups)
    else:
        groups = _scored(path, rows, config, logs, console)
    sizes = sorted({len(group) for group in groups.values()})
    if len(sizes) > 1:
        raise DataError(f"{path}: prompts have between {sizes[0]} and {sizes[-1]} responses; expected the same number for each")
    return groups


def side_by_side(files: Sequence[PromptGroups]) -> tuple[list[dict[int, list[Record]]], int]:
    """Return the groups of the prompts that all files have, by a common number, and how many prompts only some have."""
    common = [key for key in files[0] if all(key in other for other in files[1:])]
    if not common:
        raise DataError("the files have no prompt in common: they are compared on the same prompts")
    left_out = len({key for groups in files for key in groups}) - len(common)
    return [{number: groups[key] for number, key in enumerate(common)} for groups in files], left_out


def _rows(path: Path) -> list[dict[str, Any]]:
    from grpo_rl.data.sources.locate import open_source
    from grpo_rl.telemetry.rollouts.rollout_log import read_rollouts

    if path.suffix == ".zst":
        return read_rollouts(path)
    source = open_source(str(path))
    return [source.row(index) for index in range(len(source))]


def _check(row: Mapping[str, Any], where: str) -> None:
    """Raise DataError unless a scored line has what the results are made of."""
    missing = [name for name in ("uid", "prompt", "response", "data_source") if name not in row]
    if missing:
        raise DataError(
            f"{where}: has a reward, and no {', '.join(missing)}; expected lines as a run or `generate` writes them"
        )


def _scored(path: Path, rows: Sequence[dict[str, Any]], config: Config, logs: Path, console: Console) -> PromptGroups:
    """Score the responses of rows in verl's format by the rule rewards, in processes of their own and without Ray."""
    from grpo_rl.rewards.compose import RewardFunction
    from grpo_rl.rewards.runtime.runner import RewardRunner
    from grpo_rl.telemetry.rollouts.rollout_log import record_of
    from grpo_rl.trainer.progress import advancing
    from grpo_rl.trainer.sampled.reward_failures import scored

    rollouts = [one for number, row in enumerate(rows) for one in _rollouts(row, number, f"{path}, row {number}", config)]
    sources = {rollout.prompt.data_source for rollout in rollouts}
    reward = RewardFunction.from_config(config.reward)
    reward.check_data_sources(sources)
    groups: PromptGroups = defaultdict(list)
    with ExitStack() as stack:
        runner = RewardRunner(reward, config.reward, data_sources=sources, log_folder=logs)
        stack.callback(runner.close)
        runner.check_started()
        bar = stack.enter_context(console.progress(f"scoring {path.name}", len(rollouts)))
        submit = advancing(bar, runner.submit)
        for rollout in rollouts:
            submit(rollout)
        for rollout in scored(runner, rollouts, console.warn):
            # Nothing is known of tokens here.
            record = record_of(rollout) | {"response_length": len(str(rollout.text)), "finish_reason": None}
            groups[(rollout.prompt.uid, rollout.prompt.text)].append(record)
    return dict(groups)


def _rollouts(row: dict[str, Any], number: int, where: str, config: Config) -> list[Rollout]:
    from grpo_rl.data.rows import column, example
    from grpo_rl.types import Prompt, Rollout

    one = example(row, where, config.data)
    found = column(row, config.data.response_key, where)
    responses = found if isinstance(found, list) else [found]
    if not responses or not all(isinstance(response, str) for response in responses):
        raise DataError(f"{where}: column {config.data.response_key!r} has no text, and no list of texts")
    text = one.prompt if isinstance(one.prompt, str) else "\n".join(message["content"] for message in one.prompt)
    no_tokens, no_logprobs = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32)
    prompt = Prompt(f"row-{number}", no_tokens, text, one.data_source, one.ground_truth, one.extra_info)
    return [
        Rollout(prompt, sample, no_tokens, no_logprobs, "stop", (), text=response) for sample, response in enumerate(responses)
    ]
