"""The distribution of the integration tests over several processes (pytest-xdist, --dist loadgroup)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_processes import RankProcesses, make_model

ALONE = "test_training.py"
"""Its tests are whole runs and share next to nothing: they go to whoever is free. All others keep to their file."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name != ALONE:
            item.add_marker(pytest.mark.xdist_group(item.path.name))


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
