"""The first lines of an error that Ray hands over, as a person reads them."""

from __future__ import annotations

import pytest

from grpo_rl.cluster.processes.worker_group import RemoteError, cause_line, is_broken

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


@pytest.mark.parametrize(
    ("kind", "message", "is_lost"),
    [
        ("RuntimeError", "NCCL error: remote process exited or there was a network error", True),  # vLLM's own groups
        ("DistBackendError", "a collective was aborted", True),
        ("RuntimeError", "The size of tensor a (3) must match the size of tensor b (4)", False),
    ],
)
def test_a_group_that_lost_a_member_is_made_anew_and_a_mistake_is_not_tried_again(kind, message, is_lost):
    assert is_broken(RemoteError(kind, message, "", user_error=False)) == is_lost
