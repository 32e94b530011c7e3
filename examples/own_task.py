"""A task of one's own: rows that are made, each with its answer. Here: the larger of two numbers.

To look at its rows, run this file. To train on it:

    python -m grpo_rl.main recipe=arithmetic/grpo 'data.train_files=task:examples/own_task.py:larger?highest=60' \
        'data.val_files=task:examples/own_task.py:larger?highest=60&seed=1&num_rows=64'
"""

from __future__ import annotations

import random
from typing import Any


def larger(*, num_rows: int = 512, highest: int = 99, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows in verl's format. Row i depends on the options, the seed and i alone, so that a resumed run sees it again."""
    return [_row(index, random.Random(f"{seed} {index}"), highest) for index in range(num_rows)]


def _row(index: int, draw: random.Random, highest: int) -> dict[str, Any]:
    first, second = draw.randint(1, highest), draw.randint(1, highest)
    return {
        "data_source": "larger",
        # The embedded model reads digits, + and =.
        "prompt": [{"role": "user", "content": f"{first}+{second}="}],
        "reward_model": {"style": "rule", "ground_truth": str(max(first, second))},
        "extra_info": {"index": index},
    }


def main() -> None:
    for row in larger(num_rows=3, highest=60):
        print(row["prompt"][0]["content"], "->", row["reward_model"]["ground_truth"])


if __name__ == "__main__":
    main()
