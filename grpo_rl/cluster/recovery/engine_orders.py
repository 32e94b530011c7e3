"""Orders to a running run for more or fewer engines: from the file that `grpo-rl engines` writes, and from nodes that join."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray

from grpo_rl.cluster.processes.placement import runs_here
from grpo_rl.cluster.recovery.replicas import Elastic, Replicas
from grpo_rl.errors import ConfigError

LOOK_S = 0.5
MOST_ANSWERS = 16
"""Answers that are kept in status.json, the newest ones."""


class EngineOrders(threading.Thread):
    """Obeys orders as they come, and keeps `engines` of status.json true: who serves, the bounds, and an answer to each order."""

    def __init__(
        self, replicas: Replicas, elastic: Elastic, file: Path, devices: int, tell: Callable[[dict[str, Any]], None]
    ) -> None:
        """`file` has one order a line; those that are there already were for an earlier start. `devices` are those of an engine."""
        super().__init__(name="engine orders", daemon=True)
        self._replicas, self._elastic, self._file, self._devices, self._tell = replicas, elastic, file, devices, tell
        self._read = len(self._content())
        self._answers: dict[str, str] = {}
        self._told: dict[str, Any] = {}
        self._nodes = set() if runs_here() else {node["NodeID"] for node in ray.nodes()}
        self._over = threading.Event()
        self.start()

    def close(self) -> None:
        """Obey no more."""
        self._over.set()
        self.join(5.0)

    def run(self) -> None:
        while not self._over.wait(LOOK_S):
            for key, change in self._orders():
                self._answers[key] = self._obey(change)
            self._answers = dict(list(self._answers.items())[-MOST_ANSWERS:])
            for node in [] if runs_here() else ray.nodes():
                if node["Alive"] and node["NodeID"] not in self._nodes:
                    self._nodes.add(node["NodeID"])
                    # On CPUs engines own no cores: a node gets one.
                    room = int(node["Resources"]["GPU"]) // self._devices if "GPU" in node["Resources"] else 1
                    self._obey(min(room, self._elastic.most - self._replicas.wanted), node["NodeID"])
            self._report()

    def _obey(self, change: int, node: str | None = None) -> str:
        try:
            return self._replicas.resize(change, node) if change else "nothing changes"
        except ConfigError as error:
            return f"refused: {error}"

    def _orders(self) -> Iterator[tuple[str, int]]:
        """Yield the key and the change of each order that has come since; a line that is none is passed over."""
        whole, _, _ = self._content()[self._read :].rpartition(b"\n")
        self._read += len(whole) + bool(whole)
        for line in whole.splitlines():
            try:
                order = json.loads(line)
                key, change = str(order["key"])[:32], order["change"]
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            if isinstance(change, int):
                yield key, change

    def _content(self) -> bytes:
        try:
            return self._file.read_bytes()
        except OSError:
            return b""

    def _report(self) -> None:
        serving = [worker.name for worker in list(self._replicas.serving)]
        now = {
            "serving": serving,
            "wanted": self._replicas.wanted,
            "fewest": self._elastic.fewest,
            "most": self._elastic.most,
            "answers": self._answers,
        }
        if now != self._told:
            self._told = {**now, "answers": dict(self._answers)}
            self._tell(self._told)
