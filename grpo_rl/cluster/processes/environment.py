"""Environment variables of workers, which libraries read when they are loaded."""

from __future__ import annotations

from grpo_rl.freed_memory import NEVER
from grpo_rl.rollout.engine_environment import SPIN_COUNT

ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(NEVER),
    "MALLOC_TRIM_THRESHOLD_": str(NEVER),
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
SHARED_CORES = {"GOMP_SPINCOUNT": str(SPIN_COUNT)}
"""For workers that share cores. One that has them to itself spins as long as libgomp chooses: threads that
sleep between the short operations of a small model cost 4 to 6 % of its updates (scripts/bench_sft.py).
"""


def environment_of(*, alone: bool) -> dict[str, str]:
    return ENVIRONMENT if alone else ENVIRONMENT | SHARED_CORES
