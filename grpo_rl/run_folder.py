"""A run as an object: configuration, metrics, rollouts, checkpoints and model, read from its folder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from grpo_rl.config.convert import unknown_key
from grpo_rl.config.schema.fields import flat
from grpo_rl.errors import ConfigError, DataError, did_you_mean
from grpo_rl.run_files import read_text
from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.telemetry.rollout_log import read_rollouts, step_file, step_files
from grpo_rl.telemetry.rundir import RunDir, named_run, no_run, run_config
from grpo_rl.telemetry.status import current_status, read_status

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

State = Literal["running", "done", "preempted", "failed", "lost", "unknown"]
_CHECKPOINT = re.compile(r"step_(0|[1-9][0-9]*)")


class Run:
    """A run, finished or still running, as its folder shows it.

    Everything is read when it is asked for. Nothing is changed, no process is started, and torch is not
    loaded.
    """

    def __init__(self, folder: str | Path) -> None:
        """Open the run in `folder`, or of a name below `runs`. Raises DataError if there is none."""
        folder_of_run = named_run(str(folder))
        if folder_of_run is None:
            raise DataError(no_run(str(folder)))
        self.path = folder_of_run
        self._folder = RunDir(self.path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}): {self._progress()}"

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def status(self) -> Mapping[str, Any]:
        """The content of status.json: state, phase, step, total, last_commit, error ...; or empty."""
        return read_status(self.path)

    @property
    def state(self) -> State:
        """`running`, `done`, `preempted` (stopped by a signal, and saved), `failed` (`status["error"]` has
        the cause), `lost` (its process ended without a word), or `unknown` (no status)."""
        state = current_status(self.path).get("state")
        return state if state in get_args(State) else "unknown"  # type: ignore[return-value]

    @property
    def config(self) -> dict[str, Any]:
        """The whole configuration, nested as in config.yaml, without secrets and environment values."""
        return run_config(self.path)

    def setting(self, key: str) -> Any:
        """Return the value of a key (`trainer.total_training_steps`). Raises ConfigError with the nearest."""
        values = flat(self.config)
        if key not in values:
            raise ConfigError(unknown_key(key))
        return values[key]

    @property
    def overrides(self) -> list[str]:
        file = self.path / "overrides.txt"
        return read_text(file).splitlines() if file.exists() else []

    def metrics(self, *names: str) -> DataFrame:
        """Return the metrics, one row per step, one column per metric; all of them, or those with these
        names.

        Step 0 is the validation before training. What a step did not measure is NaN; `time` is in UTC. Raises
        DataError for a name that no step has, with the nearest one.
        """
        import pandas

        records = read_metrics(self.path / "metrics.jsonl")
        known = _checked_metrics(names, records, "step")
        rows = [{key: record.get(key) for key in (names or known)} for record in records]
        index = pandas.Index([int(record["step"]) for record in records], name="step")
        frame: DataFrame = pandas.DataFrame(rows, index=index, columns=list(names or known))
        if "time" in frame:
            frame["time"] = pandas.to_datetime(frame["time"], unit="s", utc=True, errors="coerce")
        return frame

    def rollout_steps(self, *, val: bool = False) -> list[int]:
        return [step for step, _ in step_files(self._rollouts_folder(val))]

    def rollouts(self, step: int | None = None, *, val: bool = False) -> DataFrame:
        """Return the responses of one step, one row each; of the last logged one if none is named.

        Columns are prompt, response, ground_truth, reward, `reward/NAME` for each of its parts, advantage,
        lengths, `uid` (equal for all responses to one prompt) and more. `val` chooses validation prompts.
        Raises DataError for a step without a log.
        """
        import pandas

        records = read_rollouts(step_file(self._rollouts_folder(val), step)[1])
        for record in records:
            parts = record.pop("reward_parts", None) or {}
            record.update({f"reward/{name}": value for name, value in parts.items()})
        frame: DataFrame = pandas.DataFrame.from_records(records)
        return frame

    @property
    def checkpoints(self) -> dict[int, Path]:
        """The committed checkpoints by step, ascending. `trainer.resume_from_path` takes one of them."""
        folder = self._folder.checkpoints
        matches = [(_CHECKPOINT.fullmatch(path.name), path) for path in (folder.iterdir() if folder.is_dir() else ())]
        # A folder gets its name by a rename when everything is in it: one with a manifest is whole.
        complete = {int(match[1]): path for match, path in matches if match and (path / "manifest.json").is_file()}
        return dict(sorted(complete.items()))

    @property
    def model(self) -> Path:
        """The trained model's Hugging Face folder. Raises DataError if it was not exported, or not yet."""
        for folder in (self._folder.model, self._folder.reward_model):
            if (folder / "config.json").is_file():
                return folder
        raise DataError(
            f"{self._folder.model}: there is no exported model; it is written at the end of a run with "
            f"trainer.export_at_end=true. This run: {self._progress()}"
        )

    @property
    def report(self) -> str:
        """The report: before and after, rewards, health, samples; made now for an unfinished run."""
        from grpo_rl.telemetry.report import report_text

        file = self._folder.report_file
        if self.state == "done" and file.exists():
            return read_text(file)
        return report_text(self._folder)

    def doctor(self) -> str:
        from grpo_rl.telemetry.diagnosis.diagnose import as_text, diagnose
        from grpo_rl.telemetry.diagnosis.run_record import RunRecord

        return as_text(diagnose(RunRecord.of_folder(self.path)))

    def plot(self, *names: str) -> Figure:
        """Return a Matplotlib figure: the curves of the report, or one panel for each of these metrics.

        A notebook shows it if it is the last value of a cell. Raises DataError for a name that no step has.
        """
        from grpo_rl.telemetry.report import curves_figure

        records = read_metrics(self.path / "metrics.jsonl")
        _checked_metrics(names, records, "step", "time")
        return curves_figure(self.name, records, names)

    def _rollouts_folder(self, val: bool) -> Path:
        return self._folder.val if val else self._folder.rollouts

    def _progress(self) -> str:
        status = self.status
        total = f" of {status['total']}" if status.get("total") else ""
        return f"{self.state}, step {status['step']}{total}" if "step" in status else self.state


def _checked_metrics(names: Iterable[str], records: Iterable[Mapping[str, Any]], *excluded: str) -> list[str]:
    """Return the metrics of the records, without `excluded`. Raises DataError for one of `names` that is none of them."""
    known = list(dict.fromkeys(key for record in records for key in record if key not in excluded))
    for name in names:
        if name not in known:
            ending = f" and {len(known) - 12} more" if len(known) > 12 else ""
            hint = did_you_mean(name, known) or f" There are {', '.join(known[:12])}{ending}"
            raise DataError(f"no step has a metric {name!r}.{hint}")
    return known
