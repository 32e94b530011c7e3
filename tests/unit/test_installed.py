"""Versions that were not tested are named, and nothing is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest

from grpo_rl.installed import untested

ROOT = Path(__file__).resolve().parents[2]


def test_a_package_outside_of_the_range_is_named_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"ray": "2.61.0", "rich": "15.0.0", "pytest": "1.0", "vllm": "0.33.0"}
    requires = ["rich==15.0.0", "peft==0.21.2", "pytest==9.2.0 ; extra == 'dev'"]
    requires += [f"{run} ; extra == 'gpu'" for run in ("ray>=2.50,<2.61", "vllm>=0.29,<0.33")]
    monkeypatch.setattr(metadata, "requires", lambda name: requires)

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    assert list(untested()) == ["ray 2.61.0 (tested: <2.61,>=2.50)", "vllm 0.33.0 (tested: <0.33,>=0.29)"]


def test_the_environment_of_the_tests_was_tested_and_a_program_that_is_not_installed_says_nothing() -> None:
    assert list(untested()) == list(untested("no-such-package")) == []


def test_the_core_without_ray_and_vllm_plans_and_a_run_is_refused_with_the_command_before_it_begins(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.lower().startswith(("ray", "vllm")):
            (packages / path.name).symlink_to(path)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{packages}", "OMP_NUM_THREADS": "1"}

    def grpo(*words: str) -> subprocess.CompletedProcess[str]:
        # Without `site` the environment's own packages are not on the path.
        command = [sys.executable, "-S", "-m", "grpo_rl", *words, "trainer.device=cpu"]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)

    sentence = "Ray and vLLM are not installed: python -m pip install 'grpo_rl[cpu]'"
    plan = grpo("plan", "recipe=arithmetic/grpo", "actor_rollout_ref.rollout.name=vllm")
    assert plan.returncode == 0, plan.stdout + plan.stderr
    assert f"this machine can plan the run and not start it: {sentence}" in " ".join(plan.stdout.split())
    run = grpo("train", "recipe=arithmetic/grpo", "actor_rollout_ref.rollout.name=hf")
    assert run.returncode == 2 and "Ray is not installed: python -m pip install 'grpo_rl[cpu]'" in run.stdout + run.stderr
    assert not (tmp_path / "runs").exists()
