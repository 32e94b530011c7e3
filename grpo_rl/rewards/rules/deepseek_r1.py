"""DeepSeek-R1's rule-based reward: accuracy plus format (arXiv 2501.12948, section 2.2.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grpo_rl.config.schema.kinds import Factor
from grpo_rl.rewards.math.math_rule import math
from grpo_rl.rewards.rules.choice import multiple_choice
from grpo_rl.rewards.rules.countdown_rule import countdown
from grpo_rl.rewards.rules.exact import exact_match
from grpo_rl.rewards.rules.format import think_answer
from grpo_rl.rewards.rules.gsm8k import gsm8k, gsm8k_flexible

ACCURACY: dict[str, Callable[..., dict[str, float]]] = {
    "math": math,
    "gsm8k": gsm8k,
    "gsm8k_flexible": gsm8k_flexible,
    "countdown": countdown,
    "multiple_choice": multiple_choice,
    "exact_match": exact_match,
}


def deepseek_r1(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    accuracy: str = "math",
    accuracy_weight: Factor = 1.0,
    format_weight: Factor = 1.0,
) -> dict[str, float]:
    """`accuracy_weight * accuracy + format_weight * format`, both 0 or 1; each of them, unweighted, and `acc` are
    parts.

    `accuracy` names the rule that decides whether the answer is right: math, gsm8k, gsm8k_flexible, countdown,
    multiple_choice or exact_match. The format is `<think>...</think><answer>...</answer>`, once and in order.
    Raises ValueError for another rule, and what that rule raises.
    """
    if accuracy not in ACCURACY:
        raise ValueError(f"accuracy is {accuracy!r}; it is one of {', '.join(ACCURACY)}")
    graded = ACCURACY[accuracy](data_source, solution_str, ground_truth, extra_info)
    right = graded["acc"]
    form = think_answer(data_source, solution_str, ground_truth, extra_info)
    parts = {"score": accuracy_weight * right + format_weight * form, "acc": right, "accuracy": right, "format": form}
    return parts | {key: graded[key] for key in ("answer", "refused") if key in graded}
