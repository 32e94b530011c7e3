"""`grpo-rl generate MODEL|RUN[@step] --data FILE --output FILE`: responses as rows, which training on rows reads.

While it goes on, whole prompts are kept in `FILE.work/`, so that the same command goes on after an end; the file itself is
written at once at the end, and the folder goes.
"""

from __future__ import annotations

import argparse
import shutil
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_rl.arguments import Arguments, counted, finite
from grpo_rl.commands import verl_words
from grpo_rl.commands.sampling_plan import (
    SamplingPlan,
    add_sampling_options,
    data_of_run,
    option_keys,
    output_folder,
    sampling_plan,
    settings_of_run,
    source_run,
)
from grpo_rl.commands.targets import find_target, model_folder
from grpo_rl.errors import ConfigError, DataError
from grpo_rl.evaluation.response_file import EvaluationFolder, Record, ResponseFile, identity_of, write_whole
from grpo_rl.telemetry.metrics.metrics_file import dump_line
from grpo_rl.telemetry.run_lock import RunLock
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.telemetry.terminal.console import Console

if TYPE_CHECKING:
    from grpo_rl.cluster.sampling import Sampler
    from grpo_rl.config.schema.tree import DataConfig
    from grpo_rl.types import Prompt, Rollout

NO_DATA = "task:arithmetic?num_rows=1"
"""The data of a plan whose prompts come from elsewhere: it is checked, and never read."""
_SUFFIXES = (".jsonl", ".parquet")


def main(argv: Sequence[str]) -> int:
    """Sample, and write the file. Returns 0. Raises this package's errors."""
    options, words = _parser().read_with_settings(verl_words.of_generation(argv))
    if len(options.targets) != 1:
        raise ConfigError("grpo-rl generate needs one model or run: grpo-rl generate builtin:arithmetic --data FILE")
    output = Path(options.output).expanduser()
    if output.suffix not in _SUFFIXES:
        raise ConfigError(f"--output {output}: is written as {' or '.join(_SUFFIXES)}; give a name that ends so")
    if output.exists() and not options.overwrite:
        raise ConfigError(f"--output {output}: is there already; give another name, or --overwrite")
    console = Console()
    with ExitStack() as stack:
        stack.callback(console.close)
        _generate(options, words, output, console, stack)
    return 0


def _generate(options: argparse.Namespace, words: Sequence[str], output: Path, console: Console, stack: ExitStack) -> None:
    target = find_target(options.targets[0], trusted=options.trust_run)
    run = source_run(options, [target])
    data = options.data or (data_of_run(run, trusted=options.trust_run) if run is not None else [])
    if not data:
        raise ConfigError("--data is missing: a file, a folder, task:NAME, ...; runs with data.val_files need none")
    keys = settings_of_run(run, options.engine, words, trusted=options.trust_run) | option_keys(options, data)
    work = output.with_name(f"{output.name}.work")
    run_dir = output_folder(work)
    stack.callback(RunLock.take(work).release)
    model = model_folder(target, console, trusted=options.trust_run)
    recipe = work / "logs" / "settings.yaml"
    planned = sampling_plan(keys | {"data.val_files": [NO_DATA]}, words, model, recipe)
    episodes = planned.composed.config.actor_rollout_ref.rollout.multi_turn.enable
    if episodes:
        _check_episodes(options)
    scores = options.scores == "yes" or episodes
    scores = scores or (options.scores == "auto" and _has_ground_truth(data, planned.composed.config.data))
    if options.keep != "all" and not scores:
        raise ConfigError(f"--keep {options.keep}: needs rewards, and nothing is scored here: the data have no ground truth")
    if scores:
        planned = sampling_plan(keys, words, model, recipe)
    console.info(f"responses are {'scored' if scores else 'not scored: the data have no ground truth, or --scores no'}")
    folder = EvaluationFolder(work)
    folder.settle(planned.settings | {"data.val_files": data, "scored": scores})
    file = folder.model("model", identity_of(model))
    n = planned.plan.config.actor_rollout_ref.rollout.val_kwargs.n
    _sample(planned, data, scores, file, run_dir, console, limit=options.limit)
    groups = file.groups(n)
    rows = list(_rows(groups.values(), options))
    if not rows:
        raise DataError(
            f"none of {sum(map(len, groups.values()))} responses is kept by --keep {options.keep}; {work} has them all"
        )
    _write(output, rows)
    _summary(groups, rows, scores, options, console)
    console.info(f"written: {output} ({len(rows):,} rows)")
    stack.callback(shutil.rmtree, work, ignore_errors=True)


