"""Rules of episodes of several turns: `actor_rollout_ref.rollout.multi_turn`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from grpo_rl.config.derived import collects, samples_answers
from grpo_rl.config.schema.fields import leaves
from grpo_rl.config.schema.tree import Config

_KEY = "actor_rollout_ref.rollout.multi_turn"


def problems(config: Config) -> Iterator[str]:
    """Yield what is wrong in `multi_turn`, and what does not go with episodes."""
    own = config.actor_rollout_ref.rollout.multi_turn
    if not own.enable:
        return
    if own.environment.name is None and not has_tools(config):
        yield (
            f"{_KEY}.enable=true: nothing answers the policy; name {_KEY}.environment.name, or tools by {_KEY}.tools or "
            "tool_config_path"
        )
    if collects(config):
        yield f"{_KEY}.enable=true: data.responses=initial_policy keeps single responses; data.responses=policy"
    elif not samples_answers(config):
        yield f"{_KEY}.enable=true: nothing is sampled in this run; leave it out"
    if config.actor_rollout_ref.rollout.ignore_eos:
        yield f"{_KEY}.enable=true: with actor_rollout_ref.rollout.ignore_eos=true no turn would ever end; leave that out"
    path = own.tool_config_path
    if path is not None and not Path(path).expanduser().is_file():
        yield f"{_KEY}.tool_config_path={path}: there is no file {Path(path).expanduser().absolute()}"
    for key, name in (
        ("environment.name", own.environment.name),
        ("format", own.format),
        *(("tools", one) for one in own.tools),
    ):
        source = Path((name or "").rpartition(":")[0]).expanduser()
        if source.suffix == ".py" and not source.is_file():
            yield f"{_KEY}.{key}={name}: there is no file {source.absolute()}"
    if own.environment.tool_timeout_s > own.environment.step_timeout_s:
        yield (
            f"{_KEY}.environment.tool_timeout_s={own.environment.tool_timeout_s:g}: longer than step_timeout_s="
            f"{own.environment.step_timeout_s:g}, which ends the whole episode; give it less"
        )


def has_tools(config: Config) -> bool:
    """Return whether turns may call tools."""
    own = config.actor_rollout_ref.rollout.multi_turn
    return bool(own.tools) or own.tool_config_path is not None


def switches(config: Config) -> dict[str, tuple[bool, str]]:
    """Return the keys of episodes that need another setting: whether it is there, and the reason to give where it is not."""
    own = config.actor_rollout_ref.rollout.multi_turn
    if not own.enable:
        return {
            key: (False, f"needs {_KEY}.enable=true")
            for key in leaves()
            if key.startswith(f"{_KEY}.") and key != f"{_KEY}.enable"
        }
    calls = (has_tools(config), f"needs {_KEY}.tools or tool_config_path")
    of_calls = ("format", "max_parallel_calls", "max_tool_response_length", "tool_response_truncate_side")
    rules = own.truncation
    return {
        **{f"{_KEY}.{name}": calls for name in (*of_calls, "environment.tool_timeout_s")},
        f"{_KEY}.environment.options": (own.environment.name is not None, f"needs {_KEY}.environment.name"),
        f"{_KEY}.truncation.penalty": (
            "punish" in (rules.turns, rules.tokens, rules.time),
            f"needs {_KEY}.truncation.turns, tokens or time =punish",
        ),
        f"{_KEY}.truncation.turns": (
            own.max_assistant_turns is not None or own.max_user_turns is not None,
            f"needs {_KEY}.max_assistant_turns or max_user_turns",
        ),
        f"{_KEY}.turn_discount": (own.environment.reward_weight != 0, f"needs {_KEY}.environment.reward_weight other than 0"),
    }
