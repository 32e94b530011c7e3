"""Loops of a user's own over the verbs of a session: they give what `trainer.schedule=sync` gives, resume, and say what is wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from real_roles import VALIDATED, MakeRun, half_right, learnt

from grpo_rl.errors import DataError, FunctionError
from grpo_rl.telemetry.rollout_log import read_rollouts
from grpo_rl.types import Prompt

README = (Path(__file__).resolve().parents[3] / "README.md").read_text()
LOOP = re.findall(r"# my_loop.py\n(.*?)\n\nif __name__", README, re.DOTALL)[0].rstrip() + "\n"


def loop_in(folder: Path, text: str = LOOP) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "my_loop.py").write_text(text)
    return f"trainer.schedule={folder / 'my_loop.py'}:train"


FILTER = "algorithm.filter_groups.enable=true"


def mostly_half_right(prompt: Prompt, sample: int) -> str:
    """Every third prompt is always answered right: its group has no signal."""
    answer = str(prompt.ground_truth)
    return answer if int(answer) % 3 == 0 else half_right(prompt, sample)


@pytest.mark.parametrize(
    "words",
    [
        ["actor_rollout_ref.actor.use_kl_loss=true"],
        ["algorithm.adv_estimator=remax"],
        ["algorithm.adv_estimator=gae"],
        [FILTER],
        [FILTER, "algorithm.filter_groups.refill=false"],
        ["actor_rollout_ref.actor.policy_loss.loss_mode=dpo"],
    ],
    ids=["grpo", "remax", "ppo", "dapo", "filter", "dpo"],
)
def test_the_loop_gives_the_calls_metrics_and_rollouts_of_sync(words: list[str], make_run: MakeRun, tmp_path: Path) -> None:
    results = []
    for schedule in ("trainer.schedule=sync", loop_in(tmp_path)):
        run, record = make_run(*VALIDATED, *words, schedule, steps=3, rows=12, answers=mostly_half_right)
        run.fit()
        rollouts = [list(read_rollouts(run.output.run_dir.rollouts / f"step_{step}.jsonl")) for step in range(1, 4)]
        results.append((record.calls, record.prompts, record.samplings, learnt(run)[-4:], rollouts))
    assert results[1] == results[0]
    assert [row["step"] for row in results[0][3]] == [0, 1, 2, 3] and results[0][3][-1]["actor/grad_norm"] > 0


def test_a_loop_goes_on_from_a_checkpoint_with_its_own_state(make_run: MakeRun, tmp_path: Path) -> None:
    text = LOOP.replace(
        "        s.sync_weights()", "        s.state.setdefault('seen', []).append(step.number)\n        s.sync_weights()"
    )
    words = (loop_in(tmp_path, text), "trainer.save_freq=2")
    run, record = make_run(*words, steps=5)
    run.fit()
    rows = learnt(run)
    resumed, again = make_run(*words, steps=5)
    resumed.resume(run.store.folder / "step_2")
    assert resumed.session.state == {"seen": [1, 2]}
    resumed.fit()
    assert again.prompts == record.prompts[2:] and learnt(resumed) == rows
    assert resumed.session.state == {"seen": [1, 2, 3, 4, 5]}


def test_a_loop_that_is_left_early_keeps_the_step_that_it_had_trained(make_run: MakeRun, tmp_path: Path) -> None:
    text = LOOP + "            if step.number == 2:\n                break\n"
    run, record = make_run(loop_in(tmp_path, text), "trainer.save_at_end=true", steps=9)
    run.fit()
    assert record.calls.count("update") == 2 and run.store.steps() == [2]
    assert [row["step"] for row in learnt(run)] == [1, 2]


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
    make_run: MakeRun,
    tmp_path: Path,
) -> None:
    run, _ = make_run(loop_in(tmp_path, LOOP.replace(*change)), steps=1)
    with pytest.raises(FunctionError, match=message) as raised:
        run.fit()
    assert f"my_loop.py, line {1 + LOOP[: LOOP.index(change[0])].count(chr(10))}, in train" in str(raised.value)


def test_an_update_in_parts_takes_the_step_of_the_whole_and_says_what_comes_between(make_run: MakeRun, tmp_path: Path) -> None:
    def loop(last: str) -> str:
        lines = ["batch = s.advantages(batch)", "for rows in ([0, 1, 2], [3, 4, 5, 6, 7]):"]
        lines += ["    s.forward_backward(batch.select(rows), batch)", last]
        return LOOP.replace("step.log(s.update(s.advantages(batch)))", ("\n" + 12 * " ").join(lines))

    norms = []
    for name, text in (("whole", LOOP), ("parts", loop("step.log(s.optim_step())"))):
        run, record = make_run(loop_in(tmp_path / name, text), steps=2)
        run.fit()
        norms.append([row["actor/grad_norm"] for row in learnt(run)[-2:]])
    assert record.calls == ["sync", "sample 2x4", "old", "3 of 8", "5 of 8", "step"] * 2 and run.session.version == 2
    assert norms[1] == pytest.approx(norms[0], rel=1e-4) and min(norms[0]) > 0
    for last, message in (
        ("s.update(batch)", r"update\(\) after forward_backward\(\): optim_step\(\) takes the step"),
        ("s.forward_backward(batch.select([0]))", r"optim_step\(\) comes between"),
        ("pass", "the step ends with gradients of forward_backward"),
    ):
        run, _ = make_run(loop_in(tmp_path / last[:8], loop(last)), steps=2)
        with pytest.raises((FunctionError, ValueError), match=message):
            run.fit()


def test_a_row_that_cannot_be_used_ends_a_loop_and_what_was_trained_is_saved(make_run: MakeRun, tmp_path: Path) -> None:
    run, _ = make_run(loop_in(tmp_path), "trainer.save_freq=10", steps=3)
    sampler = run.session.selection.sampler
    draw, count = sampler.next_batch, [0]

    def next_batch() -> Any:
        count[0] += 1
        if count[0] == 3:
            raise DataError("train.jsonl, line 7: broken JSON")
        return draw()

    sampler.next_batch = next_batch
    with pytest.raises(DataError, match="line 7"):
        run.fit()
    assert run.store.steps() == [2]


PLAY = """
def play(sampler, prompts):
    sampler.state["calls"] = sampler.state.get("calls", 0) + 1
    first = sampler.sample(prompts, n=2)
    again = sampler.sample([sampler.prompt(prompts[0], prompts[0].text)] if sampler.state["calls"] % 2 else prompts, n=2)
    return sampler.score([*first, *again])


