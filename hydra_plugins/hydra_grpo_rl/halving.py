"""Successive halving (Jamieson and Talwalkar, arXiv 1502.07943) as a sweeper of Hydra's: `hydra/sweeper=halving`.

All runs go to the first share of their steps, those of the better half of the settings to the next one, and so on. A run that pauses
is stopped as by a signal, and goes on later with the same bits.
"""

import itertools
import statistics
from collections.abc import Sequence
from math import ceil, inf
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class HalvingSweeper(Sweeper):
    """Runs every combination of the values, the worse settings no further than their share of the steps."""

    launcher: Launcher

    def __init__(self, rungs: Sequence[float]) -> None:
        self.rungs = list(rungs)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> list[JobReturn]:
        # Every start of every Hydra program imports this module: what takes time is imported here.
        from grpo_rl.sweep.points import UNTIL, setting_of

        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)  # type: ignore[union-attr]
        values: list[list[str]] = []
        for override in parser.parse_overrides(arguments):
            key = override.get_key_element()
            texts = override.sweep_string_iterator() if override.is_sweep_override() else [override.get_value_element_as_str()]
            values.append([f"{key}={text}" for text in texts])
        alive = [list(words) for words in itertools.product(*values)]
        started, results = 0, []
        for share in self.rungs:
            results = list(self.launcher.launch([[*words, f"++{UNTIL}={share}"] for words in alive], initial_job_idx=started))
            started += len(alive)
            scores: dict[Any, list[float]] = {}
            for words, result in zip(alive, results, strict=True):
                done = result.status == JobStatus.COMPLETED
                scores.setdefault(setting_of(words), []).append(result.return_value if done else -inf)
            ranked = sorted(scores, key=lambda setting: statistics.fmean(scores[setting]), reverse=True)
            better = set(ranked[: ceil(len(ranked) / 2)])
            failed = [result for result in results if result.status != JobStatus.COMPLETED]
            alive = [words for words in alive if setting_of(words) in better]
        for result in failed:
            _ = result.return_value  # raises what ended it
        return results
