"""Freed memory goes back to the system from between blocks that live, if there is much of it and the machine has little."""

from __future__ import annotations

import os
import subprocess
import sys

from grpo_rl.cluster.processes.environment import ENVIRONMENT

PROGRAM = """
import numpy, psutil
from grpo_rl import freed_memory

freed_memory.KEPT_BYTES = 64 << 20
freed_memory.KEPT_SHARE = 0.0
blocks = [numpy.ones(1 << 17) for _ in range(256)]
del blocks[:64:2]
little = freed_memory.give_back()
del blocks[::2]
freed_memory.KEPT_SHARE = 1.0
enough = freed_memory.give_back()
freed_memory.KEPT_SHARE = 0.0
resident = psutil.Process().memory_info().rss
print(little, enough, freed_memory.give_back(), (resident - psutil.Process().memory_info().rss) >> 20)
"""


def test_much_freed_memory_goes_back_and_a_little_is_kept_or_any_if_the_machine_has_enough() -> None:
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=True
    )
    little, enough, much, mib = process.stdout.split()
    assert (little, enough, much) == ("False", "False", "True")
    assert int(mib) > 90, "of 112 MiB that lie between blocks of 1 MiB"
