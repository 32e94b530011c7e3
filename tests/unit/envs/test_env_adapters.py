"""Environments and tools of others: Gymnasium, reasoning-gym, verifiers, MCP servers."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from game_players import play, says, start_of
from machine_lacks import needs_reasoning_gym

from grpo_rl.data.tasks.registry import task_rows
from grpo_rl.envs.adapters import mcp_tools
from grpo_rl.envs.adapters.gymnasium_text import GymnasiumText
from grpo_rl.envs.adapters.mcp_tools import McpTool
from grpo_rl.envs.adapters.verifiers_style import VerifiersEnvironment, rows
from grpo_rl.envs.contract import ToolResult
from grpo_rl.envs.games.answers_in_turns import ReasoningGymInTurns
from grpo_rl.errors import ConfigError

HERE = Path(__file__).parent
EPISODE = {
    "data_source": "episodes",
    "prompt": [{"role": "user", "content": "Play."}],
    "reward_model": {"ground_truth": ""},
    "extra_info": {},
}

# ---- Gymnasium -----------------------------------------------------------------------------------------------

LAKE: dict[str, Any] = {
    "id": "FrozenLake-v1",
    "kwargs": {"desc": ["SF", "HG"], "is_slippery": False},
    "actions": ["left", "down", "right", "up"],
}


def test_gymnasiums_lake_is_walked_with_words() -> None:
    row = EPISODE
    episode = play(GymnasiumText(**LAKE, describe="Go to G."), row, lambda seen: ["I go right", "down!"][len(seen)])
    assert episode.answers == ["Go to G.\n0", "1"]
    assert episode.rewards == [0.0, 1.0]
    assert episode.info == {"return": 1.0, "malformed": 0.0}
    fallen = play(GymnasiumText(**LAKE), row, says("down"))
    assert fallen.rewards == [0.0] and fallen.info["return"] == 0


def test_a_word_that_is_no_action_costs_no_step() -> None:
    episode = play(GymnasiumText(**LAKE), EPISODE, says("jump", "right", "", "down"))
    assert episode.answers[1] == episode.answers[3] == "There is no such action. Answer with left, down, right, up."
    assert episode.rewards == [None, 0.0, None, 1.0] and episode.info["malformed"] == 2


def test_gymnasium_draws_by_the_episodes_seed() -> None:
    options = {"id": "Blackjack-v1", "actions": ["stick", "hit"]}
    first = {seed: play(GymnasiumText(**options), EPISODE, says("stick"), seed=seed).answers[0] for seed in range(12)}
    again = {seed: play(GymnasiumText(**options), EPISODE, says("stick"), seed=seed).answers[0] for seed in range(12)}
    assert first == again and len(set(first.values())) > 4


def test_wrong_gymnasium_environments_are_refused() -> None:
    with pytest.raises(ConfigError, match="make\\('NoSuchGame-v0'"):
        GymnasiumText(id="NoSuchGame-v0")
    with pytest.raises(ConfigError, match="has 4 actions, and actions=\\['a', 'b'\\] names 2"):
        GymnasiumText(**(LAKE | {"actions": ["a", "b"]}))
    with pytest.raises(ConfigError, match="action space Box"):
        GymnasiumText(id="Pendulum-v1")


# ---- reasoning-gym -------------------------------------------------------------------------------------------


@needs_reasoning_gym
def test_a_question_of_reasoning_gym_may_be_corrected() -> None:
    row = task_rows("reasoning_gym:chain_sum?min_terms=2&max_terms=2&num_rows=1")[0]
    right = row["reward_model"]["ground_truth"]
    episode = play(ReasoningGymInTurns(), row, says("<answer>0</answer>", f"It is <answer>{right}</answer>"))
    assert episode.answers == ["That is not the right answer. Try again."]
    assert episode.rewards == [None, 1.0]
    assert play(ReasoningGymInTurns(turns=1, partial=0.0), row, says("<answer>0</answer>")).rewards == [0.0]
    shown = play(ReasoningGymInTurns(turns=2, show_score=True), row, says("<answer>0</answer>", "x"))
    assert "It scores 0.0" in shown.answers[0]


def test_rows_that_are_not_of_reasoning_gym_are_refused() -> None:
    with pytest.raises(ValueError, match="environment reasoning_gym: row"):
        asyncio.run(ReasoningGymInTurns().reset(start_of(EPISODE)))


# ---- verifiers -----------------------------------------------------------------------------------------------


def test_an_environment_of_verifiers_answers_and_scores() -> None:
    source = f"{HERE / 'verifiers_guess.py'}:load_environment"
    row = rows(load=source)[0]
    assert row["prompt"] == [{"role": "system", "content": "You guess."}, {"role": "user", "content": "A word?"}]
    episode = play(VerifiersEnvironment(load=source), row, says("bush", "tree"))
    assert episode.answers == ["It has 4 letters. Try 1."]
    assert episode.rewards == [None, 1.0] and episode.info == {"right": 1.0, "short": 0.0, "turns": 2.0}
    assert play(VerifiersEnvironment(load=source), row, says("tree")).rewards == [1.5]
    # max_turns is 3: the third turn is the last one, right or not.
    assert play(VerifiersEnvironment(load=source), row, says("a", "b", "c")).rewards == [None, None, 0.0]


def test_an_environment_of_verifiers_0_1_14_has_its_trajectory_its_last_word_and_its_group_of_rubrics() -> None:
    source = f"{HERE / 'verifiers_guess.py'}:load_new"
    (row,) = rows(load=source)
    assert row["extra_info"] == {"index": 0, "a": [1]} and row["prompt"] == [{"role": "user", "content": "A word?"}]
    environment = VerifiersEnvironment(load=source)
    episode = play(environment, row, says("bush", "tree"))
    assert environment._env.cleaned  # by the handlers that release what an episode holds
    assert episode.answers == ["No, 1."] and episode.rewards == [None, 1.0]
    assert episode.info == {"right": 1.0, "short": 0.0, "num_turns": 2.0, "seen": 0.0, "turns": 2.0}
    stopped = play(VerifiersEnvironment(load=source), row, says("stop"))
    assert stopped.answers == [] and stopped.rewards == [0.5] and stopped.info["seen"] == 2.0
    assert play(VerifiersEnvironment(load=source), row, says("a", "b", "c")).rewards == [None, None, 0.0]


@pytest.mark.parametrize(
    ("load", "why"), [("load_with_tools", "multi_turn.tools"), ("load_of_groups", "ranks of .* whole groups")]
)
def test_tools_and_scores_of_whole_groups_of_verifiers_are_refused(load: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        VerifiersEnvironment(load=f"{HERE / 'verifiers_guess.py'}:{load}")


def test_rows_of_verifiers_are_a_task() -> None:
    source = f"{HERE / 'verifiers_guess.py'}:load_environment"
    made = task_rows(f"task:grpo_rl.envs.adapters.verifiers_style:rows?load={source}")
    assert [row["reward_model"]["ground_truth"] for row in made] == ["tree", "sea"]
    assert made[1]["data_source"] == "other" and made[1]["extra_info"] == {"index": 1, "a": 1}
    assert len(rows(load=source, num_rows=1)) == 1


def test_objects_that_are_no_environment_of_verifiers_are_refused() -> None:
    with pytest.raises(ConfigError, match="returned a object without env_response, is_completed, rubric"):
        VerifiersEnvironment(load=f"{HERE / 'verifiers_guess.py'}:load_nothing")
    with pytest.raises(ConfigError, match="TypeError"):
        VerifiersEnvironment(load=f"{HERE / 'verifiers_guess.py'}:load_environment", arguments={"no": 1})


# ---- MCP -----------------------------------------------------------------------------------------------------

SERVER = [sys.executable, str(HERE / "mcp_counter_server.py")]


def test_tools_of_a_server_are_called_over_its_standard_streams() -> None:
    schema = McpTool(command=SERVER, tool="add").schema
    assert schema["name"] == "add" and schema["description"] == "Add two numbers."
    assert set(schema["parameters"]["properties"]) == {"left", "right"}

    async def calls() -> None:
        shared = [McpTool(command=SERVER, tool="bump") for _ in range(2)]
        assert [(await tool.call({})).text for tool in shared] == ["1", "2"]
        wrong = await McpTool(command=SERVER, tool="add").call({"left": "x", "right": 1})
        assert wrong.failed
        # An own server has an own state, and one that has ended is started again.
        own = McpTool(command=SERVER, tool="bump", shared=False)
        assert await own.call({}) == ToolResult("1")
        assert await own.call({}) == ToolResult("2")
        await own.close()
        leaving = McpTool(command=SERVER, tool="leave")
        with pytest.raises(Exception, match=r"(?i)closed"):
            await leaving.call({})
        assert await McpTool(command=SERVER, tool="bump").call({}) == ToolResult("1")

    asyncio.run(calls())


def test_servers_that_do_not_start_and_tools_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="has no tool 'subtract'; it has add, bump, leave"):
        _ = McpTool(command=SERVER, tool="subtract").schema
    with pytest.raises(ConfigError, match=r"no/such/server.*could not be asked for its tools"):
        _ = McpTool(command="no/such/server", tool="add").schema
    with monkeypatch.context() as patch:
        patch.setattr(mcp_tools, "_listed", AsyncMock(side_effect=TimeoutError))
        with pytest.raises(ConfigError, match=r"could not be asked for its tools: no answer within 30 s$"):
            mcp_tools.schemas((("slow",), ()))
    with pytest.raises(ConfigError, match="command is empty"):
        McpTool(command=[], tool="add")
