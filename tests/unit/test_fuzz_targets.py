"""The fuzzers' first inputs, whole and cut: that the targets hold, and can be told when they do not."""

from __future__ import annotations

import time
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


def test_what_raises_or_takes_too_long_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(data: bytes, folder: Path) -> None:
        end = time.process_time() + 0.06
        while time.process_time() < end:
            pass

    monkeypatch.setitem(fuzz_targets.TARGETS, "slow", slow)
    with pytest.raises(AssertionError, match=r"slow: \d+ ms for 3 bytes; allowed are 50"):
        fuzz_targets.check("slow", b"abc", tmp_path)
    fuzz_targets.check("slow", b"a" * 2048, tmp_path)
    with pytest.raises(ZeroDivisionError):
        monkeypatch.setitem(fuzz_targets.TARGETS, "slow", lambda data, folder: 1 // 0)
        fuzz_targets.check("slow", b"", tmp_path)
