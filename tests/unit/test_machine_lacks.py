"""Tests are skipped for what a machine lacks, with the reason, and in CI none is."""

from __future__ import annotations

import os

import machine_lacks
import pytest


@pytest.mark.skipif(not os.environ.get("CI"), reason="the variable CI is not set")
def test_ci_runs_every_test() -> None:
    assert machine_lacks.LACKS == {}


def test_a_machine_without_it_skips_with_the_sandboxs_own_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = "import sys, os; os.write(int(sys.argv[2]), b'Fmake the namespaces: no')"
    monkeypatch.setattr("grpo_rl.rewards.sandbox.sandbox.LAUNCH", launch)
    monkeypatch.setenv("CXX", "no-such-compiler")
    lacks = machine_lacks.lacks()
    assert lacks["sandbox"].startswith("no sandbox for code on this machine") and "make the namespaces: no" in lacks["sandbox"]
    assert lacks["compiler"] == "no C++ compiler: there is no program no-such-compiler"
