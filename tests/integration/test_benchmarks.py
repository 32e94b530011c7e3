"""The scripts that the documents name run to their end at a small size: they use parts of the program that change.

Others have tests of their own in tests/unit: those of gpu_check, track_memory, the documents, setup.sh and submit.sh;
quickstart.sh and test.sh are run by tests/campaign/test_fresh_debian.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import grpo_rl

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
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
    "../examples/train_from_python trainer.total_training_steps=3 trainer.test_freq=-1": "Finished in",
}


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    if "from_python" in command:
        pytest.importorskip("pandas", reason="pandas is not installed: the extra `frames`")
    script, *options = command.format(folder).split()
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS.parent), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
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
