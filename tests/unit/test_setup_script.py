"""Tests are skipped for what a machine lacks, with the reason, and in CI none is; `scripts/setup.sh` says what a machine lacks before anything is downloaded, and the engine's start says it if it is met later."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import machine_lacks
import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_a_missing_libnuma_is_said_with_its_remedies_before_anything_is_downloaded(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    for name in ("setup.sh", "cpu-overrides.txt", "constraints.txt"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts" / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "pyproject.toml")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$*" in *libnuma*) exit 1;; esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python), "GRPO_RL_DEVICE": "cpu"}
    done = subprocess.run(
        ["bash", "scripts/setup.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 1
    for words in ("libnuma.so.1 is missing", "sudo apt-get install libnuma1", "dnf install numactl-libs", "LD_LIBRARY_PATH"):
        assert words in done.stderr
    assert "installing" not in done.stdout and not (tmp_path / ".venv" / "bin").exists()


def test_an_engine_whose_compiled_part_is_not_loaded_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    platforms = pytest.importorskip("vllm.platforms")
    from grpo_rl.errors import ClusterError
    from grpo_rl.rollout.vllm import vllm_engine

    def missing(name: str, *_: Any) -> None:
        raise OSError("libnuma.so.1: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(platforms.current_platform, "import_kernels", lambda: None, raising=False)
    monkeypatch.setattr(vllm_engine, "torch", SimpleNamespace(ops=SimpleNamespace(_C=SimpleNamespace())))
    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(ClusterError, match=r"cannot be loaded: libnuma.so.1: cannot open .* apt-get install libnuma1"):
        vllm_engine.check_compiled_part()
    monkeypatch.setattr(vllm_engine, "torch", SimpleNamespace(ops=SimpleNamespace(_C=SimpleNamespace(init_cpu_memory_env=1))))
    vllm_engine.check_compiled_part()


@pytest.mark.skipif(not os.environ.get("CI"), reason="the variable CI is not set")
def test_ci_runs_every_test() -> None:
    assert machine_lacks.LACKS == {}


def test_a_machine_without_it_skips_with_the_sandboxs_own_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_lacks.take_namespaces_away(monkeypatch)
    monkeypatch.setenv("CXX", "no-such-compiler")
    lacks = machine_lacks.lacks()
    assert (
        lacks["sandbox"].startswith("no sandbox for code on this machine")
        and "make the namespaces: unshare" in lacks["sandbox"]
    )
    assert lacks["compiler"] == "no C++ compiler: there is no program no-such-compiler"
