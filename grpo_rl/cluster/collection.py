"""Rejection sampling: responses of the initial policy, sampled once, of which the good ones become the training data.

A run with `data.responses=initial_policy` begins with it, before there is an actor. Every part of the prompts is written
when it is done, so that a killed run goes on with the next one; then all parts become one file of rows:

    <run>/collected/settings.json    what the responses depend on: those of other settings are not taken over
    <run>/collected/parts/N.json     the rows and the counts of one part of the prompts, until all are there
    <run>/collected/train.jsonl      the rows that are trained on, one per line
    <run>/collected/summary.json     the counts of all parts; with this file the collection is complete

Yuan et al., "Scaling relationship on learning mathematical reasoning" (arXiv 2308.01825), section 3.3; DeepSeekMath (arXiv
2402.03300), appendix A.1.2. For losses over pairs a row has the best and the worst response to a prompt instead (A.1.4).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from grpo_rl.checkpoint.files import flush, rename, write_file
from grpo_rl.cluster.inputs import read_inputs
from grpo_rl.cluster.run_session import RunSession
from grpo_rl.config.schema.tree import Config, RejectionConfig
from grpo_rl.data.dataset import PromptDataset
from grpo_rl.data.training_rows.rejection import Kept, answer_rows, pair_rows, parts_of
from grpo_rl.errors import DataError
from grpo_rl.faults import fault_point
from grpo_rl.plan.decisions import Plan
from grpo_rl.protocols import Rewarder, RolloutPool
from grpo_rl.telemetry.metrics.metrics_file import dump_line, jsonable
from grpo_rl.telemetry.rollouts.rollout_log import record_of
from grpo_rl.telemetry.terminal.console import Console
from grpo_rl.trainer.progress import advancing
from grpo_rl.trainer.sampled.trained import scored
from grpo_rl.trainer.schedule import training_sampling
from grpo_rl.types import Metrics, Rollout


def collect(plan: Plan, session: RunSession) -> tuple[Path, Metrics]:
    """Return the file of the collected rows and their metrics; what is not there yet is sampled now.

    `plan` is the plan of the whole run. A run that goes on from a checkpoint has trained on the rows that are
    there: they stay. Raises DataError where nothing is left to train on.
    """
    run_dir, console = session.run_dir, session.console
    files = CollectedFiles(run_dir.collected)
    if plan.resumes and files.complete:
        return files.train, files.summary()
    assert plan.collection is not None, "the plan has a collection"
    with ExitStack() as stack:
        inputs = read_inputs(plan.collection, run_dir, console, stack, part="prompts")
        assert inputs.val_data is not None, "a collection has prompts"
        folder = session.model_folder(plan.config.actor_rollout_ref.model.path)
        collection = Collection(plan.collection.config, inputs.val_data, files, pairs=plan.objective.needs_pairs)
        settings = collection.settings(Path(folder))
        if not files.has(settings):
            if files.folder.exists():
                console.info(f"responses that were collected with other settings are now in {run_dir.set_aside(files.folder)}")
            files.begin(settings)
        if not files.complete:
            _, roles = session.start(plan.collection, inputs, stack)
            assert roles.rollout is not None and roles.rewarder is not None, "a collection samples and scores"
            collection.run(roles.rollout, roles.rewarder, console, session.phase)
        metrics = files.summary()
        collection.check(metrics)
        console.info(collection.report(metrics))
        session.phase("start")
        return files.train, metrics


class CollectedFiles:
    """The folder of a collection. Each of its files is complete or not there at all."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._parts = folder, folder / "parts"
        self.train, self._summary, self._settings = (folder / name for name in ("train.jsonl", "summary.json", "settings.json"))

    @property
    def complete(self) -> bool:
        """Return whether everything is sampled and the rows can be trained on."""
        return self._summary.is_file() and self.train.is_file()

    def summary(self) -> Metrics:
        """Return the metrics of a complete collection."""
        metrics: Metrics = json.loads(self._summary.read_text())
        return metrics

    def has(self, settings: dict[str, Any]) -> bool:
        """Return whether the folder is one of a collection with these settings."""
        return self._settings.is_file() and json.loads(self._settings.read_text()) == json.loads(json.dumps(jsonable(settings)))

    def begin(self, settings: dict[str, Any]) -> None:
        """Make the folder of a new collection."""
        self._parts.mkdir(parents=True, exist_ok=True)
        self._write(self._settings, json.dumps(jsonable(settings)))

    def part(self, number: int) -> dict[str, Any] | None:
        """Return the rows and counts of a part; None for one that is not sampled yet."""
        path = self._parts / f"{number}.json"
        return json.loads(path.read_text()) if path.is_file() else None

    def write_part(self, number: int, part: dict[str, Any]) -> None:
        """Write a part that is done."""
        self._write(self._parts / f"{number}.json", json.dumps(jsonable(part)))

    def finish(self, rows: Iterator[dict[str, Any]], counted: Callable[[], Metrics]) -> Metrics:
        """Write the rows, then the metrics that are `counted` with the last of them; the parts are no longer needed."""
        self._write(self.train, *map(dump_line, rows))
        metrics = counted()
        self._write(self._summary, json.dumps(metrics))
        for path in self._parts.iterdir():
            path.unlink()
        self._parts.rmdir()
        return metrics

    def _write(self, path: Path, *lines: str) -> None:
        temporary = path.with_name(f".{path.name}")
        temporary.unlink(missing_ok=True)
        write_file(temporary, (line.encode() for line in lines))
        rename(temporary, path)
        flush(path.parent)


