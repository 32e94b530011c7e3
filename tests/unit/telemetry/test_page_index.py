"""The page over a folder of runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from run_folders import make_run

from grpo_rl.commands.page import main
from grpo_rl.telemetry.page.page_file import write_page


def test_a_folder_of_runs_gets_a_table_with_a_curve_and_a_link_for_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs"
    first = make_run(folder, "first")
    make_run(folder, "a <b>run")
    (folder / "broken").mkdir()
    (folder / "broken" / "config.yaml").write_text("{}")
    (folder / "broken" / "metrics.jsonl").write_text("no metrics\n")
    write_page([first])
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out.strip() == f"page: {folder / 'index.html'}"
    page = (folder / "index.html").read_text()
    assert '<a href="first/page.html">first</a>' in page
    assert "a &lt;b&gt;run" in page and "<b>" not in page, "no page of its own, and no markup of its name"
    assert page.count("<tr>") == 1 + 3
    (curve,) = set(re.findall(r'points="([^"]+)"', page))
    points = [tuple(map(float, point.split(","))) for point in curve.split()]
    assert points[0][0] == 0.0 and points[-1][0] == 160.0 and len(points) == 8
    assert {min(y for _, y in points), max(y for _, y in points)} == {2.0, 30.0}