def _check_episodes(options: argparse.Namespace) -> None:
    """Raise ConfigError for what does not go with episodes of several turns."""
    if options.keep != "all":
        raise ConfigError(
            f"--keep {options.keep}: rows to learn from are single responses, and this run's are episodes of several turns; "
            "--keep all writes them with their turns, as `episode`"
        )
    if options.scores == "no":
        raise ConfigError("--scores no: episodes of several turns are scored as they are played; leave it out")


def _sample(
    planned: SamplingPlan,
    data: Sequence[str],
    scores: bool,
    file: ResponseFile,
    run_dir: RunDir,
    console: Console,
    limit: int | None,
) -> None:
    """Sample what is not in the file yet."""
    from grpo_rl.cluster.sampling import sampling_session, unscored
    from grpo_rl.trainer.schedule import VALIDATION, training_sampling
    from grpo_rl.trainer.validation import validation_sampling

    config = planned.plan.config
    values = config.actor_rollout_ref.rollout.val_kwargs
    if file.num_prompts is not None and len(file.groups(values.n)) == file.num_prompts:
        return
    plan = planned.plan if scores else unscored(planned.plan)
    with sampling_session(plan, run_dir, console) as session, session.sampler(plan) as sampler:
        prompts = _prompts(sampler, data, config.data, limit)
        there = file.groups(values.n)
        missing = [row for row in range(len(prompts)) if row not in there]
        if there and missing:
            console.info(f"goes on: {len(there)} of {len(prompts)} prompts are answered already")
        parts = [[prompts[row] for row in part] for part in sampler.parts_of(missing, values.n)]
        sampling = validation_sampling(values, training_sampling(config, VALIDATION))
        with console.progress("generating", len(missing) * values.n) as bar:
            session.phase("gen")
            for rollouts in sampler.answers(parts, values.n, sampling, bar.advance):
                session.phase("save")
                file.append([_record(rollout) for rollout in rollouts])
                session.phase("gen")
        file.complete(len(prompts))


def _record(rollout: Rollout) -> Record:
    from grpo_rl.telemetry.rollouts.rollout_log import record_of

    row = int(rollout.prompt.uid.rpartition("-")[2])
    return record_of(rollout) | {"row": row, "messages": rollout.prompt.messages}


def _prompts(sampler: Sampler, data: Sequence[str], config: DataConfig, limit: int | None) -> list[Prompt]:
    """Return the prompts: those that the sampler has read, or of rows without verl's columns for the reward."""
    if sampler.prompts is not None:
        return [sampler.prompts.prompt(row, f"val-{row}") for row in range(len(sampler.prompts))]
    return list(_plain_prompts(data, config, sampler.tokenizer, limit))


def _plain_prompts(data: Sequence[str], config: DataConfig, tokenizer: Any, limit: int | None) -> Iterator[Prompt]:
    """Yield the prompts of rows that need a prompt and nothing else. Raises BadRow and DataError for what cannot be used."""
    from grpo_rl.control_words import unmarked
    from grpo_rl.data.prompts import Renderer, truncate
    from grpo_rl.data.rows import Example, column, prompt_of
    from grpo_rl.data.sources.locate import open_source
    from grpo_rl.types import Prompt

    renderer, number = Renderer(config, tokenizer), 0
    for name in data:
        source = open_source(name, config.cache_dir)
        for index in range(len(source)):
            if limit is not None and number >= limit:
                return
            row, where = source.row(index), source.where(index)
            found = config.data_source or row.get(config.reward_fn_key)
            prompt = prompt_of(column(row, config.prompt_key, where), where, config.prompt_key)
            one = Example(prompt, found if isinstance(found, str) and found else Path(name).stem, None, {})
            text = renderer.render(one, where)
            [ids] = renderer.tokenize([one], [text])
            if len(ids) > config.max_prompt_length:
                if config.filter_overlong_prompts:
                    continue
                if config.truncation == "error":
                    raise DataError(
                        f"{where}: the prompt has {len(ids)} tokens, more than data.max_prompt_length="
                        f"{config.max_prompt_length}: raise it, or data.truncation=left, right or middle"
                    )
                ids = truncate(ids, config.max_prompt_length, config.truncation)
                text = tokenizer.decode(ids)
            yield Prompt(f"row-{number}", np.asarray(ids), unmarked(text), one.data_source, messages=renderer.messages(one))
            number += 1


def _has_ground_truth(data: Sequence[str], config: DataConfig) -> bool:
    """Return whether the first row of the data has what a reward compares with, and a source that chooses the rule."""
    from grpo_rl.data.rows import column
    from grpo_rl.data.sources.locate import open_source

    source = open_source(data[0], config.cache_dir)
    row, where = source.row(0), source.where(0)
    named = config.data_source or column(row, config.reward_fn_key, where, optional=True)
    return named is not None and _given(row, config.ground_truth_key, where)


