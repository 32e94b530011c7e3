"""Settings of model rewards and of episodes that contradict each other, do nothing, or name what is not there."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from grpo_rl.config import derived
from grpo_rl.config.checks.input_rules import model_folder
from grpo_rl.config.derived import Machine
from grpo_rl.config.effects import has_tools
from grpo_rl.config.schema.tree import Config

_TURNS = "actor_rollout_ref.rollout.multi_turn"
_MODEL, _JUDGE = "reward.reward_model", "reward.judge"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
PLACEHOLDERS = ("{prompt}", "{response}", "{ground_truth}")
TEMPLATE_SUFFIXES = (".txt", ".md")
NAMED_PARSERS = ("score", "last_number")


def problems(config: Config, machine: Machine) -> Iterator[str]:
    """Yield what is wrong in reward.reward_model and reward.judge."""
    yield from _model(config, machine)
    yield from _judge(config)


def _model(config: Config, machine: Machine) -> Iterator[str]:
    model = config.reward.reward_model
    alone, trained = derived.trains_only_reward_model(config), derived.trains_reward_model(config)
    if not model.enable and not alone:
        return
    if model.model_path is None and alone:
        yield f"{_MODEL}.model_path is not set: trainer.schedule={derived.REWARD_MODEL} trains it; a model folder, or builtin:arithmetic"
    elif model.model_path is None:
        yield f"{_MODEL}.enable=true: needs {_MODEL}.model_path, a folder with a sequence-classification model of one label"
    elif trained and model.model_path.startswith("builtin:"):
        pass  # its name is looked up by the plan
    elif problem := model_folder(
        model.model_path,
        needs_tokenizer=alone and model.tokenizer_path is None,
        elsewhere=config.trainer.machine is not None,
    ):
        problem = problem.replace("actor_rollout_ref.model.tokenizer_path", f"{_MODEL}.tokenizer_path")
        yield f"{_MODEL}.model_path={model.model_path}: {problem}"
    if model.tokenizer_path is not None and not Path(model.tokenizer_path).expanduser().is_dir():
        yield f"{_MODEL}.tokenizer_path={model.tokenizer_path}: there is no such folder"
    if model.weight == 0:
        yield f"{_MODEL}.weight=0: its score would not count; {_MODEL}.enable=false, or another weight"
    longest = config.data.max_prompt_length + config.data.max_response_length
    if model.max_token_len_per_gpu < longest:
        yield (
            f"{_MODEL}.max_token_len_per_gpu={model.max_token_len_per_gpu}: shorter than one sequence, which may have "
            f"data.max_prompt_length + data.max_response_length = {longest} tokens; at least {longest}"
        )
    yield from _trained_steps(config) if alone else _steps(config)
    yield from _place(config, machine)


def _trained_steps(config: Config) -> Iterator[str]:
    separator = config.reward.reward_model.step_separator
    if config.reward.reward_model.train.loss == "steps" and not separator:
        yield (
            f"{_MODEL}.step_separator is not set: {_MODEL}.train.loss=steps reads a step at the end of the text between steps; "
            "give it, such as '\\n\\n', and the same where the model scores"
        )


def _steps(config: Config) -> Iterator[str]:
    separator, estimator = config.reward.reward_model.step_separator, config.algorithm.adv_estimator
    if separator is None:
        return
    if separator == "":
        yield f"{_MODEL}.step_separator='': would cut nowhere; give the text between steps, such as '\\n\\n', or null"
        return
    if estimator != "grpo_process":
        yield (
            f"{_MODEL}.step_separator={separator!r}: makes rewards of steps, which algorithm.adv_estimator={estimator} does not "
            "read; set algorithm.adv_estimator=grpo_process, or leave step_separator out for one score per response"
        )
    if "arithmetic_process" in (name.rpartition("*")[2].strip() for name in config.reward.functions):
        yield (
            f"{_MODEL}.step_separator={separator!r}: the rewards of steps would come from the model and from "
            "reward.functions=[arithmetic_process]; take one of them"
        )
    if config.reward.judge.base_url is not None:
        yield (
            f"{_JUDGE}.base_url: judges whole responses, and {_MODEL}.step_separator with grpo_process reads rewards of steps "
            "only; leave one of them out"
        )


def _place(config: Config, machine: Machine) -> Iterator[str]:
    model = config.reward.reward_model
    if model.enable_resource_pool and model.nnodes == 0:
        yield f"{_MODEL}.nnodes=0: {_MODEL}.enable_resource_pool=true needs the number of its nodes; 1, or more"
    if model.param_offload and machine.device == "cpu":
        yield f"{_MODEL}.param_offload=true: moves weights from a GPU to the host, and this run has no GPU; leave it out"
    if model.enable_resource_pool and machine.device == "cuda" and not machine.cluster:
        own = derived.num_reward_model_ranks(config, machine)
        engines = 0 if derived.is_colocated(config) else derived.num_rollout_devices(config, machine)
        others = machine.world_size(config) + engines
        if others <= machine.num_gpus < others + own:
            yield (
                f"{_MODEL}.n_gpus_per_node={model.n_gpus_per_node or 'null'}: its pool asks for {own} GPUs beside {others} of the "
                f"actor and engines, and this machine has {machine.num_gpus}; lower them, or enable_resource_pool=false"
            )


def _judge(config: Config) -> Iterator[str]:
    judge = config.reward.judge
    if judge.base_url is None:
        return
    address = urlsplit(judge.base_url)
    if address.scheme not in ("http", "https") or not address.hostname:
        yield f"{_JUDGE}.base_url: must be http(s)://host[:port]/v1"
    if address.username or address.password or address.query:
        # Not shown: it may hold a secret.
        yield f"{_JUDGE}.base_url: has a user, password or query in it; give a key by {_JUDGE}.api_key_env"
    if judge.model is None:
        yield f"{_JUDGE}.model is not set: the name of the model at {_JUDGE}.base_url"
    if judge.weight == 0:
        yield f"{_JUDGE}.weight=0: its score would not count; leave {_JUDGE}.base_url out, or give another weight"
    if judge.min_score is not None and judge.max_score is not None and judge.min_score >= judge.max_score:
        yield f"{_JUDGE}.min_score={judge.min_score:g}: must be below {_JUDGE}.max_score={judge.max_score:g}"
    if judge.deadline_s < judge.timeout_s:
        yield (
            f"{_JUDGE}.deadline_s={judge.deadline_s:g}: shorter than one request, {_JUDGE}.timeout_s={judge.timeout_s:g}; "
            f"at least {judge.timeout_s:g}"
        )
    taken = sorted(set(judge.extra_body) & {"model", "messages", "stream", "max_tokens", "temperature", "n"})
    if taken:
        yield f"{_JUDGE}.extra_body: {', '.join(taken)} is set by the program"
    yield from _template(config)
    yield from _key(config)


def _template(config: Config) -> Iterator[str]:
    judge = config.reward.judge
    if judge.parser not in NAMED_PARSERS and not re.fullmatch(r"json:.+|.+:\w+", judge.parser):
        yield f"{_JUDGE}.parser={judge.parser}: one of {', '.join(NAMED_PARSERS)}, json:KEY, or path.py:function"
    if judge.template is None:
        return
    text = judge.template
    if text.endswith(TEMPLATE_SUFFIXES) and "\n" not in text:
        path = Path(text).expanduser()
        if not path.is_file():
            yield f"{_JUDGE}.template={text}: there is no file {path.absolute()}"
            return
        text = path.read_text(errors="replace")
    if "{response}" not in text:
        yield f"{_JUDGE}.template: has no {{response}}, so every response would be judged alike; it may have {', '.join(PLACEHOLDERS)}"


def _key(config: Config) -> Iterator[str]:
    name = config.reward.judge.api_key_env
    if name is None:
        return
    if not _VARIABLE.fullmatch(name):
        # Not shown: it may be the key itself.
        yield f"{_JUDGE}.api_key_env: is no name of an environment variable; put the key into one, and its name here"
    elif not os.environ.get(name):
        yield f"{_JUDGE}.api_key_env={name}: the environment has no such variable, or it is empty"


# ---- episodes of several turns: actor_rollout_ref.rollout.multi_turn ----------------------------------------


def episode_problems(config: Config) -> Iterator[str]:
    """Yield what is wrong in `multi_turn`, and what does not go with episodes."""
    own = config.actor_rollout_ref.rollout.multi_turn
    if not own.enable:
        return
    if own.environment.name is None and own.interaction_config_path is None and not has_tools(config):
        yield (
            f"{_TURNS}.enable=true: nothing answers the policy; name {_TURNS}.environment.name, or tools by {_TURNS}.tools or "
            "tool_config_path"
        )
    if own.environment.name is not None and own.interaction_config_path is not None:
        yield f"{_TURNS}.interaction_config_path: names an environment, as environment.name={own.environment.name} does; keep one"
    if derived.collects(config):
        yield f"{_TURNS}.enable=true: data.responses=initial_policy keeps single responses; data.responses=policy"
    elif not derived.samples_answers(config):
        yield f"{_TURNS}.enable=true: nothing is sampled in this run; leave it out"
    if config.actor_rollout_ref.rollout.ignore_eos:
        yield f"{_TURNS}.enable=true: with actor_rollout_ref.rollout.ignore_eos=true no turn would ever end; leave that out"
    for key in ("tool_config_path", "interaction_config_path"):
        path = getattr(own, key)
        if path is not None and not Path(path).expanduser().is_file():
            yield f"{_TURNS}.{key}={path}: there is no file {Path(path).expanduser().absolute()}"
    for key, name in (
        ("environment.name", own.environment.name),
        ("format", own.format),
        *(("tools", one) for one in own.tools),
    ):
        source = Path((name or "").rpartition(":")[0]).expanduser()
        if source.suffix == ".py" and not source.is_file():
            yield f"{_TURNS}.{key}={name}: there is no file {source.absolute()}"
    if own.environment.tool_timeout_s > own.environment.step_timeout_s:
        yield (
            f"{_TURNS}.environment.tool_timeout_s={own.environment.tool_timeout_s:g}: longer than step_timeout_s="
            f"{own.environment.step_timeout_s:g}, which ends the whole episode; give it less"
        )
