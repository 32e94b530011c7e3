"""Reward functions that do whatever their response says, in place of what people's functions do by mistake."""

import asyncio
import ctypes
import os
import subprocess
import sys
import threading
import time
from pathlib import Path


def act(data_source, solution_str, ground_truth, extra_info):
    deed, _, argument = solution_str.partition(" ")
    return DEEDS[deed](argument)


async def act_later(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0)
    return act(data_source, solution_str, ground_truth, extra_info)


def act_on_all(data_sources, solution_strs, ground_truths, extra_infos, plus=0.0):
    said = " ".join(solution_strs)
    if "exit-list" in said:
        os._exit(4)
    if "hang-list" in said:
        loop("")
    if "raise-list" in said:
        raise ValueError("no")
    if "short-list" in said:
        return []
    if "no-list" in said:
        return 1.0
    if "short" in said:
        return [1.0]
    return [None if text == "none" else plus + place for place, text in enumerate(solution_strs)]


def same(argument):
    return float(argument.split()[0])


def slow(argument):
    time.sleep(float(argument))
    return float(argument)


def no_memory(argument):
    raise MemoryError


def loop(argument):
    while True:
        pass


def hold_the_lock(argument):
    # A backtracking match runs in C and lets no other thread in.
    import re

    re.match(r"(a+)+$", "a" * 60 + "b")


def segfault(argument):
    ctypes.string_at(0)


def fork_and_stay(argument):
    """Children in this group and in a session of their own, whose pids stand in the file."""
    pids = []
    for apart in (False, True):
        child = subprocess.Popen(["sleep", "60"], start_new_session=apart)
        pids.append(child.pid)
    orphan = os.fork()
    if orphan == 0:
        grandchild = os.fork()
        if grandchild == 0:
            os.setsid()
            time.sleep(60)
        Path(argument + ".orphan").write_text(str(grandchild))
        os._exit(0)
    os.waitpid(orphan, 0)
    pids.append(int(Path(argument + ".orphan").read_text()))
    Path(argument).write_text(" ".join(map(str, pids)))
    loop("")


def leave_behind(argument):
    Path(argument).write_text(str(subprocess.Popen(["sleep", "60"]).pid))
    os._exit(1)


def return_from_a_fork(argument):
    if os.fork() == 0:
        return 7.0
    return 1.0


def allocate(argument):
    return len(bytearray(10 * 2**30))


def print_much(argument):
    for _ in range(20):
        print("x" * 2**20)
    sys.stderr.write("complaint\n")
    return 1.0


def wait_for(argument):
    """1 once as many others wait for the same: whether that many run at once."""
    mine, count = Path(argument.split()[0]), int(argument.split()[1])
    (mine / f"{os.getpid()}").touch()
    while len(list(mine.iterdir())) < count:
        time.sleep(0.005)
    return 1.0


RESTED = threading.Event()
SPOILED = threading.Event()


def spoil(argument):
    """A good score, and a thread that ends the process while it rests."""
    SPOILED.set()
    threading.Thread(target=lambda: RESTED.wait() and os._exit(9)).start()
    return 1.0


def rest(argument):
    RESTED.set()
    if SPOILED.is_set():
        loop("")
    return 1.0


class Slippery(float):
    def __float__(self):
        raise RuntimeError("no")


DEEDS = {
    "slow": slow,
    "score": same,
    "no-memory": no_memory,
    "loop": loop,
    "lock": hold_the_lock,
    "segfault": segfault,
    "fork": fork_and_stay,
    "leave": leave_behind,
    "return-from-fork": return_from_a_fork,
    "allocate": allocate,
    "print": print_much,
    "meet": wait_for,
    "spoil": spoil,
    "rest": rest,
    "raise": lambda _: 1 / 0,
    "exit": sys.exit,
    "os-exit": lambda code: os._exit(int(code)),
    "close-all": lambda _: os.closerange(0, 1000),
    "recurse": lambda _: DEEDS["recurse"](_),
    "nan": lambda _: float("nan"),
    "none": lambda _: None,
    "slippery": lambda _: Slippery(1),
    "two-steps": lambda _: {"score": 1.0, "steps": [(4, 1.0), (9, 0.5)]},
    "steps": lambda _: {"score": 1.0, "steps": [(1, object())]},
    "deep": lambda _: {"score": 1.0, "steps": deep()},
}


def deep():
    value = []
    for _ in range(100_000):
        value = [value]
    return value
