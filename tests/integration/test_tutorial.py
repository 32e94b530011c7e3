"""The tutorial's own task and reward, run as they are written there: they learn, and the doctor finds nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import grpo_rl

TUTORIAL = Path(grpo_rl.__file__).parents[1] / "docs" / "tutorial.md"


@pytest.mark.parametrize(("part", "name"), [(4, "plus-nine"), pytest.param(5, "near", marks=pytest.mark.campaign)])
def test_the_tutorials_own_task_learns_as_it_is_written(tmp_path: Path, part: int, name: str) -> None:
    text = TUTORIAL.read_text()
    for file, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, re.DOTALL):
        (tmp_path / file).write_text(code)
    (lines,) = re.findall(rf"\n## {part}\..*?```bash\n(.*?)```", text, re.DOTALL)
    lines = lines.replace(" trainer.dry_run=true", "").replace("python ", f"{sys.executable} ")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{TUTORIAL.parents[1]}"}
    done = subprocess.run(
        ["bash", "-ec", lines], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=540, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = (tmp_path / "runs" / "grpo_rl" / name / "report.txt").read_text()
    (before, after) = re.findall(r"validation plus_nine/mean@1 +([\d.]+) +([\d.]+)", report)[0]
    assert float(after) > float(before) + 0.3
    assert "Nothing is wrong with this run" in report
