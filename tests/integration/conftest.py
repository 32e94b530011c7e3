"""Who runs what where the integration tests run in several processes at a time (pytest-xdist, --dist loadgroup)."""

from __future__ import annotations

import pytest

ALONE = "test_training.py"
"""Its tests are whole runs and share next to nothing: they go to whoever is free. All others keep to their file."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name != ALONE:
            item.add_marker(pytest.mark.xdist_group(item.path.name))
