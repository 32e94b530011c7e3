"""Draw valid configurations and count those that are refused: `python scripts/check_valid_configs.py 10000`.

Each is taken through the rules of values and those between keys; every so many (`--compose-every`, Hydra needs a tenth
of a second) also through the whole way of a command line: words, composing, rules, plan.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests/unit/config"), str(ROOT)]

from config_tools import CPU, nested  # noqa: E402
from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402
from valid_configs import valid_settings  # noqa: E402

from grpo_rl.config.checks.all_rules import check  # noqa: E402
from grpo_rl.config.compose import compose  # noqa: E402
from grpo_rl.config.convert import convert  # noqa: E402
from grpo_rl.errors import ConfigError  # noqa: E402
from grpo_rl.plan.make import make_plan  # noqa: E402


def main() -> int:
    """0 when none was refused."""
    parser = argparse.ArgumentParser(description="Draw valid configurations and count those that are refused.")
    parser.add_argument("count", nargs="?", type=int, default=10_000)
    parser.add_argument("--compose-every", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    seen, composed, refused = 0, 0, list[str]()

    @seed(wanted.seed)
    @settings(
        max_examples=wanted.count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(valid_settings())
    def draw(keys: dict[str, Any]) -> None:
        nonlocal seen, composed
        seen += 1
        refused.extend(f"{problem} {keys}" for problem in check(convert(nested(keys)), CPU))
        if seen % wanted.compose_every == 0:
            composed += 1
            refused.extend(f"{problem} {keys}" for problem in _planned(keys))

    started, worked = time.perf_counter(), time.process_time()
    draw()
    print(
        f"{seen} valid configurations, {composed} of them composed and planned, in {time.perf_counter() - started:.1f} s, "
        f"{time.process_time() - worked:.1f} s of processor time; refused: {len(refused)}"
    )
    print("\n".join(refused[:10]))
    return bool(refused)


def _planned(keys: dict[str, Any]) -> list[str]:
    try:
        make_plan(compose([f"{key}={json.dumps(value)}" for key, value in keys.items()]), CPU)
    except ConfigError as error:
        return list(error.problems)
    return []


if __name__ == "__main__":
    sys.exit(main())
