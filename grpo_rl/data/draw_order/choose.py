"""Choice of the sampler that a configuration asks for."""

from __future__ import annotations

from collections.abc import Callable

from grpo_rl.config import derived
from grpo_rl.config.schema.tree import Config
from grpo_rl.data.dataset import PromptDataset
from grpo_rl.data.draw_order.curriculum import PassRateSampler
from grpo_rl.data.draw_order.mixture import MixedSampler
from grpo_rl.data.draw_order.sampler import PromptSampler, Sampler
from grpo_rl.data.training_rows.training_set import TrainingSet


def make_sampler(
    config: Config, dataset: PromptDataset | TrainingSet, is_retired: Callable[[int], bool] | None = None
) -> Sampler:
    """The order in which rows of `dataset` are drawn. Raises ConfigError for a batch larger than the data."""
    data = config.data
    batch_size = derived.gen_batch_size(config)
    size_key = "data.train_batch_size" if data.gen_batch_size is None else "data.gen_batch_size"

    def is_usable(row: int) -> bool:
        return not (is_retired is not None and is_retired(row)) and dataset.usable(row)

    if data.curriculum == "pass_rate":
        return PassRateSampler(
            len(dataset), batch_size, data.seed, data.curriculum_floor, size_key=size_key, is_usable=is_usable
        )
    difficulty = None
    if isinstance(dataset, PromptDataset) and data.curriculum == "difficulty":
        difficulty = dataset.difficulty()
    if data.train_weights:
        return MixedSampler(
            dataset.part_sizes,
            data.train_weights,
            batch_size,
            data.shuffle,
            data.seed,
            floor=data.curriculum_floor if data.dynamic_weights else None,
            size_key=size_key,
            is_usable=is_usable,
            difficulty=difficulty,
        )
    return PromptSampler(
        len(dataset), batch_size, data.shuffle, data.seed, size_key=size_key, is_usable=is_usable, difficulty=difficulty
    )
