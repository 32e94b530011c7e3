"""The page as one HTML document with its style, scripts, chart library and data. Responses of a model are
hostile text: the data are JSON without `<`, `>` and `&`, which scripts show as text only. The document's
policy allows no network, and no scripts but those with its hashes and the chunks beside the page."""

from __future__ import annotations

import base64
import glob
import hashlib
import html
import importlib.util
import json
import os
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from grpo_rl.errors import ConfigError
from grpo_rl.processes.family import is_running
from grpo_rl.run_files import write_whole
from grpo_rl.telemetry.page.rollout_chunks import write_chunk
from grpo_rl.telemetry.page.run_data import ENDED, run_data
from grpo_rl.telemetry.rundir import RunDir

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = (
    "elements.js",
    "charts.js",
    "overview.js",
    "curves.js",
    "rollout_store.js",
    "rollout_cards.js",
    "rollouts.js",
    "time.js",
    "configuration.js",
    "start.js",
)
LIVE = "live"


def write_page(
    runs: Sequence[Path], out: Path | None = None, state: str | None = None, *, keep: bool = False, trusted: bool = False
) -> Path:
    """Write the page of the runs whole, by default `RUN/page.html`, and return its path. Chunks of large runs
    lie in `<name of the page>_files`; `keep` leaves those of unchanged steps (`chunks_of`). Raises DataError
    for a folder that is no run, ConfigError if the page cannot be written."""
    out = out if out is not None else default_page(runs)
    files = out.with_name(f"{out.stem}_files")
    try:
        parts = []
        for number, run in enumerate(runs):
            folder = files if len(runs) == 1 else files / str(number)
            page_data = run_data(run, folder, state, keep=keep, trusted=trusted)
            page_data["chunks"]["folder"] = folder.relative_to(out.parent).as_posix()
            # For links to the run's files; with the dot no folder's name reads as a scheme.
            page_data["base"] = f"./{os.path.relpath(run.resolve(), out.resolve().parent)}"
            parts.append(page_data)
        is_live = any(part["status"].get("state") not in (*ENDED, None) for part in parts)
        version = round(time.time(), 3)
        data = {"version": version, "written": version, "live": f"{files.name}/{LIVE}.js" if is_live else None, "runs": parts}
        for leftover in out.parent.glob(f".{glob.escape(out.name)}.*.tmp"):
            writer = leftover.name.split(".")[-2]
            if writer.isdecimal() and not is_running(int(writer)):  # it was killed
                leftover.unlink(missing_ok=True)
        write_whole(out, document(data))
        if is_live or (files / f"{LIVE}.js").exists():
            # Open pages look here for a newer version.
            files.mkdir(exist_ok=True)
            write_chunk(files, LIVE, str(version))
    except OSError as error:
        raise ConfigError(f"{out}: the page cannot be written: {error.strerror or error}") from error
    return out


def default_page(runs: Sequence[Path]) -> Path:
    if len(runs) == 1:
        return RunDir(runs[0].resolve()).page_file
    return Path(os.path.commonpath([run.resolve().parent for run in runs])) / "runs.html"


def document(data: Mapping[str, Any]) -> str:
    scripts = "\n".join(_asset(name) for name in SCRIPTS)
    library, script = chart_library()["script"], f"(function () {{\n'use strict';\n{scripts}\n}}());"
    title = "".join(char if char.isprintable() else " " for char in " · ".join(run["name"] for run in data["runs"]))
    policy = "; ".join(
        (
            "default-src 'none'",
            # Chunks: `file:` for a page on disk, 'self' for a served one.
            f"script-src {_hash(library)} {_hash(script)} 'self' file:",
            "style-src 'unsafe-inline'",
            "img-src data: blob:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    return "\n".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">',
            f"<title>{html.escape(title)}</title>",
            f"<style>{chart_library()['style']}\n{_asset('page.css')}</style></head><body>",
            '<div id="page"></div><noscript>This page is drawn by its own scripts: allow them.</noscript>',
            f'<script type="application/json" id="data">{embedded(data)}</script>',
            f"<script>{library}</script>",
            f"<script>{script}</script></body></html>\n",
        )
    )


def embedded(value: Any) -> str:
    """Return ASCII JSON for an HTML element, without `<`, `>` and `&`."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def chart_library() -> dict[str, str]:
    """Return script and style of uPlot from its package, whose import would load IPython."""
    spec = importlib.util.find_spec("uplot")
    if spec is None or spec.origin is None:
        raise ConfigError("the page's charts need uplot-python, which is not installed: pip install -e . installs it")
    static = Path(spec.origin).parent / "static"
    return {
        "script": (static / "uPlot.iife.js").read_text(encoding="utf-8").replace("</script", "<\\/script"),
        "style": (static / "uPlot.min.css").read_text(encoding="utf-8").replace("</style", "<\\/style"),
    }


@cache
def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
