"""What keeps a machine from taking part in a run, and the interface and environment that its processes use."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from grpo_rl.cluster.processes import placement as machines
from grpo_rl.cluster.processes.placement import Found
from grpo_rl.config.relative_paths import function_files
from grpo_rl.source_code import digest, sources
from grpo_rl.workers.sharded_policy import interface_of

ROOT = Path(__file__).parents[3]
OURS = Found("node-1", {"Python": "3.11.7", "torch": "2.13.0"}, {"grpo_rl/a.py": "1", "grpo_rl/b.py": "2"})
NEEDED = {"/models/x": "critic.model.path: copy it there"}


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ({}, None),
        ({"versions": {"Python": "3.11.7", "torch": "2.12.0"}}, "M has torch 2.12.0, and the controller's machine (node-1) 2.13.0:"),
        ({"code": {"grpo_rl/a.py": "1", "grpo_rl/b.py": "3"}}, "M has other code than the controller's machine (node-1): grpo_rl/b.py differs;"),
        ({"code": {"grpo_rl/b.py": "3"}}, "grpo_rl/a.py is not there, and so it is with 1 more;"),
        ({"code": {**OURS.code, "grpo_rl/c.py": "4"}}, "grpo_rl/c.py differs;"),
        ({"lacks": frozenset(NEEDED)}, "M does not see /models/x, critic.model.path"),
    ],
)  # fmt: skip
def test_what_differs_from_the_controllers_machine_is_named(theirs: dict[str, object], expected: str | None) -> None:
    found = dataclasses.replace(OURS, name="node-2", **theirs)  # type: ignore[arg-type]
    problems = list(machines.differences("M", found, OURS, NEEDED))
    assert len(problems) == (expected is not None) and (expected or "") in "".join(problems)


def test_a_machine_reports_its_code_versions_and_what_it_lacks(tmp_path: Path) -> None:
    own = tmp_path / "loss.py"
    own.write_text("A = 1\n")
    there, missing = str(tmp_path), str(tmp_path / "not_here")
    found = machines.look([str(own), "nowhere.py"], [there, missing], seen_s=0.0)
    assert found.lacks == {missing}
    assert found.versions["Python"] == sys.version.split()[0] and found.versions["torch"][0].isdigit()
    assert found.code == sources([str(own)]) and str(own) in found.code and "nowhere.py" not in found.code
    before = digest(found.code)
    (tmp_path / "moved").mkdir()
    moved = own.rename(tmp_path / "moved" / own.name)
    assert digest(sources([str(moved)])) == before
    moved.write_text("A = 2\n")
    assert digest(sources([str(moved)])) != before != digest(sources())


def test_the_files_of_a_users_functions_are_found_wherever_they_are_named() -> None:
    tree = {
        "reward": {"functions": ["auto", "0.2*mine.py:f"], "kwargs": {"other.py:g": {}}},
        "cls": {"path": "data.py"},
        "n": 3,
    }
    assert function_files(tree) == ["data.py", "mine.py", "other.py"]
    assert function_files(["vanilla", "my.module:loss", "a text.\nwith main.py in it"]) == []


def test_ranks_take_the_interface_of_the_address_and_not_of_the_machines_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*addresses: tuple[int, str]) -> list[object]:
        return [SimpleNamespace(family=family, address=address) for family, address in addresses]

    inet, inet6 = psutil.net_if_addrs()["lo"][0].family, 10
    there = {"lo": found((inet, "127.0.0.1")), "docker0": found((inet, "172.17.0.1")), "eth0": found((17, "aa:bb:cc:00:00:01"), (inet, "10.0.0.1"), (inet6, "fd00::1"))}  # fmt: skip
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: there)
    asked = ("127.0.0.1", "10.0.0.1", "172.17.0.1", "fd00:0::1", "10.0.0.2")
    assert [interface_of(address) for address in asked] == ["lo", "eth0", "docker0", "eth0", None]


def test_a_submitted_job_runs_in_the_environment_of_the_heads_ray_and_shows_no_secret(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / "scripts" / "submit.sh").write_bytes((ROOT / "scripts" / "submit.sh").read_bytes())
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    ray = tmp_path / ".venv" / "bin" / "ray"
    ray.write_text(
        '#!/usr/bin/env bash\necho "$@"; while [[ $1 != --runtime-env ]]; do shift; done; stat -c %a "$2"; cat "$2"\n'
    )
    ray.chmod(0o755)
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody_else")

    def submit(*words: str) -> list[str]:
        command = ["bash", tmp_path / "scripts" / "submit.sh", "--address", "head:1", *words, "seed=1"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout.splitlines()

    (shown,) = submit("--dry-run")
    command_line, mode, content = submit()
    for said in (shown, command_line):
        assert said.rstrip().endswith("-- python3 -m grpo_rl.main seed=1") and "hf_of_nobody_else" not in said
    file = Path(command_line.split("--runtime-env ")[1].split()[0])
    assert mode == "600" and not file.exists()
    environment = json.loads(content)
    assert environment["env_vars"]["HF_TOKEN"] == "hf_of_nobody_else"
    assert environment["env_vars"]["PATH"] == f"{tmp_path}/.venv/bin:${{PATH}}"
    assert "-- /opt/python -m grpo_rl.main seed=1" in submit("--python", "/opt/python", "--dry-run")[0]


def test_a_missing_module_is_one_line_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / "omegaconf.py").write_text("raise ModuleNotFoundError(\"No module named 'omegaconf'\", name='omegaconf')\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-m", "grpo_rl.main"], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 6
    assert done.stderr.startswith("error: ModuleNotFoundError: No module named 'omegaconf' in the environment of ")
    assert "bash scripts/setup.sh" in done.stderr and len(done.stderr.splitlines()) == 1