class Collection:
    """The phase in which the initial policy answers every prompt `rollout.n` times."""

    def __init__(self, config: Config, prompts: PromptDataset, files: CollectedFiles, *, pairs: bool) -> None:
        self.config, self.prompts, self.files, self.pairs = config, prompts, files, pairs
        self.parts = parts_of(config, len(prompts))

    def settings(self, model: Path) -> dict[str, Any]:
        """Return everything that the collected rows depend on."""
        sampling = training_sampling(self.config, 0)
        weights = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in model.glob("*.safetensors"))
        return {
            "data": self.prompts.fingerprint,
            "model": [str(model), weights],
            "sampling": dataclasses.asdict(sampling) | {"n": self.config.actor_rollout_ref.rollout.n},
            "prompts": [len(self.parts[0]), self.config.data.max_prompt_length, self.config.data.system_prompt],
            "reward": hashlib.sha256(repr(self.config.reward).encode()).hexdigest(),
            "kept": "pairs" if self.pairs else dataclasses.asdict(self.config.algorithm.rejection),
        }

    def run(self, rollout: RolloutPool, rewarder: Rewarder, console: Console, phase: Callable[[str], None]) -> Metrics:
        """Sample what is missing, and write the rows; return the metrics. `phase` is called before every part."""
        missing = [number for number in range(len(self.parts)) if self.files.part(number) is None]
        n = self.config.actor_rollout_ref.rollout.n
        total = sum(len(self.parts[number]) for number in missing) * n
        with console.progress("sampling from the initial policy", total) as bar:
            for number in missing:
                phase("gen")
                fault_point("collection.part", number=number)
                prompts = [self.prompts.prompt(row, f"row-{row}") for row in self.parts[number]]
                sampling = training_sampling(self.config, number)
                rollouts = rollout.generate(prompts, n, sampling, advancing(bar, rewarder.submit))
                phase("reward")
                rollouts = scored(rewarder, rollouts, console.warn)
                self.files.write_part(number, self._part(rollouts))
        phase("save")
        rejection = self.config.algorithm.rejection
        chosen = Kept(RejectionConfig(min_reward=rejection.min_reward) if self.pairs else rejection)
        counts: dict[str, float] = defaultdict(float)
        for number in range(len(self.parts)):
            for name, count in self._written(number)["counts"].items():
                counts[name] += count
        rows = (row for number in range(len(self.parts)) for row in self._written(number)["rows"] if chosen.takes(row))
        return self.files.finish(rows, lambda: self._metrics(counts, chosen))

    def _written(self, number: int) -> dict[str, Any]:
        part = self.files.part(number)
        assert part is not None, "a part that was sampled is written"
        return part

    def _part(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        least = self.config.algorithm.rejection.min_reward
        records = [record_of(rollout) | {"messages": rollout.prompt.messages} for rollout in rollouts]
        rows = pair_rows(records) if self.pairs else answer_rows(records, least)
        groups = {rollout.prompt.uid for rollout in rollouts}
        useful = {row["uid"] for row in rows}
        counts = {
            "prompts": len(groups),
            "sampled": len(rollouts),
            "failed": len(rollouts) - len(rewards),
            "reward": sum(rewards),
            "without": len(groups) - len(useful),
        }
        return {"rows": rows, "counts": counts}

    def _metrics(self, counts: dict[str, float], kept: Kept) -> Metrics:
        scored_ones = max(1, counts["sampled"] - counts["failed"])
        metrics = {
            "collect/prompts": counts["prompts"],
            "collect/sampled": counts["sampled"],
            "collect/failed_rewards": counts["failed"],
            "collect/reward_mean": counts["reward"] / scored_ones,
            "collect/kept": kept.num_kept,
            "collect/duplicates": kept.num_duplicates,
        }
        if self.pairs:
            metrics["collect/tied_prompts"] = counts["without"] / counts["prompts"]
        else:
            metrics["collect/kept_share"] = kept.num_kept / counts["sampled"]
            metrics["collect/unsolved_prompts"] = counts["without"] / counts["prompts"]
            metrics["collect/over_the_cap"] = kept.num_over
        return {name: float(value) for name, value in metrics.items()}

    def report(self, metrics: Metrics) -> str:
        """Return the metrics as a sentence."""
        kept, prompts = int(metrics["collect/kept"]), int(metrics["collect/prompts"])
        sampled = f"{int(metrics['collect/sampled']):,} responses to {prompts:,} prompts, mean reward {metrics['collect/reward_mean']:.3g}"
        if self.pairs:
            return f"collected {kept:,} pairs from {sampled}; in {metrics['collect/tied_prompts']:.1%} of the groups none is better"
        return (
            f"collected {kept:,} of {sampled}; {metrics['collect/unsolved_prompts']:.1%} of the prompts have no good one, "
            f"{int(metrics['collect/duplicates']):,} were there already"
        )

    def check(self, metrics: Metrics) -> None:
        """Raise DataError where nothing is left to train on."""
        if metrics["collect/kept"]:
            return
        sampled, prompts = int(metrics["collect/sampled"]), int(metrics["collect/prompts"])
        n = self.config.actor_rollout_ref.rollout.n
        if self.pairs:
            found = f"in none of the {prompts} groups of {n} responses is one better than another"
        else:
            least = self.config.algorithm.rejection.min_reward
            found = (
                f"none of the {sampled} responses to {prompts} prompts has a reward of algorithm.rejection.min_reward={least:g}"
            )
        mean = metrics["collect/reward_mean"]
        raise DataError(
            f"nothing to train on: {found} (mean reward {mean:.4g}). Raise actor_rollout_ref.rollout.n, give easier prompts or "
            "a better initial policy, or look whether the reward recognises its answers"
        )
