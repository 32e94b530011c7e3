"""rollouts/step_N.jsonl and val/step_N.jsonl: one line per response."""

from __future__ import annotations

import logging
import os
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from grpo_rl.background import has_ended, in_background
from grpo_rl.config.secrets import hide_known
from grpo_rl.errors import DataError
from grpo_rl.run_files import read_lines
from grpo_rl.telemetry.metrics.metrics_file import JsonObject, Say, dump_line, is_count, is_number, number_from_text
from grpo_rl.telemetry.rundir import RunDir

if TYPE_CHECKING:  # types imports torch, which reading a log does not need
    from grpo_rl.types import Episode, Rollout

Kind = Literal["rollouts", "val"]
WRITE_S = 3600.0  # the longest time in which a step's rollouts are written
CLOSE_S = 30.0
MOST_REWARD_PARTS = 1000
_logger = logging.getLogger(__name__)


class RolloutLog:
    """Writes the rollouts of a step as JSON lines in a thread, while the run goes on. At most two steps are
    unfinished, which a killed process leaves out whole: `write` waits before a third. A checkpoint is
    committed after `flush`."""

    def __init__(
        self,
        run_dir: RunDir,
        *,
        token_groups: int = 0,
        written: Callable[[Kind, int, Path], None] = lambda kind, step, path: None,
        warn: Say = _logger.warning,
    ) -> None:
        self._written = written  # called by the writing thread with each whole file
        self._warn, self._is_failing = warn, False
        self._folders: dict[Kind, Path] = {"rollouts": run_dir.rollouts, "val": run_dir.val}
        self._token_groups = token_groups
        self._jobs: deque[Future[None]] = deque()

    def write(
        self, kind: Kind, step: int, rollouts: Sequence[Rollout], advantages: Sequence[float | None] | None = None
    ) -> Path:
        """Write `<kind>/step_<step>.jsonl` whole, and return its path. `advantages`: one per rollout, None if
        it is not trained. A disk that fails leaves out the file, with a warning. Raises any other failure of
        an earlier file."""
        if advantages is not None and len(advantages) != len(rollouts):
            raise ValueError(f"{len(rollouts)} rollouts but {len(advantages)} advantages")
        path = self._folders[kind] / f"step_{step}.jsonl"
        self._wait_until(1)
        previous_jobs, rollouts = [*self._jobs], list(rollouts)

        def job() -> None:
            wait(previous_jobs)
            try:
                write_rollouts(path, rollouts, advantages, self._token_groups)
            except OSError as error:
                path.with_suffix(".tmp").unlink(missing_ok=True)
                if not self._is_failing:
                    why = f"{path} cannot be written: {error.strerror or error}"
                    self._warn(f"{why}; rollouts are left out of the log while that lasts, and training goes on")
                self._is_failing = True
            else:
                self._is_failing = False
                self._written(kind, step, path)

        self._jobs.append(in_background("rollout-log", job))
        return path

    def flush(self) -> None:
        """Wait until all is written that the disk takes. Raises any other failure."""
        self._wait_until(0)

    def close(self) -> None:
        """Wait some seconds for what is unwritten: a failed run may have lost its store."""
        wait(self._jobs, CLOSE_S)

    def _wait_until(self, num_unfinished: int) -> None:
        while (jobs := [*self._jobs]) and (len(jobs) > num_unfinished or jobs[0].done()):
            if not has_ended(jobs[0], WRITE_S):
                raise OSError(f"the rollouts of a step were not written to the log within {WRITE_S:.0f} s")
            with suppress(ValueError):  # a commit waits in a thread of its own, and may have removed it
                self._jobs.remove(jobs[0])
            jobs[0].result(0)


def write_rollouts(
    path: Path, rollouts: Sequence[Rollout], advantages: Sequence[float | None] | None = None, token_groups: int = 0
) -> Path:
    uids = set(list(dict.fromkeys(rollout.prompt.uid for rollout in rollouts))[:token_groups])
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        for rollout, advantage in zip(rollouts, advantages or [None] * len(rollouts), strict=True):
            record = record_of(rollout, advantage)
            tokens: JsonObject = {}
            if rollout.prompt.uid in uids:
                logprobs = np.asarray(rollout.rollout_logprobs).tolist()
                tokens = {"token_ids": rollout.response_ids, "token_logprobs": [round(value, 4) for value in logprobs]}
            line = dump_line(record | tokens)
            hidden = hide_known(line)
            if hidden != line:  # the tokens would show what is hidden in the text
                hidden = hide_known(dump_line(record))
            file.write(hidden.encode("ascii"))
    os.replace(temporary, path)
    return path


