"""The first lines of an error that Ray hands over, as a person reads them."""

from __future__ import annotations

from grpo_rl.cluster.processes.worker_sets import cause_line

TRACEBACK = """\x1b[36mray::WorkerHost.build()\x1b[39m (pid=7, ip=10.0.0.1)
  File "host.py", line 3, in build
ModuleNotFoundError: No module named 'my_parts'
"""


def test_a_traceback_ends_with_what_happened():
    assert cause_line(TRACEBACK, at_end=True) == "ModuleNotFoundError: No module named 'my_parts'"


def test_everything_else_begins_with_it_and_colours_are_gone():
    assert (
        cause_line("\x1b[31mThe actor died\x1b[0m because of this.\n\nmore", at_end=False) == "The actor died because of this."
    )
    assert cause_line(" \n", at_end=True) == ""
