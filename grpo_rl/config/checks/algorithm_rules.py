"""Names of estimators, losses, rewards, engines and tasks, and what they need, checked without loading any of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from grpo_rl.config.checks import algorithm_table as table
from grpo_rl.config.checks.switch_rules import value_of
from grpo_rl.config.convert import show
from grpo_rl.config.schema.fields import leaves
from grpo_rl.config.schema.tree import ActorConfig, Config

_A = "actor_rollout_ref.actor"
_CLIP_BOUNDS = {
    "clip_ratio": ("clip_low", "clip_high"),
    "clip_ratio_low": ("clip_low",),
    "clip_ratio_high": ("clip_high",),
    "clip_ratio_c": ("clip_c",),
}


@dataclass(frozen=True, slots=True)
class Estimator:
    """What is known of an estimator without calling it."""

    name: str
    needs: tuple[str, ...]
    options: tuple[str, ...]


def problems(config: Config) -> Iterator[str]:
    """Unknown names, and settings that registered estimators and losses do not go with.

    A function of the user's own is known only once it is imported: the plan applies the same rules to it then.
    """
    algorithm, actor, rollout = config.algorithm, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    yield from _unknown("algorithm.adv_estimator", "advantage estimator", algorithm.adv_estimator, table.ESTIMATORS)
    yield from _unknown(f"{_A}.policy_loss.loss_mode", "policy loss", actor.policy_loss.loss_mode, table.LOSS_BOUNDS)
    yield from _unknown(f"{_A}.loss_agg_mode", "loss_agg_mode", actor.loss_agg_mode, table.AGGREGATIONS)
    yield from _unknown("actor_rollout_ref.rollout.name", "rollout engine", rollout.name, table.ENGINES)
    for spec in config.reward.functions:
        yield from _unknown("reward.functions", "reward function", spec.rpartition("*")[2].strip(), table.REWARDS)
    model = config.actor_rollout_ref.model.path
    if model.startswith("builtin:") and model.removeprefix("builtin:") not in table.EMBEDDED_MODELS:
        known = ", ".join(f"builtin:{name}" for name in table.EMBEDDED_MODELS)
        yield f"actor_rollout_ref.model.path: there is no embedded model {show(model)!r}; there are {known}"
    yield from _tasks(config)
    facts = table.ESTIMATORS.get(algorithm.adv_estimator)
    if facts is not None:
        yield from estimator_problems(config, Estimator(algorithm.adv_estimator, facts["needs"], facts["options"]))
    bounds = table.LOSS_BOUNDS.get(actor.policy_loss.loss_mode)
    if bounds is not None:
        yield from _bounds(actor, bounds)


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """The line for a name that no registry of this kind has, with the nearest ones."""
    names = sorted(known)
    near = difflib.get_close_matches(name[:200], names, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return (
        f"unknown {kind} {show(name)!r}.{hint} Known: {', '.join(names)}; "
        f"or your own as my_package.module:function or path/to/file.py:function"
    )


def _unknown(key: str, kind: str, name: str, known: Iterable[str]) -> Iterator[str]:
    if name not in known and ":" not in name:
        yield f"{key}: {unknown_name(kind, name, known)}"


def _tasks(config: Config) -> Iterator[str]:
    for key in ("train_files", "val_files"):
        for file in getattr(config.data, key):
            kind, colon, rest = file.partition(":")
            name = rest.partition("?")[0]
            if kind == "task" and colon and ":" not in name and name not in table.TASKS:
                yield f"data.{key}={file}: {unknown_name('task', name, table.TASKS)}"


def estimator_problems(config: Config, estimator: Estimator) -> Iterator[str]:
    """Settings that the estimator does not go with."""
    yield from _group(config, estimator)
    yield from _critic(config, estimator)
    yield from _options(config, estimator)


def _group(config: Config, estimator: Estimator) -> Iterator[str]:
    """An estimator that compares responses, with one response per prompt."""
    if "group" in estimator.needs and config.actor_rollout_ref.rollout.n == 1:
        yield (
            f"algorithm.adv_estimator: {estimator.name} compares the responses to one prompt, so it needs at least 2, and "
            "actor_rollout_ref.rollout.n=1; usual is 5 to 16"
        )


def _critic(config: Config, estimator: Estimator) -> Iterator[str]:
    """Settings of a critic that is not there, and one that is switched off and needed."""
    if "values" in estimator.needs:
        if config.critic.enable is False:
            yield f"critic.enable=false: algorithm.adv_estimator={estimator.name} learns from a critic; leave it out"
        return
    settings = [leaf for key, leaf in leaves().items() if key.startswith("critic.") or key == "trainer.critic_warmup"]
    for leaf in settings:
        value = value_of(config, leaf.key)
        if value != leaf.default and not (leaf.key == "critic.enable" and value is False):
            yield (
                f"{leaf.key}={show(value)}: algorithm.adv_estimator={estimator.name} needs no critic; leave it out, or "
                "algorithm.adv_estimator=gae"
            )


def _options(config: Config, estimator: Estimator) -> Iterator[str]:
    """Options that the estimator does not take."""
    algorithm, name = config.algorithm, estimator.name
    if name != "grpo" and not algorithm.norm_adv_by_std_in_grpo:
        yield (
            f"algorithm.norm_adv_by_std_in_grpo=false: only algorithm.adv_estimator=grpo reads it, and it is {name}; leave it out"
        )
    elif not algorithm.norm_adv_by_std_in_grpo and "std" in algorithm.adv_options:
        yield "algorithm.adv_options: std says the same as algorithm.norm_adv_by_std_in_grpo=false; give one of them"
    for key in ("gamma", "lam"):
        if getattr(algorithm, key) != 1.0 and key not in estimator.options:
            yield f"algorithm.{key}={getattr(algorithm, key):g}: algorithm.adv_estimator={name} has none; leave it out"
        if key in algorithm.adv_options:
            yield f"algorithm.adv_options: {key} is set by algorithm.{key}"
    if "weights" in algorithm.adv_options and "parts" in estimator.needs:
        yield "algorithm.adv_options: weights are the factors in reward.functions, such as 0.2*format"
    for option in algorithm.adv_options:
        if option not in (*estimator.options, "gamma", "lam"):
            near = difflib.get_close_matches(option, estimator.options, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            yield (
                f"algorithm.adv_options: {name} has no option {option}.{hint} It takes {', '.join(estimator.options) or 'none'}"
            )


def _bounds(actor: ActorConfig, bounds: Iterable[str]) -> Iterator[str]:
    """Clip bounds that were set and that the policy loss does not have."""
    default = ActorConfig()
    for key, needed in _CLIP_BOUNDS.items():
        if getattr(actor, key) != getattr(default, key) and not any(bound in bounds for bound in needed):
            yield (
                f"{_A}: {key}={getattr(actor, key):g}: has no effect with policy_loss.loss_mode={actor.policy_loss.loss_mode}, "
                "which has no such bound; leave it out"
            )
