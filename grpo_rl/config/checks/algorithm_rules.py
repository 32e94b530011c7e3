"""Names of estimators, losses, rewards, engines and tasks, and what they need, checked without loading any of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from grpo_rl.config import derived, function_options
from grpo_rl.config.checks import algorithm_table as table
from grpo_rl.config.checks.switch_rules import value_of
from grpo_rl.config.convert import show
from grpo_rl.config.derived import estimates_advantages, is_offline
from grpo_rl.config.schema.fields import leaves
from grpo_rl.config.schema.tree import Config

_A = "actor_rollout_ref.actor"


@dataclass(frozen=True, slots=True)
class Function:
    """The facts about a function of the algorithm that are there without calling it."""

    name: str
    needs: tuple[str, ...]
    options: tuple[str, ...]


TABLES: tuple[tuple[function_options.Choice, dict[str, table.Facts]], ...] = (
    (function_options.ESTIMATOR, table.ESTIMATORS),
    (function_options.LOSS, table.LOSSES),
    (function_options.AVERAGE, table.AGGREGATIONS),
    (function_options.KL_IN_LOSS, table.KL_ESTIMATORS | {"full": table.NO_FACTS}),
    (function_options.KL_IN_REWARD, table.KL_ESTIMATORS),
)
"""Each choice with the functions that this package has for it."""


def problems(config: Config) -> Iterator[str]:
    """Yield unknown names, and settings that the registered functions do not go with.

    A function of the user's own is known only once it is imported: the plan applies the same rules to it then.
    """
    rollout = config.actor_rollout_ref.rollout
    for choice, known in TABLES:
        name = choice.name(config)
        yield from _unknown(f"{choice.section}.{choice.key}", choice.kind, name, known)
        facts = known.get(name)
        # Where no advantages are estimated, settings of an estimator are refused as such.
        if facts is not None and (choice is not function_options.ESTIMATOR or estimates_advantages(config)):
            yield from function_problems(config, choice, Function(name, facts["needs"], facts["options"]))
    yield from _unknown("actor_rollout_ref.rollout.name", "rollout engine", rollout.name, table.ENGINES)
    for spec in config.reward.functions:
        yield from _unknown("reward.functions", "reward function", spec.rpartition("*")[2].strip(), table.REWARDS)
    model = config.actor_rollout_ref.model.path
    if model.startswith("builtin:") and model.removeprefix("builtin:") not in table.EMBEDDED_MODELS:
        known_models = ", ".join(f"builtin:{name}" for name in table.EMBEDDED_MODELS)
        yield f"actor_rollout_ref.model.path: there is no embedded model {show(model)!r}; there are {known_models}"
    yield from _tasks(config)


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
    for key in ("train_files", "val_files", "val_prompt_files"):
        for file in getattr(config.data, key):
            kind, colon, rest = file.partition(":")
            name = rest.partition("?")[0]
            if kind == "task" and colon and ":" not in name and name not in table.TASKS:
                yield f"data.{key}={file}: {unknown_name('task', name, table.TASKS)}"


def function_problems(config: Config, choice: function_options.Choice, function: Function) -> Iterator[str]:
    """Yield the settings that a chosen function does not go with."""
    yield from _options(config, choice, function)
    if choice is function_options.LOSS and "pairs" in function.needs:
        yield from _pairs(config, function)
    if choice is function_options.ESTIMATOR:
        yield from _group(config, function)
        yield from _critic(config, function)
    if choice is function_options.KL_IN_REWARD:
        yield from _value_alone(function)


def _options(config: Config, choice: function_options.Choice, function: Function) -> Iterator[str]:
    """Options that the function does not take, and options that are set twice."""
    section, own = value_of(config, choice.section), value_of(config, f"{choice.section}.{choice.options_key}")
    assert isinstance(own, dict)
    chosen = f"{choice.section}.{choice.key}={function.name}"
    for key, fixed in choice.fixed.items():
        value = value_of(section, key)
        missing = [option for option in fixed.options if option not in function.options]
        if key == "clip_ratio_c" and without_dual_clip(function.name):
            continue
        if value is not None and value != fixed.verl_default and len(missing) == len(fixed.options):
            yield (
                f"{choice.section}.{key}={_short(value)}: has no effect with {chosen}, which has no option "
                f"{' or '.join(missing)}; it takes {', '.join(function.options) or 'none'}; leave it out"
            )
        for option in own:
            # clip_ratio sets both bounds, which have keys of their own too; std has no key, only a switch.
            if option in fixed.options and key != "clip_ratio" and value is not True:
                yield f"{choice.section}.{choice.options_key}: {option} is set by {choice.section}.{key}; give one of them"
    parts = config.algorithm.reward_parts
    if choice is function_options.ESTIMATOR and parts and "parts" not in function.needs:
        yield f"algorithm.reward_parts={show(parts)}: algorithm.adv_estimator={function.name} reads no parts of the reward; gdpo does"
    if "weights" in own and "parts" in function.needs and not parts:
        yield f"{choice.section}.{choice.options_key}: weights are the factors in reward.functions, such as 0.2*format"
    keyed = {option for key, fixed in choice.fixed.items() if fixed.verl_default is not True for option in fixed.options}
    for option in own:
        if option not in function.options and option not in keyed:
            near = difflib.get_close_matches(str(option), function.options, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            yield (
                f"{choice.section}.{choice.options_key}: {choice.kind} {function.name!r} has no option {show(option)}.{hint} "
                f"It takes {', '.join(function.options) or 'none'}"
            )


def without_dual_clip(loss: str) -> bool:
    """Return whether this is a loss that verl's commands give clip_ratio_c to, and that does not read it there either."""
    return loss in ("gspo", "gspo_token")


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(show(value))


