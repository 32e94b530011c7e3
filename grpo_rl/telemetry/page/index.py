"""A page over a folder of runs, a line for each, with links to their pages."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path

from grpo_rl.errors import ConfigError, GrpoRlError
from grpo_rl.run_files import write_whole
from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.telemetry.metrics.validation import results
from grpo_rl.telemetry.rundir import refuse_links
from grpo_rl.telemetry.status import current_status
from grpo_rl.telemetry.terminal.text import safe_text

NAME = "index.html"
WIDTH, HEIGHT = 160, 32  # pixels of a curve
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>:root{{color-scheme:light dark;font:15px system-ui}}body{{margin:1.5rem;overflow-x:auto}}table{{border-collapse:collapse}}
th,td{{padding:.35rem .9rem .35rem 0;text-align:left;border-bottom:1px solid #8884;vertical-align:middle}}
th{{font-weight:600}}polyline{{fill:none;stroke:#2563eb;stroke-width:2}}</style>
<h1>{title}</h1><table><tr><th>run<th>state<th>step<th>reward<th>result<th>before<th>after</tr>
{rows}
</table></html>
"""


def runs_below(folder: Path) -> list[Path]:
    return sorted(file.parent for file in folder.glob("*/config.yaml") if not (file.parent / "config.json").is_file())


def write_index(folder: Path) -> Path:
    """Raises ConfigError if the page cannot be written."""
    rows = "\n".join(_row(run) for run in runs_below(folder))
    out = folder / NAME
    try:
        write_whole(out, _PAGE.format(title=_text(folder.resolve().name), rows=rows))
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error.strerror or error}") from error
    return out


def _row(run: Path) -> str:
    try:
        refuse_links(run)
        records, status = read_metrics(run / "metrics.jsonl"), current_status(run)
    except (GrpoRlError, OSError) as error:  # one broken run does not hide the others
        return f"<tr><td>{_text(run.name)}<td colspan=6>{_text(str(error).splitlines()[0])}</tr>"
    name, link = _text(run.name), html.escape(f"{run.name}/page.html", quote=True)
    step, total = status.get("step", 0), status.get("total")
    result = next(iter(results(records)), None)
    numbers = ["", "", ""] if result is None else [result[0], f"{result[1][1]:.4g}", f"{result[2][1]:.4g}"]
    cells = [
        f'<a href="{link}">{name}</a>' if (run / "page.html").is_file() else name,
        _text(str(status.get("state", "unknown"))),
        _text(f"{step} of {total}" if total else str(step)),
        _curve([record["reward/mean"] for record in records if math.isfinite(record.get("reward/mean", math.nan))]),
        *map(_text, numbers),
    ]
    return f"<tr>{''.join(f'<td>{cell}' for cell in cells)}</tr>"


def _curve(values: Sequence[float]) -> str:
    if len(values) < 2:
        return ""
    low, span = min(values), (max(values) - min(values)) or 1.0
    points = " ".join(
        f"{place * WIDTH / (len(values) - 1):.1f},{HEIGHT - 2 - (value - low) / span * (HEIGHT - 4):.1f}"
        for place, value in enumerate(values)
    )
    label = f"{values[0]:.3g} to {values[-1]:.3g}"
    return f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{label}"><polyline points="{points}"/></svg>'


def _text(text: str) -> str:
    return html.escape(safe_text(text, limit=100))
