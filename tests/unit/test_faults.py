import ast
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_rl import faults
from grpo_rl.errors import ConfigError
from grpo_rl.faults import InjectedFault, arm, fault_point, tell, told
from grpo_rl.workers.actor import ActorWorker
from grpo_rl.workers.critic import CriticWorker
from grpo_rl.workers.reward_model import TrainedRewardModelWorker

PACKAGE = Path(faults.__file__).parent
POINT = "actor.update.mid_backward"


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    arm("")


def test_every_point_in_the_code_is_in_the_table_and_every_row_of_the_table_is_in_the_code() -> None:
    calls = [
        (ast.unparse(node.func).rpartition(".")[2], node.args[0].value)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)
    ]
    found = {point for function, point in calls if function == "fault_point"}
    # The loop of all trained ranks passes the same points under the name of each kind.
    found |= {
        f"{kind.role}.update.{point}"
        for function, point in calls
        if function == "_passes"
        for kind in (ActorWorker, CriticWorker, TrainedRewardModelWorker)
    }
    assert found == set(faults.POINTS)


def test_a_fault_happens_where_all_its_conditions_hold_and_nowhere_else() -> None:
    arm(f"{POINT}:raise@step=3,rank=1")
    tell(step=3)
    assert fault_point(POINT, rank=0) is None
    assert fault_point("actor.update.start", rank=1) is None
    with pytest.raises(InjectedFault, match=POINT):
        fault_point(POINT, rank=1)
    tell(step=4)
    assert fault_point(POINT, rank=1) is None
    arm(f"{POINT}:nan@rank=1,n=2")
    assert [fault_point(POINT, rank=rank) for rank in (1, 0, 0, 1, 1)] == [None, None, None, "nan", None]


def test_a_fault_that_happens_once_does_not_come_back_in_another_process(tmp_path: Path) -> None:
    for expected in ("nan", None):
        arm(f"{POINT}:nan@once", str(tmp_path))  # arming anew forgets what this process remembers
        assert fault_point(POINT, rank=0) == expected
    noted = [json.loads(line) for line in (tmp_path / "fired.jsonl").read_text().splitlines()]
    assert [(note["fault"], note["pid"], note["rank"]) for note in noted] == [(f"{POINT}:nan@once", os.getpid(), "0")]


def test_a_disk_s_error_is_raised_as_the_system_raises_it() -> None:
    arm("ckpt.before_write:enospc")
    with pytest.raises(OSError) as caught:
        fault_point("ckpt.before_write")
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize(("action", "code"), [("kill9", -signal.SIGKILL), ("loop=0", 0)])
def test_a_process_ends_as_the_action_says(action: str, code: int) -> None:
    program = "from grpo_rl.faults import fault_point; fault_point('driver.step')"
    environment = {**os.environ, "GRPO_FAULT": f"driver.step:{action}"}
    assert subprocess.run([sys.executable, "-c", program], env=environment, timeout=240).returncode == code


def test_what_is_told_travels_only_where_something_is_armed() -> None:
    tell(step=1)
    assert told() is None
    arm("driver.step:raise@step=9")
    tell(step=2)
    assert told() == {"step": 2}


REFUSED = {
    "actor.update:kill9": "no fault point 'actor.update'",
    "driver.step:kill": "no action 'kill'",
    "driver.step": "is not POINT:ACTION",
    "driver.step:delay": "needs a number",
    "driver.step:delay=soon": "is not POINT:ACTION",
    "driver.step:kill9=3": "delay needs a number, and",
    "driver.step:raise@step": "is not POINT:ACTION",
    "driver.step:raise@once": "GRPO_FAULT_STATE",
}


@pytest.mark.parametrize("spec", REFUSED)
def test_what_cannot_be_armed_is_refused_with_the_rule(spec: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[spec]):
        arm(spec)
