"""The page served live: on this machine only, below a secret path, written anew whenever the run has moved on.

Every program on the same machine can reach the port, and any web page in the same browser can try to: the path has a
random token, and a request for another host name is refused (a page elsewhere may have made its own name mean 127.0.0.1).
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from grpo_rl.errors import ConfigError, DataError, GrpoRlError
from grpo_rl.run_files import read_bytes
from grpo_rl.telemetry.page.page_file import default_page, write_page

HOST = "127.0.0.1"
EVERY_S = 2.0
"""Seconds between two looks at the run's files."""
WATCHED = ("metrics.jsonl", "status.json", "timeline.jsonl")
TYPES = {".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8"}


class PageServer:
    """Serves the page of runs at `address`, and keeps it new, until `close`."""

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

    def _state(self) -> list[tuple[int, int] | None]:
        """Return size and time of the runs' files, by which a run that has moved on is recognised."""
        found: list[tuple[int, int] | None] = []
        for run in self.runs:
            for name in WATCHED:
                try:
                    stat = (run / name).stat()
                    found.append((stat.st_size, stat.st_mtime_ns))
                except OSError:
                    found.append(None)
        return found

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
