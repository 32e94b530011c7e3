"""The distribution of the integration tests over several processes (pytest-xdist, --dist loadgroup)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rank_processes import RankProcesses

ALONE = "test_training.py"
"""Its tests are whole runs and share next to nothing: they go to whoever is free. All others keep to their file."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name != ALONE:
            item.add_marker(pytest.mark.xdist_group(item.path.name))


@pytest.fixture(scope="module")
def ranks() -> Iterator[dict[int, RankProcesses]]:
    """One rank, and two that meet over gloo."""
    made = {size: RankProcesses(size) for size in (1, 2)}
    yield made
    for processes in made.values():
        processes.shutdown()
