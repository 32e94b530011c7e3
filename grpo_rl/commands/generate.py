"""`grpo-rl generate MODEL|RUN[@step] --data FILE --output FILE`: scored responses as rows. Answered prompts
are kept in `FILE.work/`, so that the same command goes on, until the file is written at the end."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_rl.arguments import Arguments
from grpo_rl.commands.sampling_plan import (
    NO_DATA,
    add_sampling_options,
    answer_missing,
    data_settings,
    responses_folder,
    sampled_with,
    sampling_plan,
)
from grpo_rl.commands.targets import find_target, model_folder
from grpo_rl.errors import ConfigError
from grpo_rl.evaluation.response_file import Record, identity_of, response_file, settle
from grpo_rl.telemetry.terminal.console import Console

if TYPE_CHECKING:
    from grpo_rl.config.schema.tree import DataConfig

_SUFFIXES = (".jsonl", ".parquet")


def main(argv: Sequence[str]) -> int:
    options, words = _parser().read_with_settings(argv)
    if len(options.targets) != 1:
        raise ConfigError("grpo-rl generate needs one model or run: grpo-rl generate builtin:arithmetic --data FILE")
    output = Path(options.output).expanduser()
    if output.suffix not in _SUFFIXES:
        raise ConfigError(f"--output {output}: is written as {' or '.join(_SUFFIXES)}; give a name that ends so")
    if output.exists() and not options.overwrite:
        raise ConfigError(f"--output {output}: is there already; give another name, or --overwrite")
    target = find_target(options.targets[0], trusted=options.trust_run)
    _, data, keys = sampled_with(options, [target], words)
    work = output.with_name(f"{output.name}.work")
    with closing(Console()) as console, responses_folder(work) as run_dir:
        model = model_folder(target, console, trusted=options.trust_run)
        recipe = run_dir.logs / "settings.yaml"
        plan, settings = sampling_plan(keys | {"data.val_files": [NO_DATA]}, words, model, recipe)
        scores = plan.config.rollout.multi_turn.enable or _has_ground_truth(data, plan.config.data)
        if scores:
            plan, settings = sampling_plan(keys, words, model, recipe)
        console.info(f"responses are {'scored' if scores else 'not scored: the data have no ground truth'}")
        settle(work, settings | data_settings(plan.config.data, data) | {"scored": scores})
        file = response_file(work, "model", identity_of(model))
        from grpo_rl.cluster.sampling import unscored
        from grpo_rl.data.dataset import BarePromptDataset

        def bare_prompts(tokenizer: Any) -> BarePromptDataset:
            return BarePromptDataset(data, plan.config.data, tokenizer, max_samples=options.limit or -1).checked(whole=True)

        models = [("generating", plan if scores else unscored(plan), file)]
        answer_missing(models, run_dir, console, None if scores else bare_prompts)
        groups = file.groups(plan.config.rollout.val_kwargs.n)
        rows = rows_of(groups.values())
        from grpo_rl.data.sources.tables import write_rows

        write_rows(output, rows)
        rewards = [row["reward"] for row in rows if isinstance(row["reward"], int | float)]
        mean = f", mean reward {statistics.fmean(rewards):.3g}" if scores and rewards else ""
        console.info(f"{len(rows):,} responses to {len(groups):,} prompts{mean}")
        console.info(f"written: {output}")
        shutil.rmtree(work, ignore_errors=True)
    return 0


def _has_ground_truth(data: Sequence[str], config: DataConfig) -> bool:
    """Return whether the first row has a ground truth and a source that chooses the rule."""
    from grpo_rl.data.rows import BadRow, example
    from grpo_rl.data.sources.locate import open_source

    source = open_source(data[0])
    try:
        return example(source.row(0), config).ground_truth is not None
    except BadRow:
        return False


def rows_of(groups: Iterable[Sequence[Record]]) -> list[Record]:
    """Return the responses without the fields of the work folder alone."""
    return [{key: value for key, value in record.items() if key not in _INTERNAL} for group in groups for record in group]


_INTERNAL = ("row", "advantage", "weight_version")  # say nothing about the response


def _parser() -> Arguments:
    parser = Arguments(
        "generate",
        "Sample responses to the prompts of a file and write them as rows, with rewards where the rows have a ground truth.",
        "grpo-rl generate runs/grpo_rl/my_run --data task:arithmetic?num_rows=512 -n 8 --output responses.jsonl\n"
        "  grpo-rl generate builtin:arithmetic --data prompts.parquet --output responses.parquet",
    )
    parser.add_argument("targets", nargs="*", metavar="MODEL|RUN[@step]", help="a model's folder, builtin:NAME, a run, RUN@40")
    parser.add_argument("--output", metavar="FILE", default="responses.jsonl", help=".jsonl or .parquet (responses.jsonl)")
    parser.add_argument("--overwrite", action="store_true", help="replace the file where it is there")
    add_sampling_options(parser, n=1)
    return parser
