"""Every number among the options of a registered function has two bounds with a reason, or says that it has none."""

import inspect
import typing

import pytest

from grpo_rl.algos.advantages.registered import ADVANTAGES
from grpo_rl.algos.aggregate import AGGREGATIONS
from grpo_rl.algos.kl import KL_ESTIMATORS
from grpo_rl.algos.losses.registered import POLICY_LOSSES
from grpo_rl.algos.objective import Objective
from grpo_rl.config.schema.kinds import Range
from grpo_rl.config.schema.reward import RewardConfig
from grpo_rl.data.tasks.registry import TASKS, task_rows
from grpo_rl.envs.environments import ENVIRONMENTS, TOOLS, Named, class_of, made
from grpo_rl.errors import ConfigError
from grpo_rl.registry import check_options, out_of_bounds, ranges_of
from grpo_rl.rewards.compose import RewardFunction
from grpo_rl.rewards.registry import REWARDS

REGISTRIES = (POLICY_LOSSES, ADVANTAGES, KL_ESTIMATORS, AGGREGATIONS, REWARDS, TASKS)
PLACES = [(table, name) for table in (ENVIRONMENTS, TOOLS) for name in table]
FUNCTIONS = {
    **{f"{registry.kind} {name}": registry.get(name) for registry in REGISTRIES for name in registry},
    **{name: class_of(name, table, "environment or tool") for table, name in PLACES},
}
NOT_BOUNDED = ("extra_info",)


def has_number(hint):
    return hint in (int, float) or any(map(has_number, typing.get_args(hint)))


def parameters(function):
    selection = getattr(function, "selection", None)
    found = {} if selection is None else parameters(selection)
    hints = typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)
    given = inspect.signature(function).parameters.items()
    return found | {name: (p.default, hints.get(name)) for name, p in given if p.default is not p.empty}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_number_among_the_options_has_two_bounds_and_a_reason_or_says_that_it_has_none(name):
    function = FUNCTIONS[name]
    options = {key: one for key, one in parameters(function).items() if key not in NOT_BOUNDED}
    ranges = ranges_of(function)
    for key, (default, hint) in options.items():
        if hint is None or typing.get_origin(hint) is dict:
            assert isinstance(default, bool | str) or default is None, f"{key} has no type"
            continue
        if not has_number(hint):
            continue
        bounds = ranges.get(key)
        assert isinstance(bounds, Range), f"{key} has no bounds: Annotated[..., Range(...)]"
        lower, upper = bounds.ge is not None or bounds.gt is not None, bounds.le is not None or bounds.lt is not None
        assert bounds.reason and lower == upper, f"{key} has one bound, or no reason"
        assert lower or bounds.reason.startswith("no bounds"), key
        assert default is None or not out_of_bounds(name, function, {key: default})


@pytest.mark.parametrize("loss", ["dpo", "ipo", "dpo_hinge", "simpo", "orpo", "kto"])
@pytest.mark.parametrize("beta", [-1, 0, 1e300, float("nan")])
def test_a_beta_that_learns_nothing_or_the_reverse_is_refused(loss, beta):
    with pytest.raises(ConfigError, match=r"beta=\S+ is out of range, it must be >= 1e-06 and <= 10000 \(0 learns nothing"):
        Objective(loss_mode=loss, loss_options={"beta": beta})


def test_tasks_rewards_environments_tools_and_a_users_function_are_held_to_their_bounds():
    with pytest.raises(ConfigError, match="num_rows=0 is out of range"):
        task_rows("task:arithmetic?num_rows=0")
    with pytest.raises(ConfigError, match="memory_mb=1 is out of range"):
        RewardFunction.from_config(RewardConfig(functions=["code"], function_kwargs={"code": {"memory_mb": 1}}))
    with pytest.raises(ConfigError, match="partial=-1 is out of range"):
        made(Named("word_game", {"partial": -1}), ENVIRONMENTS, "environment")
    with pytest.raises(ConfigError, match=r"time_s=1000000000\.0 is out of range"):
        made(Named("python", {"time_s": 1e9}), TOOLS, "tool")

    def mine(inputs, *, bonus: typing.Annotated[float, Range(ge=0, le=1, reason="a share")] = 0.5):
        return inputs

    with pytest.raises(ConfigError, match=r"mine: bonus=2 is out of range, it must be >= 0 and <= 1 \(a share\)"):
        check_options("mine", mine, {"bonus": 2})
