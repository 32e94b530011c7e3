"""`grpo-rl export RUN[@step]`: a Hugging Face folder with a model card: training, results, repetition."""

from __future__ import annotations

import argparse
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import yaml

import grpo_rl
from grpo_rl.arguments import Arguments, writing
from grpo_rl.commands.targets import FLAG, Target, add_trust_option, find_target, model_folder
from grpo_rl.config.schema.fields import changed, flat, leaves
from grpo_rl.config.secrets import redact
from grpo_rl.errors import ConfigError, DataError
from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.telemetry.metrics.validation import results
from grpo_rl.telemetry.rundir import RunDir, run_config
from grpo_rl.telemetry.terminal.console import Console
from grpo_rl.telemetry.terminal.text import safe_text

_BASE = "actor_rollout_ref.model.path"
_LOCAL = ("trainer.default_local_dir", "trainer.experiment_name", "trainer.resume_from_path")  # folders


_RUNS_CODE = (".py", ".pyc", ".so", ".sh", ".pkl", ".pickle", ".bin", ".pt", ".pth", ".ckpt")
"""Endings of code, and of files whose reader runs what they say."""
CARD, CONFIG, CURVE, METRICS = "README.md", "run_config.yaml", "curves.png", "metrics.jsonl"
_TEXT = """\
---
{metadata}---

# {name}

Trained with reinforcement learning by grpo_rl {version}, from `{base}`: {at}. Objective: `{estimator}` advantages, `{loss}` policy loss.

## Result

{result}
{curve}
## Configuration

Keys that differ from the defaults; all of them are in `run_config.yaml`.

```yaml
{changed}```

Paths in it are those of the machine that trained. The same again:

```bash
python -m grpo_rl.main recipe=run_config.yaml trainer.experiment_name=again
```
"""


def model_card(run_dir: RunDir, config: Mapping[str, Any], step: int | None, *, has_curve: bool) -> str:
    """Return the card as Markdown. `step` is the checkpoint's, None for the end."""
    config = flat(config)
    records = [record for record in read_metrics(run_dir.metrics_file) if step is None or record["step"] <= step]
    done = int(records[-1]["step"]) if records else 0
    settings = {key: value for key, (value, _) in changed(config).items() if key in leaves() and key not in _LOCAL}
    return _TEXT.format(
        metadata=_metadata(config),
        name=safe_text(run_dir.name, limit=100),
        version=grpo_rl.__version__,
        base=_code(config.get(_BASE)),
        at=f"the checkpoint of step {step}" if step is not None else f"the policy after {done} steps",
        estimator=_code(config.get("algorithm.adv_estimator")),
        loss=_code(config.get("actor_rollout_ref.actor.policy_loss.loss_mode")),
        result=_result(records),
        curve="\n![curves](curves.png)\n" if has_curve else "",
        changed=yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).replace("```", ""),
    )


def _metadata(config: Mapping[str, Any]) -> str:
    """Return the head of the card, which the hub reads."""
    metadata: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["grpo_rl", "reinforcement-learning"],
    }
    estimator, base, files = (config.get(key) for key in ("algorithm.adv_estimator", _BASE, "data.train_files"))
    if isinstance(estimator, str) and ":" not in estimator:
        metadata["tags"].append(estimator)
    if str(base).count("/") == 1 and not str(base).startswith(("/", ".", "~")):
        metadata["base_model"] = str(base)
    hub = [str(file) for file in (files if isinstance(files, list) else ()) if str(file).startswith("hf:")]
    if hub:
        metadata["datasets"] = [file.removeprefix("hf:").partition("?")[0] for file in hub]
    return yaml.safe_dump(metadata, sort_keys=False)


def _result(records: Sequence[Mapping[str, float]]) -> str:
    rows = []
    for name, (first, start_value), (last, end_value) in results(records):
        label = safe_text(name, limit=80).replace("|", "\\|")
        rows.append(f"| {label} | {start_value:.4g} (step {first:.0f}) | {end_value:.4g} (step {last:.0f}) |")
    return "\n".join(["| | first | last |", "|---|---|---|", *rows]) if rows else "No step was measured."


