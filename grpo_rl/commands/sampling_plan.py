"""What the commands that sample share: options, plan, and answers to prompts that have none yet. The plan is
that of a run that only validates (`trainer.val_only=true`), of settings of a run, options and `key=value`
words, later ones first. Of a run's configuration only what bears on sampling and scoring is taken."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from grpo_rl.arguments import Arguments, not_negative, whole_number, writing
from grpo_rl.commands.targets import Target, add_trust_option, refuse_settings
from grpo_rl.config import relative_paths
from grpo_rl.config.compose import Composed, compose
from grpo_rl.config.relative_paths import function_files
from grpo_rl.config.schema.fields import changed, flat, nested
from grpo_rl.errors import ConfigError
from grpo_rl.run_files import model_digests
from grpo_rl.source_code import user_sources
from grpo_rl.telemetry.rundir import RunDir, RunLock, find_run, run_config

if TYPE_CHECKING:
    from grpo_rl.config.schema.tree import DataConfig
    from grpo_rl.data.dataset import PromptDataset
    from grpo_rl.evaluation.response_file import ResponseFile
    from grpo_rl.plan.decisions import Plan
    from grpo_rl.telemetry.terminal.console import Console

Keys = dict[str, Any]  # values of the configuration by their keys
_A, _R = "actor_rollout_ref", "actor_rollout_ref.rollout"
_DATA = (
    *("prompt_key", "reward_fn_key", "data_source", "ground_truth_key", "extra_info_key", "system_prompt", "chat_template"),
    *("apply_chat_template_kwargs", "custom_cls.path", "custom_cls.name", "on_bad_row", "max_prompt_length"),
    *("max_response_length", "filter_overlong_prompts", "truncation"),
)
_ENGINE = (
    *("name", "seed", "dtype", "fp32_lm_head", "tensor_model_parallel_size", "kv_cache_gib", "enforce_eager", "max_num_seqs"),
    *("max_num_batched_tokens", "enable_prefix_caching", "cpu_threads", "hf.batched", "engine_kwargs"),
)
TAKEN = frozenset([*(f"data.{key}" for key in _DATA), *(f"{_R}.{key}" for key in _ENGINE), "trainer.device", "trainer.seed"])
"""Keys of a run that bear on sampling, beside those of `reward.` and of episodes."""
EPISODES = f"{_R}.multi_turn."  # how the keys of episodes begin
SAMPLED_WITH = frozenset(f"{_R}.{key}" for key in ("name", "seed", "dtype", "fp32_lm_head"))
"""Keys of the engine that bear on responses; the others bear on speed and memory."""
_PROCESSES = frozenset(f"{EPISODES}environment.{key}" for key in ("num_workers", "memory_limit_gb", "retries"))
NO_DATA = "task:arithmetic?num_rows=1"  # never read: the prompts come from elsewhere
ALONE_MEMORY_SHARE = 0.85  # GPU: of the memory, for an engine alone on its device


def add_sampling_options(parser: Arguments, *, n: int) -> None:
    parser.add_argument("--data", action="append", metavar="FILE", help="prompts, as data.val_files takes them")
    parser.add_argument("-n", type=whole_number, default=n, help=f"responses to each prompt ({n})")
    parser.add_argument("--top-k", type=int, default=-1, help="sample from so many tokens; -1 takes all")
    parser.add_argument("--limit", type=whole_number, help="only the first rows of the data")
    parser.add_argument("--settings-of", metavar="RUN", help="the run whose data columns, templates and reward are taken")
    parser.add_argument("--max-tokens", type=whole_number, help="longest response in tokens (as the run has it, else 512)")
    add_engine_options(parser)


def add_engine_options(parser: Arguments) -> None:
    parser.add_argument("--temperature", type=not_negative, default=1.0, metavar="T", help="0 is greedy (1)")
    parser.add_argument("--top-p", type=not_negative, default=1.0, metavar="P", help="the likeliest tokens of this share (1)")
    parser.add_argument("--seed", type=int, metavar="S", help="seed of sampling (as the run has it, else 0)")
    parser.add_argument(
        "--engine", choices=("vllm", "hf"), help="vllm, or hf: plain transformers (as the run has it, else vllm)"
    )
    add_trust_option(parser)


@contextmanager
def responses_folder(folder: Path) -> Iterator[RunDir]:
    """Make the folder if need be, and lock it. Raises ConfigError if that fails."""
    run_dir = RunDir(folder)
    with writing(f"--output {folder}"):
        run_dir.logs.mkdir(parents=True, exist_ok=True)
    lock = RunLock(folder)
    try:
        yield run_dir
    finally:
        lock.release()


def option_keys(options: argparse.Namespace, data: Sequence[str]) -> Keys:
    greedy = options.temperature == 0
    if greedy and options.n > 1:
        raise ConfigError(f"-n {options.n} --temperature 0: greedy decoding gives the same response {options.n} times; -n 1")
    keys: Keys = {
        "data.val_files": list(data),
        f"{_R}.val_kwargs.n": options.n,
        f"{_R}.val_kwargs.temperature": float(options.temperature),
        f"{_R}.val_kwargs.do_sample": not greedy,
        f"{_R}.val_kwargs.top_p": options.top_p,
        f"{_R}.val_kwargs.top_k": options.top_k,
        "data.max_response_length": options.max_tokens,
        f"{_R}.seed": options.seed,
        f"{_R}.name": options.engine,
        "data.val_max_samples": options.limit,
    }
    return {key: value for key, value in keys.items() if value is not None}


def settings_of_run(
    run: Path | None,
    engine: str | None = None,
    words: Sequence[str] = (),
    *,
    trusted: bool = False,
    without: Sequence[str] = (),
) -> Keys:
    """Return a run's keys that bear on sampling and scoring and are not the defaults; none without a run.

    Left out are keys in `words`, those that begin as one of `without`, and if another `engine` is asked for
    those of the run's engine. Raises ConfigError for settings that may run code or reach an address, unless
    the run is `trusted`.
    """
    if run is None:
        return {}
    tree = flat(run_config(run))
    typed, has_other_engine = _typed(words), engine not in (None, tree.get(f"{_R}.name"))
    settings = {
        key: value
        for key, (value, _) in changed(tree).items()
        if _is_taken(key) and key not in typed and not key.startswith(tuple(without))
        if key == f"{_R}.seed" or not (has_other_engine and _is_of_engine(key))
    }
    if not trusted:
        refuse_settings(run, settings)
    return settings


def data_of_run(run: Path, *, trusted: bool = False) -> list[str]:
    """Raises ConfigError for a task of the run's own, unless it is `trusted`."""
    section = run_config(run).get("data", {})
    files = section.get("val_files") or section.get("val_prompt_files")
    names = [str(file) for file in files] if isinstance(files, list) else []
    if not trusted:
        refuse_settings(run, {"data.val_files": names})
    return names


