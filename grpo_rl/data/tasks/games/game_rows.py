"""The common parts of the rows of games: verl's row format, and conversations of random play to begin from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from grpo_rl.config.schema.kinds import Count
from grpo_rl.data.tasks.made_rows import LazyRows, Row
from grpo_rl.errors import ConfigError

Wording = Literal["words", "short"]
"""`words` for a model that was trained on English, `short` for a small one of single characters."""
Play = Literal["none", "random"]
"""`random`: the row has the column `messages`, a whole game with random moves, to learn the form of the game from."""
Message = dict[str, Any]


def game_row(name: str, prompt: str, ground_truth: Any, extra: dict[str, Any]) -> Row:
    """Return a row in verl's format: the game's name is its `data_source`, and what an environment reads beside the truth its `extra`."""
    return {
        "data_source": name,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": "game",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": extra,
    }


def played(row: Row, move: Callable[[], str], answer: Callable[[str], str | None], turns: int) -> Row:
    """Return the row with a conversation in `messages`: moves, each with its answer, until there is none (it is solved) or `turns` are over."""
    messages: list[Message] = list(row["prompt"])
    for turn in range(turns):
        messages.append({"role": "assistant", "content": move()})
        said = answer(messages[-1]["content"])
        if said is None or turn + 1 == turns:
            break
        messages.append({"role": "user", "content": said})
    return {**row, "messages": messages}


def refuse(name: str, *rules: tuple[bool, str]) -> None:
    """Raise ConfigError with the texts of all `rules` that do not hold."""
    problems = [f"task {name}: {text}" for holds, text in rules if not holds]
    if problems:
        raise ConfigError(problems)


def episodes(*, num_rows: Count = 8192, prompt: str = "Play the game.", data_source: str = "episodes") -> LazyRows:
    """Rows for an environment that makes its game from the episode's seed: the same `prompt` and no ground truth in each.

    Raises ConfigError for options out of range.
    """
    refuse("episodes", (prompt.strip() != "", "prompt is empty"))
    return LazyRows(num_rows, lambda index: game_row(data_source, prompt, "", {"index": index}))
