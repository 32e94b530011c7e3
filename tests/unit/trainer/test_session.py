"""Loops of a user's own over the verbs of a session: they give what `trainer.schedule=sync` gives, resume, and say what is wrong."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_sync_trainer import Critic, Policy, make_config, with_loss

from grpo_rl.config.schema.tree import AlgorithmConfig, Config
from grpo_rl.errors import DataError, FunctionError
from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.telemetry.rollout_log import read_rollouts
from grpo_rl.types import Batch, Counts, Metrics

README = (Path(__file__).resolve().parents[3] / "README.md").read_text()
LOOP = re.findall(r"# my_loop.py\n(.*?)\n\nif __name__", README, re.DOTALL)[0].rstrip() + "\n"
Make = Callable[..., Any]


def with_loop(config: Config, folder: Path, text: str = LOOP) -> Config:
    (folder / "my_loop.py").write_text(text)
    return dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, schedule=f"{folder / 'my_loop.py'}:train"))


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if not key.startswith(("time", "timing_s/", "perf/"))} | {"step": row["step"]}
        for row in rows
    ]


FILTER = dataclasses.replace(AlgorithmConfig().filter_groups, enable=True)


@pytest.mark.parametrize(
    ("config", "roles"),
    [
        (make_config(), {"reference": True}),
        (make_config(AlgorithmConfig(adv_estimator="remax")), {}),
        (make_config(AlgorithmConfig(adv_estimator="gae")), {"critic": Critic}),
        (make_config(AlgorithmConfig(filter_groups=FILTER)), {}),
        (make_config(AlgorithmConfig(filter_groups=dataclasses.replace(FILTER, refill=False))), {}),
        (with_loss(make_config(), "dpo"), {"reference": True}),
    ],
    ids=["grpo", "remax", "ppo", "dapo", "filter", "dpo"],
)
def test_the_loop_gives_the_calls_metrics_and_rollouts_of_sync(
    config: Config,
    roles: dict[str, Any],
    make: Make,
    tmp_path: Path,
) -> None:
    results = []
    for settings in (config, with_loop(config, tmp_path)):
        options = {name: value() if callable(value) else value for name, value in roles.items()}
        trainer, policy = make(settings, total_steps=4, rows=12, **options)
        # The first prompt of every second batch is always answered right: its group has no signal.
        policy.is_solved = lambda uid, policy=policy: uid in {batch[0] for batch in policy.prompts[1::2]}
        trainer.fit()
        run_dir = trainer.output.run_dir
        rows = untimed(read_metrics(run_dir.metrics_file))[-5:]
        rollouts = [list(read_rollouts(run_dir.rollouts / f"step_{step}.jsonl")) for step in range(1, 5)]
        results.append((policy.calls, policy.prompts, policy.samplings, rows, rollouts))
    assert results[1] == results[0]
    assert len(results[0][3]) == 5


def test_a_loop_goes_on_from_a_checkpoint_with_its_own_state(make: Make, tmp_path: Path) -> None:
    text = LOOP.replace(
        "        s.sync_weights()", "        s.state.setdefault('seen', []).append(step.number)\n        s.sync_weights()"
    )
    config = with_loop(make_config(save_freq=2), tmp_path, text)
    trainer, policy = make(config, total_steps=5, with_val=False)
    trainer.fit()
    resumed, again = make(config, total_steps=5, with_val=False)
    resumed.resume(trainer.store.folder / "step_2")
    assert resumed.session.state == {"seen": [1, 2]}
    resumed.fit()
    assert again.prompts == policy.prompts[2:] and resumed.session.state == {"seen": [1, 2, 3, 4, 5]}


def test_a_loop_that_is_left_early_keeps_the_step_that_it_had_trained(make: Make, tmp_path: Path) -> None:
    text = LOOP + "            if step.number == 2:\n                break\n"
    trainer, policy = make(with_loop(make_config(save_at_end=True), tmp_path, text), total_steps=9, with_val=False)
    trainer.fit()
    assert policy.calls.count("update") == 2 and trainer.store.steps() == [2]
    assert [row["step"] for row in read_metrics(trainer.output.run_dir.metrics_file)] == [1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("s.update(s.advantages(batch))", "s.update(batch)"), r"update\(\) needs a batch that advantages\(\) has returned"),
        (
            ("step.log(s.update(", "step.log(s.optim_step()) or (s.update("),
            r"optim_step\(\) needs the gradients of forward_backward",
        ),
        (
            ("step.log(s.update(s.advantages(batch)))", "s.forward_backward(batch)"),
            r"forward_backward\(\) needs a batch that adv",
        ),
        (("s.batch(trained)", "s.batch([])"), r"there are no rollouts to train"),
        (("s.logprobs(s.batch(trained))", "s.logprobs(s.batch(trained), of='teacher')"), r"this run has no such role"),
    ],
)
def test_a_verb_in_the_wrong_place_says_what_it_needs_and_names_the_users_line(
    change: tuple[str, str],
    message: str,
    make: Make,
    tmp_path: Path,
) -> None:
    trainer, _ = make(with_loop(make_config(), tmp_path, LOOP.replace(*change)), total_steps=1, with_val=False)
    with pytest.raises(FunctionError, match=message) as raised:
        trainer.fit()
    assert f"my_loop.py, line {1 + LOOP[: LOOP.index(change[0])].count(chr(10))}, in train" in str(raised.value)


def test_an_update_in_parts_takes_one_step_and_says_what_comes_between(make: Make, tmp_path: Path) -> None:
    class InParts(Policy):
        def forward_backward(self, batch: Batch, whole: Counts) -> None:
            self.calls.append(f"{batch.num_rollouts} of {whole.num_sequences}")

        def optim_step(self, whole: Counts) -> Metrics:
            self.version += 1
            return {"actor/loss": 0.0}

    def loop(last: str) -> str:
        lines = ["batch = s.advantages(batch)", "for rows in ([0, 1, 2], [3, 4, 5, 6, 7]):"]
        lines += ["    s.forward_backward(batch.select(rows), batch)", last]
        return LOOP.replace("step.log(s.update(s.advantages(batch)))", ("\n" + 12 * " ").join(lines))

    policy = InParts()
    trainer, _ = make(with_loop(make_config(), tmp_path, loop("step.log(s.optim_step())")), 2, with_val=False, policy=policy)
    trainer.fit()
    assert policy.calls == ["sync", "generate 2x4", "old", "3 of 8", "5 of 8"] * 2 and policy.version == 2
    for last, message in (
        ("s.update(batch)", r"update\(\) after forward_backward\(\): optim_step\(\) takes the step"),
        ("s.forward_backward(batch.select([0]))", r"optim_step\(\) comes between"),
        ("pass", "the step ends with gradients of forward_backward"),
    ):
        folder = tmp_path / last[:8]
        folder.mkdir()
        trainer, _ = make(with_loop(make_config(), folder, loop(last)), 2, with_val=False, policy=InParts())
        with pytest.raises((FunctionError, ValueError), match=message):
            trainer.fit()


def test_a_row_that_cannot_be_used_ends_a_loop_and_what_was_trained_is_saved(make: Make, tmp_path: Path) -> None:
    trainer, policy = make(with_loop(make_config(save_freq=10), tmp_path), total_steps=3, with_val=False)
    sampler = trainer.session.selection.sampler
    draw, count = sampler.next_batch, [0]

    def next_batch() -> Any:
        count[0] += 1
        if count[0] == 3:
            raise DataError("train.jsonl, line 7: broken JSON")
        return draw()

    sampler.next_batch = next_batch
    with pytest.raises(DataError, match="line 7"):
        trainer.fit()
    assert trainer.store.steps() == [2] and isinstance(policy, Policy)


PLAY = """
def play(sampler, prompts):
    sampler.state["calls"] = sampler.state.get("calls", 0) + 1
    first = sampler.sample(prompts, n=2)
    again = sampler.sample([sampler.prompt(prompts[0], prompts[0].text)] if sampler.state["calls"] % 2 else prompts, n=2)
    return sampler.score([*first, *again])


