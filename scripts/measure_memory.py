"""Peak memory of a command: the sum of PSS over its whole process tree, sampled while it runs (Linux).

    .venv/bin/python scripts/measure_memory.py -- .venv/bin/python -m grpo_rl.main recipe=arithmetic/grpo

PSS counts a page that several processes share once. Ray's own processes are part of the tree.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

INTERVAL_S = 1.0


def main() -> int:
    if "--" not in sys.argv:
        print(__doc__)
        return 2
    process = subprocess.Popen(sys.argv[sys.argv.index("--") + 1 :])
    peak, at_peak = 0, {}
    while process.poll() is None:
        usage = tree_pss(process.pid)
        if sum(usage.values()) > peak:
            peak, at_peak = sum(usage.values()), usage
        time.sleep(INTERVAL_S)
    print(f"\npeak of the sum of PSS: {peak / 2**30:.2f} GiB over {len(at_peak)} processes")
    for (pid, name), size in sorted(at_peak.items(), key=lambda item: -item[1])[:8]:
        print(f"  {size / 2**30:6.2f} GiB  {name} ({pid})")
    return process.returncode


def tree_pss(root: int) -> dict[tuple[int, str], int]:
    """PSS in bytes of a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it ended meanwhile
        children.setdefault(parent, []).append(int(stat.parent.name))
    usage, waiting = {}, [root]
    while waiting:
        pid = waiting.pop()
        waiting += children.get(pid, [])
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            name = Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:
            continue
        match = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
        usage[pid, name] = 1024 * int(match[1]) if match else 0
    return usage


if __name__ == "__main__":
    sys.exit(main())
