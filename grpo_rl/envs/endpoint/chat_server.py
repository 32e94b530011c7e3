"""The HTTP server of one conversation: it reads requests, hands them over, and writes answers, streams and errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
from dataclasses import dataclass
from typing import Any

from grpo_rl.envs.endpoint.chat_format import ChatAnswer, ChatRequest, Refused, completion, read_request, stream

LONGEST_REQUEST = 16 * 2**20
"""Bytes of a request; more is refused."""
LONGEST_HEAD = 16 * 2**10
"""Bytes of a request's head; more is refused."""
REQUEST_S = 60.0
"""Seconds in which a request has to arrive as a whole."""
MOST_STRANGERS = 32
"""Connections that have not shown the token yet. One more ends the oldest of them, which an agent's request never gets to be:
any user of this machine may connect, and hold memory and files of this process."""
LAST_ANSWERS_S = 1.0
"""Seconds that requests have to read that the conversation is over."""


@dataclass(slots=True)
class Asked:
    """A request that waits for the policy's turn."""

    request: ChatRequest
    answer: asyncio.Future[ChatAnswer]

    def refuse(self, refused: Refused) -> None:
        """Answer with an error, unless there is an answer already."""
        if not self.answer.done():
            self.answer.set_exception(refused)


class ChatServer:
    """`POST .../v1/chat/completions` and `GET .../v1/models` under a secret path, on this machine alone.

    Requests with an answer to wait for come out of `requests`, in their order.
    """

    def __init__(self) -> None:
        self.requests: asyncio.Queue[Asked] = asyncio.Queue()
        self._token = secrets.token_urlsafe(16)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[Any]] = set()
        self._strangers: list[asyncio.Task[Any]] = []

    async def start(self) -> str:
        """Begin to listen; return the base URL, which ends with /v1."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=LONGEST_HEAD)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/{self._token}/v1"

    async def close(self, waiting: Asked | None) -> None:
        """Tell what still waits, `waiting` and the requests in the queue, that the conversation is over, and listen no more."""
        left = [] if waiting is None else [waiting]
        while not self.requests.empty():
            left.append(self.requests.get_nowait())
        for asked in left:
            asked.refuse(Refused(410, "the episode is over", "episode_over"))
        if self._server is not None:
            self._server.close()
        if self._connections:  # what was answered or refused a moment ago may not be written yet
            await asyncio.wait(self._connections, timeout=LAST_ANSWERS_S)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request of a connection, and close it."""
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        self._strangers.append(task)
        task.add_done_callback(self._known)
        if len(self._strangers) > MOST_STRANGERS:
            self._strangers.pop(0).cancel()
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                try:
                    await self._answer(reader, writer)
                except Refused as refused:
                    # Clients of OpenAI try 409 and 5xx again by themselves, unless they are asked not to.
                    _write(writer, refused.status, refused.body(), "x-should-retry: false\r\n")
                await writer.drain()
        finally:
            writer.close()

    def _known(self, task: asyncio.Task[Any] | None) -> None:
        """Note that this connection has shown the token, or is over."""
        if task in self._strangers:
            self._strangers.remove(task)

    async def _read(self, reader: asyncio.StreamReader) -> tuple[str, str, bytes]:
        """Return a request's method, path below the token, and body. Raises Refused; nobody's body is read without the token."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        except asyncio.LimitOverrunError:
            raise Refused(431, "the head of the request is too long") from None
        method, path, *_ = [*head[0].split(" "), "", ""]
        _, token, *below = [*path.split("/", 2), ""]
        if not secrets.compare_digest(token.encode(), self._token.encode()):
            raise _nowhere()
        self._known(asyncio.current_task())
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        if method == "POST" and "content-length" not in headers:
            raise Refused(411, "a request needs a Content-Length")
        size = headers.get("content-length", "0")
        if not re.fullmatch("[0-9]{1,9}", size) or int(size) > LONGEST_REQUEST:
            raise Refused(413, f"a request has a Content-Length of at most {LONGEST_REQUEST} bytes")
        return method, below[0], await reader.readexactly(int(size))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Write the answer to the request that is read. Raises Refused."""
        try:
            async with asyncio.timeout(REQUEST_S):
                method, path, body = await self._read(reader)
        except TimeoutError:
            raise Refused(408, f"the request has not arrived within {REQUEST_S:g} s") from None
        if method == "GET" and path == "v1/models":
            model = {"id": "policy", "object": "model", "created": 0, "owned_by": "grpo_rl"}
            _write(writer, 200, {"object": "list", "data": [model]})
            return
        if method != "POST" or path != "v1/chat/completions":
            raise _nowhere()
        request = read_request(body)
        asked = Asked(request, asyncio.get_running_loop().create_future())
        await self.requests.put(asked)
        answer = await asked.answer
        if not request.streams:
            _write(writer, 200, completion(answer, request.model))
            return
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\nConnection: close\r\n\r\n"
        )
        for event in stream(answer, request):
            writer.write(event)
            await writer.drain()


def _nowhere() -> Refused:
    return Refused(404, "there is POST .../v1/chat/completions and GET .../v1/models")


def _write(writer: asyncio.StreamWriter, status: int, body: Any, more: str = "") -> None:
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} {'OK' if status == 200 else 'Refused'}\r\nContent-Type: application/json\r\n{more}"
    writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
