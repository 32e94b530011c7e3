"""`scripts/bare_machine.py` with stand-ins: wheels in pieces that arrive one by one, and the main job on random weights."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bare_machine.py"


def call(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *map(str, words)], capture_output=True, text=True, timeout=280)


def wheel(folder: Path, name: str) -> Path:
    """Write a wheel with one module, which holds more than a piece."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", f"NAME = {name!r}\nFILL = {'x' * 3000!r}\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: by-hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def test_pieces_arrive_one_by_one_and_are_installed_when_all_are_there_and_whole(tmp_path: Path) -> None:
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        from bare_machine import cut
    finally:
        sys.path.remove(str(SCRIPT.parent))
    pieces, site = tmp_path / "pieces", tmp_path / "site"
    pieces.mkdir()
    cut([wheel(tmp_path, "first"), wheel(tmp_path, "second")], pieces, 2000 / 2**20)
    there = sorted(pieces.glob("piece_*"))
    assert len(there) > 2 and max(piece.stat().st_size for piece in there) <= 2000
    last = there[-1].read_bytes()
    there[-1].unlink()
    done = call("install", "--from", pieces, "--to", site)
    assert done.returncode == 1 and f"still to come: {there[-1].name}" in done.stderr
    there[-1].write_bytes(last[:-1] + b"?")
    done = call("install", "--from", pieces, "--to", site)
    assert done.returncode == 1 and "second-1.0-py3-none-any.whl is not as it was packed" in done.stderr
    there[-1].write_bytes(last)
    done = call("install", "--from", pieces, "--to", site)
    assert done.returncode == 0, done.stderr
    assert {"first.py", "second.py"} <= {path.name for path in site.iterdir()}


@pytest.mark.campaign
def test_the_main_job_learns_on_random_weights(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "12+7=", "answer": "#### 19"}\n' * 40)
    words = ["actor_rollout_ref.rollout.name=hf", "trainer.val_before_train=false", "actor_rollout_ref.actor.optim.lr=3e-3"]
    done = call("run", "--tiny", "--out", tmp_path / "out", "--rows", rows, "--steps", 12, "--", *words)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "reward 0." in done.stdout
