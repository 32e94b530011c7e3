"""A whole run whose second step is traced on one of two ranks: the trace is there, and figures to tune by are in every step."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from whole_runs import RUN_TIMEOUT_S, arithmetic, train

from grpo_rl.models import builtin

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(2 * RUN_TIMEOUT_S)]


def test_a_chosen_step_is_traced_on_a_chosen_rank_and_every_step_is_measured(tmp_path: Path) -> None:
    model = builtin.build("builtin:arithmetic", tmp_path / "model")
    run = train(
        tmp_path,
        "traced",
        *arithmetic(model),
        "actor_rollout_ref.rollout.name=hf",
        "~actor_rollout_ref.rollout.kv_cache_gib",
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
        "trainer.device_tflops=1",
        "global_profiler.tool=torch",
        "global_profiler.steps=[2]",
        "actor_rollout_ref.actor.profiler.enable=true",
        "actor_rollout_ref.actor.profiler.ranks=[1]",
    )
    traces = sorted(str(file.relative_to(run.path)) for file in run.path.rglob("*.json.gz"))
    assert traces == ["profile/step_000002/actor1.update.json.gz"]
    events = json.loads(gzip.decompress((run.path / traces[0]).read_bytes()))["traceEvents"]
    names = {str(event.get("name")) for event in events}
    assert (
        "actor1.update" in names
        and any("Backward" in name for name in names)
        and any("Optimizer.step" in name for name in names)
    )
    for row in run.steps.values():
        phases = sum(seconds for key, seconds in row.items() if key.startswith("timing_s/") and key != "timing_s/step")
        assert 0.8 * row["timing_s/step"] < phases <= 1.01 * row["timing_s/step"], "the phases make the step"
        assert row["perf/throughput"] == pytest.approx(row["perf/total_num_tokens"] / row["timing_s/step"] / 2, rel=0.2)
        assert 0 < row["perf/mfu/actor"] == row["perf/tflops/actor"] < 1
        assert 0 < row["perf/mfu/ref"] < 1
        for role, phase in (("actor", "update"), ("ref", "logprobs"), ("rollout", "sampling")):
            assert 0.05 < row[f"perf/memory/{role}/{phase}/resident_gib"] < 8
