"""A script whose extra is not installed names it in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
HIDDEN = """
import runpy, sys
for name in {modules!r}: sys.modules[name] = None
sys.path.insert(0, {folder!r})
sys.argv = {argv!r}
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("script", "argv", "modules", "extra"),
    [
        ("fuzz_parsers.py", ["jsonl", "--seconds", "1"], ["atheris"], "setup.sh dev data fuzz"),
        ("build_docs.py", [], ["mkdocs.commands.build", "mkdocs.config"], "setup.sh docs"),
    ],
)
def test_a_script_without_its_extra_says_which_one_it_needs(
    script: str, argv: list[str], modules: list[str], extra: str
) -> None:
    path = str(SCRIPTS / script)
    program = HIDDEN.format(modules=modules, folder=str(SCRIPTS), argv=[path, *argv], script=path)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=SCRIPTS.parent)
    assert done.returncode == 1 and extra in done.stderr and "Traceback" not in done.stderr
