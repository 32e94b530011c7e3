"""The functions of the algorithm, bound and tried before anything starts."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from grpo_rl.algos import trial
from grpo_rl.algos.advantages.registered import ADVANTAGES, reads_token_rewards
from grpo_rl.algos.correction import RolloutCorrection
from grpo_rl.algos.kl import KL_ESTIMATORS
from grpo_rl.algos.losses.distillation import Distillation
from grpo_rl.algos.losses.registered import POLICY_LOSSES, selection_of
from grpo_rl.algos.objective import Objective, average_options
from grpo_rl.config import derived, effects
from grpo_rl.config.convert import show
from grpo_rl.config.function_options import (
    ACTOR,
    AVERAGE,
    CHOICES,
    ESTIMATOR,
    KL_IN_LOSS,
    KL_IN_REWARD,
    LOSS,
    PAIR_AVERAGES,
    WITHOUT_DUAL_CLIP,
    Choice,
    chosen_options,
)
from grpo_rl.config.schema.fields import value_of
from grpo_rl.config.schema.tree import Config
from grpo_rl.data.draw_order import CURRICULA
from grpo_rl.errors import ConfigError, Problems
from grpo_rl.models import builtin
from grpo_rl.models.load import load_tokenizer
from grpo_rl.registry import check_options, needs_of, options_of
from grpo_rl.rewards.combined import factors_of, may_score_steps
from grpo_rl.rewards.compose import LIFTED
from grpo_rl.trainer.sampled.sampler import ROLLOUTS
from grpo_rl.trainer.sampled.selection import FILTERS
from grpo_rl.trainer.sampled.trained import estimator_options

ACTS_AT_ONE = ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "negative_low", "negative_high")
"""Options of losses that change the gradient even if every ratio is 1; others bound the ratio."""

UNDIVIDED = {"std": "none", "mode": "mean_norm"}  # estimators' options that divide by nothing


def checks(config: Config) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield how a rule's messages begin, and the check, which raises ConfigError."""
    for choice in CHOICES:
        if _is_used(config, choice):
            yield "", partial(_bind, config, choice)
    if config.distillation.enabled:
        yield "", lambda: _refuse(_of_teachers(config))
    if config.is_offline:
        return  # nothing is sampled that could be corrected or filtered
    if config.estimates_advantages:
        yield "algorithm.adv_estimator: ", lambda: _refuse(_of_estimator(config))
    if not config.trains_pairs:
        yield "algorithm.rollout_correction.", lambda: _refuse(_of_correction(config))
    groups, data, function = config.algorithm.filter_groups, config.data, config.rollout.function
    if function is not None:
        yield "actor_rollout_ref.rollout.function: ", lambda: ROLLOUTS.check_call(function, "sampler", "prompts")
    if groups.enable and ":" in groups.metric:
        yield "algorithm.filter_groups.metric: ", lambda: FILTERS.check_call(groups.metric, "group")
    elif groups.enable:
        yield "algorithm.filter_groups.metric", lambda: _check_metric(groups.metric, config)
    if data.curriculum is not None:
        yield "data.curriculum: ", lambda: CURRICULA.check_call(data.curriculum or "", "draw")
    if data.retire_above is not None or data.curriculum is not None:
        yield "data.retire_metric", lambda: _check_metric(data.retire_metric, config)


def _check_metric(name: str, config: Config) -> None:
    """Raise ConfigError for a metric that no reward of this run can have; `function/key` is known only when it is called."""
    names = list(_factors(config))
    if names == [""]:
        return
    overlong = ["overlong"] if config.reward.overlong_buffer.tokens is not None else []
    possible = ["score", "seq_reward", *names, *overlong, *LIFTED]
    if name not in possible and name.partition("/")[0] not in names:
        raise ConfigError(f"={name}: no part of the reward is called so; one of {', '.join(possible)}")


def objective_of(config: Config) -> Objective:
    correction = RolloutCorrection.from_config(config.algorithm.rollout_correction)
    objective = Objective.from_config(config.actor, config.data.max_response_length, correction)
    return dataclasses.replace(objective, distillation=Distillation.from_config(config.distillation))


def without_effect_on_policy(config: Config) -> list[str]:
    """Return keys that were set and do nothing if one update per batch makes every ratio 1."""
    name = LOSS.name(config)
    if name not in POLICY_LOSSES or not _has_ratio(config):
        return []
    options = options_of(POLICY_LOSSES.get(name))
    idle = [key for option, (key, _) in LOSS.given(config).items() if option in options and option not in ACTS_AT_ONE]
    return list(dict.fromkeys(idle))


