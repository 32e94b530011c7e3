"""The words of verl's main_generation and main_eval, as those of `eval` and `generate`.

verl (0.5, trainer/config/generation.yaml and evaluation.yaml) names model, data and sampling by keys of files of their own.
Those with a meaning here become options or keys; each of the others is refused with what to use instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from grpo_rl.errors import ConfigError

_OPTIONS = {
    "data.n_samples": "-n",
    "rollout.temperature": "--temperature",
    "rollout.top_p": "--top-p",
    "rollout.top_k": "--top-k",
    "rollout.response_length": "--max-tokens",
    "rollout.seed": "--seed",
}
"""Keys that become options of the command."""
_KEYS = {
    "data.data_source_key": "data.reward_fn_key",
    "rollout.prompt_length": "data.max_prompt_length",
    "custom_reward_function.path": "reward.custom_reward_function.path",
    "custom_reward_function.name": "reward.custom_reward_function.name",
}
"""Keys with another name here."""
_UNSAID = {
    "data.batch_size": "requests go to the engines one by one; leave it out",
    "rollout.mode": "requests always go to the engines one by one; leave it out",
    "rollout.calculate_log_probs": "responses come with their log-probs; leave it out",
    "data.tokenizer": "use actor_rollout_ref.model.tokenizer_path",
    "actor.strategy": "nothing is trained; leave it out",
}
"""Keys without a meaning here, with the reason."""


def of_evaluation(words: Sequence[str]) -> list[str]:
    """Return a command line of `eval` in which verl's keys are ours. Raises ConfigError for those without a meaning."""
    if any(word.lstrip("+").startswith("data.response_key=") for word in words):
        # main_eval scores the responses that are in the file: the file is what is measured.
        words = [
            entry
            for word in words
            for entry in (_listed(word[len("data.path=") :]) if word.startswith("data.path=") else [word])
        ]
    return _translated(words, {})


def of_generation(words: Sequence[str]) -> list[str]:
    """Return a command line of `generate` in which verl's keys are ours. Raises ConfigError for those without a meaning."""
    return _translated(words, {"data.output_path": "--output"})


def _translated(words: Sequence[str], options: dict[str, str]) -> list[str]:
    found: list[str] = []
    problems: list[str] = []
    for word in words:
        sign_key, equals, value = word.partition("=")
        key = sign_key.lstrip("+")
        if word.startswith("-") or not equals:
            found.append(word)
        elif key in _UNSAID:
            problems.append(f"{key}: {_UNSAID[key]}")
        elif key == "data.output_path" and key not in options:
            problems.append(f"{key}: this command writes a folder, --output FOLDER; grpo-rl generate writes a file")
        elif key == "model.path":
            found.insert(0, value)
        elif key == "data.path":
            found += [word for file in _listed(value) for word in ("--data", file)]
        elif key in {**_OPTIONS, **options}:
            found += [{**_OPTIONS, **options}[key], value]
        elif key == "data.reward_model_key":
            found.append(f"data.ground_truth_key={value}.ground_truth")
        elif key in _KEYS:
            found.append(f"{_KEYS[key]}={value}")
        elif key.split(".")[0] in ("rollout", "model"):
            found.append(f"actor_rollout_ref.{key}={value}")
        else:
            found.append(word)
    if problems:
        raise ConfigError(problems)
    return found


def _listed(value: str) -> list[str]:
    """Return the entries of `[a,b]`, or the value alone."""
    inner = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    return [entry.strip().strip("'\"") for entry in inner.split(",")] if inner is not value else [value]
