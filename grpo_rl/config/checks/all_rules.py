"""Rules between keys: what they name must be there, sizes must fit, and no setting may silently do nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from grpo_rl.config import derived, effects
from grpo_rl.config.checks import engine_arguments, inputs, sizes
from grpo_rl.config.convert import show
from grpo_rl.config.derived import ASYNC, ITERATE, OFFLINE, Machine, settled
from grpo_rl.config.schema.fields import nearest, value_of
from grpo_rl.config.schema.tree import Config

_A, _R, _M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_SCORER, _TURNS = "reward.reward_model", "actor_rollout_ref.rollout.multi_turn"
_RESUMABLE = ("model", "optimizer", "extra")
SUPERVISED_LOSS = "sft"


def check(config: Config, machine: Machine) -> list[str]:
    """Return everything that is wrong between the keys, a line each with key, value, rule and remedy; nothing if it can run.

    The functions that are named are looked up later, by the plan.
    """
    run = settled(config)
    found = [*_without_machine(config, run), *sizes.problems(run, machine), *effects.problems(config, machine)]
    return list(dict.fromkeys(found))


def _without_machine(config: Config, run: Config) -> Iterator[str]:
    yield from inputs.problems(run)
    yield from sizes.problems_without_machine(run)
    yield from contradictions(config)
    yield from engine_arguments.problems(run)


def between_sound_keys(config: Config, problems: Iterable[str]) -> Iterator[str]:
    """Yield what is wrong between the keys that `problems` leave alone: `config` has defaults where those were found.

    A line that names a key with a problem of its own, or one that a misspelt key may have meant, is left out: it
    may follow from nothing but the default. Sizes that depend on the machine are the plan's.
    """
    doubtful: set[str] = set()
    for problem in problems:
        key = re.split(r"[=:\s]", problem, maxsplit=1)[0]
        doubtful |= {name.rpartition(".")[2] for name in (key, *nearest(key))}
        if key.startswith(("recipe", "the")):
            return
    # No key is refused on GPUs that has an effect on CPUs.
    found = [*_without_machine(config, settled(config)), *effects.problems(config, Machine(1, 1, "cuda"))]
    # What is missing altogether may stand in the word or recipe that could not be read.
    yield from (line for line in found if "is not set" not in line and not doubtful & set(re.findall(r"\w+", line)))


# ---- settings that contradict each other, or that the schedule cannot do ------------------------------------------


def contradictions(config: Config) -> Iterator[str]:
    """Yield contradictions between settings, and what does not go with the schedule."""
    yield from _training(config)
    yield from _sampling(config)
    yield from _rewards(settled(config))
    yield from _episodes(config)
    yield from _schedule(config)


def _training(config: Config) -> Iterator[str]:
    """Yield contradictions between the loss, the optimizer, the model and its checkpoints."""
    algorithm, actor, model = config.algorithm, config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    if algorithm.use_kl_in_reward and actor.use_kl_loss:
        yield (
            f"algorithm.use_kl_in_reward=true: the KL is in the loss already ({_A}.use_kl_loss=true, the default); set "
            f"{_A}.use_kl_loss=false, or algorithm.use_kl_in_reward=false"
        )
    for key in (f"{_A}.optim", "critic.optim", f"{_SCORER}.train.optim"):
        if len(betas := value_of(config, f"{key}.betas")) != 2:
            yield f"{key}.betas={show(betas)}: must be two numbers >= 0 and < 1, e.g. [0.9,0.999]"
    if algorithm.filter_groups.enable and config.actor_rollout_ref.rollout.n == 1:
        yield f"algorithm.filter_groups.enable=true: a group of one response never has a signal, and {_R}.n=1; usual is 5 to 16"
    if model.lora_rank and derived.is_iterated(config):
        yield f"{_M}.lora_rank={model.lora_rank}: trainer.schedule=iterate moves the reference, which under adapters is the base model"
    contents = actor.checkpoint.save_contents
    missing = [name for name in _RESUMABLE if name not in contents]
    if missing and config.trainer.save_freq > 0:
        yield (
            f"{_A}.checkpoint.save_contents={show(contents)}: a run cannot resume without {' and '.join(missing)}; "
            "[model,optimizer,extra] and hf_model if wanted"
        )


def _sampling(config: Config) -> Iterator[str]:
    """Yield contradictions in sampling, and in validation by it."""
    rollout, trainer, values = config.actor_rollout_ref.rollout, config.trainer, config.actor_rollout_ref.rollout.val_kwargs
    validates = bool(config.data.val_files or config.data.val_prompt_files)
    for key, top_k in ((_R, rollout.top_k), (f"{_R}.val_kwargs", values.top_k if validates else -1)):
        if top_k == 0:
            yield f"{key}.top_k=0: would leave no token; -1 takes all"
    cuts = [
        f"{_R}.{name}={getattr(rollout, name):g}" for name in ("top_p", "min_p") if getattr(rollout, name) != (name == "top_p")
    ]
    if rollout.name == "vllm" and rollout.top_k == -1 and cuts:
        yield (
            f"{' and '.join(cuts)}: needs {_R}.top_k: the trainer needs the tokens that could be sampled, and vllm reports "
            "the top_k likeliest ones; set top_k, e.g. 100, or rollout.name=hf"
        )
    if rollout.quantization is not None and rollout.dtype == "float32":
        yield f"{_R}.quantization={rollout.quantization}: quantizes weights of 16 bits; set {_R}.dtype=bfloat16, or leave it out"
    if not validates and trainer.val_only:
        yield "trainer.val_only=true: there is nothing to validate on; give data.val_files"
    if validates and values.n > 1 and not (values.do_sample and values.temperature):
        yield (
            f"{_R}.val_kwargs.n={values.n}: needs {_R}.val_kwargs.do_sample=true and a temperature above 0; validation is greedy, "
            "and all would be equal"
        )


def _rewards(config: Config) -> Iterator[str]:
    scorer, estimator = config.reward.reward_model, config.algorithm.adv_estimator
    separator, key = scorer.step_separator, f"{_SCORER}.step_separator"
    if derived.trains_only_reward_model(config):
        if scorer.train.loss == "steps" and not separator:
            yield (
                f"{key} is not set: {_SCORER}.train.loss=steps reads a step at the end of the text between steps; give it, such as "
                "'\\n\\n', and the same where the model scores"
            )
    elif scorer.enable and separator == "":
        yield f"{key}='': would cut nowhere; give the text between steps, such as '\\n\\n', or null"
    elif scorer.enable and separator is not None and estimator != "grpo_process":
        yield (
            f"{key}={separator!r}: makes rewards of steps, which algorithm.adv_estimator={estimator} does not read; set "
            "algorithm.adv_estimator=grpo_process, or leave step_separator out for one score per response"
        )
    if scorer.enable_resource_pool and scorer.nnodes == 0:
        yield f"{_SCORER}.nnodes=0: {_SCORER}.enable_resource_pool=true needs the number of its nodes; 1, or more"


def _episodes(config: Config) -> Iterator[str]:
    """Yield what does not go with episodes of several turns."""
    own = config.actor_rollout_ref.rollout.multi_turn
    if not own.enable:
        return
    if own.environment.name is None and own.interaction_config_path is None and not (own.tools or own.tool_config_path):
        yield (
            f"{_TURNS}.enable=true: nothing answers the policy; name {_TURNS}.environment.name, or tools by {_TURNS}.tools or "
            "tool_config_path"
        )
    if own.environment.name is not None and own.interaction_config_path is not None:
        yield f"{_TURNS}.interaction_config_path: names an environment, as environment.name={own.environment.name} does; keep one"
    if derived.collects(config):
        yield f"{_TURNS}.enable=true: data.responses=initial_policy keeps single responses; data.responses=policy"
    if config.actor_rollout_ref.rollout.ignore_eos:
        yield f"{_TURNS}.enable=true: with {_R}.ignore_eos=true no turn would ever end; leave that out"


def _schedule(config: Config) -> Iterator[str]:
    """Yield what does not go with the schedule."""
    loss, schedule, data, n = (
        config.actor_rollout_ref.actor.policy_loss.loss_mode,
        config.trainer.schedule,
        config.data,
        config.actor_rollout_ref.rollout.n,
    )
    offline, pairs = derived.is_offline(config), derived.trains_pairs(config)
    if pairs and loss in derived.LABEL_LOSSES and data.responses != "rows":
        yield f"{_A}.policy_loss.loss_mode={loss}: learns labelled answers; data.responses=rows, with columns completion and label"
    if pairs and offline and data.truncation != "error":
        yield (
            f"data.truncation={data.truncation}: a loss over pairs compares whole answers, and a cut one would be another; "
            "drop long rows with data.filter_overlong_prompts=true"
        )
    if pairs and derived.collects(config) and n < 2:
        yield f"{_R}.n={n}: data.responses={data.responses} compares the best and the worst of a group; 2 or more"
    if schedule == OFFLINE and not offline:
        yield f"trainer.schedule={OFFLINE}: is chosen by data.responses=rows, which trains on the answers in data.train_files"
    elif loss == SUPERVISED_LOSS and not offline and ":" not in schedule:
        yield (
            f"{_A}.policy_loss.loss_mode={loss}: reads no advantages, so the reward would have no effect with "
            f"trainer.schedule={schedule}; data.responses=rows learns the answers in the data, loss_mode=reinforce weighs sampled ones"
        )
    if derived.is_iterated(config):
        yield from _iterated(config)
    if derived.overlaps(config):
        yield from _overlapping(config)
    yield from _old_samples(config)


def _old_samples(config: Config) -> Iterator[str]:
    """Yield what does not go with tokens that an older policy has sampled."""
    correction, replay = config.algorithm.rollout_correction, f"algorithm.replay.max_age={config.algorithm.replay.max_age}"
    is_corrected = correction.rollout_is or correction.rollout_rs
    if derived.oldest_sampler(config) and correction.bypass_mode is False and not is_corrected:
        key = f"trainer.schedule={config.trainer.schedule}" if derived.max_staleness(config) else replay
        yield (
            f"algorithm.rollout_correction.bypass_mode=false: with {key} the weights that sampled a token may be older than "
            "those that it trains, and nothing would correct for that; leave it out, or set rollout_is=token beside it"
        )
    if not config.algorithm.replay.max_age:
        return
    rollout, others = config.actor_rollout_ref.rollout, ""
    if derived.plays_episodes(config):
        others = "episodes of several turns"
    elif config.distillation.enabled:
        others = "teachers, which read more of a prompt than is kept"
    elif rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0:
        others = "top_p, top_k and min_p, whose sets of tokens are not kept"
    if others:
        yield f"{replay}: does not go with {others}; leave it out"


def _overlapping(config: Config) -> Iterator[str]:
    """Yield what a schedule cannot do that samples while it trains."""
    key, own = f"trainer.schedule={config.trainer.schedule}", config.trainer.asynchronous
    if derived.is_colocated(config) and not config.trainer.val_only:
        yield (
            f"{key}: samples while it trains, and with {_R}.nnodes=0 the engines share the actor's devices; give them their own: "
            f"{_R}.nnodes=1 {_R}.n_gpus_per_node=..., beside trainer.n_gpus_per_node"
        )
    if config.trainer.schedule == ASYNC and own.sync_every > own.max_staleness + 1:
        yield (
            f"trainer.asynchronous.sync_every={own.sync_every}: the weights would be older than max_staleness={own.max_staleness} "
            "before they are sent; at most max_staleness + 1"
        )


def _iterated(config: Config) -> Iterator[str]:
    """Yield what iterated training cannot do: its reward is the model's score, and the labels are those of the rules."""
    key, reward, scorer = f"trainer.schedule={ITERATE}", config.reward, config.reward.reward_model
    if not scorer.enable:
        yield f"{key}: trains on the score of a reward model; give {_SCORER}.enable=true and its model_path"
    if not reward.functions:
        yield f"{key}: needs reward.functions, whose reward labels the reward model's pairs and shows the true accuracy"
    if config.trainer.critic_warmup:
        yield f"trainer.critic_warmup={config.trainer.critic_warmup}: counts first steps, which with {key} may be the reward model's"
    if config.trainer.iterate.reward_model_steps == 0:
        return
    if config.actor_rollout_ref.rollout.n < 2:
        yield f"{_R}.n={config.actor_rollout_ref.rollout.n}: {key} compares the best and the worst of a group; 2 or more"
    if scorer.step_separator is not None or scorer.train.loss != "bradley_terry":
        yield (
            f"{key}: trains the reward model on pairs of whole responses; leave out {_SCORER}.step_separator and train.loss, or set "
            "trainer.iterate.reward_model_steps=0"
        )
    if config.trainer.val_only and (scorer.model_path or "").startswith("builtin:"):
        yield (
            f"trainer.val_only=true: {_SCORER}.model_path={scorer.model_path} has no head before {key} trains it; name a trained "
            f"one, or validate by the rules alone, without this schedule and {_SCORER}"
        )
