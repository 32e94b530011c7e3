"""Curves of one run or several, as pictures: python examples/plot_runs.py runs/grpo_rl/first runs/grpo_rl/second"""

from __future__ import annotations

import sys

from matplotlib.figure import Figure

import grpo_rl


def compare(runs: list[grpo_rl.Run], name: str) -> Figure:
    """Return one metric of several runs over each other."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot(title=name, xlabel="step")
    for run in runs:
        run.metrics(name)[name].dropna().rolling(5, min_periods=1).mean().plot(ax=axes, label=run.name)
    axes.legend()
    return figure


def main() -> None:
    runs = [grpo_rl.Run(folder) for folder in sys.argv[1:]]
    runs[0].plot().savefig("curves.png")  # the picture of the report
    runs[0].plot("reward/mean", "response_length/mean", "timing_s/step").savefig("metrics.png")
    compare(runs, "reward/mean").savefig("compared.png")
    print("written: curves.png metrics.png compared.png")


if __name__ == "__main__":
    main()
