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
import shutil
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

SETTINGS, SUMMARY, TRAIN, PARTS = "settings.json", "summary.json", "train.jsonl", "parts"


def collect(plan: Plan, session: RunSession) -> tuple[Path, Metrics]:
    """Return the file of the collected rows and their metrics; what is not there yet is sampled now.

    `plan` is the plan of the whole run. A run that goes on from a checkpoint has trained on the rows that are
    there: they stay. Raises DataError where nothing is left to train on.
    """
    run_dir, console, folder = session.run_dir, session.console, session.run_dir.collected
    if plan.resumes and (metrics := summary_of(folder)) is not None:
        return folder / TRAIN, metrics
    assert plan.collection is not None, "the plan has a collection"
    with ExitStack() as stack:
        inputs = read_inputs(plan.collection, run_dir, console, stack, part="prompts")
        assert inputs.val_data is not None, "a collection has prompts"
        model = Path(session.model_folder(plan.config.actor_rollout_ref.model.path))
        pairs = plan.objective.needs_pairs
        collection = Collection(plan.collection.config, inputs.val_data, folder, model, pairs=pairs)
        if not collection.is_begun:
            if folder.exists():
                console.info(f"responses that were collected with other settings are now in {run_dir.set_aside(folder)}")
            collection.begin()
        if summary_of(folder) is None:
            _, roles = session.start(plan.collection, inputs, stack)
            assert roles.rollout is not None and roles.rewarder is not None, "a collection samples and scores"
            collection.run(roles.rollout, roles.rewarder, console, session.phase)
        metrics = collection.checked()
        console.info(collection.report(metrics))
        session.phase("start")
        return folder / TRAIN, metrics


def summary_of(folder: Path) -> Metrics | None:
    """Return the metrics of the collection in this folder; None for one that is not complete."""
    summary = folder / SUMMARY
    metrics: Metrics | None = json.loads(summary.read_text()) if summary.is_file() and (folder / TRAIN).is_file() else None
    return metrics


class Collection:
    """The phase in which the initial policy answers every prompt `rollout.n` times. Each of its files is complete or not there."""

    def __init__(self, config: Config, prompts: PromptDataset, folder: Path, model: Path, *, pairs: bool) -> None:
        self.config, self.prompts, self.folder, self.pairs = config, prompts, folder, pairs
        self.parts = parts_of(config, len(prompts))
        weights = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in model.glob("*.safetensors"))
        self._settings = json.dumps(
            jsonable(
                {
                    "data": prompts.fingerprint,
                    "model": [str(model), weights],
                    "sampling": dataclasses.asdict(training_sampling(config, 0)) | {"n": config.actor_rollout_ref.rollout.n},
                    "prompts": [len(self.parts[0]), config.data.max_prompt_length, config.data.system_prompt],
                    "reward": hashlib.sha256(repr(config.reward).encode()).hexdigest(),
                    "kept": "pairs" if pairs else dataclasses.asdict(config.algorithm.rejection),
                }
            )
        )
        """Everything that the collected rows depend on."""

    @property
    def is_begun(self) -> bool:
        """Return whether the folder is one of a collection with these settings."""
        file = self.folder / SETTINGS
        return file.is_file() and file.read_text() == self._settings

    def begin(self) -> None:
        """Make the folder of a new collection."""
        (self.folder / PARTS).mkdir(parents=True, exist_ok=True)
        self._write(SETTINGS, self._settings)

    def part(self, number: int) -> dict[str, Any] | None:
        """Return the rows and counts of a part; None for one that is not sampled yet."""
        path = self.folder / PARTS / f"{number}.json"
        return json.loads(path.read_text()) if path.is_file() else None

    def _write(self, name: str, *lines: str) -> None:
        path = self.folder / name
        temporary = path.with_name(f".{path.name}")
        temporary.unlink(missing_ok=True)
        write_file(temporary, (line.encode() for line in lines))
        rename(temporary, path)
        flush(path.parent)

    def run(self, rollout: RolloutPool, rewarder: Rewarder, console: Console, phase: Callable[[str], None]) -> Metrics:
        """Sample what is missing, and write the rows; return the metrics. `phase` is called before every part."""
        missing = [number for number in range(len(self.parts)) if self.part(number) is None]
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
                self._write(f"{PARTS}/{number}.json", json.dumps(jsonable(self._part(rollouts))))
        phase("save")
        rejection = self.config.algorithm.rejection
        chosen = Kept(RejectionConfig(min_reward=rejection.min_reward) if self.pairs else rejection)
        counts: dict[str, float] = defaultdict(float)

        def rows() -> Iterator[str]:
            for number in range(len(self.parts)):
                part = self.part(number)
                assert part is not None, "a part that was sampled is written"
                for name, count in part["counts"].items():
                    counts[name] += count
                yield from (dump_line(row) for row in part["rows"] if chosen.takes(row))

        self._write(TRAIN, *rows())
        metrics = self._metrics(counts, chosen)
        self._write(SUMMARY, json.dumps(metrics))
        # The parts are no longer needed.
        shutil.rmtree(self.folder / PARTS)
        return metrics

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

    def checked(self) -> Metrics:
        """Return the metrics of the complete collection. Raises DataError where nothing is left to train on."""
        metrics = summary_of(self.folder)
        assert metrics is not None, "the collection is complete"
        if metrics["collect/kept"]:
            return metrics
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