def _is_used(config: Config, choice: Choice) -> bool:
    """Return whether a function is called at all; the full KL is not a registered one."""
    if choice is KL_IN_LOSS:
        return config.has_kl_in_loss and choice.name(config) != "full"
    if choice is ESTIMATOR:
        return config.estimates_advantages
    if choice is KL_IN_REWARD:
        return config.algorithm.use_kl_in_reward
    return not config.trains_only_reward_model


def _bind(config: Config, choice: Choice) -> None:
    """Raise ConfigError for a missing function, refused or idle options, or a failed trial."""
    kind, name = trial.KINDS[choice.kind], choice.name(config)
    key = f"{choice.section}.{choice.key}"
    with _problems_of(f"{key}: "):
        function = kind.registry.get(name)
    _refuse([*_idle_keys(config, choice, function), *_fits(config, choice, function)])
    options = _options(config, choice)
    options_given = value_of(config, f"{choice.section}.{choice.options_key}")
    with _problems_of(f"{choice.section}.{choice.options_key}: "):
        check_options(f"{choice.kind} {name!r}", function, options_given)
    run = kind.run
    if choice is ESTIMATOR:  # tried with the run's number of reward parts
        num_parts = max(1, len(config.algorithm.reward_parts or _factors(config)))
        run = partial(trial.run_estimator, num_parts=num_parts)
    with _problems_of(f"{key}: "):
        check_options(f"{choice.kind} {name!r}", function, options)
        trial.check(kind, name, options, run)
    for option, (key, value) in choice.given(config).items():
        if key == "algorithm.norm_adv_by_std_in_grpo" and options_of(function)[option] == value:
            raise ConfigError(f"{key}=false: {name} has {option}={value} anyway; leave it out")
        all_options = options_of(function) | options
        undivided = [f"{switch}={off}" for switch, off in UNDIVIDED.items() if all_options.get(switch) == off]
        if option == "epsilon" and undivided and choice is ESTIMATOR and name in ADVANTAGES and name != "gdpo":
            raise ConfigError(
                f"{key}: epsilon={value} has no effect with {name} and {undivided[0]}, which divides by nothing; leave it out"
            )


def _refuse(problems: Iterable[str]) -> None:
    if messages := list(problems):
        raise ConfigError(messages)


