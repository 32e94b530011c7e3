"""The cost of slow, failing, hanging or unreachable trackers for a training step: `python scripts/bench_trackers.py`.

For each, the sinks of a run with a tracker that sends each step by HTTP to a server of this machine. A step costs the
controller the time that `log` takes, and at most the processor time that the tracker's thread uses beside it. Both are
given as shares of a step of half a second.
"""

from __future__ import annotations

import http.client
import http.server
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from grpo_rl.config.schema.tree import TrainerConfig  # noqa: E402
from grpo_rl.telemetry.metrics.sinks import Sinks  # noqa: E402
from grpo_rl.telemetry.metrics.tracking import Background, Connect  # noqa: E402
from grpo_rl.telemetry.rundir import RunDir  # noqa: E402

STEP_S, BAR = 0.5, 0.01
NUM_STEPS, NUM_METRICS, BETWEEN_S = 300, 80, 0.01
CASES = ("none", "well", "slow", "refusing", "unreachable", "hanging", "not accepting")
"""A server that answers at once; after 3 s; with an error; no server; one that never answers; one that never accepts."""


class _Answers(http.server.BaseHTTPRequestHandler):
    case = "well"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep({"slow": 3.0, "hanging": 3600.0}.get(self.case, 0.0))
        self.send_response(500 if self.case == "refusing" else 200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def _serve(case: str, ready: Connection) -> None:
    handler = type("Handler", (_Answers,), {"case": case})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        ready.send(server.server_port)
        if case == "not accepting":
            time.sleep(3600)
        server.serve_forever()


@contextmanager
def _server(case: str) -> Iterator[int]:
    """The port of a server in a process of its own."""
    mine, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_serve, args=(case, theirs), daemon=True)
    process.start()
    try:
        if not mine.poll(60):
            raise TimeoutError("the server did not start within 60 s")
        yield mine.recv()
    finally:
        process.kill()
        process.join(10)


class HttpTracker:
    """Sends each step as JSON; an answer other than 200 is an error. A tracker's own library waits as long."""

    def __init__(self, port: int) -> None:
        self._port = port

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=3600)
        connection.request("POST", "/", json.dumps({"step": step, **metrics}))
        answer = connection.getresponse()
        if answer.status != 200:
            raise ConnectionError(f"the server answered {answer.status}")
        connection.close()

    def truncate_after(self, step: int) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def measure(case: str, connect: Connect | None) -> tuple[float, float, float, list[str]]:
    """Seconds of `log` (median, worst), processor seconds of other threads per step, and what was warned of."""
    warnings: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        sinks = Sinks(RunDir.create(Path(folder), "r"), TrainerConfig(), {}, warnings.append)
        tracker = None if connect is None else Background(case, connect, warnings.append)
        if tracker is not None:
            sinks._sinks.append(tracker)
        metrics = {f"section/metric_{index}": index / 7 for index in range(NUM_METRICS)}
        seconds: list[float] = []
        others = time.process_time() - time.thread_time()
        for step in range(NUM_STEPS):
            started = time.perf_counter()
            sinks.log(step, metrics)
            seconds.append(time.perf_counter() - started)
            time.sleep(BETWEEN_S)
        others = time.process_time() - time.thread_time() - others
        if tracker is not None:
            tracker.close(timeout_s=0.5)
            sinks._sinks.remove(tracker)
        sinks.close()
    return statistics.median(seconds), max(seconds), others / NUM_STEPS, warnings


def main() -> int:
    """0 when no tracker takes more than 1 % of a step."""
    print(f"{NUM_STEPS} steps of {NUM_METRICS} metrics; shares of a step of {STEP_S} s; TensorBoard and metrics.jsonl in all")
    print("| tracker | log, median ms | log, worst ms | other threads, ms | share | told |\n|---|---|---|---|---|---|")
    worst = 0.0
    for case in CASES:
        with _server("well" if case in ("none", "unreachable") else case) as port:
            if case == "unreachable":
                with http.server.HTTPServer(("127.0.0.1", 0), _Answers) as closed:
                    port = closed.server_port
            median, most, others, warnings = measure(case, None if case == "none" else partial(HttpTracker, port))
        share = (median + others) / STEP_S
        worst = max(worst, share)
        print(
            f"| {case} | {median * 1e3:.2f} | {most * 1e3:.2f} | {others * 1e3:.2f} | {share:.2%} | {'; '.join(warnings)} |",
            flush=True,
        )
    left = [thread.name for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()]
    print(f"threads that would hold up the end of the program: {left or 'none'}")
    return int(worst > BAR or bool(left))


if __name__ == "__main__":
    sys.exit(main())
