"""Instruments around calls: memory of a phase, traces of chosen steps."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import torch

from grpo_rl.workers.instruments import Instruments

MIB = 2**20


class Worker:
    """A worker whose update takes memory, and multiplies."""

    def __init__(self) -> None:
        self.work = SimpleNamespace(take=lambda: 7.0)
        self.weight = torch.ones(64, 64, requires_grad=True)

    def update(self) -> None:
        taken = torch.ones(64 * MIB // 4)
        (torch.ones(8, 64) @ self.weight).sum().backward()
        del taken


def call(instruments: Instruments, worker: Worker, method: str = "update") -> None:
    with instruments.around(worker, method):
        worker.update()


def test_a_phase_has_its_own_peak_though_another_one_before_took_more() -> None:
    instruments, worker = Instruments("actor0"), Worker()
    with instruments.around(worker, "save"):
        held = torch.ones(256 * MIB // 4)
        del held
    call(instruments, worker)
    phases = instruments.measures()
    save, update = phases["save"].memory, phases["update"].memory
    assert save and update and save["resident"] - update["resident"] > 150 * MIB
    assert phases["update"].flops == 7.0 and phases["update"].seconds > 0
    assert instruments.measures() == {}


def test_a_chosen_step_leaves_a_trace_that_contains_the_update(tmp_path: Path) -> None:
    instruments, worker = Instruments("actor1"), Worker()
    call(instruments, worker)
    instruments.observe(str(tmp_path / "step_2"))
    call(instruments, worker)
    call(instruments, worker)
    call(instruments, worker, "save")
    instruments.observe(None)
    call(instruments, worker)
    assert sorted(file.name for file in tmp_path.rglob("*.gz")) == ["actor1.update.2.json.gz", "actor1.update.json.gz"]
    events = json.loads(gzip.decompress((tmp_path / "step_2" / "actor1.update.json.gz").read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    assert "actor1.update" in names and "aten::mm" in names
    assert any("Backward" in str(name) for name in names)