@contextlib.contextmanager
def _problems_of(key: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError([f"{key}{problem}" for problem in error.problems]) from error


def _idle_keys(config: Config, choice: Choice, function: Any) -> Problems:
    """Yield fixed keys whose option the function lacks, and options that are set twice."""
    section, settings = value_of(config, choice.section), value_of(config, f"{choice.section}.{choice.options_key}")
    name, options = choice.name(config), options_of(function)
    for key, (fixed, verls_default) in choice.fixed.items():
        value = value_of(section, key)
        if key == "clip_ratio_c" and name in WITHOUT_DUAL_CLIP:
            continue
        if value not in (None, verls_default) and not set(fixed) & set(options):
            shown_value = f"{value:g}" if isinstance(value, float) else show(value)
            yield (
                f"{choice.section}.{key}={shown_value}: has no effect with {choice.section}.{choice.key}={name}, which has no "
                f"option {' or '.join(fixed)}; it takes {', '.join(options) or 'none'}; leave it out"
            )
        for option in settings:
            # clip_ratio sets both bounds, which also have own keys; std has only a switch.
            if option in fixed and key != "clip_ratio" and value is not True:
                yield f"{choice.section}.{choice.options_key}: {option} is set by {choice.section}.{key}; give one of them"


def _fits(config: Config, choice: Choice, function: Any) -> Problems:
    """Yield settings beyond its options that do not go with a function."""
    needs, name = needs_of(function), choice.name(config)
    chosen = f"{choice.section}.{choice.key}={name}"
    n, parts = config.rollout.n, config.algorithm.reward_parts
    if choice is KL_IN_REWARD and name.endswith("+"):
        yield f"{chosen}: differs from {name[:-1]} by its gradient, and a reward has none; algorithm.kl_penalty={name[:-1]}"
    if choice is KL_IN_REWARD and "old_logprobs" in needs:
        yield f"{chosen}: corrects for samples of an older policy, and the reward is of the policy that sampled; algorithm.kl_penalty=k3"
    if choice is LOSS and "pairs" in needs:
        yield from _pairs(config, chosen)
    elif choice is LOSS and config.is_offline and name != "sft" and ":" not in name:
        yield (
            f"{chosen}: is made for responses of the policy as it is, and data.responses={config.data.responses} trains on fixed ones; "
            f"{LOSS.key}=sft learns them, {LOSS.key}=dpo compares two"
        )
    if choice is not ESTIMATOR:
        return
    if parts and "parts" not in needs:
        yield f"algorithm.reward_parts={show(parts)}: {chosen} reads no parts of the reward; gdpo does"
    if "weights" in config.algorithm.adv_options and "parts" in needs and not parts:
        yield "algorithm.adv_options: weights are the factors in reward.functions, such as 0.2*format"
    if "group" in needs and n == 1:
        yield f"{chosen}: compares the responses to one prompt, so it needs at least 2, and actor_rollout_ref.rollout.n=1; usual is 5 to 16"
    if "values" in needs:
        if config.critic.enable is False:
            yield f"critic.enable=false: {chosen} learns from a critic; leave it out"
        return
    if ":" in name:  # of a registered one the rules know it before
        unread = effects.refusals(config, "critic", f"{chosen} needs no critic")
        yield from (line for line in unread if not line.startswith("critic.enable=false"))


def _pairs(config: Config, chosen: str) -> Problems:
    """Yield what does not go with a loss over pairs."""
    average = AVERAGE.name(config)
    if ":" not in average and average not in PAIR_AVERAGES:
        yield f"{ACTOR}.loss_agg_mode={average}: makes no mean over pairs, and {chosen} is one; {ACTOR}.loss_agg_mode={' or '.join(PAIR_AVERAGES)}"
    if not config.is_offline and config.rollout.n == 1:
        yield f"{chosen}: compares the best and the worst response to a prompt, and actor_rollout_ref.rollout.n=1; usual is 2 to 16"
    rule, longest = derived.pass_rule(config, "actor"), config.longest_sequence
    budget, sequence_ranks = rule.max_tokens, rule.sequence_ranks
    if budget is not None and longest <= budget < 2 * longest:
        yield (
            f"{ACTOR}.ppo_max_token_len_per_gpu={budget // sequence_ranks}: shorter than a pair, whose two sequences stay together with "
            f"{chosen} and may have 2 x {longest} tokens; at least {-(-2 * longest // sequence_ranks)}"
        )


def _options(config: Config, choice: Choice) -> dict[str, Any]:
    """Return the keywords of a function's call, as far as they are known without data."""
    if choice is ESTIMATOR:
        return estimator_options(config.algorithm, _factors(config))
    if choice is AVERAGE:
        return average_options(config.actor, config.data.max_response_length)
    function = trial.KINDS[choice.kind].registry.get(choice.name(config))
    section = config.actor if choice.section == ACTOR else config.algorithm
    return chosen_options(choice, section, options_of(function))


def _factors(config: Config) -> dict[str, float]:
    """Return the factor of each part of the reward; one part if it has a problem, reported elsewhere."""
    try:
        return factors_of(config)
    except ConfigError:
        return {"": 1.0}


def _reads_old_logprobs(config: Config) -> bool:
    """Return whether loss or KL term depend on the policy that sampled."""
    kl = KL_ESTIMATORS.get(config.actor.kl_loss_type) if _is_used(config, KL_IN_LOSS) else None
    return (kl is not None and "old_logprobs" in needs_of(kl)) or _has_ratio(config)


def _has_ratio(config: Config) -> bool:
    return trial.has_ratio(POLICY_LOSSES.get(LOSS.name(config)), _options(config, LOSS))


def _of_estimator(config: Config) -> Problems:
    algorithm, name = config.algorithm, config.algorithm.adv_estimator
    try:
        needed = needs_of(ADVANTAGES.get(name))
    except ConfigError:
        return  # reported by itself
    read = "steps" if "steps" in needed else "the parts"
    if "states" in needed and not config.plays_episodes:
        yield (
            f"{name} compares turns that episodes take in the same state, and here every response is one turn; "
            "actor_rollout_ref.rollout.multi_turn.enable=true, or an estimator of whole responses, such as grpo"
        )
    elif "steps" in needed and not _may_score_steps(config):
        yield (
            f"{name} reads the rewards of reasoning steps, and reward.functions={config.reward.functions} score "
            "whole responses; name arithmetic_process, or your own path.py:function that returns 'steps' beside 'score'; or take a reward model with "
            "reward.reward_model.step_separator"
        )
    if "baselines" in needed and config.rollout.function is not None:
        yield f"{name} compares with greedy responses, which actor_rollout_ref.rollout.function does not make; another estimator"
    if not reads_token_rewards(needed):
        if algorithm.use_kl_in_reward:
            yield (
                f"{name} does not read rewards of tokens, so algorithm.use_kl_in_reward=true would have no effect; "
                "put the KL into the loss: actor_rollout_ref.actor.use_kl_loss=true"
            )
        if config.reward.overlong_buffer.tokens is not None:
            yield f"{name} reads {read} of the reward, so reward.overlong_buffer would have no effect"
        if config.reward.on_failure == "value":
            yield (
                f"{name} reads {read} of the reward, which a failed one does not have; reward.on_failure=value cannot stand for them, "
                "use drop or stop"
            )
    if config.is_iterated and "parts" in needed:
        yield f"{name} reads the parts of the reward, and with trainer.schedule=iterate only the model's score counts"
    if config.is_iterated and "steps" in needed and config.reward.reward_model.step_separator is None:
        yield (
            f"{name} reads rewards of steps, which with trainer.schedule=iterate come from the reward model alone "
            "(reward.reward_model.step_separator); take an estimator of whole responses, such as grpo"
        )


def _of_teachers(config: Config) -> Problems:
    teachers, taught = derived.teachers_of(config), Distillation.from_config(config.distillation)
    assert taught is not None
    key, loss, rows = "distillation.teacher_models", f"{LOSS.key}={LOSS.name(config)}", config.is_offline
    if config.trains_pairs:
        yield f"distillation.enabled=true: {loss} compares pairs, and a teacher teaches single responses; {LOSS.key}=vanilla"
    elif taught.as_advantage and LOSS.name(config) in POLICY_LOSSES and selection_of(POLICY_LOSSES.get(LOSS.name(config))):
        yield f"distillation.distillation_loss.use_policy_gradient=true: {loss} chooses tokens by the advantages of rewards"
    if rows and taught.as_advantage:
        yield (
            "distillation.distillation_loss.use_policy_gradient=true: reads what the policy sampled, and "
            f"data.responses={config.data.responses} trains on fixed responses; use_policy_gradient=false, e.g. loss_mode=forward_kl"
        )
    if rows and len(teachers) > 1:
        yield f"{key}: {len(teachers)} teachers, and rows that are trained as they stand have one; leave one"
    for name, teacher in teachers.items():
        if rows and teacher.context is not None:
            yield f"{key}.{name}.context: is put before sampled prompts, and rows are trained as they stand; leave it out"
        if teacher.model_path is None and teacher.context is None and teacher.ema_decay is None:
            yield (
                f"{key}.{name}: is the policy with the same prompt, which teaches nothing; give it a model_path, a context or an ema_decay"
            )
        elif teacher.model_path is not None and (other := first_other_token(config, teacher.model_path)):
            yield f"{key}.{name}.model_path={teacher.model_path}: {other}; a teacher needs the policy's tokens"


def first_other_token(config: Config, path: str) -> str | None:
    """Return a folder's first token that is not the policy's; None if equal, or the folder is elsewhere."""
    vocabularies = []
    for folder in (config.model.tokenizer_path or config.model.path, path):
        if folder.startswith(builtin.PREFIX):
            vocabularies.append(dict(enumerate(builtin.vocabulary(builtin.get_builtin(folder).vocab_size))))
        elif Path(folder).expanduser().is_dir():
            numbers = load_tokenizer(folder, trust_remote_code=False).get_vocab()
            vocabularies.append({number: token for token, number in numbers.items()})
        else:
            return None
    policy, other = vocabularies
    number = next((number for number in sorted(policy | other) if policy.get(number) != other.get(number)), None)
    return (
        None if number is None else f"its token {number} is {other.get(number)!r}, and the policy's is {policy.get(number)!r}"
    )


def _of_correction(config: Config) -> Problems:
    correction = RolloutCorrection.from_config(config.algorithm.rollout_correction)
    loss = f"{LOSS.section}.{LOSS.key}={LOSS.name(config)}"
    if derived.oldest_sampler(config) > 0 and not correction.rollout_is and not _has_ratio(config):
        yield (
            f"rollout_is=null: {'trainer.schedule=' + config.trainer.schedule if derived.max_staleness(config) else 'algorithm.replay'} trains tokens that older weights have sampled, and "
            f"{loss} has no ratio that corrects for that; rollout_is=token"
        )
    elif correction.bypass_mode and not _reads_old_logprobs(config) and not (correction.rollout_is or correction.rollout_rs):
        yield f"bypass_mode=true: has no effect with {loss}, which has no ratio"


def _may_score_steps(config: Config) -> bool:
    try:
        return may_score_steps(config)
    except ConfigError:
        return True  # reported by itself