def sampled_with(
    options: argparse.Namespace, targets: Sequence[Target], words: Sequence[str]
) -> tuple[Path | None, list[str], Keys]:
    """Return the run that gives settings (the named one, else the first target's), data and keys."""
    run = next((target.run for target in targets if target.run is not None), None)
    run = run if options.settings_of is None else find_run(options.settings_of)
    data = options.data or (data_of_run(run, trusted=options.trust_run) if run is not None else [])
    if not data:
        raise ConfigError("--data is missing: a file, a folder, task:NAME, ...; runs with data.val_files need none")
    keys = settings_of_run(run, options.engine, words, trusted=options.trust_run)
    return run, data, keys | option_keys(options, data)


def answer_missing(
    models: Sequence[tuple[str, Plan, ResponseFile]],
    run_dir: RunDir,
    console: Console,
    bare_prompts: Callable[[Any], PromptDataset] | None = None,
) -> None:
    """Sample and score what the files lack; of each model: label, plan, file."""
    values = models[0][1].config.rollout.val_kwargs
    open_ones = [model for model in models if not model[2].is_complete(values.n)]
    if not open_ones:
        console.info("all responses are there already")
        return
    for _, plan, _ in open_ones:
        if plan.lacks:
            raise ConfigError(plan.lacks)
    # Loading engines and Ray takes seconds, for which finished tables need not wait.
    from grpo_rl.cluster.sampling import sampler, sampling_session
    from grpo_rl.telemetry.rollout_log import record_of
    from grpo_rl.trainer.parts import validation_sampling

    with sampling_session(open_ones[0][1], run_dir, console) as session:
        for label, plan, file in open_ones:
            with sampler(session, plan) as started:
                prompts = started.prompts if bare_prompts is None else bare_prompts(started.tokenizer)
                assert prompts is not None, "an evaluation has data"
                answered = file.groups(values.n)
                missing = [row for row in range(len(prompts)) if row not in answered]
                if answered and missing:
                    console.info(f"{label}: goes on, {len(answered)} of {len(prompts)} prompts are answered already")
                sampling = validation_sampling(plan.config)
                parts = [[prompts.prompt(row, f"val-{row}") for row in part] for part in started.parts_of(missing, values.n)]
                with console.progress(label, len(missing) * values.n) as bar:
                    session.phase("gen")
                    for rollouts in started.answers(parts, values.n, sampling, bar.advance):
                        session.phase("save")
                        file.append(
                            [record_of(rollout) | {"row": int(rollout.prompt.uid.removeprefix("val-"))} for rollout in rollouts]
                        )
                        session.phase("gen")
                file.complete(len(prompts))


