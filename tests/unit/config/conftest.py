"""Cases that name data sets of packages which are not installed are skipped, with the reason."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

PACKAGES = {"hf:": "datasets"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {prefix: package for prefix, package in PACKAGES.items() if find_spec(package) is None}
    for item in items:
        for prefix, package in missing.items():
            if f"train_files={prefix}" in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=f"{package} is not installed: scripts/setup.sh data"))
