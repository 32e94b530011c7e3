"""The words of verl's main_generation and main_eval, as those of `eval` and `generate`.

verl (0.5, trainer/config/generation.yaml and evaluation.yaml) names model, data and sampling by keys of files of their own.
Those with a meaning here become options or keys; the others are answered as verl's keys are in training.
"""

from __future__ import annotations

from collections.abc import Sequence

_PLACES = {
    "data.n_samples": "-n",
    "data.output_path": "--output",
    "rollout.temperature": "--temperature",
    "rollout.top_p": "--top-p",
    "rollout.top_k": "--top-k",
    "rollout.response_length": "--max-tokens",
    "rollout.seed": "--seed",
    "rollout.prompt_length": "data.max_prompt_length",
    "data.data_source_key": "data.reward_fn_key",
}
"""The option or the key that has the value of one of verl's keys."""


def translated(words: Sequence[str]) -> list[str]:
    """Return a command line in which verl's keys are ours."""
    # main_eval scores the responses that are in the file: the file is what is measured.
    file_option = [] if any(word.lstrip("+").startswith("data.response_key=") for word in words) else ["--data"]
    found: list[str] = []
    for word in words:
        key, equals, value = word.lstrip("+").partition("=")
        place = _PLACES.get(key, key)
        if word.startswith("-") or not equals:
            found.append(word)
        elif key == "model.path":
            found.insert(0, value)
        elif key == "data.path":
            files = value.removeprefix("[").removesuffix("]").split(",")
            found += [entry for file in files for entry in (*file_option, file.strip().strip("'\""))]
        elif key == "data.reward_model_key":
            found.append(f"data.ground_truth_key={value}.ground_truth")
        elif place.startswith("-"):
            found += [place, value]
        elif place == key and key.split(".")[0] in ("rollout", "model", "actor"):
            found.append(f"actor_rollout_ref.{key}={value}")
        else:
            found.append(word if place == key else f"{place}={value}")
    return found
