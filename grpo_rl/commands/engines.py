"""`grpo-rl engines RUN`: the rollout engines of a running run, and an order for more of them or fewer."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence

from grpo_rl.arguments import Arguments, whole_number
from grpo_rl.errors import ConfigError
from grpo_rl.run_files import append_lines
from grpo_rl.telemetry.rundir import RunDir, find_run
from grpo_rl.telemetry.status import is_gone, read_status
from grpo_rl.telemetry.terminal.text import safe_text, say

ANSWER_S = 20.0


def main(argv: Sequence[str]) -> int:
    """Raises ConfigError for what cannot be changed."""
    parser = Arguments(
        "engines",
        "Show the rollout engines of a running run, or let some join or leave while it goes on. The bounds are those of\n"
        "actor_rollout_ref.rollout.min_replicas and max_replicas. What a run samples does not depend on their number.",
        "grpo-rl engines runs/grpo_rl/grpo --add 2",
    )
    parser.add_argument("run", metavar="RUN", help="folder or name of a run")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--add", type=whole_number, metavar="N", help="let N engines join")
    either.add_argument(
        "--remove", type=whole_number, metavar="N", help="let N engines leave; others go on with their requests"
    )
    options = parser.read(argv)
    run = find_run(options.run)
    status = read_status(run)
    if status.get("state") != "running" or is_gone(status):
        raise ConfigError(f"{run}: is not running")
    engines = status.get("engines")
    if not isinstance(engines, dict):
        rollout = "actor_rollout_ref.rollout"
        raise ConfigError(
            f"{run}: the number of its engines is fixed, or none has started yet; a run that was started with "
            f"{rollout}.min_replicas or max_replicas can change it"
        )
    change = (options.add or 0) - (options.remove or 0)
    if not change:
        serving = ", ".join(safe_text(str(name), limit=40) for name in engines.get("serving", ()))
        say(f"serving: {serving}\nwanted: {engines.get('wanted')}, from {engines.get('fewest')} to {engines.get('most')}")
        return 0
    key = secrets.token_hex(8)
    append_lines(RunDir(run).engine_orders, [json.dumps({"key": key, "change": change}) + "\n"])
    deadline = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
        current = read_status(run).get("engines")
        answers = current.get("answers") if isinstance(current, dict) else None
        if isinstance(answers, dict) and key in answers:
            answer = safe_text(str(answers[key]))
            if answer.startswith("refused: "):
                raise ConfigError(answer)
            say(answer)
            return 0
        time.sleep(0.2)
    raise ConfigError(f"{run}: did not answer within {ANSWER_S:g} s; the order stays in {RunDir(run).engine_orders}")
