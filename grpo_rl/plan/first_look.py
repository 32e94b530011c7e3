"""A look before the start at what usually costs a run: model, data, prompts, reward, disk and memory, in seconds.

What cannot run at all is refused by the plan. This is about what runs and is in vain: a reward that gives the right answer
no more than an empty one, prompts that are cut, answers that are longer than a response may be, a disk that is too small.
"""

from __future__ import annotations

import mmap
import shutil
import statistics
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from grpo_rl.data.dataset import PromptDataset
from grpo_rl.errors import DataError, RewardError
from grpo_rl.machine_memory import machine_memory
from grpo_rl.plan.decisions import Plan
from grpo_rl.plan.memory import gib, host_bytes
from grpo_rl.rewards.check import gold_response
from grpo_rl.telemetry.terminal.text import safe_text
from grpo_rl.types import Prompt, Rollout

NUM_ROWS = 8
"""The rows whose prompts are rendered, and on which the reward is tried."""
MANY_PASSES, FEW_ROWS = 20, 1000
"""Passes over few rows after which a policy is likely to have learnt their answers by heart."""
TRAINED_BYTES = 12
"""Bytes of a checkpoint per parameter of a trained model: a float32 weight and AdamW's two moments."""
FULL = 0.95
"""The share of all memory from which on a run that fails is likely to fail of it."""
SHOWN = 60


@dataclass(frozen=True, slots=True)
class Sight:
    """One thing that was looked at."""

    name: str
    text: str
    advice: str = ""
    """The change to make; empty where all is well."""

    def as_line(self) -> str:
        """Return it as a line for people."""
        advice = f". {self.advice[:1].upper()}{self.advice[1:]}" if self.advice else ""
        return safe_text(f"{self.name + ' ':<9}{self.text}{advice}", limit=1000)


