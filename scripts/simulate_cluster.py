"""Simulates the schedules on a cluster of any size: how many GPUs to sample with, how many to train with, what limits.

    python scripts/simulate_cluster.py --model qwen3-8b --gpus 64 512 4096 --mean 4096 --longest 16384
    python scripts/simulate_cluster.py --model qwen3-32b --gpus 256 --split 192:64 --schedules sync async --staleness 2
    python scripts/simulate_cluster.py --gpus 64 --lengths runs/NAME           # lengths as that run sampled them
    python scripts/simulate_cluster.py --validate runs/sync runs/async         # rates of the first, compared with both
    python scripts/simulate_cluster.py --sources

For each number of GPUs and each schedule it prints the best division that it finds: seconds per step, rollouts per second,
how long either side works, staleness of the oldest token in versions, and what the limit is. The model is in
cluster_model.py, the numbers that it stands on with their sources in cluster_profiles.yaml. It needs SimPy:
pip install '.[simulate]'.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cluster_lengths import drawn_from, lognormal
from cluster_model import SCHEDULES, ClusterRates, Result, Work, reduced, simulate
from cluster_rates import Lengths, Model, Pools, Profiles, candidates, cluster_rates

MOST_REPLICAS, SEARCH_REPLICAS = 32, 8
"""The replicas that are simulated one by one, in the answer and in the search for it; more are represented by them."""
STEPS, SEARCH_STEPS = 14, 6
EMPTY = 0.3
"""The share of filled slots below which the longest responses decide how long sampling takes."""


@dataclass(frozen=True)
class Case:
    """A model, lengths and a batch, to be put on clusters of several sizes."""

    profiles: Profiles
    machine: str
    model: Model
    lengths: Lengths
    source: Callable[[], Callable[[int], np.ndarray]]
    """A function that returns a source of lengths, the same ones each time."""
    groups: int
    group_size: int
    staleness: int
    forward_passes: int
    most_sequences: int
    keep_cache: bool

    def rates(self, pools: Pools) -> ClusterRates:
        return cluster_rates(
            self.profiles,
            self.machine,
            self.model,
            self.lengths,
            pools,
            forward_passes=self.forward_passes,
            most_sequences=self.most_sequences,
            recomputes_cache=not self.keep_cache,
        )

    def simulate(self, pools: Pools, schedule: str, *, quick: bool = False) -> tuple[ClusterRates, Result]:
        """Return the rates of a division, and what a training on it takes."""
        rates = self.rates(pools)
        work = Work(
            self.groups,
            self.group_size,
            self.lengths.prompt,
            self.source(),
            SEARCH_STEPS if quick else STEPS,
            self.staleness,
        )
        return rates, simulate(*reduced(rates, work, SEARCH_REPLICAS if quick else MOST_REPLICAS), schedule)

    def best(self, gpus: int, schedule: str) -> Pools:
        """Return the division with the shortest step; ties go to the one with fewer GPUs that train."""
        if schedule == "colocated":
            return Pools(gpus, gpus, shared=True)
        divisions = candidates(gpus, self.model.tensor_parallel)
        return min(divisions, key=lambda pools: self.simulate(pools, schedule, quick=True)[1].step_s())


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    gpus: int
    schedule: str
    pools: Pools
    step_s: float
    rollouts_s: float
    rollout_busy: float
    filled: float
    trainer_busy: float
    staleness_mean: float
    staleness_max: int
    transfer: float
    controller: float

    @property
    def limit(self) -> str:
        """The part that is at work for the largest share of a step: to make it faster makes the step faster.

        `long responses`: engines sample, and most of their slots are empty; more of them would not help.
        """
        parts = {
            "sampling": self.rollout_busy,
            "training": self.trainer_busy,
            "weight transfer": self.transfer,
            "controller": self.controller,
        }
        most = max(parts, key=lambda name: parts[name])
        return "long responses" if most == "sampling" and self.filled < EMPTY else most

    @classmethod
    def of(cls, case: Case, gpus: int, schedule: str, pools: Pools) -> Row:
        """Simulate one division, and return its line."""
        rates, result = case.simulate(pools, schedule)
        step_s, staleness = result.step_s(), result.staleness()
        return cls(
            gpus,
            schedule,
            pools,
            step_s,
            case.groups * case.group_size / step_s,
            result.busy_s / result.total_s,
            result.filled,
            result.trainer_s / result.total_s,
            statistics.fmean(staleness),
            max(staleness),
            rates.transfer_s / step_s,
            result.controller_s / result.total_s,
        )

    def line(self) -> str:
        split = "shared" if self.pools.shared else f"{self.pools.rollout}:{self.pools.trainer}"
        return (
            f"| {self.gpus:,} | {self.schedule} | {split} | {self.step_s:,.1f} | {self.rollouts_s:,.1f} | {self.rollout_busy:.0%} | "
            f"{self.filled:.0%} | {self.trainer_busy:.0%} | {self.staleness_mean:.1f} / {self.staleness_max} | "
            f"{self.transfer:.1%} | {self.controller:.1%} | {self.limit} |"
        )


HEAD = (
    "| GPUs | schedule | sample:train | s per step | rollouts/s | sampling busy | slots filled | training busy | "
    "staleness mean / max | transfer | controller | limit |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def case_of(arguments: argparse.Namespace) -> Case:
    """Return the case that the words of the command describe. Raises ValueError, KeyError or OSError for bad ones."""
    profiles = Profiles()
    if arguments.lengths is not None:
        from cluster_validation import lengths_of

        prompt, measured = lengths_of(arguments.lengths)
        lengths = Lengths(prompt, float(np.mean(measured)), int(max(measured)))

        def source() -> Callable[[int], np.ndarray]:
            return drawn_from(measured)
    else:
        lengths = Lengths(arguments.prompt, arguments.mean, arguments.longest)

        def source() -> Callable[[int], np.ndarray]:
            return lognormal(arguments.mean, arguments.spread, arguments.longest)

    return Case(
        profiles,
        arguments.machine,
        profiles.model(arguments.model),
        lengths,
        source,
        arguments.groups,
        arguments.n,
        arguments.staleness,
        arguments.forward_passes,
        arguments.max_num_seqs,
        arguments.keep_cache,
    )


def print_table(case: Case, arguments: argparse.Namespace) -> None:
    """Print a line for each number of GPUs and schedule."""
    print(
        f"{case.model.name} on {case.profiles.content['machines'][case.machine]['title']}; {case.groups:,} groups of "
        f"{case.group_size}, prompts of {case.lengths.prompt:,} tokens, responses of {case.lengths.mean:,.0f} on average and "
        f"{case.lengths.longest:,} at most; max_staleness {case.staleness}, cache "
        f"{'kept' if case.keep_cache else 'computed anew'} at an update\n\n{HEAD}"
    )
    for gpus in arguments.gpus:
        for schedule in arguments.schedules:
            if arguments.split and schedule != "colocated":
                rollout, trainer = (int(part) for part in arguments.split.split(":"))
                pools = Pools(rollout, trainer)
            else:
                pools = case.best(gpus, schedule)
            print(Row.of(case, pools.gpus, schedule, pools).line(), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--validate", nargs="+", type=Path, metavar="RUN", help="compare with these runs' timelines")
    parser.add_argument("--sources", action="store_true", help="print where the numbers are from")
    parser.add_argument("--machine", default="h100", help="a machine of cluster_profiles.yaml")
    parser.add_argument("--model", default="qwen3-8b", help="a model of cluster_profiles.yaml")
    parser.add_argument("--gpus", nargs="+", type=int, default=[8, 64, 512])
    parser.add_argument("--split", metavar="SAMPLE:TRAIN", help="this division instead of the best one")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--groups", type=int, default=512, help="prompts in a batch")
    parser.add_argument("--n", type=int, default=16, help="responses to each")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--mean", type=float, default=4096.0, help="mean tokens of a response, before the cut")
    parser.add_argument("--spread", type=float, default=0.8, help="sigma of the logarithm of the lengths")
    parser.add_argument("--longest", type=int, default=16384)
    parser.add_argument("--lengths", type=Path, metavar="RUN", help="draw lengths from this run's log of rollouts instead")
    parser.add_argument("--staleness", type=int, default=1, help="trainer.asynchronous.max_staleness")
    parser.add_argument("--keep-cache", action="store_true", help="trainer.asynchronous.keep_cache=true")
    parser.add_argument("--forward-passes", type=int, default=1, help="besides the update: old log-probs, reference")
    parser.add_argument("--max-num-seqs", type=int, default=512, help="requests that a replica samples at once, at most")
    arguments = parser.parse_args()
    if arguments.validate:
        from cluster_validation import validate

        return validate(arguments.validate)
    try:
        if arguments.sources:
            print("\n".join(Profiles().sources()))
            return 0
        print_table(case_of(arguments), arguments)
    except (KeyError, ValueError, OSError) as error:
        print(f"error: {error.args[0] if isinstance(error, KeyError) else error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
