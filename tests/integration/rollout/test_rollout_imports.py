from __future__ import annotations

import subprocess
import sys


def test_describing_an_engine_and_packing_weights_loads_neither_vllm_nor_transformers_nor_ray() -> None:
    code = (
        "import sys, grpo_rl.rollout.engine, grpo_rl.rollout.senders, grpo_rl.rollout.engine_environment, grpo_rl.workers.rollout;"
        "print(sorted({'vllm', 'transformers', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"
