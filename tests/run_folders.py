"""Folders of runs for tests, written by the program's own writers and without a training."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from grpo_rl.config.compose import compose
from grpo_rl.models.builtin import build_tokenizer
from grpo_rl.telemetry.metrics.metrics_file import MetricsFile
from grpo_rl.telemetry.metrics.timeline import Timeline
from grpo_rl.telemetry.rollout_log import write_rollouts
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.types import Ending, Episode, PlayedTurn, Prompt, Rollout

PLAN = """plan: recipe arithmetic/grpo
  model        builtin:arithmetic
  data         task:arithmetic?split=train: 8,192 rows
objective
  A            = (R - mean(R of group)) / (std(R of group) + 1e-06)  [grpo]
  loss         = avg(pg) + 0.001·avg(KL)
  pg           = max(-A r, -A clip(r, 0.8, 1.2)), at most -3 A where A < 0;
                 r = π / π_old
notes
  - nothing
"""
Text = Callable[[int, int, int], str]


def answer(step: int, row: int, sample: int) -> str:
    """Return the response to a row at a step: right more often as the steps go by."""
    return str(2 * row if random.Random(step * 7919 + row * 31 + sample).random() < 0.2 + 0.07 * step else 2 * row + 1)


def group(step: int, row: int, size: int, text: Text = answer) -> list[Rollout]:
    """Return the responses to one row: one for each sample, with the reward of a right answer."""
    prompt = Prompt(f"e0-r{row}", (1, 2, 3), f"<|user|>{row}+{row}=<|assistant|>", "arithmetic", str(2 * row))
    rollouts = []
    for sample in range(size):
        response = text(step, row, sample)
        reward = float(response == str(2 * row))
        rollouts.append(
            Rollout(prompt, sample, (4, 5, 6), (-0.1, -2.0, -0.01), "stop", ((step, 3),), response, reward, {"acc": reward})
        )
    return rollouts


def make_run(
    base: Path,
    name: str = "a_run",
    *words: str,
    recipe: str = "arithmetic/grpo",
    num_steps: int = 8,
    rows: int = 6,
    size: int = 4,
    text: Text = answer,
    **status: object,
) -> Path:
    """Write the folder of a run with metrics, rollouts of training and validation, timeline, plan, status and configuration."""
    run_dir = RunDir.create(base, name)
    composed = compose([f"recipe={recipe}", f"trainer.default_local_dir={base}", f"trainer.experiment_name={name}", *words])
    run_dir.write_config(composed.yaml(), composed.overrides)
    run_dir.plan_file.write_text(PLAN, encoding="utf-8")
    metrics, timeline = MetricsFile(run_dir.metrics_file), Timeline(run_dir.timeline_file)
    for step in range(num_steps + 1):
        numbers: dict[str, float] = {}
        if step:
            rollouts = [one for row in range(rows) for one in group(step, row, size, text)]
            write_rollouts(run_dir.rollouts / f"step_{step}.jsonl", rollouts, [0.5] * len(rollouts))
            mean = sum(one.reward or 0.0 for one in rollouts) / len(rollouts)
            numbers |= {"reward/mean": mean, "actor/kl_loss": 0.01 * step, "perf/total_num_tokens": 100.0}
            numbers |= {"timing_s/step": 2.0, "timing_s/gen": 1.0, "timing_s/update_actor": 0.8, "actor/grad_norm": 1.0}
            for role, what, start, end in (("rollout", "gen", 0.0, 1.0), ("actor", "update_actor", 1.1, 1.9)):
                timeline.record(role, what, 2.0 * step + start, 2.0 * step + end, step)  # type: ignore[arg-type]
            timeline.record("step", "step", 2.0 * step, 2.0 * step + 2.0, step)
        if step % 4 == 0:
            validated = [one for row in range(100, 100 + rows) for one in group(step, row, 1, text)]
            write_rollouts(run_dir.val / f"step_{step}.jsonl", validated)
            numbers["val/arithmetic/mean@1"] = sum(one.reward or 0.0 for one in validated) / len(validated)
        metrics.log(step, numbers)
    metrics.close()
    timeline.write()
    noted = {"state": "done", "phase": "end", "step": num_steps, "total": num_steps, "last_commit": 4, "host": "elsewhere"}
    run_dir.status_file.write_text(json.dumps(noted | status), encoding="utf-8")
    run_dir.release()
    return run_dir.path


def episode(row: int, sample: int, said: Sequence[str], heard: Sequence[str], *, ended: Ending = "done") -> Rollout:
    """Return an episode in which the policy said one thing after the other, and heard an answer of a tool after each but the last."""
    tokenizer = build_tokenizer(128)
    ids: list[int] = []
    turns, messages = [], []
    for number, text in enumerate(said):
        turn = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        turns.append(PlayedTurn(len(ids), len(turn), reward=float(number)))
        messages.append({"role": "assistant", "content": text})
        ids += turn
        if number < len(heard):
            messages.append({"role": "tool", "name": "calculator", "content": heard[number]})
            ids += tokenizer(f"<|user|>{heard[number]}<|assistant|>")["input_ids"]
    sampled = {place for turn in turns for place in range(turn.start, turn.end)}
    logprobs = [-0.1 * (1 + place % 30) if place in sampled else 0.0 for place in range(len(ids))]
    prompt = Prompt(f"e0-r{row}", (1, 2, 3), f"<|user|>{row}*{row}=<|assistant|>", "calculator", str(row * row))
    counts = {"tool_calls": float(len(heard)), "failed_calls": 0.0}
    played = Episode(tuple(turns), tuple(messages), ended, counts, (0.3, 0.2), {"solved": 1.0})
    reward = sum(turn.reward or 0.0 for turn in turns)
    return Rollout(
        prompt, sample, ids, logprobs, "stop", ((1, len(sampled)),), "\n\n".join(said), reward, {"environment": reward},
        episode=played,
    )  # fmt: skip
