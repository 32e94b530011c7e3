"""Trainings that end with their test, however it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from oracles import Training


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    """Makes a training in the test's own folder: its name, its words, its faults."""
    made = []

    def make(*arguments: Any) -> Training:
        made.append(Training(tmp_path, *arguments))
        return made[-1]

    yield make
    for one in made:
        if one.process is not None and one.process.poll() is None:
            one.kill()