def _given(row: dict[str, Any], key: str, where: str) -> bool:
    from grpo_rl.data.rows import column

    try:
        return column(row, key, where, optional=True) is not None
    except DataError:  # a path through something that is no object
        return False


def _rows(groups: Any, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of the file: all responses, the good ones, or the best and the worst of each prompt."""
    from grpo_rl.config.schema.tree import RejectionConfig
    from grpo_rl.data.training_rows.rejection import Kept, answer_rows, pair_rows

    kept = Kept(RejectionConfig(min_reward=options.min_reward, max_per_prompt=options.max_per_prompt))
    for group in groups:
        if options.keep == "all":
            yield from ({key: value for key, value in record.items() if key not in _INTERNAL} for record in group)
            continue
        rollouts = [_rollout(record) for record in group]
        rows = pair_rows(rollouts) if options.keep == "pairs" else answer_rows(rollouts, options.min_reward)
        yield from (row for row in rows if kept.takes(row))


_INTERNAL = ("row", "messages", "advantage", "weight_version")
"""Fields of a line in the folder of work that say nothing about the response."""


def _rollout(record: Record) -> Rollout:
    """Return a line as a rollout; of its tokens the line has only the count."""
    from grpo_rl.types import Prompt, Rollout

    prompt = Prompt(
        uid=str(record["uid"]),
        token_ids=np.zeros(record["prompt_length"], dtype=np.int32),
        text=record["prompt"],
        data_source=record["data_source"],
        ground_truth=record["ground_truth"],
        messages=None if record["messages"] is None else tuple(record["messages"]),
    )
    length = record["response_length"]
    # Two responses are compared by their tokens: a number that is made of the text stands in for each.
    mark = zlib.crc32(record["response"].encode("utf-8", "surrogatepass")) & 0x7FFF_FFFF
    return Rollout(
        prompt=prompt,
        sample_index=record["sample"],
        response_ids=np.full(length, mark, dtype=np.int32),
        rollout_logprobs=np.zeros(length),
        finish_reason=record["finish_reason"],
        versions=(),
        text=record["response"],
        reward=None if record.get("failure") else record["reward"],
    )


def _write(output: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the file as a whole. Raises DataError for rows that have no common columns in parquet."""
    if output.suffix == ".jsonl":
        write_whole(output, "".join(map(dump_line, rows)))
        return
    import pyarrow as pa
    import pyarrow.parquet as parquet

    temporary = output.with_name(f".{output.name}")
    try:
        parquet.write_table(pa.Table.from_pylist(rows), temporary)
    except pa.ArrowException as error:
        temporary.unlink(missing_ok=True)
        raise DataError(f"{output}: the rows have no common columns ({str(error).splitlines()[0]}); give a .jsonl") from error
    temporary.replace(output)


def _summary(groups: Any, rows: Sequence[Any], scores: bool, options: argparse.Namespace, console: Console) -> None:
    records = [record for group in groups.values() for record in group]
    rewards = [record["reward"] for record in records if isinstance(record["reward"], int | float)]
    text = f"{len(records):,} responses to {len(groups):,} prompts"
    if scores and rewards:
        text += f", mean reward {float(np.mean(rewards)):.3g}"
    if options.keep != "all":
        text += f"; kept {len(rows):,} ({options.keep})"
    console.info(text)


def _parser() -> Arguments:
    parser = Arguments(
        "generate",
        "Sample responses to the prompts of a file and write them as rows, with rewards where the rows have a ground truth.\n"
        "--keep good writes what data.responses=rows learns from (rejection sampling), --keep pairs what losses over pairs read.",
        "grpo-rl generate runs/grpo_rl/my_run --data task:arithmetic?num_rows=512 -n 8 --keep good --output good.jsonl\n"
        "  grpo-rl generate builtin:arithmetic --data prompts.parquet --output responses.parquet",
    )
    parser.add_argument("targets", nargs="*", metavar="MODEL|RUN[@step]", help="a model's folder, builtin:NAME, a run, RUN@40")
    parser.add_argument("--data", action="append", metavar="FILE", help="prompts, as data.val_files takes them")
    parser.add_argument("--output", metavar="FILE", default="responses.jsonl", help=".jsonl or .parquet (responses.jsonl)")
    parser.add_argument("--overwrite", action="store_true", help="replace the file where it is there")
    parser.add_argument("--keep", choices=("all", "good", "pairs"), default="all", help="which responses become rows (all)")
    parser.add_argument("--min-reward", type=finite, default=1.0, help="--keep good: the least reward of a good one (1)")
    parser.add_argument("--max-per-prompt", type=counted, help="--keep good: at most so many for one prompt")
    parser.add_argument("--scores", choices=("auto", "yes", "no"), default="auto", help="score the responses (auto)")
    add_sampling_options(parser, n=1, temperature=1.0)
    return parser