def record_of(rollout: Rollout, advantage: float | None = None) -> JsonObject:
    logprobs = np.asarray(rollout.rollout_logprobs)
    sampled = np.concatenate([logprobs[start : start + length] for start, length in rollout.spans] or [logprobs[:0]])
    optional: JsonObject = {
        "weight_versions": rollout.versions if len(rollout.versions) > 1 else None,
        "baseline": rollout.baseline,
        "steps": rollout.steps,
        "failure": rollout.failure,
        "failure_cause": rollout.failure_cause,
    }
    if (episode := rollout.episode) is not None:
        optional |= {"ended": episode.ended, "num_turns": len(episode.turns), "episode": episode_record(episode)}
    return {
        "prompt": rollout.prompt.text,
        "response": str(rollout.text),
        "ground_truth": rollout.prompt.ground_truth,
        "data_source": rollout.prompt.data_source,
        "reward": rollout.reward,
        "reward_parts": rollout.reward_parts,
        "advantage": advantage,
        "uid": rollout.prompt.uid,
        "sample": rollout.sample_index,
        "finish_reason": rollout.finish_reason,
        "weight_version": rollout.oldest_version,
        "prompt_length": len(rollout.prompt.token_ids),
        "response_length": len(rollout.response_ids),
        "rollout_logprob_mean": float(sampled.mean(dtype="float64")) if len(sampled) else None,
    } | {name: value for name, value in optional.items() if value is not None}


def episode_record(episode: Episode) -> JsonObject:
    """Return an episode's conversation, with tokens and reward of each assistant turn. `spans`: start and
    length, in the response, of sampled tokens; all others are context."""
    turns = iter(episode.turns)
    messages: list[JsonObject] = []
    for message in episode.messages:
        copy = dict(message)
        if message["role"] == "assistant" and (turn := next(turns, None)) is not None:
            copy |= {"tokens": turn.length, "reward": turn.reward}
        messages.append(copy)
    return {
        "messages": messages,
        "spans": [[turn.start, turn.length] for turn in episode.turns],
        "ended": episode.ended,
        "counts": dict(episode.counts),
        "wait_s": round(sum(episode.waits_s), 3),
        "info": dict(episode.info),
    }


def read_rollouts(path: Path) -> list[JsonObject]:
    """Raises DataError if the file cannot be read, or a field has another form than the writer's."""
    records = []
    for number, record in read_lines(path):
        if record is None:
            raise DataError(f"{path}, line {number}: is no JSON object")
        for name, value in record.items():
            expected, is_right = FORMS.get(name, ("", None))
            if is_right is not None and value is not None and not is_right(value):
                raise DataError(f"{path}, line {number}: {name} is {str(value)[:40]!r}, expected {expected}")
        records.append({"prompt": "", "response": ""} | record | {"reward_parts": record.get("reward_parts") or {}})
    return records


def _is_number(value: Any) -> bool:
    return is_number(number_from_text(value))


def _are(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda values: isinstance(values, list) and all(map(is_right, values))


def _is_episode(value: Any) -> bool:
    spans = _are(lambda span: _are(is_count)(span) and len(span) == 2)
    messages = _are(lambda message: isinstance(message, dict))
    return isinstance(value, dict) and messages(value.get("messages", [])) and spans(value.get("spans", []))


_TEXT = ("a text", lambda value: isinstance(value, str))
_NUMBER = ("a number", _is_number)
_COUNT = ("a whole number from 0", is_count)
_NUMBERS = ("a list of numbers", _are(lambda value: value is None or _is_number(value)))
FORMS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("prompt", "response", "data_source", "uid", "finish_reason", "failure", "failure_cause", "ended"), _TEXT),
    **dict.fromkeys(("reward", "advantage", "baseline", "rollout_logprob_mean"), _NUMBER),
    **dict.fromkeys(("sample", "prompt_length", "response_length", "num_turns"), _COUNT),
    "token_logprobs": _NUMBERS,
    "token_ids": ("a list of whole numbers from 0", _are(is_count)),
    "reward_parts": (
        f"an object of at most {MOST_REWARD_PARTS} names",
        lambda value: isinstance(value, dict) and len(value) <= MOST_REWARD_PARTS,
    ),
    "episode": ("an object with messages and spans", _is_episode),
}
"""The form of each field, which may be null, meaning unknown."""


def prompt_key(record: Mapping[str, Any]) -> tuple[str, str]:
    """Return what names a logged rollout's prompt at every step: its row of the data, and its text."""
    row = re.search(r"-r?(\d+)$", str(record.get("uid")))
    return f"row {row[1]}" if row else f"answer {record.get('ground_truth')}", str(record.get("prompt", ""))


def step_files(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, file) ascending, none if there is no such folder."""
    paths = folder.iterdir() if folder.is_dir() else ()
    matches = ((re.fullmatch(r"step_([0-9]{1,9})\.jsonl", path.name), path) for path in paths)
    return sorted((int(match[1]), path) for match, path in matches if match)


def step_file(folder: Path, step: int | None) -> tuple[int, Path]:
    """As `step_files`, of one step, None: the last. Raises DataError with the steps there are."""
    files = dict(step_files(folder))
    if not files:
        raise DataError(f"{folder}: no rollouts were logged (step_N.jsonl; trainer.save_rollouts)")
    chosen = max(files) if step is None else step
    if chosen not in files:
        steps = [*map(str, files)]
        listed = ", ".join(steps if len(steps) <= 12 else [*steps[:6], "...", *steps[-6:]])
        raise DataError(f"{folder}: there is no step {step}; there are {listed}")
    return chosen, files[chosen]
