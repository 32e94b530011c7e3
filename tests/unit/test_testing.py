"""`grpo_rl.testing`: the roles of a run in this process, by which users test loops and functions, and these tests too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_rl import testing
from grpo_rl.errors import ConfigError
from grpo_rl.run_folder import Run
from grpo_rl.schedules import asynchronous, one_step_off, sync
from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.types import Prompt

GRPO = "recipe=arithmetic/grpo"


def alternating(prompt: Prompt, sample: int) -> str:
    """Every other response is right."""
    return str(prompt.ground_truth) if sample % 2 == 0 else "no idea"


def learnt(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run that do not measure time or memory."""
    rows = read_metrics(folder / "metrics.jsonl")
    return [{name: row[name] for name in row if not name.startswith(("time", "timing_s", "perf"))} for row in rows]


def test_a_loop_trains_a_model_whose_engine_gets_its_weights() -> None:
    with testing.session(GRPO) as s:
        sync.train(s)
        assert (s.step, s.version, s.engine_version) == (2, 2, 1)
        folder = s.output.run_dir.path
        metrics = Run(folder).metrics()
        assert list(metrics.index) == [1, 2] and (metrics["rollout/logprob_diff_max"] < 1e-4).all()
    assert not folder.exists() and not torch.distributed.is_initialized()


def test_answers_that_a_test_gives_have_the_rewards_that_it_expects() -> None:
    with testing.session(GRPO, answers=alternating) as s:
        for step in s.steps():
            s.sync_weights()
            rollouts = s.score(s.sample(s.next_prompts()))
            assert [rollout.reward for rollout in rollouts] == [1.0, 0.0, 1.0, 0.0] * 4
            batch = s.advantages(s.logprobs(s.batch(s.select(rollouts))))
            # The sample standard deviation of 1 0 1 0 is sqrt(1/3).
            advantages_N = batch.advantages_N
            assert advantages_N is not None
            assert advantages_N.tolist() == pytest.approx([0.75**0.5, -(0.75**0.5)] * 8, rel=1e-5)
            step.log(s.update(batch))
        assert s.version == 2


def test_a_response_gets_a_token_of_the_present_weights_at_each_look_and_so_many_while_a_batch_is_trained() -> None:
    words = ("trainer.schedule=async", "data.train_batch_size=1", "actor_rollout_ref.rollout.n=2")
    versions = []
    with testing.session(
        GRPO,
        *words,
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",
        answers=lambda *_: "1234567",
        slots=2,
        tokens_per_update=3,
    ) as s:
        for step in s.steps():
            s.sync_weights()
            s.submit(2)
            rollouts = s.completed()
            versions.append([rollout.versions for rollout in rollouts])
            step.log(s.train_beside_sampling(s.select(s.score(rollouts))))
    # Seven digits and the end. Both groups are asked for at first, and the first one has both slots until it has ended.
    assert versions == [[((0, 8),)] * 2, [((0, 3), (1, 5))] * 2]


@pytest.mark.parametrize(
    ("words", "train", "metric"),
    [
        (("algorithm.adv_estimator=gae",), sync.train, "critic/vf_loss"),
        (("algorithm.adv_estimator=remax", "actor_rollout_ref.actor.use_kl_loss=true"), sync.train, "actor/kl_loss"),
        (("trainer.schedule=one_step_off",), one_step_off.train, "staleness/max"),
        (("trainer.schedule=async",), asynchronous.train, "staleness/max"),
    ],
    ids=["critic", "reference", "one_step_off", "async"],
)
def test_every_role_and_schedule_works_in_one_process(words: tuple[str, ...], train: Any, metric: str) -> None:
    with testing.session(GRPO, *words, "trainer.total_training_steps=3", answers=alternating) as s:
        train(s)
        rows = read_metrics(s.output.run_dir.metrics_file)
        assert s.version == 3 and all(metric in row for row in rows[-3:])


def test_a_named_run_goes_on_from_its_checkpoint_to_the_same_numbers(tmp_path: Path) -> None:
    words = (GRPO, "trainer.total_training_steps=4", "trainer.save_freq=2")
    with testing.session(*words, "trainer.experiment_name=whole", folder=tmp_path) as s:
        sync.train(s)
    for _ in range(2):
        with testing.session(*words, "trainer.experiment_name=halves", folder=tmp_path) as s:
            for step in s.steps():
                s.sync_weights()
                step.log(s.train(s.select(s.score(s.sample(s.next_prompts())))))
                if step.number == 2:
                    break
            sync_step = s.step
        assert sync_step in (2, 4)
    assert learnt(tmp_path / "halves") == learnt(tmp_path / "whole")


def test_what_needs_several_processes_is_refused() -> None:
    words = (GRPO, "trainer.n_gpus_per_node=2")
    with pytest.raises(ConfigError, match="the words ask for several of actor"), testing.session(*words):
        pass
