"""The model card of an exported policy: what it was trained on, how, what came of it, and how to repeat that."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import yaml

import grpo_rl
from grpo_rl.config.schema.fields import flat, leaves
from grpo_rl.errors import DataError
from grpo_rl.run_files import read_text
from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.telemetry.metrics.validation import shown_keys
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.telemetry.terminal.text import safe_text

_LOCAL = ("trainer.default_local_dir", "trainer.experiment_name", "trainer.resume_from_path", "data.cache_dir")
"""Keys that are about one machine's folders and say nothing about the model."""


def model_card(run_dir: RunDir, config: Mapping[str, Any], step: int | None, *, has_curve: bool) -> str:
    """Return the card as Markdown with the hub's metadata at its head. `step` is that of the checkpoint, None for the end."""
    config = flat(config)
    records = [record for record in read_metrics(run_dir.metrics_file) if step is None or record["step"] <= step]
    base, steps = config.get("actor_rollout_ref.model.path"), int(records[-1]["step"]) if records else 0
    trained = f"Trained with reinforcement learning by grpo_rl {grpo_rl.__version__}"
    at = f"the checkpoint of step {step}" if step is not None else f"the policy after {steps} steps"
    lines = [
        *_metadata(str(base), config),
        f"# {safe_text(run_dir.name, limit=100)}",
        "",
        f"{trained}, from `{_code(base)}`: {at}. Objective: `{_code(config.get('algorithm.adv_estimator'))}` advantages, "
        f"`{_code(config.get('actor_rollout_ref.actor.policy_loss.loss_mode'))}` policy loss.",
    ]
    lines += ["", "## Data and reward", "", *_data(config)]
    lines += ["", "## Result", "", *_result(records)]
    lines += ["", "![curves](curves.png)"] if has_curve else []
    lines += ["", "## Configuration", "", "Keys that differ from the defaults; all of them are in `run_config.yaml`.", ""]
    lines += ["```yaml", *_changed(config), "```"]
    lines += ["", "## How to repeat it", "", *_repeat(run_dir)]
    return "\n".join(lines) + "\n"


def _metadata(base: str, config: Mapping[str, Any]) -> list[str]:
    """Return the block at the head of the card, which the hub reads."""
    found: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["grpo_rl", "reinforcement-learning"],
    }
    estimator = config.get("algorithm.adv_estimator")
    if isinstance(estimator, str) and ":" not in estimator:
        found["tags"].append(estimator)
    if base.count("/") == 1 and not base.startswith(("/", ".", "~")):
        found["base_model"] = base
    names = [
        file.removeprefix("hf:").partition("?")[0] for file in _listed(config, "data.train_files") if file.startswith("hf:")
    ]
    if names:
        found["datasets"] = names
    return ["---", *yaml.safe_dump(found, sort_keys=False).splitlines(), "---", ""]


def _data(config: Mapping[str, Any]) -> list[str]:
    lines = [f"- trained on `{_code(file)}`" for file in _listed(config, "data.train_files")]
    lines += [f"- validated on `{_code(file)}`" for file in _listed(config, "data.val_files")]
    lines += [f"- reward `{_code(name)}`" for name in _listed(config, "reward.functions")]
    return lines


def _result(records: Sequence[Mapping[str, float]]) -> list[str]:
    """Return a table of validation and reward before and after."""
    keys = [*shown_keys(records), "reward/mean", "response_length/mean"]
    rows = []
    for key in keys:
        points = [(int(record["step"]), record[key]) for record in records if key in record]
        if points:
            (first, before), (last, after) = points[0], points[-1]
            name = safe_text(key, limit=80).replace("|", "\\|")
            rows.append(f"| {name} | {before:.4g} (step {first}) | {after:.4g} (step {last}) |")
    if not rows:
        return ["No step was measured."]
    return ["| | first | last |", "|---|---|---|", *rows]


def _changed(config: Mapping[str, Any]) -> list[str]:
    """Return the keys that differ from the schema's defaults, one per line, without those about one machine's folders."""
    found = []
    for key, leaf in leaves().items():
        value = config.get(key, leaf.default)
        if value != leaf.default and key not in _LOCAL:
            text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
            text = text.removesuffix("\n").removesuffix("\n...")
            found.append(f"{key}: {text.replace('```', '')}")
    return found


def _repeat(run_dir: RunDir) -> list[str]:
    """Return the commands that train the same again: from the configuration here, and as they were typed."""
    lines = ["```bash", "python -m grpo_rl.main recipe=run_config.yaml trainer.experiment_name=again", "```"]
    words: list[str] = []
    with suppress(DataError):
        words = read_text(run_dir.overrides_file).splitlines()
    if words:
        typed = " ".join(shlex.quote(safe_text(word)) for word in words).replace("```", "")
        lines += ["", "It was started as:", "", "```bash", f"python -m grpo_rl.main {typed}", "```"]
    return [*lines, "", "Paths in these files are those of the machine that trained."]


def _listed(config: Mapping[str, Any], key: str) -> list[str]:
    found = config.get(key, [])
    return [str(entry) for entry in found] if isinstance(found, list) else [str(found)]


def _code(value: Any) -> str:
    return safe_text(str(value), limit=300).replace("`", "'")
