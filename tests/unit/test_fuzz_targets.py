"""The fuzzers' first inputs, whole and cut: that the targets hold."""

from __future__ import annotations

from pathlib import Path

import fuzz_targets
import pytest


@pytest.mark.campaign
@pytest.mark.parametrize("name", fuzz_targets.TARGETS)
def test_the_first_inputs_break_nothing(name: str, tmp_path: Path) -> None:
    for seed in fuzz_targets.SEEDS[name]:
        fuzz_targets.check(name, seed, tmp_path)
        if name != "overrides":  # a configuration takes a tenth of a second
            fuzz_targets.TARGETS[name](seed[: len(seed) // 2], tmp_path)
