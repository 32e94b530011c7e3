"""The distribution of the integration tests over several processes (pytest-xdist, --dist loadfile)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_rl.cluster.session.ray_session import set_environment

set_environment()  # before a file of tests imports Ray

from rank_processes import RankProcesses, make_model  # noqa: E402
from xdist.scheduler import LoadFileScheduling  # noqa: E402

ALONE = "/test_training.py"
"""Its tests are whole runs and share next to nothing: they go to whoever is free. All others keep to their file."""


LONGEST = (
    "test_layout_invariance.py",
    "test_tutorial.py",
    "test_training.py",
    "test_commands.py",
    "test_episodes_run.py",
    "test_sessions.py",
    "test_sweep_launchers.py",
    "test_secrets.py",
)
"""They begin: a long one that begins last is waited for by everybody else."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)


class FilesOrRuns(LoadFileScheduling):
    """Give a process all tests of a file, whose fixtures they share, or one test of the file of whole runs.

    `--dist loadgroup` would do, but pytest-xdist 3.8 reads no groups under pytest 9.2 (pytest-xdist, issue 1386).
    """

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        return nodeid if file.endswith(ALONE) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesOrRuns | None:
    return FilesOrRuns(config, log) if config.getvalue("dist") == "loadfile" else None


class RanksBySize(dict[int, RankProcesses]):
    """Sets of ranks that meet over gloo, by their number; a set is started when it is first asked for."""

    def __missing__(self, size: int) -> RankProcesses:
        return self.setdefault(size, RankProcesses(size))


@pytest.fixture(scope="module")
def ranks() -> Iterator[dict[int, RankProcesses]]:
    made = RanksBySize()
    yield made
    for processes in made.values():
        processes.shutdown()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model whose LM head is its embedding."""
    return make_model(tmp_path_factory.mktemp("model"), tied=True)
