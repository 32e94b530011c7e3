"""What the commands that sample share: their options, their plan, and the answers to the prompts that have none yet.

The plan is made of settings of a run, options of the command, and `key=value` words, later ones first.

The configuration is that of a run which only validates (`trainer.val_only=true`), composed and checked in the same way. Of a
run's own configuration only what bears on sampling and scoring is taken: data columns, templates, lengths, reward, engine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from grpo_rl.arguments import Arguments, counted, not_negative, writing
from grpo_rl.commands.targets import Target, add_trust_option, refuse_settings
from grpo_rl.config import relative_paths
from grpo_rl.config.compose import Composed, compose
from grpo_rl.config.schema.fields import changed, flat, nested
from grpo_rl.errors import ConfigError
from grpo_rl.telemetry.rundir import RunDir, find_run, run_config

if TYPE_CHECKING:
    from grpo_rl.cluster.run_session import RunSession
    from grpo_rl.cluster.sampling import Sampler
    from grpo_rl.data.dataset import PromptDataset
    from grpo_rl.evaluation.response_file import ResponseFile
    from grpo_rl.plan.decisions import Plan
    from grpo_rl.telemetry.terminal.console import Console

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
"""Keys of a run that bear on sampling; those of `reward.` and of episodes are taken as well."""
EPISODES = f"{_R}.multi_turn."
"""The beginning of the keys of episodes of several turns."""
SAMPLED_WITH = frozenset(f"{_R}.{key}" for key in ("name", "seed", "dtype", "fp32_lm_head"))
"""Keys of the engine that responses depend on; the others are about speed and memory."""
_PROCESSES = frozenset(f"{EPISODES}environment.{key}" for key in ("num_workers", "memory_limit_gb", "retries"))
"""Keys of episodes that are about the processes of environments."""
NO_DATA = "task:arithmetic?num_rows=1"
"""The data of a plan whose prompts come from elsewhere: it is checked, and never read."""
ALONE_MEMORY_SHARE = 0.85
"""GPU: share of the memory for an engine that has the device to itself."""


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """A composed configuration and its plan."""

    composed: Composed
    plan: Plan

    @property
    def settings(self) -> dict[str, Any]:
        """Return what responses and rewards depend on beside model and data, by key, where it is not the default.

        Settings of speed and memory are none of them: an evaluation may go on with others.
        """
        tree = flat(self.composed.resolved)
        matters = {key for key in tree if _is_taken(key) and (not _is_of_engine(key) or key in SAMPLED_WITH)} - _PROCESSES
        kept = {key: value for key, (value, _) in changed(tree).items() if key in matters}
        values = {key: tree[key] for key in tree if key.startswith(f"{_R}.val_kwargs.")}
        return kept | values | {"data.val_max_samples": tree.get("data.val_max_samples")}


def add_sampling_options(parser: Arguments, *, n: int) -> None:
    """Add the options that all commands which sample for prompts have in common."""
    parser.add_argument("--data", action="append", metavar="FILE", help="prompts, as data.val_files takes them")
    parser.add_argument("-n", type=counted, default=n, help=f"responses to each prompt ({n})")
    parser.add_argument("--top-k", type=int, default=-1, help="sample from so many tokens; -1 takes all")
    parser.add_argument("--limit", type=counted, help="only the first rows of the data")
    parser.add_argument("--settings-of", metavar="RUN", help="the run whose data columns, templates and reward are taken")
    parser.add_argument("--max-tokens", type=counted, help="longest response in tokens (as the run has it, else 512)")
    add_engine_options(parser)


def add_engine_options(parser: Arguments) -> None:
    """Add the options of sampling from one model."""
    parser.add_argument("--temperature", type=not_negative, default=1.0, metavar="T", help="0 is greedy (1)")
    parser.add_argument("--top-p", type=not_negative, default=1.0, metavar="P", help="the likeliest tokens of this share (1)")
    parser.add_argument("--seed", type=int, metavar="S", help="seed of sampling (as the run has it, else 0)")
    parser.add_argument(
        "--engine", choices=("vllm", "hf"), help="vllm, or hf: plain transformers (as the run has it, else vllm)"
    )
    add_trust_option(parser)


def output_folder(folder: Path) -> RunDir:
    """Make a folder for responses and logs. Raises ConfigError where it cannot be made."""
    run_dir = RunDir(folder)
    with writing(f"--output {folder}"):
        run_dir.logs.mkdir(parents=True, exist_ok=True)
    return run_dir


def option_keys(options: argparse.Namespace, data: Sequence[str]) -> dict[str, Any]:
    """Return the options as keys of the configuration."""
    greedy = options.temperature == 0
    if greedy and options.n > 1:
        raise ConfigError(f"-n {options.n} --temperature 0: greedy decoding gives the same response {options.n} times; -n 1")
    keys: dict[str, Any] = {
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
) -> dict[str, Any]:
    """Return the keys of a run that bear on sampling and scoring, where they are not the defaults; none without a run.

    Where another `engine` is asked for, the settings of the run's own are left out: they mean nothing to it. So are the keys
    that are typed (`words`), and those that begin as one of `without`. Raises ConfigError for settings that may run code or
    reach an address, unless the run is `trusted`.
    """
    if run is None:
        return {}
    tree = flat(run_config(run))
    left_out = _typed(words)
    kept = {key: value for key, (value, _) in changed(tree).items() if _is_taken(key) and key not in left_out}
    kept = {key: value for key, value in kept.items() if not key.startswith(tuple(without))}
    if engine not in (None, tree.get(f"{_R}.name")):
        kept = {key: value for key, value in kept.items() if not _is_of_engine(key) or key == f"{_R}.seed"}
    if not trusted:
        refuse_settings(run, kept)
    return kept


def data_of_run(run: Path, *, trusted: bool = False) -> list[str]:
    """Return the validation data of a run. Raises ConfigError for a task of its own, unless the run is `trusted`."""
    section = run_config(run).get("data", {})
    files = section.get("val_files") or section.get("val_prompt_files") if isinstance(section, dict) else None
    found = [str(file) for file in files] if isinstance(files, list) else []
    if not trusted:
        refuse_settings(run, {"data.val_files": found})
    return found


def sampled_with(
    options: argparse.Namespace, targets: Sequence[Target], words: Sequence[str]
) -> tuple[Path | None, list[str], dict[str, Any]]:
    """Return the run that settings are taken from (the one that is named, else the first among the targets), data and keys."""
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
    """Sample and score what is not in the files yet: of each model a label for the screen, its plan, its file.

    `bare_prompts` makes the prompts, with the tokenizer, for plans without data.
    """
    n = models[0][1].config.actor_rollout_ref.rollout.val_kwargs.n
    open_ones = [model for model in models if not model[2].is_complete(n)]
    if not open_ones:
        console.info("all responses are there already")
        return
    # Loading engines and Ray takes seconds, which tables of responses that are there need not wait for.
    from grpo_rl.cluster.sampling import sampler, sampling_session

    with sampling_session(open_ones[0][1], run_dir, console) as session:
        for label, plan, file in open_ones:
            with sampler(session, plan) as started:
                prompts = started.prompts if bare_prompts is None else bare_prompts(started.tokenizer)
                assert prompts is not None, "an evaluation has data"
                _answer(label, plan, started, session, prompts, file, console)


def _answer(
    label: str,
    plan: Plan,
    sampler: Sampler,
    session: RunSession,
    prompts: PromptDataset,
    file: ResponseFile,
    console: Console,
) -> None:
    from grpo_rl.telemetry.rollouts.rollout_log import record_of
    from grpo_rl.trainer.schedule import VALIDATION, training_sampling
    from grpo_rl.trainer.validation import validation_sampling

    values = plan.config.actor_rollout_ref.rollout.val_kwargs
    there = file.groups(values.n)
    missing = [row for row in range(len(prompts)) if row not in there]
    if there and missing:
        console.info(f"{label}: goes on, {len(there)} of {len(prompts)} prompts are answered already")
    sampling = validation_sampling(values, training_sampling(plan.config, VALIDATION))
    parts = [[prompts.prompt(row, f"val-{row}") for row in part] for part in sampler.parts_of(missing, values.n)]
    with console.progress(label, len(missing) * values.n) as bar:
        session.phase("gen")
        for rollouts in sampler.answers(parts, values.n, sampling, bar.advance):
            session.phase("save")
            rows = (int(rollout.prompt.uid.removeprefix("val-")) for rollout in rollouts)
            file.append([record_of(one) | {"row": row} for one, row in zip(rollouts, rows, strict=True)])
            session.phase("gen")
    file.complete(len(prompts))


def sampling_plan(keys: Mapping[str, Any], words: Sequence[str], model: str, recipe: Path) -> SamplingPlan:
    """Return the plan for sampling from `model`. `keys` go into the file `recipe`; what is typed (`words`) goes over it.

    Raises ConfigError and DataError as `make_plan` does.
    """
    typed = _typed(words)
    own: dict[str, Any] = {"trainer.val_only": True, f"{_A}.model.path": model}
    planned = _planned({**own, **keys}, typed, words, recipe)
    share = f"{_R}.gpu_memory_utilization"
    if planned.plan.machine.device != "cuda" or planned.plan.config.actor_rollout_ref.rollout.name != "vllm" or share in typed:
        return planned
    # The engine has its device to itself: nothing is trained beside it.
    return _planned({**own, share: ALONE_MEMORY_SHARE, **keys}, typed, words, recipe)


def _planned(keys: Mapping[str, Any], typed: set[str], words: Sequence[str], recipe: Path) -> SamplingPlan:
    from grpo_rl.plan.make import make_plan

    untyped = {key: value for key, value in keys.items() if key not in typed}
    tree = nested(relative_paths.from_folder(untyped, Path.cwd()))
    recipe.parent.mkdir(parents=True, exist_ok=True)
    recipe.write_text(yaml.safe_dump(tree, sort_keys=True, allow_unicode=True), encoding="utf-8")
    composed = compose([f"recipe={recipe}", *words])
    return SamplingPlan(composed, make_plan(composed))


def _typed(words: Sequence[str]) -> set[str]:
    return {word.partition("=")[0].lstrip("+~") for word in words}


def _is_taken(key: str) -> bool:
    return key in TAKEN or key.startswith(("reward.", EPISODES))


def _is_of_engine(key: str) -> bool:
    return key.startswith(f"{_R}.") and not key.startswith(EPISODES)
