"""Run folders for tests of the commands, written by the program's own writers and without a training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from grpo_rl.config.compose import compose
from grpo_rl.telemetry.metrics.metrics_file import MetricsFile
from grpo_rl.telemetry.rollouts.rollout_log import write_rollouts
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.telemetry.status import Status
from grpo_rl.types import Prompt, Rollout


def rollout(row: int, reward: float, *, sample: int = 0, text: str = "3", kind: str = "val") -> Rollout:
    prompt_text = f"{row}+1="  # a token for each character, as the embedded tokenizer has it
    prompt = Prompt(f"{kind}-{row}", [1] * len(prompt_text), prompt_text, "arithmetic", ground_truth=str(row + 1))
    return Rollout(
        prompt, sample, [3, 4], [-0.1, -0.2], "stop", ((1, 2),), text=text, reward=reward, reward_parts={"acc": reward}
    )


def make_run(
    base: Path,
    name: str,
    *words: str,
    rewards: Sequence[float] = (0.1, 0.2, 0.3),
    solved: Sequence[int] = (0, 1),
    num_prompts: int = 20,
    tokens: float = 100.0,
    state: str = "done",
) -> Path:
    """A run of so many steps, validated at the last one, which solved the prompts of these rows."""
    run_dir = RunDir.create(base, name)
    composed = compose([*words, f"trainer.default_local_dir={base}", f"trainer.experiment_name={name}"])
    run_dir.write_config(composed.yaml(), composed.overrides)
    metrics = MetricsFile(run_dir.metrics_file)
    metrics.log(0, {"val/arithmetic/mean@1": 0.05, "timing_s/testing": 1.0})
    for step, reward in enumerate(rewards, start=1):
        row = {"reward/mean": reward, "response_length/mean": 2.0, "perf/total_num_tokens": tokens, "timing_s/step": 2.0}
        if step == len(rewards):
            row["val/arithmetic/mean@1"] = len(solved) / num_prompts
        metrics.log(step, row)
        write_rollouts(run_dir.rollouts / f"step_{step}.jsonl", [rollout(row, reward, kind="row") for row in range(4)])
    metrics.close()
    validated = [rollout(row, float(row in solved)) for row in range(num_prompts)]
    write_rollouts(run_dir.val / f"step_{len(rewards)}.jsonl", validated)
    status = Status(run_dir.status_file)
    status.update(step=len(rewards), total=10, phase="gen", last_commit=2)
    if state == "done":
        status.end()
    elif state == "failed":
        from grpo_rl.errors import DataError

        status.end(DataError("rows.jsonl, line 3: no prompt"))
    else:
        wait_until_written(status)
    run_dir.release()
    return run_dir.path


def wait_until_written(status: Status) -> None:
    """Wait until the newest version of a status is on the disk."""
    with status._changed:
        assert status._changed.wait_for(lambda: status._written >= status._version, timeout=10)