def nothing(sampler, prompts):
    pass
"""


def with_function(config: Config, folder: Path, name: str = "play") -> Config:
    (folder / "my_rollouts.py").write_text(PLAY)
    parts = config.actor_rollout_ref
    rollout = dataclasses.replace(parts.rollout, function=f"{folder / 'my_rollouts.py'}:{name}")
    return dataclasses.replace(config, actor_rollout_ref=dataclasses.replace(parts, rollout=rollout))


def test_rollouts_of_a_users_function_are_scored_once_grouped_by_prompt_and_go_on_after_a_resume(
    make: Make, tmp_path: Path
) -> None:
    config = with_function(make_config(save_freq=2), tmp_path)
    trainer, policy = make(config, total_steps=5, with_val=False)
    waited, wait = list[int](), trainer.roles.rewarder.wait
    trainer.roles.rewarder.wait = lambda rollouts: waited.append(len(rollouts)) or wait(rollouts)
    trainer.fit()
    trainer.roles.rewarder.wait = wait
    assert waited == [6, 0, 8, 0, 6, 0, 8, 0, 6, 0]
    groups = [
        [record["uid"] for record in read_rollouts(trainer.output.run_dir.rollouts / f"step_{step}.jsonl")] for step in (1, 2)
    ]
    first, second = policy.prompts[0]
    assert groups[0] == [first, first, second, second, f"p1.{first}", f"p1.{first}"]
    # The second two responses to a prompt are further ones, with other seeds and numbers.
    assert sorted(groups[1]) == sorted([*policy.prompts[2]] * 4) and policy.samplings[2].seed != policy.samplings[3].seed
    resumed, other = make(config, total_steps=5, with_val=False)
    resumed.resume(trainer.store.folder / "step_2")
    assert resumed.session.sampler.state == {"calls": 2}
    resumed.fit()
    assert other.prompts == policy.prompts[4:] and other.samplings == policy.samplings[4:]


def test_a_function_that_makes_no_rollouts_is_told_what_it_returns(make: Make, tmp_path: Path) -> None:
    trainer, _ = make(with_function(make_config(), tmp_path, "nothing"), total_steps=1, with_val=False)
    with pytest.raises(FunctionError, match=r"my_rollouts.py:nothing returned None; it returns a list of rollouts"):
        trainer.fit()
