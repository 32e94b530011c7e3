"""The page as a file, and served live: one HTML document with its style, its scripts, the chart library and the data.

Responses of a model are hostile text. They are in the document as JSON without `<`, `>` and `&`, so that nothing in them
can end the element that holds them, and the scripts put them on the screen as text only. The policy in the document
allows no network, and no script but those that are named by their hash and the chunks beside the page.
"""

from __future__ import annotations

import base64
import glob
import hashlib
import html
import importlib.util
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from grpo_rl.errors import ConfigError, DataError, GrpoRlError
from grpo_rl.processes.family import is_running
from grpo_rl.run_files import read_bytes, write_whole
from grpo_rl.telemetry.page.rollout_chunks import INLINE_BYTES, write_chunk
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
HOST = "127.0.0.1"
EVERY_S = 2.0
"""Seconds between two looks at the run's files."""
WATCHED = ("metrics.jsonl", "status.json", "timeline.jsonl")
TYPES = {".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8"}


def write_page(runs: Sequence[Path], out: Path | None = None, state: str | None = None, *, keep: bool = False) -> Path:
    """Write the page of the runs, which is complete or not there at all, and return its path.

    One run's page is `RUN/page.html` unless `out` names another. Chunks of large runs lie in `<name of the page>_files`
    beside it; with `keep` those of steps that have not changed stay as they are (`chunks_of`). Raises DataError for a folder that is no run, ConfigError where the page cannot be written.
    """
    out = out if out is not None else default_page(runs)
    files = out.with_name(f"{out.stem}_files")
    try:
        parts = []
        for number, run in enumerate(runs):
            folder = files if len(runs) == 1 else files / str(number)
            found = run_data(run, folder, state, INLINE_BYTES, keep=keep)
            chunks = {
                "index": found.chunks.index if found.chunks.folder is None else None,
                "inlined": found.chunks.inlined,
                "folder": None if found.chunks.folder is None else found.chunks.folder.relative_to(out.parent).as_posix(),
            }
            parts.append(found.data | {"chunks": chunks})
        is_live = any(part["status"].get("state") not in (*ENDED, None) for part in parts)
        version = round(time.time(), 3)
        data = {"version": version, "written": version, "live": f"{files.name}/{LIVE}.js" if is_live else None, "runs": parts}
        for left in out.parent.glob(f".{glob.escape(out.name)}.*.tmp"):
            writer = left.name.split(".")[-2]
            if writer.isdecimal() and not is_running(int(writer)):  # it was killed
                left.unlink(missing_ok=True)
        write_whole(out, document(data))
        if is_live or (files / f"{LIVE}.js").exists():
            # Pages that are open look here for a newer version of themselves.
            files.mkdir(exist_ok=True)
            write_chunk(files, LIVE, str(version))
    except OSError as error:
        raise ConfigError(f"{out}: the page cannot be written: {error.strerror or error}") from error
    return out


def default_page(runs: Sequence[Path]) -> Path:
    """Return where the page of these runs is written unless another place is named."""
    if len(runs) == 1:
        return RunDir(runs[0].resolve()).page_file
    return Path(os.path.commonpath([run.resolve().parent for run in runs])) / "runs.html"


def document(data: Mapping[str, Any]) -> str:
    """Return the HTML document with these data."""
    # The page's own scripts are one behind the other in one function.
    scripts = "\n".join(_asset(name) for name in SCRIPTS)
    library, script = chart_library()["script"], f"(function () {{\n'use strict';\n{scripts}\n}}());"
    title = "".join(char if char.isprintable() else " " for char in " · ".join(run["name"] for run in data["runs"]))
    policy = "; ".join(
        (
            "default-src 'none'",
            # Chunks: `file:` for a page on the disk, 'self' for one that is served.
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
    """Return JSON that can stand in an element of HTML: ASCII only, without `<`, `>` and `&`."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def chart_library() -> dict[str, str]:
    """Return script and style of uPlot from the package that carries them, which is not imported: that would load IPython."""
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


class PageServer:
    """Serves the page of runs at `address`, on this machine alone, and keeps it new, until `close`.

    Every program on the same machine can reach the port, and any web page in the same browser can try to: the path has a
    random token, and a request for another host name is refused (a page elsewhere may have made its own name mean 127.0.0.1).
    """

    def __init__(
        self, runs: Sequence[Path], out: Path | None = None, port: int = 0, warn: Callable[[str], None] = lambda _: None
    ) -> None:
        self.runs, self.out, self._warn = runs, out if out is not None else default_page(runs), warn
        self._seen = self._state()
        self.page = write_page(runs, self.out)
        self._token = secrets.token_urlsafe(24)
        try:
            self._server = ThreadingHTTPServer((HOST, port), self._handler())
        except OSError as error:
            raise ConfigError(f"--port {port}: {error.strerror or error}") from error
        self._server.daemon_threads = True
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._server.serve_forever, name="page-server", daemon=True),
            threading.Thread(target=self._keep_new, name="page-writer", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def address(self) -> str:
        """The address to open, with the token."""
        return f"http://{HOST}:{self._server.server_address[1]}/{self._token}/{self.page.name}"

    def close(self) -> None:
        """Stop serving."""
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join(5.0)

    def _keep_new(self) -> None:
        while not self._closing.wait(EVERY_S):
            state = self._state()
            if state != self._seen:
                try:
                    write_page(self.runs, self.out, keep=True)
                    self._seen = state
                except GrpoRlError as error:
                    self._warn(str(error))

    def _state(self) -> list[tuple[int, int]]:
        """Return size and time of the runs' files, by which a run that has moved on is recognised."""
        files = [run / name for run in self.runs for name in WATCHED]
        return [(found.st_size, found.st_mtime_ns) for file in files if file.exists() for found in [file.stat()]]

    def _file(self, path: str, host: str) -> Path | None:
        """Return the file that a request may have; None for every other."""
        port = self._server.server_address[1]
        if host not in (f"{HOST}:{port}", f"localhost:{port}"):
            return None
        token, _, place = unquote(urlsplit(path).path).lstrip("/").partition("/")
        if not secrets.compare_digest(token.encode(), self._token.encode()):
            return None
        if place == self.page.name:
            return self.page
        folder = self.page.with_name(f"{self.page.stem}_files").resolve()
        file = (self.page.parent / place).resolve()
        return file if file.suffix == ".js" and file.is_relative_to(folder) else None

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                """Answer with the page or one of its chunks; 404 for everything else, without saying why."""
                try:
                    file = server._file(self.path, self.headers.get("Host", ""))
                    content = read_bytes(file) if file is not None else None
                except (DataError, ValueError):  # ValueError: no name of a file, such as one with a NUL
                    file = content = None
                if file is None or content is None:
                    self.send_error(HTTPStatus.NOT_FOUND)
                    return
                self.send_response(HTTPStatus.OK)
                self.send_header("Content-Type", TYPES[file.suffix])
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Cache-Control", "no-store")
                self.send_header("Referrer-Policy", "no-referrer")
                self.send_header("X-Content-Type-Options", "nosniff")
                self.send_header("X-Frame-Options", "DENY")
                self.send_header("Cross-Origin-Resource-Policy", "same-origin")
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *arguments: object) -> None:
                """Write nothing: the token is a part of every address."""

        return Handler