class Scores(Protocol):
    """The reward processes of a run, as far as they score rollouts."""

    def submit(self, rollout: Rollout) -> None:
        """Begin to score this rollout."""

    def wait(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return the rollouts with their rewards, or with the reason why one has none."""


def of_plan(plan: Plan, runs: Path) -> list[Sight]:
    """Return what the plan alone shows; checkpoints will lie below the folder `runs`."""
    return [*_rows(plan), *_disk(plan, runs)]


def of_prompts(plan: Plan, prompts: Sequence[Prompt], tokenizer: Any) -> list[Sight]:
    """Return how the first prompts look as the model reads them, and whether their answers fit into a response."""
    if not prompts:
        return []
    data = plan.config.data
    lengths = [len(prompt.token_ids) for prompt in prompts]
    cut = 0 if data.truncation == "error" else sum(length >= data.max_prompt_length for length in lengths)
    shown = f"at most {max(lengths)} tokens of {data.max_prompt_length}: {_short(prompts[0].text)!r}"
    sights = [
        Sight("prompts", shown)
        if not cut
        else Sight(
            "prompts",
            f"{cut} of {len(prompts)} reach data.max_prompt_length={data.max_prompt_length}, and longer ones are cut "
            f"({data.truncation}): {_short(prompts[lengths.index(max(lengths))].text)!r}",
            "raise it, or leave such rows out: data.filter_overlong_prompts=true",
        )
    ]
    answers = [
        _length(tokenizer, str(one.ground_truth)) + 1 for one in prompts if isinstance(one.ground_truth, str | int | float)
    ]
    too_long = sum(length > data.max_response_length for length in answers)
    if too_long:
        sights.append(
            Sight(
                "answers",
                f"{too_long} of {len(answers)} right answers, with the end token, are longer than data.max_response_length="
                f"{data.max_response_length}",
                f"raise it to {max(answers)} at the very least: a response that is cut earns nothing",
            )
        )
    return sights


def some_prompts(data: PromptDataset | None, number: int = NUM_ROWS) -> list[Prompt]:
    """Return prompts of some usable rows, spread evenly over the data."""
    if data is None:
        return []
    places = sorted({place * len(data) // number for place in range(number)} if len(data) else ())
    found = []
    for place in places:
        with suppress(DataError):
            if data.usable(place):
                found.append(data.prompt(place, f"first look, row {place}"))
    return found


class RewardTrial:
    """The reward of some rows' right answers beside that of empty ones. It is scored in the background once this is made."""

    def __init__(self, prompts: Sequence[Prompt], rules: Scores, tokenizer: Any) -> None:
        self._rules = rules
        self._empty = [_rollout(prompt, 0, "", tokenizer) for prompt in prompts]
        golds = [(prompt, _right_answer(prompt)) for prompt in prompts]
        self._right = [_rollout(prompt, 1, gold, tokenizer) for prompt, gold in golds if gold is not None]
        for rollout in (*self._right, *self._empty):
            rules.submit(rollout)

    def sights(self) -> list[Sight]:
        """Wait for the scores, and return what they say; nothing without a row."""
        if not self._empty:
            return []
        with suppress(RewardError):  # what becomes of a failed reward is for the training; here it is said
            self._rules.wait([*self._right, *self._empty])
        if not self._right:
            empty = _range([one.reward for one in self._empty if one.reward is not None])
            text = f"no right answer could be made from the ground truth of these rows; an empty one gets {empty}"
            return [Sight("reward", text)]
        failed = [one for one in self._right if one.reward is None]
        if len(failed) * 4 >= len(self._right):
            cause = (failed[0].failure_cause or failed[0].failure or "no number").splitlines()[0]
            text = f"it fails on {len(failed)} of {len(self._right)} right answers: {_short(cause, 160)}"
            return [Sight("reward", text, "mend the function: python -m grpo_rl check-reward tries it alone")]
        return [self._compared()]

    def _compared(self) -> Sight:
        """Return how the right answers compare with the empty ones of the same rows."""
        empty = {one.prompt.uid: one.reward for one in self._empty}
        pairs = [(one, one.reward, empty[one.prompt.uid]) for one in self._right if one.reward is not None]
        worse = [(one, right, none) for one, right, none in pairs if none is not None and right <= none]
        rights, nones = _range([right for _, right, _ in pairs]), _range([none for *_, none in pairs if none is not None])
        if 2 * len(worse) < len(pairs):
            return Sight("reward", f"tried on {len(pairs)} rows: the right answer gets {rights}, an empty one {nones}")
        one = worse[0][0]
        text = (
            f"in {len(worse)} of {len(pairs)} rows the right answer gets no more than an empty one ({rights} and {nones}), for "
            f"instance {_short(str(one.text))!r} to {_short(one.prompt.text)!r}"
        )
        return Sight(
            "reward", text, "check reward.functions and the form of answer that they want: python -m grpo_rl check-reward"
        )


# ---- parts ---------------------------------------------------------------------------------------------------


def _rows(plan: Plan) -> Iterator[Sight]:
    sizes, batch = plan.sizes, plan.config.data.train_batch_size
    if not plan.trains or not sizes.num_train_rows or not sizes.total_steps:
        return
    passes = sizes.total_steps * batch / sizes.num_train_rows
    text = (
        f"{sizes.num_train_rows:,} rows, {batch:,} in a batch, {sizes.total_steps:,} steps: each row comes {passes:.3g} times"
    )
    heart = passes > MANY_PASSES and sizes.num_train_rows < FEW_ROWS
    advice = "so few rows are learnt by heart: give more, or fewer steps, and validate on others" if heart else ""
    yield Sight("rows", text, advice)


def _disk(plan: Plan, runs: Path) -> Iterator[Sight]:
    trainer, size, steps = plan.config.trainer, plan.model, plan.sizes.total_steps
    if size is None or trainer.save_freq < 1 or not steps:
        return
    models = sum(plan.role(name) is not None for name in ("actor", "critic")) + plan.trains_reward_model
    number = -(-steps // trainer.save_freq)
    if trainer.max_actor_ckpt_to_keep is not None:
        number = min(number, trainer.max_actor_ckpt_to_keep + 1)  # an old one goes when the new one is there
    needed = number * models * size.num_params * TRAINED_BYTES
    there = next(path for path in (runs, *runs.parents) if path.exists())
    free = shutil.disk_usage(there).free
    text = f"{number} checkpoints take {gib(needed)}; {gib(free)} are free in {there}"
    advice = "set trainer.max_actor_ckpt_to_keep=2, raise trainer.save_freq, or set trainer.default_local_dir to a larger disk"
    yield Sight("disk", text, advice if needed > free else "")


def of_memory(plan: Plan) -> list[Sight]:
    """Return the need of all processes beside what the machine has; on GPUs that of the largest role beside one device."""
    if not plan.memory or plan.machine.cluster:
        return []
    if plan.machine.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            return []
        free, place = float(torch.cuda.get_device_properties(0).total_memory), "one GPU"
        needed, what = max((need.num_bytes, need.role.replace("_", " ")) for need in plan.memory)
        advice = "use more GPUs, or lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu; param_offload and optimizer_offload help"
    else:
        has = machine_memory()
        own = int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE  # counted in what is needed
        free, place = min(has.total, has.free + own), f"the {has.owner}, which has {gib(int(has.total))}"
        needed, what = host_bytes(plan), "all processes"
        advice = (
            "give it more, or lower actor_rollout_ref.rollout.kv_cache_gib or actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
        )
    text = f"{what}: about {gib(needed)} of {gib(int(free))} free on {place}"
    return [Sight("memory", text, advice if needed > free else "")]


def lack_of_memory(plan: Plan) -> str:
    """Return that memory is what a run is likely to have failed of; empty where there is enough."""
    has, needed = machine_memory(), host_bytes(plan)
    if needed <= has.total and has.used_share < FULL:
        return ""
    need = f", and the run needs about {gib(needed)}" if needed else ""
    return f"the likely cause is memory: the {has.owner} has {gib(int(has.total))}{need}"


def _right_answer(prompt: Prompt) -> str | None:
    """Return a response with the right answer; None where the ground truth has no form from which one is made."""
    try:
        return gold_response(prompt.data_source, prompt.ground_truth, prompt.extra_info)
    except (TypeError, ValueError, ArithmeticError, LookupError):
        return None


def _rollout(prompt: Prompt, index: int, text: str, tokenizer: Any) -> Rollout:
    token_ids = np.asarray(tokenizer.encode(text, add_special_tokens=False) if text else [], dtype=np.int32)
    return Rollout(prompt, index, token_ids, np.zeros(len(token_ids), dtype=np.float32), "stop", (), text)


def _length(tokenizer: Any, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))


def _range(values: Sequence[float]) -> str:
    if not values:
        return "none"
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:.3g} to {high:.3g} ({statistics.fmean(values):.3g} on average)"


def _short(text: str, limit: int = SHOWN) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
