"""Draw valid configurations and count those that are refused: `python scripts/check_valid_configs.py 10000`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests/unit/config"), str(ROOT)]

from config_tools import CPU, nested  # noqa: E402
from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from valid_configs import valid_settings  # noqa: E402

from grpo_rl.config.checks import check  # noqa: E402
from grpo_rl.config.convert import convert  # noqa: E402


def main() -> int:
    """0 when none was refused."""
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    seen, refused = 0, list[str]()

    @settings(
        max_examples=wanted, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(valid_settings())
    def draw(keys: dict[str, Any]) -> None:
        nonlocal seen
        seen += 1
        refused.extend(f"{problem} {keys}" for problem in check(convert(nested(keys)), CPU))

    started = time.perf_counter()
    draw()
    print(f"{seen} valid configurations in {time.perf_counter() - started:.1f} s, refused: {len(refused)}")
    print("\n".join(refused[:10]))
    return bool(refused)


if __name__ == "__main__":
    sys.exit(main())
