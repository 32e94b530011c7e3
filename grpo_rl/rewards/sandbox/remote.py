"""A sandbox elsewhere: SandboxFusion's HTTP interface, `POST /run_code`, as verl uses it."""

from __future__ import annotations

import inspect
import json
import secrets
import time
import urllib.error
import urllib.request
from typing import Any

from grpo_rl.errors import RewardError
from grpo_rl.rewards.sandbox import inside
from grpo_rl.rewards.sandbox.sandbox import GRACE_S, Case, CaseOutcome, Limits

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 8.0
RETRIED = (408, 425, 429, 500, 502, 503, 504)
"""HTTP answers of a server that is busy or starting."""


class _Again(Exception):
    """An error: the service could not do it now."""


class RemoteSandbox:
    """Runs cases of one source by a service; same use as `Sandbox`, but that cases may run at the same time.

    Nothing of a case's expected output is sent. Raises RewardError when the service has given no answer in `patience_s`, or
    one that is none of its interface.
    """

    def __init__(self, url: str, source: str, limits: Limits, patience_s: float) -> None:
        base = url.rstrip("/")
        self._url = base if base.endswith("/run_code") else f"{base}/run_code"
        self._source, self._limits, self._patience_s = source, limits, patience_s

    def __enter__(self) -> RemoteSandbox:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, case: Case, time_s: float | None = None) -> CaseOutcome:
        """Return what the source does with the case; asked again, after a pause that doubles, while the service is busy."""
        allowed = min(self._limits.time_s, time_s or self._limits.time_s)
        deadline = time.monotonic() + self._patience_s
        pause, mark = FIRST_PAUSE_S, secrets.token_hex(16)
        request = {
            "code": self._source if case.function is None else _with_call(self._source, case, mark),
            "language": "python",
            "stdin": case.stdin,
            "compile_timeout": allowed,
            "run_timeout": allowed,
            "memory_limit_MB": self._limits.memory_mb,
        }
        while True:
            left = deadline - time.monotonic()
            try:
                reply = self._post(request, min(left, 2 * allowed + GRACE_S))
                return _outcome(reply, mark if case.function else None)
            except _Again as error:
                if deadline - time.monotonic() <= pause:
                    raise RewardError(
                        f"the sandbox at {self._url} gave no result in {self._patience_s:g} s: {error}; see whether it is up, "
                        f"or lower reward.num_workers"
                    ) from None
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)

    def _post(self, request: dict[str, Any], timeout_s: float) -> Any:
        data = json.dumps(request).encode()
        post = urllib.request.Request(self._url, data, {"Content-Type": "application/json"})
        most = 4 * 1024 * self._limits.output_kb + (1 << 20)
        try:
            with urllib.request.urlopen(post, timeout=max(0.1, timeout_s)) as response:
                body = response.read(most)
        except urllib.error.HTTPError as error:
            with error:
                text = f"HTTP {error.code}: {error.read(200).decode(errors='replace')}"
            if error.code in RETRIED:
                raise _Again(text) from None
            raise RewardError(f"the sandbox at {self._url} refused: {text}") from None
        except OSError as error:  # no connection, or none in time
            raise _Again(str(error)) from None
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            if len(body) == most:
                return {"status": "Success", "run_result": {"status": "TooMuchOutput"}}
            raise RewardError(f"the sandbox at {self._url} answered no JSON: {body[:100]!r}") from None


def _with_call(source: str, case: Case, mark: str) -> str:
    """The source, then code that calls the function and writes its value, on a line of its own that begins with the mark."""
    return "\n".join(
        [
            source,
            inspect.getsource(inside.encode),
            f"_owner = Solution() if {case.function!r} not in globals() else None",
            f"_call = getattr(_owner, {case.function!r}) if _owner is not None else {case.function}",
            f"print('\\n{mark}' + encode(_call(*{case.arguments!r})))",
        ]
    )


def _outcome(reply: Any, mark: str | None) -> CaseOutcome:
    """Return what the service's answer says of the candidate. Raises _Again where it is about the service itself."""
    run = reply.get("run_result") if isinstance(reply, dict) else None
    if not isinstance(reply, dict) or reply.get("status") not in ("Success", "Failed"):
        raise _Again(f"status {reply.get('status')!r}: {reply.get('message')}" if isinstance(reply, dict) else "no object")
    if not isinstance(run, dict):
        compiled = reply.get("compile_result")
        if isinstance(compiled, dict):
            return CaseOutcome("timeout" if compiled.get("status") == "TimeLimitExceeded" else "ended", 1)
        raise _Again(f"no run_result: {reply.get('message')}")
    if run.get("status") == "TimeLimitExceeded":
        return CaseOutcome("timeout")
    if run.get("status") == "TooMuchOutput":
        return CaseOutcome("output")
    if run.get("status") != "Finished":
        raise _Again(f"run_result.status {run.get('status')!r}: {run.get('stderr')}")
    stdout = str(run.get("stdout") or "")
    stderr = str(run.get("stderr") or "")[: inside.STDERR_BYTES].encode(errors="replace")
    code = run.get("return_code")
    value = ""
    if mark is not None:
        stdout, _, value = stdout.rpartition(f"\n{mark}")
    exit_code = code if isinstance(code, int) else 1
    return CaseOutcome("ended", exit_code, stdout.encode(errors="replace"), value.strip().encode(errors="replace"), stderr)
