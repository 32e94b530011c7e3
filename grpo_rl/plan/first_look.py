"""A look, in seconds, at what usually costs a run and runs all the same: rewards that give a right answer no
more than an empty one, cut prompts, answers longer than responses, too small a disk or memory."""

from __future__ import annotations

import itertools
import mmap
import shutil
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_rl.data.dataset import PromptDataset
from grpo_rl.errors import DataError, RewardError
from grpo_rl.machine_memory import machine_memory
from grpo_rl.plan.decisions import Plan
from grpo_rl.plan.memory import checkpoint_bytes, gib, host_bytes
from grpo_rl.rewards.check import BARE, IN_MARKS, is_structured, right_responses
from grpo_rl.rewards.registry import reads_marks
from grpo_rl.telemetry.terminal.text import safe_text
from grpo_rl.types import Prompt, Rollout

if TYPE_CHECKING:
    from grpo_rl.rewards.runtime.runner import RewardRunner

NUM_ROWS = 8  # whose prompts are rendered and rewards tried
MANY_PASSES, FEW_ROWS = 20, 1000  # after which a policy likely knows the answers by heart
FULL = 0.95  # share of all memory from which on it likely is the cause of a failure
SHOWN = 60


def of_plan(plan: Plan, runs: Path) -> Iterator[str]:
    """Yield warnings of few rows, and of a disk too small for the checkpoints below `runs`."""
    trainer, batch = plan.config.trainer, plan.config.data.train_batch_size
    steps, rows = plan.sizes.total_steps, plan.sizes.num_train_rows
    if not steps:
        return
    if rows and rows < FEW_ROWS and (passes := steps * batch / rows) > MANY_PASSES:
        text = f"{rows:,} rows, {batch:,} in a batch, {steps:,} steps: each row comes {passes:.3g} times"
        yield _line("rows", f"{text}. So few rows are learnt by heart: give more, or fewer steps, and validate on others")
    if trainer.save_freq < 1 and not trainer.save_at_end and not trainer.keep_best:
        return
    number = -(-steps // trainer.save_freq) if trainer.save_freq > 0 else 1
    if trainer.keep_best:
        number += -(-steps // trainer.test_freq) if trainer.max_actor_ckpt_to_keep is None else 1
    if trainer.max_actor_ckpt_to_keep is not None:
        # An old one goes when the new one is there.
        number = min(number, trainer.max_actor_ckpt_to_keep + 1 + trainer.keep_best)
    needed = number * checkpoint_bytes(plan)
    existing = next(path for path in (runs, *runs.parents) if path.exists())
    if needed > (free := shutil.disk_usage(existing).free):
        yield _line(
            "disk",
            f"{number} checkpoints take {gib(needed)}; {gib(free)} are free in {existing}. Set trainer.default_local_dir to a larger "
            "disk, or "
            + ("trainer.max_actor_ckpt_to_keep=2, or raise trainer.save_freq" if number > 1 else "trainer.save_at_end=false"),
        )


def of_prompts(plan: Plan, prompts: Sequence[Prompt], tokenizer: Any) -> Iterator[str]:
    """Yield warnings of cut prompts, and of right answers that do not fit into a response."""
    data = plan.config.data
    lengths = [len(prompt.token_ids) for prompt in prompts]
    if cut := 0 if data.truncation == "error" else sum(length >= data.max_prompt_length for length in lengths):
        yield _line(
            "prompts",
            f"{cut} of {len(prompts)} reach data.max_prompt_length={data.max_prompt_length}, and longer ones are cut "
            f"({data.truncation}): {_short(prompts[lengths.index(max(lengths))].text)!r}. Raise it, or leave such rows out: "
            "data.filter_overlong_prompts=true",
        )
    plain = sum(prompt.messages is None for prompt in prompts)
    if plain and (tokenizer.chat_template or data.chat_template) and not plan.plays_episodes:
        yield _line(
            "prompts",
            f"{plain} of {len(prompts)} are plain strings, which the policy continues as they are, without the chat template that the "
            f"tokenizer has: {_short(prompts[0].text)!r}. Give messages ([{{role: user, content: ...}}]) if it should answer them; "
            "supervised fine-tuning on plain strings puts them into the template (docs/data.md)",
        )
    truths = [str(example.ground_truth) for example in prompts if isinstance(example.ground_truth, str | int | float)]
    answers = [len(tokenizer.encode(truth, add_special_tokens=False)) + 1 for truth in truths]
    if too_long := sum(length > data.max_response_length for length in answers):
        yield _line(
            "answers",
            f"{too_long} of {len(answers)} right answers, with the end token, are longer than data.max_response_length="
            f"{data.max_response_length}. Raise it to {max(answers)} at the very least: a response that is cut earns nothing",
        )


def of_memory(plan: Plan) -> Iterator[str]:
    """Yield a warning if all processes on CPUs need more than is free; the plan has a table for GPUs."""
    needed, has = host_bytes(plan), machine_memory()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE  # counted in what is needed
    if needed > (free := min(has.total, has.free + resident)):
        yield _line(
            "memory",
            f"all processes: about {gib(needed)} of {gib(int(free))} free on the {has.owner}, which has {gib(int(has.total))}. Give it "
            "more, or lower actor_rollout_ref.rollout.kv_cache_gib or actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
        )


def lack_of_memory(plan: Plan) -> str:
    """Return that memory is the likely cause of a failure; empty if there is enough."""
    has, needed = machine_memory(), host_bytes(plan)
    if needed <= has.total and has.used_share < FULL:
        return ""
    need = f", and the run needs about {gib(needed)}" if needed else ""
    return f"the likely cause is memory: the {has.owner} has {gib(int(has.total))}{need}"


def some_rows(data: PromptDataset | None) -> list[tuple[Prompt, Mapping[str, Any]]]:
    """Return prompts of usable rows, spread over the data, each with its row as stored."""
    if data is None:
        return []
    places = sorted({place * len(data) // NUM_ROWS for place in range(NUM_ROWS)} if len(data) else ())
    samples = list[tuple[Prompt, Mapping[str, Any]]]()
    for place in places:
        with suppress(DataError):
            if data.usable(place):
                samples.append((data.prompt(place, f"first look, row {place}"), data.as_stored(place)))
    return samples


class RewardTrial:
    """The rewards of some rows' right answers, in each form, beside those of empty ones."""

    def __init__(self, rows: Sequence[tuple[Prompt, Mapping[str, Any]]], rules: RewardRunner, tokenizer: Any) -> None:
        self._rules = rules
        self._empty = [_rollout(prompt, 0, "", tokenizer) for prompt, _ in rows]
        self._forms = defaultdict[str, list[Rollout]](list)
        self._is_clear = False
        for prompt, row in rows:
            source = prompt.data_source
            marked, truth = all(reads_marks(name, source) for name in rules.factors), prompt.ground_truth
            forms = right_responses(row, source, truth, prompt.extra_info, marked_only=marked)
            # From a structured ground truth an answer is made for countdown alone; other forms are worth a
            # try.
            made = is_structured(truth) and (isinstance(truth, str) or IN_MARKS not in forms)
            self._is_clear |= bool(forms.keys() - {IN_MARKS, BARE}) or (bool(forms) and not made)
            for number, (form, text) in enumerate(forms.items(), start=1):
                self._forms[form].append(_rollout(prompt, number, text, tokenizer))
        self._all = [*self._empty, *itertools.chain.from_iterable(self._forms.values())]
        for rollout in self._all:
            rules.submit(rollout)

    def verdict(self) -> tuple[str, bool]:
        """Wait for the scores; return the line about them, and whether it is a warning."""
        if not self._empty:
            return "", False
        with suppress(RewardError):  # failures are reported below
            self._rules.wait(self._all)
        empty = {rollout.prompt.uid: rollout.reward for rollout in self._empty if rollout.reward is not None}
        nones = _range(list(empty.values()))

        def worth(form: str) -> float:
            return sum((rollout.reward or 0.0) - (empty.get(rollout.prompt.uid) or 0.0) for rollout in self._forms[form])

        # The form for which the reward is made: in others a right answer is none.
        form = max(self._forms, key=worth, default="")
        if not form or (not self._is_clear and worth(form) <= 0):
            text = f"no right answer could be made from the ground truth of these rows; an empty one gets {nones}"
            return _line("reward", text), False
        right, tried = self._forms[form], ", ".join(self._forms)
        failed = [rollout for rollout in right if rollout.reward is None]
        if len(failed) * 4 >= len(right):
            cause = (failed[0].failure_cause or failed[0].failure or "no number").splitlines()[0]
            text = f"it fails on {len(failed)} of {len(right)} right answers ({form}): {_short(cause, 160)}"
            return _line("reward", f"{text}. Mend the function: python -m grpo_rl check-reward tries it alone"), True
        scored = [(rollout, rollout.reward) for rollout in right if rollout.reward is not None]
        worse = [rollout for rollout, reward in scored if reward <= empty.get(rollout.prompt.uid, -np.inf)]
        rights = _range([reward for _, reward in scored])
        if 2 * len(worse) < len(scored):
            text = f"tried on {len(scored)} rows: the right answer ({form}) gets {rights}, an empty one {nones}"
            return _line("reward", text), False
        text = (
            f"in {len(worse)} of {len(scored)} rows the right answer gets no more than an empty one ({rights} and {nones}), for "
            f"instance {_short(str(worse[0].text))!r} to {_short(worse[0].prompt.text)!r}. Tried: {tried}. Check reward.functions "
            "and the form of answer that they want: python -m grpo_rl check-reward"
        )
        return _line("reward", text), True


def _line(name: str, text: str) -> str:
    return safe_text(f"{name + ' ':<9}{text}", limit=1000)


def _rollout(prompt: Prompt, index: int, text: str, tokenizer: Any) -> Rollout:
    token_ids = np.asarray(tokenizer.encode(text, add_special_tokens=False) if text else [], dtype=np.int32)
    return Rollout(prompt, index, token_ids, np.zeros(len(token_ids), dtype=np.float32), "stop", (), text)


def _range(values: Sequence[float]) -> str:
    if not values:
        return "none"
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:.3g} to {high:.3g} ({statistics.fmean(values):.3g} on average)"


def _short(text: str, limit: int = SHOWN) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
