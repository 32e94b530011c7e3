"""No secret in anything that a whole run writes: its folder, Ray's folder while it lasts, the screen."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from whole_runs import RUN_TIMEOUT_S, arithmetic, environment_of_user

from grpo_rl.models import builtin

NAMES = ("HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD")
CANARIES = {name: f"canary/{index}+{name.lower()}=" for index, name in enumerate(NAMES)}
CODE = """\
import os, subprocess, sys

from grpo_rl.algos.losses.registered import TokenLoss


def leak(data_source, solution_str, ground_truth, extra_info):
    print(dict(os.environ))
    sys.stderr.write(os.environ["HF_TOKEN"])
    subprocess.run(["env"])
    if len(solution_str) % 2:
        raise RuntimeError("the server refused " + os.environ["OPENAI_API_KEY"] + " " + "x" * 3000 + os.environ["HF_TOKEN"])
    return len(set(solution_str)) / 10


def loud(inputs):
    print(dict(os.environ))
    subprocess.run(["env"])
    loud.calls = getattr(loud, "calls", 0) + (len(inputs.advantages_T) > 64)  # not the small batch of the plan
    if loud.calls > 2:
        raise RuntimeError("401 for " + os.environ["AWS_SECRET_ACCESS_KEY"])
    return TokenLoss(-(inputs.advantages_T * inputs.policy_logprobs_T).double())
"""

pytestmark = pytest.mark.timeout(RUN_TIMEOUT_S)


def holders(folder: Path) -> Iterator[tuple[str, str]]:
    """Files below `folder` with a canary in them, and which."""
    for file in folder.rglob("*"):
        try:
            data = file.read_bytes() if file.is_file() else b""
        except OSError:
            continue
        yield from ((str(file), value) for value in CANARIES.values() if value.encode() in data)


def test_a_run_whose_rewards_and_loss_print_their_environment_and_fail_with_it_writes_no_secret(tmp_path: Path) -> None:
    (tmp_path / "leaks.py").write_text(CODE)
    model = builtin.build("builtin:arithmetic", tmp_path / "model")
    words = arithmetic(
        model,
        *("reward.functions=[leaks.py:leak]", "reward.num_workers=1", "reward.on_failure=drop"),
        "actor_rollout_ref.actor.policy_loss.loss_mode=leaks.py:loud",
        *("data.system_prompt=${oc.env:DB_PASSWORD}", "data.max_prompt_length=64"),
        *("actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.rollout.kv_cache_gib=1.0"),
        *("trainer.total_training_steps=4", "trainer.save_freq=1", "trainer.val_before_train=false"),
        "actor_rollout_ref.actor.use_kl_loss=false",
        *(f"trainer.default_local_dir={tmp_path / 'runs'}", "trainer.experiment_name=r"),
    )
    run = tmp_path / "runs" / "r"
    seen_by_ray: set[tuple[str, str]] = set()
    environment = environment_of_user() | CANARIES | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-m", "grpo_rl.main", *words],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            while process.poll() is None:
                try:
                    process.wait(2.0)
                except subprocess.TimeoutExpired:
                    if (session := run / "session.json").exists():
                        seen_by_ray |= set(holders(Path(json.loads(session.read_text())["folder"])))
        finally:
            process.kill()
        assert process.stdout is not None
        screen = process.stdout.read()
    assert process.returncode == 5, screen
    assert "401 for <hidden>" in screen
    assert not [value for value in CANARIES.values() if value in screen]
    assert seen_by_ray == set()
    logs = {name: (run / "logs" / f"{name}.log").read_text() for name in ("actor0", "reward-0", "error")}
    assert "<hidden>" in logs["actor0"] and "<hidden>" in logs["reward-0"] and "401 for <hidden>" in logs["error"]
    records = [json.loads(line) for line in (run / "rollouts" / "step_1.jsonl").read_text().splitlines()]
    assert any("the server refused <hidden>" in record.get("failure_cause", "") for record in records)
    assert all("<hidden>" in record["prompt"] for record in records)
    assert (run / "checkpoints" / "step_1").is_dir()
    assert list(holders(tmp_path / "runs")) == []
