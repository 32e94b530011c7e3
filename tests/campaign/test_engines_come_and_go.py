"""Random scripts of engines that join, leave and are killed while a run goes on: weights and responses are those of a run left alone."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from oracles import Training, assert_each_sample_once, state_hash

from grpo_rl.__main__ import main
from grpo_rl.telemetry.metrics.timeline import read_timeline
from grpo_rl.telemetry.rollout_log import read_rollouts

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(1800)]
STEPS, BATCH_SIZE, SAMPLES, STALENESS = 16, 16, 8, 2
END_S = 900.0
SERVES_S = 30.0
POLICY = "actor_rollout_ref"
CONTENT = ("uid", "sample", "prompt", "response", "reward", "advantage", "response_length")
WORDS = [
    "recipe=arithmetic/grpo",
    f"data.train_batch_size={BATCH_SIZE}",
    f"{POLICY}.actor.ppo_mini_batch_size={BATCH_SIZE}",
    f"{POLICY}.rollout.n={SAMPLES}",
    f"{POLICY}.rollout.nnodes=1",
    f"{POLICY}.rollout.n_gpus_per_node=2",
    f"{POLICY}.rollout.max_num_seqs=16",
    f"{POLICY}.rollout.min_replicas=1",
    f"{POLICY}.rollout.max_replicas=3",
    f"trainer.total_training_steps={STEPS}",
    f"trainer.save_freq={STEPS}",
    "trainer.max_restarts=100",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.export_at_end=false",
    "trainer.page_freq=-1",
]
ENGINES = {
    "hf": [f"{POLICY}.rollout.name=hf"],
    "vllm": [f"{POLICY}.rollout.name=vllm", f"{POLICY}.rollout.kv_cache_gib=0.1"],
}
ASYNC = ["trainer.schedule=async", f"trainer.asynchronous.max_staleness={STALENESS}"]


def responses(run: Path) -> str:
    """SHA-256 of what was sampled and how it was rewarded, step by step."""
    digest = hashlib.sha256()
    for step in range(1, STEPS + 1):
        rows = sorted(read_rollouts(run / "rollouts" / f"step_{step}.jsonl"), key=lambda row: (row["uid"], row["sample"]))
        digest.update(json.dumps([[row.get(name) for name in CONTENT] for row in rows]).encode())
    return digest.hexdigest()


def disturb(run: Training, dice: random.Random) -> Counter[str]:
    """Let engines join and leave, and kill some, at random moments until the run ends; return how often each was done."""
    done: Counter[str] = Counter()
    assert run.process is not None
    run.until(lambda status: bool(status.get("engines")) and status["step"] >= 1, END_S)
    while run.process.poll() is None and run.status.get("state") == "running":
        act = dice.choice(("add", "remove", "kill"))
        if act == "kill":
            workers = [pid for name, pid in run.status.get("workers", {}).items() if name.startswith("rollout") and pid]
            with suppress(OSError, IndexError):
                os.kill(dice.choice(workers), signal.SIGKILL)
                done[act] += 1
        elif main(["engines", str(run.path), f"--{act}", "1"]) == 0:
            done[act] += 1
        time.sleep(dice.uniform(0.0, 2.0))
    return done


@pytest.fixture(scope="module", params=sorted(ENGINES))
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """The run of each engine that nobody disturbs."""
    run = Training(tmp_path_factory.mktemp(f"alone_{request.param}"), request.param, [*WORDS, *ENGINES[request.param]]).start()
    try:
        assert run.wait(END_S) == 0, run.describe()
        yield run
    finally:
        run.end()


@pytest.mark.parametrize("seed", range(20))
def test_no_bit_depends_on_which_engines_there_are(alone, seed, tmp_path, record_property):
    run = Training(tmp_path, f"{alone.name}_{seed}", [*WORDS, *ENGINES[alone.name]]).start()
    try:
        done = disturb(run, random.Random(seed))
        assert run.wait(END_S) == 0, run.describe()
    finally:
        run.end()
    print(f"MEASURED {run.name}: {dict(done)}")
    assert state_hash(run.path, STEPS) == state_hash(alone.path, STEPS)
    assert responses(run.path) == responses(alone.path)


@pytest.mark.parametrize("seed", range(2))
def test_no_prompt_is_lost_and_none_is_too_old_where_sampling_goes_on_beside_training(seed, tmp_path):
    run = Training(tmp_path, f"async_{seed}", [*WORDS, *ENGINES["hf"], *ASYNC]).start()
    try:
        print(f"MEASURED {run.name}: {dict(disturb(run, random.Random(100 + seed)))}")
        assert run.wait(END_S) == 0, run.describe()
    finally:
        run.end()
    assert_each_sample_once(run.path, STEPS, BATCH_SIZE, SAMPLES, STALENESS)


def test_an_engine_that_joins_serves_soon_and_holds_no_step(tmp_path):
    run = Training(tmp_path, "joins", [*WORDS, *ENGINES["hf"], f"trainer.total_training_steps={4 * STEPS}"]).start()
    try:
        run.until(lambda status: bool(status.get("engines")) and status["step"] >= 2, END_S)
        asked = time.monotonic()
        assert main(["engines", str(run.path), "--add", "1"]) == 0
        before = run.status["step"]
        run.until(lambda status: len(status["engines"]["serving"]) == 3, SERVES_S)
        print(f"MEASURED serves after {time.monotonic() - asked:.1f} s, {run.status['step'] - before} steps meanwhile")
        assert run.wait(END_S) == 0, run.describe()
    finally:
        run.end()
    assert any(one.role == "engines" and one.what == "rollout2 joined" for one in read_timeline(run.path / "timeline.jsonl"))
