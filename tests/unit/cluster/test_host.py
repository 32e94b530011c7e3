"""The process that hosts a worker, without its process."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from grpo_rl.cluster import host
from grpo_rl.cluster.host import Host

SLOW = """
import threading
{name} = threading.Event()
threading.current_thread().entered.set()
{name}.wait(60)
"""


def test_a_spare_that_still_imports_takes_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "PRELOADED_S", 0.05)
    monkeypatch.syspath_prepend(str(tmp_path))
    entered = threading.Event()
    monkeypatch.setattr(threading.Thread, "entered", entered, raising=False)
    (tmp_path / "imported_slowly.py").write_text(SLOW.format(name="may_end"))
    spare = Host("spare", None, {})
    spare.preload(["imported_slowly"])
    assert entered.wait(10)
    with pytest.raises(RuntimeError, match="still importing"):
        spare.become("actor0", None)
    assert spare.name == "spare"
    sys.modules["imported_slowly"].may_end.set()
    monkeypatch.setattr(host, "PRELOADED_S", 10.0)
    spare.become("actor0", None)
    assert spare.name == "actor0" and "imported_slowly" in sys.modules
    del sys.modules["imported_slowly"]


def test_a_list_that_comes_after_the_place_was_taken_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "imported_late.py").write_text("")
    spare = Host("spare", None, {})
    spare.become("actor0", None)
    spare.preload(["imported_late"])
    assert spare._preloading is None and "imported_late" not in sys.modules
