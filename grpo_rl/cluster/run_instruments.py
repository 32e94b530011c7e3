"""Figures that people tune by (memory by phase, MFU, throughput), and traces if ordered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_rl.cluster.processes.worker_group import Worker, WorkerGroup, wait_all
from grpo_rl.config.derived import profilers_of
from grpo_rl.errors import ClusterError
from grpo_rl.plan.decisions import Plan
from grpo_rl.plan.machine import peak_tflops
from grpo_rl.types import Metrics
from grpo_rl.workers.instruments import GIB, PhaseMeasure

ANSWER_S = 60.0
"""Without an answer in this time the step's figures are left out: the next call finds what is wrong."""
REQUEST = "profile_next_step"
"""The file that a person makes in the run's folder to have the next step traced, on rank 0 of every role."""
WORK_NAMES = {
    ("actor", "update"): "actor",
    ("actor", "logprobs"): "actor_infer",
    ("critic", "update"): "critic",
    ("critic", "values"): "critic_infer",
    ("reference", "logprobs"): "ref",
    ("reward_model", "update"): "reward_model",
    ("reward_model", "scores"): "reward_model_infer",
}
"""The metric of a role's phase in which a model runs: verl's names, if it has one."""
PROFILERS = {
    "actor": "actor_rollout_ref.actor.profiler",
    "reference": "actor_rollout_ref.ref.profiler",
    "critic": "critic.profiler",
}
Answer = tuple[str | None, dict[str, PhaseMeasure]]


@dataclass
class RunInstruments:
    plan: Plan
    worker_groups: Sequence[WorkerGroup]
    run_folder: Path
    say: Callable[[str], None]
    expected: Metrics
    _profiled: Sequence[Worker] = ()

    def __post_init__(self) -> None:
        self.config = self.plan.config
        self.num_devices = sum(pool.nnodes * pool.devices_per_node for pool in self.plan.pools)

    @property
    def folder(self) -> Path:
        return self.run_folder / self.config.global_profiler.save_path

    def begin(self, step: int) -> None:
        chosen: dict[str, Sequence[int]] = {}
        if (request := self.run_folder / REQUEST).exists():
            request.unlink()
            chosen = {worker_group.role: [0] for worker_group in self.worker_groups if worker_group.role != "rollout"}
        global_profiler, profilers = self.config.global_profiler, profilers_of(self.config)
        if global_profiler.tool is not None and step in (global_profiler.steps or ()):
            for worker_group in self.worker_groups:
                profiler = profilers.get(PROFILERS.get(worker_group.role, ""))
                if profiler is not None and profiler.enable:
                    ranks = range(len(worker_group)) if profiler.all_ranks else profiler.ranks or [0]
                    chosen[worker_group.role] = ranks
        self._profiled = [
            worker_group.workers[rank] for worker_group in self.worker_groups for rank in chosen.get(worker_group.role, ())
        ]
        if self._profiled:
            _ask(self._profiled, "observe", str(self.folder / f"step_{step:06d}"))
            self.say(f"step {step} is profiled into {self.folder}")

    def end(self, metrics: Metrics) -> Metrics:
        """End what `begin` ordered; return memory, MFU, throughput and what the plan predicted of the step with these metrics."""
        if self._profiled:
            _ask(self._profiled, "observe", None)
            self._profiled = []
        figures: Metrics = {}
        if seconds := metrics.get("timing_s/step"):
            figures["perf/time_per_step"] = seconds
            if "perf/total_num_tokens" in metrics:
                figures["perf/throughput"] = metrics["perf/total_num_tokens"] / (seconds * self.num_devices)
        for worker_group in self.worker_groups:
            answers = _ask([worker for worker in worker_group.workers if worker.is_built], "measures")
            if answers:
                figures |= figures_of(worker_group.role, answers, self.config.trainer.device_tflops)
        return figures | self.expected


def figures_of(role: str, answers: Sequence[Answer], device_tflops: float | None) -> Metrics:
    """Return a role's highest memory by phase, in GiB over its ranks, and TFLOP/s and MFU of the phases in which a model runs."""
    name = "ref" if role == "reference" else role
    metrics: Metrics = {}
    for phase in sorted({phase for _, phases in answers for phase in phases}):
        measures = [phases[phase] for _, phases in answers if phase in phases]
        for kind in sorted({kind for measure in measures for kind in measure.memory}):
            max_bytes = max(measure.memory.get(kind, 0) for measure in measures)
            metrics[f"perf/memory/{name}/{phase}/{kind}_gib"] = max_bytes / GIB
        seconds, flops = max(measure.seconds for measure in measures), sum(measure.flops for measure in measures)
        work = WORK_NAMES.get((role, phase))
        if work is None or not seconds or not flops:
            continue
        achieved = flops / seconds / len(answers) / 1e12
        metrics[f"perf/tflops/{work}"] = achieved
        peak = device_tflops or peak_tflops(answers[0][0] or "")
        if peak is not None:
            metrics[f"perf/mfu/{work}"] = achieved / peak
    if role == "actor":
        for kind in ("allocated", "reserved"):
            highest = [value for key, value in metrics.items() if key.endswith(f"/{kind}_gib")]
            if highest:
                metrics[f"perf/max_memory_{kind}_gb"] = max(highest)
    return metrics


def _ask(workers: Sequence[Worker], method: str, *arguments: Any) -> list[Any]:
    refs = [getattr(worker.actor, method).remote(*arguments) for worker in workers]
    try:
        return wait_all(workers, refs, ANSWER_S, f"instruments.{method}")
    except ClusterError:
        return []
