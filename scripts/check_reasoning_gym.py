#!/usr/bin/env python
"""Every data set of reasoning-gym through rows and reward: does its own answer score 1, and garbage less?

    python scripts/check_reasoning_gym.py [--only NAME ...] [--rows 2]

One line per data set. Exit code 1 when a row cannot be made or scored, differs between two makings, or garbage scores 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

from grpo_rl import gym
from grpo_rl.data.tasks.reasoning_gym import PREFIX, reasoning_gym_rows
from grpo_rl.rewards.rules.auto import auto

GARBAGE = ("", "banana", "[1, 2", "<answer>0 0</answer>", "__import__('os')", "9**9**9**9")


MAKE_AGAIN = """
import json, sys
from grpo_rl.data.tasks.reasoning_gym import PREFIX, reasoning_gym_rows
for line in sys.stdin:
    name, num_rows = line.split()
    rows = reasoning_gym_rows(f"{PREFIX}{name}?num_rows={num_rows}")
    print(json.dumps([row["prompt"][0]["content"] for row in rows]), flush=True)
"""
OTHER = subprocess.Popen(
    [sys.executable, "-c", MAKE_AGAIN],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
    env=os.environ | {"PYTHONHASHSEED": "7"},
)


def score(row: dict, response: str) -> dict[str, float]:
    """Return what the reward gives, with the row as it comes out of a JSON file."""
    row = json.loads(json.dumps(row))
    return auto(row["data_source"], response, row["reward_model"]["ground_truth"], row["extra_info"])


def check(name: str, num_rows: int) -> dict:
    """Return what came out for one data set."""
    started = time.perf_counter()
    rows = list(reasoning_gym_rows(f"{PREFIX}{name}?num_rows={num_rows}"))
    made = time.perf_counter()
    longer = reasoning_gym_rows(f"{PREFIX}{name}?num_rows=100")
    same = [longer[index]["prompt"] for index in range(num_rows)] == [row["prompt"] for row in rows]
    scoring = time.perf_counter()
    answers = [row["reward_model"]["ground_truth"] for row in rows]
    own = [
        None if answer is None else score(row, f"so <answer>{answer}</answer>")["score"]
        for row, answer in zip(rows, answers, strict=True)
    ]
    garbage = max(score(row, text)["score"] for row in rows for text in GARBAGE)
    seconds = (time.perf_counter() - scoring) / (num_rows * (1 + len(GARBAGE)))
    carried = all("metadata" in row["extra_info"]["gym"] for row in rows)
    prompts = [row["prompt"][0]["content"] for row in rows]
    return {
        "own": own, "garbage": garbage, "same": same, "carried": carried, "prompts": prompts,
        "make_s": (made - started) / num_rows, "score_s": seconds,
    }  # fmt: skip


def again(name: str, num_rows: int) -> list[str]:
    """The prompts as a process with another hash of strings makes them."""
    if OTHER.poll() is not None:
        return []
    assert OTHER.stdin is not None and OTHER.stdout is not None
    print(name, num_rows, file=OTHER.stdin, flush=True)
    line = OTHER.stdout.readline()
    return json.loads(line) if line.startswith("[") else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these data sets; all if not given")
    parser.add_argument("--rows", type=int, default=2, help="rows of each")
    arguments = parser.parse_args()
    names = arguments.only or gym.names()
    print(f"{'data set':<28}{'own answer':>12}{'garbage':>9}{'again':>7}{'entry':>9}{'make ms':>9}{'score ms':>10}")
    problems, full, without = [], 0, []
    for name in names:
        try:
            found = check(name, arguments.rows)
        except Exception as error:  # one data set must not hide the others
            problems.append(f"{name}: {type(error).__name__}: {error}")
            print(f"{name:<28}{'failed':>12}", flush=True)
            continue
        same = found["same"] and found["prompts"] == again(name, arguments.rows)
        own = found["own"]
        shown = "none given" if None in own else f"{min(own):.2f}"
        if None in own:
            without.append(name)
        elif min(own) == 1:
            full += 1
        else:
            problems.append(f"{name}: its own answer scores {own}")
        if found["garbage"] >= 1:
            problems.append(f"{name}: garbage scores {found['garbage']}")
        if not same:
            problems.append(f"{name}: other rows when made again")
        print(
            f"{name:<28}{shown:>12}{found['garbage']:>9.2f}{'same' if same else 'OTHER':>7}"
            f"{'carried' if found['carried'] else 'remade':>9}{1000 * found['make_s']:>9.1f}{1000 * found['score_s']:>10.1f}",
            flush=True,
        )
    print(f"{len(names)} data sets: {full} score their own answer 1, {len(without)} give none ({', '.join(without)})")
    print(f"refused: {', '.join(f'{name} ({why})' for name, why in gym.REFUSED.items())}")
    for problem in problems:
        print(f"PROBLEM {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
