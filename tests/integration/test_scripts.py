"""The scripts that the documents name run to their end at a small size: they use parts of the program that change.

Others have tests of their own in tests/unit: those of gpu_check, track_memory, the documents, setup.sh and submit.sh;
quickstart.sh and test.sh are run by tests/campaign/test_fresh_debian.py. And the packages of a GPU machine fit together.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import grpo_rl

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
UV = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
OFFLINE = ("Failed to fetch", "error sending request", "dns error", "client error", "Network")
MISSED = (0, 1)
"""Exit codes of a script that also says whether a bar is met, which no bar is at this size."""

SHOWN = {
    "bench_controller --rollouts 32 --tokens 16 --ranks 2 --replicas 1 --steps 1": "object store, bytes per token:",
    "bench_episodes --episodes 8 --turns 2 --slots 8 --workers 1 --wait-s 0.01 --step-ms 1": "waiting / max(alone, longest)",
    "bench_step --steps 1 --model 1m --cases equal": "equal",
    "bench_sft --steps 1 --model 1m --lengths equal": "throughput of the program",
    "bench_schedules --speed --model 1m --steps 1 --rounds 1 --max-num-seqs 8 --response-tokens 8 --out {}": "async",
    "ill_runs --only reward_never_seen --folder {}": "reward_never_seen",
    "paradigm --only rft --seeds 1 --out {}": "rft",
    "soak --steps 4 --rate 1000 --folder {}": "committed steps lost",
    "../examples/rl_loop trainer.total_training_steps=1 trainer.test_freq=-1 trainer.val_before_train=false": "Finished in",
    "../examples/train_from_python trainer.total_training_steps=3 trainer.test_freq=-1": "Finished in",
}


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script, *options = command.format(folder).split()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    words = [sys.executable, str(SCRIPTS / f"{script}.py"), *options]
    return subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True, timeout=850)


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize("command", SHOWN)
def test_a_benchmark_runs(command: str, tmp_path: Path) -> None:
    done = run(command, tmp_path)
    assert done.returncode in MISSED and "Traceback" not in done.stderr, done.stdout[-2000:] + done.stderr[-4000:]
    assert SHOWN[command] in done.stdout
    if "train_from_python" in command:
        trained = grpo_rl.Run(tmp_path / "runs" / "grpo_rl" / "from-python")
        assert trained.state == "done" and list(trained.metrics("reward/terse/needless").dropna().index) == [1, 2, 3]


def test_tools_run(tmp_path: Path) -> None:
    done = run("code_tasks --to {}/tasks.jsonl", tmp_path)
    assert done.returncode == 0 and json.loads((tmp_path / "tasks.jsonl").read_text().splitlines()[0])["reward_model"]
    rows = [{"data_source": "openai/gsm8k", "reward_model": {"ground_truth": str(number)}} for number in (3, 12)]
    (tmp_path / "gsm8k").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "gsm8k" / "gsm8k_test.parquet")
    done = run("check_rewards {}", tmp_path)
    assert done.returncode == 0 and "GSM8K test" in done.stdout, done.stderr
    assert "package" in run("size", tmp_path).stdout
    # It runs in an environment of TRL's, and shares with bench_step.py what is imported before it looks for TRL.
    assert "--ragged" in run("bench_trl --help", tmp_path).stdout


def test_pieces_of_packages_arrive_one_by_one_and_are_installed_when_all_are_there_and_whole(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from bare_machine import cut

    pieces, site = tmp_path / "pieces", tmp_path / "packed"
    pieces.mkdir()
    site.mkdir()
    for name in ("first.py", "second.py"):
        (site / name).write_bytes(os.urandom(3000))
    with tarfile.open(tmp_path / "site.tar.xz", "w:xz") as archive:
        archive.add(site, arcname=".")
    cut(tmp_path / "site.tar.xz", pieces, 2000 / 2**20)
    there = sorted(pieces.glob("piece_*"))
    assert len(there) > 2 and max(piece.stat().st_size for piece in there) <= 2000
    last, install = there[-1].read_bytes(), "bare_machine install --from {0}/pieces --to {0}/site"
    there[-1].unlink()
    done = run(install, tmp_path)
    assert done.returncode == 1 and f"still to come: {there[-1].name}" in done.stderr
    there[-1].write_bytes(last[:-1] + b"?")
    done = run(install, tmp_path)
    assert done.returncode == 1 and f"{there[-1].name} is not as it was packed" in done.stderr
    there[-1].write_bytes(last)
    done = run(install, tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path.name: path.read_bytes() for path in (tmp_path / "site").iterdir()} == {
        path.name: path.read_bytes() for path in site.iterdir()
    }


@pytest.mark.campaign
def test_the_environment_of_a_bare_machine_is_packed_for_its_python(tmp_path: Path) -> None:
    (tmp_path / "there.txt").write_text("omegaconf==2.3.1\n")
    words = "--without PyYAML --drop hydra/grammar -- hydra-core==1.3.8"
    done = run(f"bare_machine pack --to {{0}}/pieces --there {{0}}/there.txt {words}", tmp_path)
    if done.returncode and any(word in done.stderr for word in OFFLINE):
        pytest.skip("needs a package index, and none can be reached")
    assert done.returncode == 0, done.stderr
    done = run("bare_machine install --from {0}/pieces --to {0}/site", tmp_path)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    # The ANTLR runtime is published as source only.
    assert (site / "antlr4").is_dir() and (site / "hydra" / "main.py").is_file()
    assert not any((site / name).exists() for name in ("omegaconf", "yaml", "hydra/grammar"))


@pytest.mark.campaign
def test_the_main_job_of_a_bare_machine_learns_on_random_weights(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "12+7=", "answer": "#### 19"}\n' * 40)
    words = "actor_rollout_ref.rollout.name=hf trainer.val_before_train=false actor_rollout_ref.actor.optim.lr=3e-3"
    done = run(f"bare_machine run --tiny --out {{0}}/out --rows {{0}}/rows.jsonl --steps 12 -- {words}", tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "reward 0." in done.stdout


@pytest.mark.campaign
@pytest.mark.skipif(UV is None, reason="needs uv, which is not installed")
def test_an_installer_other_than_that_of_the_lock_finds_versions_for_all_packages_of_a_gpu_machine(tmp_path: Path) -> None:
    command = [str(UV), "pip", "compile", str(ROOT / "pyproject.toml"), "--extra", "gpu", "--quiet", "--no-header"]
    done = subprocess.run([*command, "--output-file", str(tmp_path / "gpu.txt")], capture_output=True, text=True, timeout=240)
    if done.returncode and any(words in done.stderr for words in OFFLINE):
        pytest.skip("needs a package index, and none can be reached")
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "gpu.txt").read_text().splitlines()
    versions = dict(line.split(";")[0].strip().split("==") for line in lines if "==" in line)
    pinned = {"vllm": "0.32.0", "torch": "2.13.0", "transformers": "5.19.0", "ray": "2.60.0"}
    assert {name: versions.get(name) for name in pinned} == pinned
    assert any(name.startswith("nvidia-") for name in versions), "these are the builds for CUDA"