def _value_alone(function: Function) -> Iterator[str]:
    """Refuse a KL estimator for the reward whose name promises a gradient, or that corrects for older samples."""
    if function.name.endswith("+"):
        yield (
            f"algorithm.kl_penalty={function.name}: differs from {function.name[:-1]} by its gradient, and a reward has none; "
            f"algorithm.kl_penalty={function.name[:-1]}"
        )
    if "old_logprobs" in function.needs:
        yield (
            f"algorithm.kl_penalty={function.name}: corrects for samples of an older policy, and the reward is of the policy that "
            "sampled; algorithm.kl_penalty=k3"
        )


def _pairs(config: Config, loss: Function) -> Iterator[str]:
    """A loss over pairs where a prompt has one response, with an average that is no mean over pairs, or a budget of tokens that holds none."""
    chosen = f"{function_options.LOSS.section}.{function_options.LOSS.key}={loss.name}"
    average = function_options.AVERAGE.name(config)
    if average in table.AGGREGATIONS and average not in function_options.PAIR_AVERAGES:
        yield (
            f"{_A}.loss_agg_mode={average}: makes no mean over pairs, and {chosen} is one; "
            f"{_A}.loss_agg_mode={' or '.join(function_options.PAIR_AVERAGES)}"
        )
    if not is_offline(config) and config.actor_rollout_ref.rollout.n == 1:
        yield f"{chosen}: compares the best and the worst response to a prompt, and actor_rollout_ref.rollout.n=1; usual is 2 to 16"
    rule, longest = derived.update_rule(config), derived.longest_sequence(config)
    budget, together = rule.max_tokens, rule.sequence_ranks
    if budget is not None and longest <= budget < 2 * longest:
        yield (
            f"{_A}.ppo_max_token_len_per_gpu={budget // together}: shorter than a pair, whose two sequences stay together with "
            f"{chosen} and may have 2 x {longest} tokens; at least {-(-2 * longest // together)}"
        )


def _group(config: Config, estimator: Function) -> Iterator[str]:
    """An estimator that compares responses, with one response per prompt."""
    if "group" in estimator.needs and config.actor_rollout_ref.rollout.n == 1:
        yield (
            f"algorithm.adv_estimator: {estimator.name} compares the responses to one prompt, so it needs at least 2, and "
            "actor_rollout_ref.rollout.n=1; usual is 5 to 16"
        )


def _critic(config: Config, estimator: Function) -> Iterator[str]:
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