def _code(value: Any) -> str:
    return safe_text(str(value), limit=300).replace("`", "'")


def main(argv: Sequence[str]) -> int:
    """Raises ConfigError for words, CheckpointError for a bad checkpoint."""
    options = _parser().read(argv)
    target = find_target(options.target, trusted=options.trust_run)
    if target.run is None:
        raise ConfigError(f"{options.target} belongs to no run: there is nothing to export")
    run_dir = RunDir(target.run)
    with closing(Console()) as console:
        folder = Path(options.output).expanduser() if options.output else _default(target, options)
        model, marks = Path(model_folder(target, console, trusted=options.trust_run)), "config.json"
        if options.adapter:
            model, marks = model / "lora_adapter", "adapter_config.json"
            if not (model / marks).is_file():
                raise ConfigError(f"{target.label}: has no adapter: it was trained without actor_rollout_ref.model.lora_rank")
        with writing(str(folder)):
            if folder.resolve() != model.resolve():
                if folder.exists() and any(folder.iterdir()) and not (folder / marks).is_file():
                    raise ConfigError(f"--output {folder}: is there and holds no model; give a new folder")
                folder.mkdir(parents=True, exist_ok=True)
                may_run_code = sorted(path.name for path in model.rglob("*") if path.suffix in _RUNS_CODE)
                left_out = [] if options.trust_run else may_run_code
                with console.progress("copying the model"):
                    shutil.copytree(model, folder, dirs_exist_ok=True, ignore=lambda _, names: set(left_out) & set(names))
                if left_out:
                    console.warn(
                        f"left out, as they are code or may run some when they are read: {', '.join(left_out)}; {FLAG}"
                    )
            if options.dtype is not None:
                from grpo_rl.checkpoint.exporting import cast  # which loads torch

                with console.progress(f"writing the weights in {options.dtype}"):
                    cast(folder, options.dtype)
            files = {CONFIG: run_dir.config_file, METRICS: run_dir.metrics_file, CURVE: run_dir.plots / CURVE}
            names = [name for name, file in files.items() if file.is_file()]
            for name in names:
                shutil.copyfile(files[name], folder / name)
            card = model_card(run_dir, run_config(target.run), target.step, has_curve=CURVE in names)
            (folder / CARD).write_text(redact(card), encoding="utf-8")
        what = "adapter" if options.adapter else "model, tokenizer"
        console.info(f"written: {folder} ({what}, {', '.join([CARD, *names])})")
        console.info(f"to the hub: hf upload OWNER/NAME {shlex.quote(str(folder))}")
    return 0


def _default(target: Target, options: argparse.Namespace) -> Path:
    ending = ("_adapter" if options.adapter else "") + (f"_{options.dtype}" if options.dtype else "")
    if target.step is not None:
        return target.export_folder.with_name(target.export_folder.name + ending)
    if target.run is not None and Path(target.model) == RunDir(target.run).model:
        return target.run / "exports" / f"final{ending}"
    raise DataError(f"{target.label}: is the model that the run began with; export it with --output FOLDER if that is meant")


def _parser() -> Arguments:
    parser = Arguments(
        "export",
        "Write the policy of a run, or of one of its checkpoints, as a Hugging Face folder with a model card: data, configuration,\n"
        "curve, and the command that repeats the run. No Ray, no GPU, no training process.",
        "grpo-rl export runs/grpo_rl/my_run@40 --output my_model\n  grpo-rl export my_run --adapter",
    )
    parser.add_argument("target", metavar="RUN[@step]", help="a run's folder or name; RUN@40 is the checkpoint of step 40")
    parser.add_argument("--output", metavar="FOLDER", help="the folder (RUN/exports/final or RUN/exports/step_N)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="the type of the weights (as they are: float32)"
    )
    parser.add_argument("--adapter", action="store_true", help="the LoRA adapter alone, as a peft folder, without the model")
    add_trust_option(parser)
    return parser
