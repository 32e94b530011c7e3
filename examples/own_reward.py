"""A reward of one's own: right or wrong, and a little less for every character beyond what the answer needs.

To try it on rows before any training, and to train with it:

    python -m grpo_rl check-reward examples/own_reward.py:terse --data train.parquet
    python -m grpo_rl.main recipe=arithmetic/grpo 'reward.functions=[examples/own_reward.py:terse]'
"""

from __future__ import annotations

from typing import Any


def terse(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, price: float = 0.05
) -> dict[str, float]:
    """Return `score`, which is trained on, and `acc`, which validation reports; every number is logged."""
    words = solution_str.split()
    right = float(bool(words) and words[-1] == str(ground_truth))
    needless = max(0, len(solution_str.strip()) - len(str(ground_truth)))
    return {"score": right - price * min(needless, 10), "acc": right, "needless": float(needless)}


def main() -> None:
    for response in ("55", "the sum is 55", "54", ""):
        print(f"{response!r:<18} {terse('sums', response, '55')}")


if __name__ == "__main__":
    main()
