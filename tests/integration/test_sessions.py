"""Sessions in the calling process, with real Ray and FSDP2: they give the metrics of the command, at once and one after the other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from whole_runs import without_ray

import grpo_rl
from grpo_rl import testing
from grpo_rl.errors import ConfigError
from grpo_rl.models import builtin
from grpo_rl.schedules import sync
from grpo_rl.telemetry.metrics.metrics_file import read_metrics

WORDS = (
    "recipe=arithmetic/grpo",
    "data.train_files=task:arithmetic?num_rows=64",
    "data.train_batch_size=8",
    "data.val_files=[]",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.use_kl_loss=false",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.name=hf",
    # Each role has one thread: sums depend on their number.
    "ray_kwargs.ray_init.num_cpus=1",
    "trainer.device=cpu",
    "trainer.n_gpus_per_node=1",
    "trainer.total_training_steps=2",
    "trainer.test_freq=-1",
)
LOOP = """
import sys

from omegaconf import OmegaConf

import grpo_rl
from grpo_rl.config.compose import compose

def train(*sessions):
    for steps in zip(*(s.steps() for s in sessions), strict=True):
        for s in sessions:
            s.sync_weights()
        for s, step in zip(sessions, steps):
            if trained := s.select(s.score(s.sample(s.next_prompts()))):
                step.log(s.update(s.advantages(s.values(s.logprobs(s.batch(trained))))))

if __name__ == "__main__":
    words = sys.argv[1:]
    composed = OmegaConf.create(compose(words).yaml())
    with (
        grpo_rl.session(*words, "trainer.experiment_name=first") as first,
        grpo_rl.session(composed, "trainer.experiment_name=beside") as beside,
    ):
        try:
            with grpo_rl.session(*words, "ray_kwargs.ray_init.num_cpus=3"):
                raise AssertionError("two clusters")
        except grpo_rl.errors.ConfigError as error:
            print(error)
        train(first, beside)
    with grpo_rl.session(*words, "trainer.experiment_name=afterwards") as session:
        train(session)
"""


def learnt(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run that do not measure time or memory."""
    rows = read_metrics(run / "metrics.jsonl")
    return [
        {name: value for name, value in row.items() if not name.startswith(("time", "timing_s", "perf", "plan"))}
        for row in rows
    ]


@pytest.mark.timeout(600)
def test_sessions_of_words_and_of_a_configuration_the_command_and_a_session_without_ray_give_the_same_metrics(
    tmp_path: Path,
) -> None:
    (tmp_path / "my_loop.py").write_text(LOOP)
    model = builtin.build("builtin:arithmetic", tmp_path / "random")
    words = [*WORDS, f"actor_rollout_ref.model.path={model}", f"trainer.default_local_dir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "my_loop.py", *words], cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "another session is open in this process with other values" in done.stdout
    command = [
        sys.executable,
        "-m",
        "grpo_rl.main",
        *words,
        "trainer.schedule=my_loop.py:train",
        "trainer.experiment_name=command",
    ]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    with testing.session(*words, "trainer.experiment_name=without_ray") as session:
        sync.train(session)
    first, *others = (learnt(tmp_path / name) for name in ("first", "beside", "afterwards", "command", "without_ray"))
    assert len(first) == 2 and all(other == first for other in others)
    assert (tmp_path / "beside" / "model" / "config.json").is_file()


EXAMPLES = Path(grpo_rl.__file__).parents[1] / "examples"


SMALL = ("data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16")


def test_rows_by_pass_rate_and_the_best_of_eight_are_learnt(tmp_path: Path) -> None:
    run = without_ray(
        sync.train,
        tmp_path,
        "example",
        *WORDS,
        *SMALL,
        f"data.curriculum={EXAMPLES / 'by_pass_rate.py'}:next_rows",
        f"actor_rollout_ref.rollout.function={EXAMPLES / 'best_of_n.py'}:play",
        "algorithm.adv_estimator=rft",
        "reward.functions=[my_reward.py:odd]",
        "actor_rollout_ref.actor.policy_loss.loss_mode=reinforce",
        "trainer.save_at_end=true",
    )
    uids = [record["uid"] for step in (1, 2) for record in run.rollouts(step)]
    assert [uid.partition("-")[0] for uid in uids] == [f"s{number}" for number in range(32)]
    # Half of the responses earn 1, and the best of eight nearly always.
    assert all(row["reward/mean"] > 0.9 and row["actor/grad_norm"] > 0 for row in run.steps.values())
    state = json.loads((run.path / "checkpoints" / "step_2" / "trainer.json").read_text())
    assert state["sampler"]["num_named"] == 32 and len(state["sampler"]["pass_rates"]) == len(
        {uid.partition("-")[2] for uid in uids}
    )


def test_two_turns_are_one_rollout_whose_answers_alone_are_trained(tmp_path: Path) -> None:
    function = f"actor_rollout_ref.rollout.function={EXAMPLES / 'self_correction.py'}:play"
    words = [*WORDS, *SMALL, function, "data.max_response_length=24", "reward.functions=[my_reward.py:variety]"]
    run = without_ray(sync.train, tmp_path, "example", *words)
    assert sorted(run.steps) == [1, 2]
    for step, row in run.steps.items():
        assert row["episode/turns"] == 2 and row["episode/context_token_fraction"] > 0.2
        # The trainer finds the engine's log-probs of the second turn: its context is that of the sampling, token for token.
        assert row["rollout/logprob_diff_max"] < 1e-4 and row["actor/grad_norm"] > 0
        assert len(run.rollouts(step)) == 16 * 4


def test_words_that_cannot_be_run_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="the loop over a session is the schedule"), grpo_rl.session("trainer.schedule=async"):
        pass
    with pytest.raises(ConfigError, match=r"data\.trainbatch"), grpo_rl.session("data.trainbatch=4"):
        pass
