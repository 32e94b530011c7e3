"""Rejection sampling: responses of the initial policy, sampled once, of which the good ones become training
data.

Every part of the prompts is written when it is done, so that a killed run goes on with the next one:

<run>/collected/settings.json what the responses depend on: those of other settings are not taken over
<run>/collected/parts/N.json rows and counts of one part of the prompts, until all are there
<run>/collected/train.jsonl the rows that are trained on, one per line <run>/collected/summary.json the counts
of all parts; with this file the collection is complete

Yuan et al., "Scaling relationship on learning mathematical reasoning" (arXiv 2308.01825), section 3.3;
DeepSeekMath (arXiv 2402.03300), appendix A.1.2; for losses over pairs, the best and the worst response,
A.1.4.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

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
from grpo_rl.telemetry.rollout_log import record_of
from grpo_rl.telemetry.terminal.console import Console
from grpo_rl.trainer.parts import advancing, training_sampling
from grpo_rl.trainer.sampled.trained import scored
from grpo_rl.types import Metrics, Rollout

SETTINGS, SUMMARY, TRAIN, PARTS = "settings.json", "summary.json", "train.jsonl", "parts"


def collect(plan: Plan, session: RunSession) -> tuple[Path, Metrics]:
    """Return the file of the collected rows and their metrics; what is not there yet is sampled now.

    A run that goes on from a checkpoint has trained on the rows that are there: they stay. Raises DataError
    if nothing is left to train on.
    """
    run_dir, console, folder = session.run_dir, session.console, session.run_dir.collected
    if plan.resumes and (metrics := summary_of(folder)) is not None:
        return folder / TRAIN, metrics
    assert plan.collection is not None, "the plan has a collection"
    with ExitStack() as stack:
        inputs = read_inputs(plan.collection, run_dir, console, part="prompts")
        assert inputs.val_data is not None, "a collection has prompts"
        model = Path(session.model_folder(plan.config.model.path))
        pairs = plan.objective.needs_pairs
        collection = Collection(plan.collection.config, inputs.val_data, folder, model, pairs=pairs)
        if not collection.is_begun:
            if folder.exists():
                console.info(f"responses that were collected with other settings are now in {run_dir.set_aside(folder)}")
            collection.begin()
        if summary_of(folder) is None:
            _, roles, _ = session.start(plan.collection, inputs, stack)
            assert roles.rollout is not None and roles.rewarder is not None, "a collection samples and scores"
            collection.run(roles.rollout, roles.rewarder, console, session.phase)
        metrics, report = collection.checked()
        console.info(report)
        session.phase("start")
        return folder / TRAIN, metrics


def summary_of(folder: Path) -> Metrics | None:
    summary = folder / SUMMARY
    metrics: Metrics | None = json.loads(summary.read_text()) if summary.is_file() and (folder / TRAIN).is_file() else None
    return metrics


@dataclasses.dataclass(eq=False)
class Collection:
    """The phase in which the initial policy answers every prompt `rollout.n` times. Each of its files is complete or not there."""

    config: Config
    prompts: PromptDataset
    folder: Path
    model: Path
    pairs: bool

    def __post_init__(self) -> None:
        config, prompts = self.config, self.prompts
        self.parts = parts_of(config, len(prompts))
        files = ((path.name, path.stat()) for path in self.model.glob("*.safetensors"))
        weights = sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in files)
        self._settings = json.dumps(
            jsonable(
                {
                    "data": prompts.fingerprint,
                    "model": [str(self.model), weights],
                    "sampling": dataclasses.asdict(training_sampling(config, 0)) | {"n": config.rollout.n},
                    "prompts": [len(self.parts[0]), config.data.max_prompt_length, config.data.system_prompt],
                    "reward": hashlib.sha256(repr(config.reward).encode()).hexdigest(),
                    "kept": "pairs" if self.pairs else dataclasses.asdict(config.algorithm.rejection),
                }
            )
        )

    @property
    def is_begun(self) -> bool:
        file = self.folder / SETTINGS
        return file.is_file() and file.read_text() == self._settings

    def begin(self) -> None:
        (self.folder / PARTS).mkdir(parents=True, exist_ok=True)
        self._write(SETTINGS, [self._settings])

    def part(self, number: int) -> dict[str, Any] | None:
        path = self.folder / PARTS / f"{number}.json"
        return json.loads(path.read_text()) if path.is_file() else None

    def _write(self, name: str, lines: Iterable[str]) -> None:
        """Write a file line by line: the rows of a large collection do not fit into memory."""
        path = self.folder / name
        temporary = path.with_name(f".{path.name}")
        temporary.unlink(missing_ok=True)
        write_file(temporary, (line.encode() for line in lines))
        rename(temporary, path)
        flush(path.parent)

    def run(self, rollout: RolloutPool, rewarder: Rewarder, console: Console, phase: Callable[[str], None]) -> None:
        missing = [number for number in range(len(self.parts)) if self.part(number) is None]
        n = self.config.rollout.n
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
                self._write(f"{PARTS}/{number}.json", [json.dumps(jsonable(self._part(rollouts)))])
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

        self._write(TRAIN, rows())
        self._write(SUMMARY, [json.dumps(self._metrics(counts, chosen))])
        shutil.rmtree(self.folder / PARTS)

    def _part(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        records = [
            record_of(rollout) | {"messages": rollout.prompt.messages, "token_ids": np.asarray(rollout.response_ids).tolist()}
            for rollout in rollouts
        ]
        rows = pair_rows(records) if self.pairs else answer_rows(records, self.config.algorithm.rejection.min_reward)
        groups = {rollout.prompt.uid for rollout in rollouts}
        counts = {
            "prompts": len(groups),
            "sampled": len(rollouts),
            "failed": len(rollouts) - len(rewards),
            "reward": sum(rewards),
            "without": len(groups) - len({row["uid"] for row in rows}),
        }
        return {"rows": rows, "counts": counts}

    def _metrics(self, counts: dict[str, float], kept: Kept) -> Metrics:
        metrics = {
            "prompts": counts["prompts"],
            "sampled": counts["sampled"],
            "failed_rewards": counts["failed"],
            "reward_mean": counts["reward"] / max(1, counts["sampled"] - counts["failed"]),
            "kept": kept.num_kept,
            "duplicates": kept.num_duplicates,
            "tied_prompts" if self.pairs else "unsolved_prompts": counts["without"] / counts["prompts"],
        }
        if not self.pairs:
            metrics |= {"kept_share": kept.num_kept / counts["sampled"], "over_the_cap": kept.num_over}
        return {f"collect/{name}": float(value) for name, value in metrics.items()}

    def checked(self) -> tuple[Metrics, str]:
        """Return the metrics of the complete collection, and as a sentence. Raises DataError if nothing is left to train on."""
        metrics = summary_of(self.folder)
        assert metrics is not None, "the collection is complete"
        num_kept, sampled, prompts = (int(metrics[f"collect/{name}"]) for name in ("kept", "sampled", "prompts"))
        counts = f"{sampled:,} responses to {prompts:,} prompts (mean reward {metrics['collect/reward_mean']:.4g})"
        if num_kept and self.pairs:
            tied = metrics["collect/tied_prompts"]
            return metrics, f"collected {num_kept:,} pairs from {counts}; in {tied:.1%} of the groups none is better"
        if num_kept:
            unsolved, same = metrics["collect/unsolved_prompts"], int(metrics["collect/duplicates"])
            return (
                metrics,
                f"collected {num_kept:,} of {counts}; {unsolved:.1%} of the prompts have no good one, {same:,} were there already",
            )
        least = self.config.algorithm.rejection.min_reward
        none = (
            "is better than another of its group" if self.pairs else f"has a reward of algorithm.rejection.min_reward={least:g}"
        )
        raise DataError(
            f"nothing to train on: none of {counts} {none}. Raise actor_rollout_ref.rollout.n, give easier prompts or "
            "a better initial policy, or look whether the reward recognises its answers"
        )
