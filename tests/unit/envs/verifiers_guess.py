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


class Text:
    """A message of a class of its own, as the package's are from 0.1.10 on."""

    def __init__(self, role: str, content: str) -> None:
        self.role, self.content = role, content

    def model_dump(self, exclude_none: bool = False) -> dict[str, Any]:
        return {"role": self.role, "content": self.content}


class Group:
    """A group of rubrics, which the package makes of every rubric by adding its own metrics."""

    def __init__(self, *rubrics: Any) -> None:
        self.funcs: list[Any] = []
        self.weights: list[float] = []
        self.rubrics = list(rubrics)


class Metrics:
    def __init__(self) -> None:
        self.funcs, self.weights = [self.num_turns, seen], [0.0, 0.25]
        self.class_objects = {"bonus": 2.0}

    async def num_turns(self, state: dict[str, Any]) -> int:
        return len(state["trajectory"])


def seen(bonus: float, state: dict[str, Any]) -> float:
    """Return the bonus where the environment's last word is part of what is scored."""
    return bonus * (state["completion"][-1]["content"] == "Enough.")


class NewGuessEnv(GuessEnv):
    """The methods as from 0.1.8 on: stop conditions over a trajectory, a last word, attributes of messages, cleanup handlers."""

    def __init__(self) -> None:
        super().__init__()
        self.rubric = Group(self.rubric, Metrics())  # type: ignore[assignment]
        self.cleaned: list[str] = []
        self.dataset = [
            {"prompt": [{"role": "user", "content": "A word?"}], "answer": "tree", "info": '{"a": [1]}', "example_id": 0}
        ]

    async def setup_state(self, state: dict[str, Any]) -> None:  # type: ignore[override]
        state["tries"] = len(state["info"]["a"])

    async def is_completed(self, state: dict[str, Any]) -> bool:
        steps = state["trajectory"]
        reached = 0 < self.max_turns <= len(steps) or state["final_env_response"] is not None
        return reached or state["error"] is not None or steps[-1]["completion"][-1].content == state["answer"]

    async def env_response(self, messages: list[Any], state: dict[str, Any], **kwargs: Any) -> Any:
        if messages[-1].content == "stop":
            state["final_env_response"] = [Text("user", "Enough.")]
        return [Text("user", f"No, {len(state['trajectory'])}.")]

    async def cleanup(self, state: dict[str, Any]) -> None:
        state["timing"].generation.end = 0.0
        self.cleaned.append(state["trajectory_id"])


NEW = NewGuessEnv()


def load_new() -> GuessEnv:
    return NEW


def load_with_tools() -> GuessEnv:
    environment = GuessEnv()
    environment.oai_tools = [{"type": "function"}]  # type: ignore[attr-defined]
    return environment


def ranks(completions: list[Any]) -> list[float]:
    return [0.0 for _ in completions]


def load_of_groups() -> GuessEnv:
    environment = GuessEnv()
    environment.rubric.funcs.append(ranks)
    environment.rubric.weights.append(1.0)
    return environment


def load_environment(**arguments: Any) -> GuessEnv:
    return GuessEnv(**arguments)


def load_nothing() -> object:
    return object()