def nothing(sampler, prompts):
    pass
"""


def function_in(folder: Path, name: str = "play") -> str:
    (folder / "my_rollouts.py").write_text(PLAY)
    return f"actor_rollout_ref.rollout.function={folder / 'my_rollouts.py'}:{name}"


def test_rollouts_of_a_users_function_are_scored_once_grouped_by_prompt_and_go_on_after_a_resume(
    make_run: MakeRun, tmp_path: Path
) -> None:
    words = (function_in(tmp_path), "trainer.save_freq=2")
    run, record = make_run(*words, steps=5)
    waited, wait = list[int](), run.roles.rewarder.wait
    run.roles.rewarder.wait = lambda rollouts: waited.append(len(rollouts)) or wait(rollouts)
    run.fit()
    assert waited == [6, 0, 8, 0, 6, 0, 8, 0, 6, 0]
    groups = [
        [record["uid"] for record in read_rollouts(run.output.run_dir.rollouts / f"step_{step}.jsonl")] for step in (1, 2)
    ]
    first, second = record.prompts[0]
    assert groups[0] == [first, first, second, second, f"p1.{first}", f"p1.{first}"]
    # The second two responses to a prompt are further ones, with other seeds and numbers.
    assert sorted(groups[1]) == sorted([*record.prompts[2]] * 4) and record.samplings[2].seed != record.samplings[3].seed
    resumed, again = make_run(*words, steps=5)
    resumed.resume(run.store.folder / "step_2")
    assert resumed.session.sampler.state == {"calls": 2}
    resumed.fit()
    assert again.prompts == record.prompts[4:] and again.samplings == record.samplings[4:]


def test_a_function_that_makes_no_rollouts_is_told_what_it_returns(make_run: MakeRun, tmp_path: Path) -> None:
    run, _ = make_run(function_in(tmp_path, "nothing"), steps=1)
    with pytest.raises(FunctionError, match=r"my_rollouts.py:nothing returned None; it returns a list of rollouts"):
        run.fit()
