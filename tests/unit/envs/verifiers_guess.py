"""An environment as the package verifiers (0.1) has them, without that package: a word is guessed by its length."""

from __future__ import annotations

from typing import Any


class Rubric:
    def __init__(self) -> None:
        self.funcs = [right, self.short]
        self.weights = [1.0, 0.5]

    async def short(self, completion: list[dict[str, str]], **kwargs: Any) -> float:
        return float(len(completion) == 1)


def right(completion: list[dict[str, str]], answer: str) -> float:
    return float(completion[-1]["content"] == answer)


class GuessEnv:
    max_turns = 3
    system_prompt = "You guess."

    def __init__(self, hint: str = "It has {} letters.") -> None:
        self.hint = hint
        self.dataset = [
            {"question": "A word?", "answer": "tree"},
            {"question": "Another?", "answer": "sea", "task": "other", "info": {"a": 1}},
        ]
        self.rubric = Rubric()

    async def setup_state(self, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "tries": 0}

    async def is_completed(self, state: dict[str, Any]) -> bool:
        return state["completion"][-1]["content"] == state["answer"]

    async def env_response(self, messages: list[dict[str, str]], state: dict[str, Any]) -> list[dict[str, str]]:
        state["tries"] += 1
        return [{"role": "user", "content": self.hint.format(len(state["answer"])) + f" Try {state['tries']}."}]


class OldGuessEnv(GuessEnv):
    """The methods as they were up to 0.1.7: with the messages, and the state returned."""

    def is_completed(self, messages: list[dict[str, str]], state: dict[str, Any]) -> bool:  # type: ignore[override]
        return messages[-1]["content"] == state["answer"]

    def env_response(self, messages: list[dict[str, str]], state: dict[str, Any]) -> Any:  # type: ignore[override]
        return [{"role": "user", "content": "No."}], {**state, "tries": state["tries"] + 1}


def load_environment(**arguments: Any) -> GuessEnv:
    return GuessEnv(**arguments)


def load_old() -> GuessEnv:
    return OldGuessEnv()


def load_nothing() -> object:
    return object()