def sampling_plan(keys: Mapping[str, Any], words: Sequence[str], model: str, recipe: Path) -> tuple[Plan, Keys]:
    """Return the plan for sampling from `model`, of `keys`, which go into the file `recipe`, and `words` over
    them.

    Also returns the settings that responses and rewards depend on beside model and data, if not the defaults:
    an evaluation may go on with other settings of speed and memory. Raises ConfigError and DataError as
    `plan_without_page`.
    """
    from grpo_rl.plan.make import plan_without_page

    typed = _typed(words)
    fixed: Keys = {"trainer.val_only": True, f"{_A}.model.path": model}

    def planned() -> tuple[Composed, Plan]:
        untyped = {key: value for key, value in {**fixed, **keys}.items() if key not in typed}
        tree = nested(relative_paths.from_folder(untyped, Path.cwd()))
        recipe.parent.mkdir(parents=True, exist_ok=True)
        recipe.write_text(yaml.safe_dump(tree, sort_keys=True, allow_unicode=True), encoding="utf-8")
        composed = compose([f"recipe={recipe}", *words])
        return composed, plan_without_page(composed.config, looks_at_data=keys.get("data.val_files") != [NO_DATA])

    composed, plan = planned()
    share = f"{_R}.gpu_memory_utilization"
    if plan.machine.device == "cuda" and plan.config.rollout.name == "vllm" and share not in typed:
        fixed[share] = ALONE_MEMORY_SHARE
        composed, plan = planned()
    tree = flat(composed.resolved)
    matters = {key for key in tree if _is_taken(key) and (not _is_of_engine(key) or key in SAMPLED_WITH)} - _PROCESSES
    settings = {key: value for key, (value, _) in changed(tree).items() if key in matters}
    settings |= {key: tree[key] for key in tree if key.startswith(f"{_R}.val_kwargs.")}
    return plan, settings | {"data.val_max_samples": tree.get("data.val_max_samples")} | _contents(settings)


def data_settings(data: DataConfig, names: Sequence[str] | None = None) -> Keys:
    """Return the names of the data, by default those of `data`, with a digest of their contents."""
    from grpo_rl.data.sources.locate import open_source
    from grpo_rl.data.sources.source import fingerprint_of

    names = data.val_files if names is None else names
    settings_of_data: Keys = {"data.val_files": list(names)}
    if data.custom_cls.path is None:
        settings_of_data["digest of the data"] = fingerprint_of([open_source(name) for name in names])
    return settings_of_data


def _contents(settings: Mapping[str, Any]) -> Keys:
    """Return digests of the files, function files with imports, and model folders that settings name."""
    paths = filter(os.path.exists, _texts(settings))
    digests = user_sources({*function_files(settings), *paths}) | model_digests(settings)
    return {f"digest of {name}": of for name, of in sorted(digests.items())}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)


def _typed(words: Sequence[str]) -> set[str]:
    return {word.partition("=")[0].lstrip("+~") for word in words}


def _is_taken(key: str) -> bool:
    return key in TAKEN or key.startswith(("reward.", EPISODES))


def _is_of_engine(key: str) -> bool:
    return key.startswith(f"{_R}.") and not key.startswith(EPISODES)
