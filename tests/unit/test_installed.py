"""Versions that were not tested are named, and nothing is refused."""

from __future__ import annotations

from importlib import metadata

import pytest

from grpo_rl.installed import untested


def test_a_package_outside_of_the_range_is_named_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"ray": "2.61.0", "rich": "15.0.0"}
    requires = ["ray>=2.50,<2.61", "rich==15.0.0", "peft==0.21.2", "vllm==0.32.0 ; extra == 'gpu'"]
    monkeypatch.setattr(metadata, "requires", lambda name: requires)

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    assert list(untested()) == ["ray 2.61.0 (tested: <2.61,>=2.50)"]


def test_the_environment_of_the_tests_was_tested_and_a_program_that_is_not_installed_says_nothing() -> None:
    assert list(untested()) == list(untested("no-such-package")) == []
