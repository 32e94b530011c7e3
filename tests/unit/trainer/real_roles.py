"""Small runs of real roles in this process, and a record of what was asked of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.trainer.run import RunLoop
from grpo_rl.types import GREEDY, Batch, Prompt, Sampling

WORDS = (
    "recipe=arithmetic/grpo",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.use_kl_loss=false",
    "data.max_response_length=64",
    "data.train_batch_size=2",
    "trainer.experiment_name=run",
)
"""Batches of 2 prompts with 4 responses each (`grpo_rl.testing.SMALL`)."""
VALIDATED = ("data.val_files=task:arithmetic?split=val&num_rows=3",)
REFERENCE = "actor_rollout_ref.actor.use_kl_loss=true"
MakeRun = Callable[..., tuple[RunLoop, "Record"]]
CALLS = {
    "rollout": {"sync_weights": "sync", "submit": "sample", "keep_weights": "train beside", "completed": "", "forget": ""},
    "actor": {
        "old_logprobs": "old",
        "update": "update",
        "forward_backward": "part",
        "optim_step": "step",
        "save": "save",
        "load": "load",
    },
    "reference": {"logprobs": "ref", "become": "refresh reference"},
    "critic": {"values": "values", "update": "update critic"},
    "reward_model": {"update": "update reward model"},
}
"""The verbs of each role that are noted, and their names in `Record.calls`; those without one are not in it."""


def learnt(run: RunLoop) -> list[dict[str, Any]]:
    """Return the metrics that measure neither time nor memory."""
    rows = read_metrics(run.output.run_dir.metrics_file)
    return [{name: row[name] for name in row if not name.startswith(("time", "timing_s/", "perf/"))} for row in rows]


def row_of(prompt: Prompt) -> int:
    return int(prompt.uid.rpartition("r")[2])


def half_right(prompt: Prompt, sample: int) -> str:
    """Every other response is right, and the greedy one to every other row."""
    is_right = row_of(prompt) % 2 == 0 if sample == GREEDY else sample % 2 == 0
    return str(prompt.ground_truth) if is_right else "no idea"


class Asked(NamedTuple):
    """Prompts whose responses were asked for together, by uid, and the version of the engine then."""

    uids: list[str]
    n: int
    sampling: Sampling
    version: int


class Record:
    """What a run's schedule asks its real roles for, in order."""

    def __init__(self, run: RunLoop) -> None:
        self.calls: list[str] = []
        self.asked: list[Asked] = []
        self.batches: dict[str, list[Batch]] = {}
        """The batches that each role was given, by the name of the call."""
        self.warnings: list[str] = []
        run.output.console.warn = self.warnings.append  # type: ignore[method-assign]
        self.threads: dict[str, set[str]] = {}
        """The names of the threads that called each role."""
        for role, verbs in CALLS.items():
            part = getattr(run.roles, role)
            for verb, name in verbs.items():
                if hasattr(part, verb):
                    setattr(part, verb, self._noting(role, part, verb, name))

    @property
    def trained(self) -> list[Batch]:
        return self.batches.get("update", [])

    @property
    def prompts(self) -> list[list[str]]:
        return [asked.uids for asked in self.asked]

    @property
    def samplings(self) -> list[Sampling]:
        return [asked.sampling for asked in self.asked]

    def _noting(self, role: str, part: Any, verb: str, name: str) -> Any:
        real = getattr(part, verb)

        def noted(*arguments: Any, **options: Any) -> Any:
            self.threads.setdefault(role, set()).add(threading.current_thread().name)
            call = name
            if verb == "submit":
                prompts, n, sampling = arguments
                self.asked.append(Asked([prompt.uid for prompt in prompts], n, sampling, part.version))
                call = f"sample {len(prompts)}x{n}" + (" and greedy" if options.get("greedy") else "")
            elif verb == "forward_backward":
                call = f"{arguments[0].num_rollouts} of {arguments[1].num_sequences}"
            elif arguments and isinstance(arguments[0], Batch):
                self.batches.setdefault(name, []).append(arguments[0])
            self.calls += [call] if call else []
            return real(*arguments, **options)

        return noted
