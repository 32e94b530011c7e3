"""A headless Chromium for tests of pages, driven over its DevTools protocol: open, evaluate, hear of errors."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WAIT_S = 60.0


def browser_path() -> str | None:
    """Return the program of a Chromium on this machine; None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """One tab of the browser."""

    def __init__(self, address: str) -> None:
        self._socket = connect(address, max_size=2**28, open_timeout=WAIT_S)
        self._ids = itertools.count(1)
        self.problems: list[str] = []
        """Exceptions of scripts and errors in the console, those of the content security policy among them."""
        self.requests: list[str] = []
        """The addresses that the page asked for."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=WAIT_S))
            self._note(message)
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return dict(message["result"])

    def open(self, address: str, *, wait_for: str = "document.querySelector('main .tab')?.children.length > 0") -> None:
        """Open a page and wait until `wait_for` is true."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=address)
        self.wait(wait_for)

    def evaluate(self, script: str) -> Any:
        """Return the value of a script, awaited if it is a promise."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = WAIT_S) -> None:
        """Wait until the script is true."""
        deadline = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({script})"):
            assert time.monotonic() < deadline, f"not true within {seconds:g} s: {script}\n{self.problems}"
            time.sleep(0.05)

    def click(self, text: str, within: str = "button, summary") -> None:
        """Click the first element with this text."""
        assert self.evaluate(
            f"(() => {{ const one = [...document.querySelectorAll({json.dumps(within)})]"
            f".find((each) => each.textContent.trim().startsWith({json.dumps(text)})); one?.click(); return Boolean(one); }})()"
        ), f"there is nothing to click with {text!r}"

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """Give the tab a size and a colour scheme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1.0, mobile=width < 600)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)

    def close(self) -> None:
        """Leave the tab."""
        self._socket.close()

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.problems.append(str(details.get("exception", {}).get("description", details["text"])))
        elif message.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
        elif message.get("method") == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])


@contextmanager
def chromium(folder: Path) -> Iterator[Tab]:
    """Start a browser with a profile in `folder`, and yield its tab."""
    program = browser_path()
    assert program is not None
    words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio"]
    words += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"]
    words += ["--remote-debugging-port=0", "--remote-allow-origins=*", f"--user-data-dir={folder}", "about:blank"]
    with (folder.parent / f"{folder.name}.log").open("wb") as log:
        process = subprocess.Popen([program, *words], stdout=log, stderr=log)
    try:
        with _tab(folder / "DevToolsActivePort") as tab:
            yield tab
    finally:
        process.terminate()
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10.0)


@contextmanager
def _tab(port_file: Path) -> Iterator[Tab]:
    deadline = time.monotonic() + WAIT_S
    while not (port_file.exists() and port_file.read_text().strip()):
        assert time.monotonic() < deadline, "the browser does not start"
        time.sleep(0.05)
    port = port_file.read_text().split()[0]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=WAIT_S) as answer:
        address = next(one["webSocketDebuggerUrl"] for one in json.load(answer) if one["type"] == "page")
    tab = Tab(address)
    try:
        yield tab
    finally:
        tab.close()
