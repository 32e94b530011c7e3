"""Which processes a run's instruments are ordered in, step by step, and what becomes of their answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_rl.cluster import run_instruments
from grpo_rl.cluster.run_instruments import REQUEST, RunInstruments
from grpo_rl.config.schema.model import ProfilerConfig
from grpo_rl.config.schema.tree import Config
from grpo_rl.errors import ClusterError
from grpo_rl.workers.instruments import GIB, PhaseMeasure


class Process:
    """A process that notes its orders, and answers with the same measures each time."""

    def __init__(self, name: str, log: list[tuple[str, str | None]], measures: Any) -> None:
        self.name, self.is_built = name, True
        self.actor = SimpleNamespace(
            observe=SimpleNamespace(remote=lambda folder: log.append((name, folder))),
            measures=SimpleNamespace(remote=lambda: measures),
        )


def instruments(tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> tuple[RunInstruments, Any]:
    log: list[tuple[str, str | None]] = []
    monkeypatch.setattr(run_instruments, "wait_all", lambda workers, refs, timeout_s, what: refs)
    update = PhaseMeasure(2.0, 4e12, {"resident": GIB})

    class Group(list[Any]):
        def __init__(self, role: str, size: int) -> None:
            super().__init__(Process(f"{role}{rank}", log, (None, {"update": update})) for rank in range(size))
            self.role, self.workers = role, list(self)

    sets: Any = [Group("rollout", 1), Group("actor", 4), Group("reference", 4)]
    pools = [SimpleNamespace(nnodes=2, devices_per_node=2)]
    plan: Any = SimpleNamespace(config=config, pools=pools)
    return RunInstruments(plan, sets, tmp_path, lambda text: None, {"plan/timing_s/step": 4.0}), log


def config_with(tool: str | None, steps: list[int] | None, **profiler: Any) -> Config:
    config = Config()
    actor = replace(config.actor_rollout_ref.actor, profiler=ProfilerConfig(**profiler))
    parts = replace(config.actor_rollout_ref, actor=actor)
    return replace(config, actor_rollout_ref=parts, global_profiler=replace(config.global_profiler, tool=tool, steps=steps))


@pytest.mark.parametrize(
    ("profiler", "names"),
    [
        ({"enable": True}, ["actor0"]),
        ({"enable": True, "ranks": [1, 3]}, ["actor1", "actor3"]),
        ({"enable": True, "all_ranks": True}, ["actor0", "actor1", "actor2", "actor3"]),
        (None, ["actor0", "reference0"]),
    ],
)
def test_chosen_steps_are_traced_on_chosen_ranks_and_the_next_one_where_a_file_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profiler: dict[str, Any] | None, names: list[str]
) -> None:
    config = Config() if profiler is None else config_with("torch", [2], **profiler)
    own, log = instruments(tmp_path, config, monkeypatch)
    for step in (1, 2, 3):
        if step == 2 and profiler is None:
            (tmp_path / REQUEST).touch()
        own.begin(step)
        own.end({})
    folder = str(tmp_path / "profile" / "step_000002")
    assert log == [(name, folder) for name in names] + [(name, None) for name in names]
    assert not (tmp_path / REQUEST).exists()


def test_throughput_is_per_device_and_an_absolute_folder_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(Config(), global_profiler=replace(Config().global_profiler, save_path=str(tmp_path / "elsewhere")))
    own, _ = instruments(tmp_path / "run", config, monkeypatch)
    figures = own.end({"timing_s/step": 5.0, "perf/total_num_tokens": 1000.0})
    assert figures["plan/timing_s/step"] == 4.0, "what the plan predicted stands beside what was measured"
    assert figures["perf/throughput"] == 1000 / 5 / 4 and figures["perf/time_per_step"] == 5.0
    assert figures["perf/tflops/actor"] == pytest.approx(4 * 4 / 2 / 4)
    assert figures["perf/memory/actor/update/resident_gib"] == 1.0
    assert "perf/mfu/actor" not in figures
    assert own.folder == tmp_path / "elsewhere"


def test_processes_that_do_not_answer_leave_their_figures_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, _ = instruments(tmp_path, Config(), monkeypatch)

    def gone(*arguments: Any) -> Any:
        raise ClusterError("the process died")

    monkeypatch.setattr(run_instruments, "wait_all", gone)
    assert own.end({"timing_s/step": 5.0}) == {"perf/time_per_step": 5.0, "plan/timing_s/step": 4.0}
