"""A Python interpreter as a tool: variables stay from call to call of an episode, in a sandbox."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Mapping
from typing import Any

from grpo_rl.config.schema.kinds import Count, ProcessMegabytes, Seconds
from grpo_rl.envs.contract import SimpleTool, ToolResult, text_tool
from grpo_rl.rewards.sandbox.sandbox import Case, Limits, Sandbox

LOOP = """
import ast, contextlib, io, os, sys, traceback

def read(size):
    parts = []
    while size:
        part = os.read(0, min(size, 1 << 16))
        if not part:
            os._exit(0)
        parts.append(part)
        size -= len(part)
    return b"".join(parts)

def write(data):
    while data:
        data = data[os.write(0, data):]

def run(code, names):
    tree = ast.parse(code, "<cell>")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), names)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
        if value is not None:
            print(repr(value))

names = {"__name__": "__main__"}
longest = int.from_bytes(read(4), "little")
while True:
    code = read(int.from_bytes(read(4), "little")).decode()
    said, failed = io.StringIO(), b"0"
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            run(code, names)
        except BaseException as error:
            failed = b"1"
            for frame in traceback.extract_tb(error.__traceback__):
                if frame.filename == "<cell>":
                    said.write(f"line {frame.lineno}, in {frame.name}\\n")
            said.write("".join(traceback.format_exception_only(error)))
    text = said.getvalue()
    if len(text) > longest:
        text = text[: longest // 2] + "\\n[...]\\n" + text[-(longest // 2):]
    data = text.encode(errors="replace")
    write(failed + len(data).to_bytes(4, "little") + data)
"""
"""Takes a cell (length, text) and answers (failed or not, length, what was printed)."""
BYTES_OF_A_CHARACTER = 4
LONGEST_CODE = 1 << 20
_FENCED = re.compile(r"\s*```(?:python|py)?[ \t]*\n(.*?)```\s*", re.DOTALL)


class Ended(Exception):
    """By the code's own doing or by a limit, which the text says."""


class PythonInterpreter(SimpleTool):
    """The tool `python`: returns what a cell printed, with the value of its last expression as in a notebook.

    `time_s` is the wall time of one call, `total_s` bounds CPU and wall time of an episode, `memory_mb` the
    address space. A call that exceeds a limit ends the interpreter; the next one begins a fresh one. There is
    no network, no file but in a small /tmp, and no package beside the standard library (docs/rewards.md).
    """

    schema = text_tool(
        "python",
        "Run Python code. Variables stay for later calls. Returns what is printed, and the value of the last line.",
        "code",
        "the code to run",
    )

    def __init__(
        self,
        *,
        time_s: Seconds = 5.0,
        total_s: Seconds = 120.0,
        memory_mb: ProcessMegabytes = 512,
        max_characters: Count = 2000,
    ) -> None:
        self._limits = Limits(time_s=total_s, memory_mb=memory_mb, output_kb=64)
        self._time_s, self._max_characters = float(time_s), max_characters
        self._running: tuple[Sandbox, socket.socket] | None = None

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        code = arguments.get("code")
        if not isinstance(code, str) or len(code) > LONGEST_CODE:
            return ToolResult(f"code must be a string of at most {LONGEST_CODE} characters", failed=True)
        if fenced := _FENCED.fullmatch(code):  # as models write code that were trained on Markdown, verl's ReTool among them
            code = fenced[1]
        if self._running is None:
            # Starting waits for another process, which other episodes shall not do.
            self._running = await asyncio.to_thread(self._started)
        try:
            failed, text = await asyncio.wait_for(self._run(self._running[1], code), self._time_s)
            return ToolResult(text, failed=failed)
        except TimeoutError:
            reason = f"the code ran longer than {self._time_s:g} s"
        except (Ended, OSError) as error:
            reason = str(error)
        await self.close()
        return ToolResult(f"The interpreter was ended: {reason}. Its variables are gone.", failed=True)

    async def close(self) -> None:
        """May be called twice."""
        running, self._running = self._running, None
        if running is not None:
            sandbox, line = running
            line.close()
            await asyncio.to_thread(sandbox.close)

    def _started(self) -> tuple[Sandbox, socket.socket]:
        parent_socket, child_socket = socket.socketpair()
        try:
            sandbox = Sandbox(LOOP, self._limits, child_socket)
        except BaseException:
            parent_socket.close()
            raise
        sandbox.begin(Case(), self._limits.time_s)
        parent_socket.setblocking(False)
        parent_socket.send(self._max_characters.to_bytes(4, "little"))
        return sandbox, parent_socket

    async def _run(self, line: socket.socket, code: str) -> tuple[bool, str]:
        """What comes is hostile: it is bounded, and nothing but text."""
        data = code.encode(errors="replace")
        await asyncio.get_running_loop().sock_sendall(line, len(data).to_bytes(4, "little") + data)
        failed = await _receive(line, 1)
        size = int.from_bytes(await _receive(line, 4), "little")
        if size > (self._max_characters + 16) * BYTES_OF_A_CHARACTER:
            raise Ended("it broke the protocol of its answers")
        text = (await _receive(line, size)).decode(errors="replace")
        return failed != b"0", text[: self._max_characters + 16]


async def _receive(line: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = await asyncio.get_running_loop().sock_recv(line, size)
        if not part:
            raise Ended("it left, or exceeded a limit of memory, time or output")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
