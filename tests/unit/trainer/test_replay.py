"""The history of pairs: which are kept, which are learnt again, and that a checkpoint has all of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from grpo_rl.errors import CheckpointError
from grpo_rl.trainer.iterate import FILE, LabelledPair, ReplayHistory
from grpo_rl.types import Prompt, Rollout


def pairs(numbers: range, iteration: int) -> list[LabelledPair]:
    def side(number: int, reward: float) -> Rollout:
        prompt = Prompt(f"p{number}", (1, number + 2), "", "test")
        answer = (5, 6 + int(reward))
        return Rollout(prompt, 0, answer, (0.0, 0.0), "stop", ((0, 2),), text="sums to 4: \u2713\ud800", reward=reward)

    return [LabelledPair.of(side(number, 1.0), side(number, 0.0), iteration, number) for number in numbers]


def filled(capacity: int = 100, share: float = 0.1, seed: int = 1) -> ReplayHistory:
    history = ReplayHistory(capacity, share, seed)
    history.add(pairs(range(30), 1), 1)
    history.add(pairs(range(30, 50), 2), 2)
    return history


@pytest.mark.parametrize("num_new", [3, 8, 9, 90])
@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_the_replayed_pairs_are_their_share_of_all_batches_together_however_small_one_is(num_new, share):
    history = ReplayHistory(1000, share, seed=1)
    history.add(pairs(range(900), 1), 1)
    new = replayed = 0
    for step in range(40):
        chosen = history.draw(num_new, 2, step)
        assert all(pair.iteration == 1 for pair in chosen)
        history.add(pairs(range(900, 900 + num_new), 2), 2)
        new, replayed = new + num_new, replayed + len(chosen)
        due = new * share / (1 - share)
        assert due - 1 < replayed <= due + 1e-9, "never a whole pair behind"
    assert replayed / (new + replayed) == pytest.approx(share, abs=1 / (new + replayed))


def test_a_full_history_is_an_even_sample_of_all_pairs_that_were_made():
    counts: Counter[int] = Counter()
    for seed in range(200):
        history = ReplayHistory(20, 0.1, seed)
        for iteration in range(1, 5):
            history.add(pairs(range(25 * iteration - 25, 25 * iteration), iteration), iteration)
        assert len(history.pairs) == 20 and history.num_seen == 100
        assert [pair.number for pair in history.pairs] == sorted(pair.number for pair in history.pairs)
        counts.update(pair.iteration for pair in history.pairs)
    # 1,000 each are expected, with a standard deviation of about 25 (hypergeometric, 200 draws of 20 of 100).
    assert all(abs(counts[iteration] - 1000) < 120 for iteration in range(1, 5)), counts


def test_a_history_that_was_saved_goes_on_as_if_nothing_had_been(tmp_path: Path):
    history, again = filled(capacity=40, share=0.3), ReplayHistory(40, 0.3, seed=1)
    history.draw(8, 3, 1)
    history.add(pairs(range(50, 58), 3), 3)
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    assert set(history.save(tmp_path / "one")) == {FILE} == set(history.saved(0.0) or {})
    again.load(tmp_path / "one")
    assert again.num_beside == history.num_beside == 28 and again.num_seen == history.num_seen == 58
    for step in range(2, 6):
        one, other = history.draw(8, 4, step), again.draw(8, 4, step)
        assert [pair.record() for pair in one] == [pair.record() for pair in other]
        for each in (history, again):
            each.add(pairs(range(step * 100, step * 100 + 8), 4), 4)
    assert history.save(tmp_path / "two") == again.save(_folder(tmp_path / "three"))
    assert again.pairs[0].pair.chosen_ids.dtype == np.int32


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_a_checkpoint_without_a_history_or_with_a_broken_one_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"has no replay\.jsonl"):
        filled().load(tmp_path)
    (tmp_path / FILE).write_text('{"num_seen": 1, "num_beside": 0}\n{"number": 0}\n')
    with pytest.raises(CheckpointError, match=r"replay\.jsonl cannot be used: KeyError"):
        filled().load(tmp_path)
