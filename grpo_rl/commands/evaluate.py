"""`grpo-rl eval MODEL|RUN[@step] ...`: how well models answer prompts, with intervals and tests of their differences."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_rl.arguments import Arguments, finite
from grpo_rl.commands.sampling_plan import (
    add_sampling_options,
    answer_missing,
    data_settings,
    responses_folder,
    sampled_with,
    sampling_plan,
)
from grpo_rl.commands.targets import Target, find_target, model_folder
from grpo_rl.errors import ConfigError
from grpo_rl.evaluation.estimates import LEVEL, RESAMPLES
from grpo_rl.evaluation.response_file import ResponseFile, identity_of, response_file, settle
from grpo_rl.run_files import write_whole
from grpo_rl.telemetry.metrics.metrics_file import jsonable
from grpo_rl.telemetry.terminal.console import Console

if TYPE_CHECKING:
    from grpo_rl.evaluation.evaluation_results import Groups
    from grpo_rl.plan.decisions import Plan

FOLDER = Path("evaluations")


def main(argv: Sequence[str]) -> int:
    options, words = _parser().read_with_settings(argv)
    if not options.targets:
        raise ConfigError("grpo-rl eval needs a model or a run: grpo-rl eval runs/grpo_rl/my_run --data FILE")
    targets = [find_target(text, trusted=options.trust_run) for text in options.targets]
    if len({target.label for target in targets}) < len(targets):
        raise ConfigError("the same model is named twice")
    run, data, keys = sampled_with(options, targets, words)
    folder = Path(options.output) if options.output else FOLDER / _name(targets[0], data, keys, words)
    with closing(Console()) as console, responses_folder(folder) as run_dir:
        console.log_to(run_dir.logs / "console.log")
        console.info(f"evaluation folder: {folder}")
        if run is not None:
            console.info(f"data columns, templates, lengths and reward are those of {run}")
        models: list[tuple[str, Plan, ResponseFile]] = []
        # All that can be refused is refused before an engine starts.
        for number, target in enumerate(targets):
            path = model_folder(target, console, trusted=options.trust_run)
            plan, settings = sampling_plan(keys, words, path, run_dir.logs / f"settings_{number + 1}.yaml")
            if number == 0:
                settle(folder, settings | data_settings(plan.config.data))
            models.append((f"evaluating {target.label}", plan, response_file(folder, target.label, identity_of(path))))
        answer_missing(models, run_dir, console)
        values = models[0][1].config.rollout.val_kwargs
        groups = [file.groups(values.n) for _, _, file in models]
        _report([target.label for target in targets], groups, folder, console, options.pass_at, values.temperature)
        console.info(f"responses: {', '.join(str(file.path) for _, _, file in models)}")
    return 0


def _report(
    labels: Sequence[str], groups: Sequence[Groups], folder: Path, console: Console, pass_at: float, temperature: float
) -> None:
    from grpo_rl.evaluation import evaluation_results as results

    n = len(next(iter(groups[0].values())))
    estimates = results.results_of(groups, pass_at=pass_at)
    how = (
        f"Means over prompts with 95 % intervals: bootstrap over prompts, {RESAMPLES:,} resamples. pass@k: unbiased (Chen et al. "
        f"2021), a response passes with a value of at least {pass_at:g}. Sampled at temperature {temperature:g}."
    )
    if len(labels) > 1:
        how += " Differences: the same prompts, p by a two-sided sign-flip permutation test over prompts."
    for estimate in estimates:
        title = f"{estimate.source}: {estimate.num_prompts} prompts, {n} response{'s' * (n > 1)} each"
        tables = {title: results.table(estimate, labels)}
        if len(labels) > 1:
            tables[f"{estimate.source}: differences"] = results.differences_table(estimate, labels)
        for name, (header, rows) in tables.items():
            console.info("")
            console.table(name, rows, header)
        if not estimate.binary:
            console.info("The values are not only 0 and 1: pass@k depends on --pass-at.")
    console.info("")
    console.info(how)
    summary = {
        "models": list(labels),
        "n": n,
        "pass_at": pass_at,
        "level": LEVEL,
        "interval": f"percentile bootstrap over prompts, {RESAMPLES} resamples",
        "test": "two-sided sign-flip permutation test over prompts",
        "results": results.as_json(estimates, labels),
    }
    write_whole(folder / "summary.json", json.dumps(jsonable(summary), indent=1))
    console.info(f"written: {folder / 'summary.json'}")


def _name(target: Target, data: Sequence[str], keys: dict[str, Any], words: Sequence[str]) -> str:
    """Equal settings have the same name, so that the same command goes on."""
    first = Path(data[0].partition("?")[0].removeprefix("task:")).stem
    name = f"{target.run.name if target.run is not None else target.label}-{first}"
    digest = hashlib.sha256(json.dumps([sorted(keys.items()), sorted(words)], default=str).encode()).hexdigest()[:8]
    return "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in name) + f"-{digest}"


def _parser() -> Arguments:
    parser = Arguments(
        "eval",
        "Answer prompts with one or several models, score the responses, and show mean@n, pass@k (unbiased) and maj@n with\n"
        "95 % intervals for each data source, and paired tests of the differences. The same command goes on where it stopped.",
        "grpo-rl eval runs/grpo_rl/my_run@start runs/grpo_rl/my_run --data task:arithmetic?split=val -n 16\n"
        "  grpo-rl eval builtin:arithmetic --data test.parquet reward.functions=[math] data.max_prompt_length=1024",
    )
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="MODEL|RUN[@step]",
        help="a model's folder, builtin:NAME, a run, RUN@40, RUN@last, RUN@start",
    )
    parser.add_argument("--output", metavar="FOLDER", help="where responses and tables go (evaluations/NAME)")
    parser.add_argument("--pass-at", type=finite, default=1.0, help="a response passes with a value of at least this (1)")
    add_sampling_options(parser, n=16)
    return parser
