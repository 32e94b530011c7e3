"""Writes small code tasks, with their tests in each form that the reward `code` reads, as rows in verl's format."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROGRAMS: dict[str, tuple[list[str], Callable[[str], str]]] = {
    "Read two integers from one line and print their sum.": (
        ["1 2", "-5 3", "1000000 1", "0 0"],
        lambda text: str(sum(map(int, text.split()))),
    ),
    "Read a line and print it backwards.": (["abc", "level", "a b", "x"], lambda text: text[::-1]),
    "Read a line of integers and print them sorted, with a space between.": (
        ["3 1 2", "5", "-1 -2 0", "2 2 1"],
        lambda text: " ".join(map(str, sorted(map(int, text.split())))),
    ),
    "Read a line and print how many vowels (aeiou) it has.": (
        ["hello", "xyz", "queue", "a"],
        lambda text: str(sum(letter in "aeiou" for letter in text)),
    ),
    # Any program that runs to its end, such as `88`: what a model that writes numbers can learn.
    "Write a program that prints nothing.": (["", "1"], lambda text: ""),
}
FUNCTIONS: dict[str, tuple[str, list[list[Any]], list[Any]]] = {
    "Write a function is_even(n).": ("is_even", [[0], [1], [-2], [7]], [True, False, True, False]),
    "Write a function largest(numbers) that returns the largest one.": ("largest", [[[1, 3, 2]], [[-1]], [[5, 5]]], [3, -1, 5]),
}
ASSERTIONS: dict[str, list[str]] = {
    "Write a function middle(a, b, c) that returns the median.": ["assert middle(3, 1, 2) == 2", "assert middle(5, 5, 1) == 5"],
    "Write a function unique(items) that returns a set.": ["assert unique([1, 1, 2]) == {1, 2}", "assert unique([]) == set()"],
}


def rows() -> list[dict[str, Any]]:
    """One row per task."""
    tests: dict[str, Any] = {
        task: {"inputs": inputs, "outputs": [answer(text) for text in inputs]} for task, (inputs, answer) in PROGRAMS.items()
    }
    tests |= {
        task: {"fn_name": name, "inputs": inputs, "outputs": outputs} for task, (name, inputs, outputs) in FUNCTIONS.items()
    }
    tests |= {task: {"asserts": asserts} for task, asserts in ASSERTIONS.items()}
    return [
        {
            "data_source": "code",
            "prompt": [{"role": "user", "content": f"{task} Answer with one ```python block."}],
            "reward_model": {"style": "rule", "ground_truth": json.dumps(truth)},
            "extra_info": {"index": index},
        }
        for index, (task, truth) in enumerate(tests.items())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=Path("data/code/train.jsonl"))
    target = parser.parse_args().to
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    print(f"{target}: {len(rows())} tasks")


if __name__ == "__main__":
    main()
