"""An agent written elsewhere as an environment: it asks an OpenAI-compatible endpoint, where the policy
answers.

Its requests become the observations of an episode, and the policy's turns their answers: an existing agent is
trained by another `base_url`, and every conversation is recorded token for token.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_rl.envs.chat_format import (
    ChatAnswer,
    ChatRequest,
    Refused,
    answer_of,
    completion,
    continues,
    read_request,
    said,
    stream,
)
from grpo_rl.envs.contract import Message, Observation, Start, Turn, result_of
from grpo_rl.envs.tool_formats import check_format
from grpo_rl.registry import load_function

LONGEST_REQUEST = 16 * 2**20
"""Bytes of a request."""
LONGEST_HEAD = 16 * 2**10
"""Bytes of a request's head."""
REQUEST_S = 60.0
MOST_STRANGERS, ACCEPTED_AT_ONCE = 256, 32
"""Connections that have not shown the token yet: any user of this machine may connect. One more ends the
oldest. So few are accepted at once that an agent's request, which comes immediately, is not the oldest."""
LAST_ANSWERS_S = 1.0
"""Seconds for requests to read that the conversation is over."""


class ChatEndpoint:
    """The environment `endpoint`: one conversation of a user's agent with the policy.

    `agent` names a function `agent(base_url, start, **agent_options) -> reward or None`, async or not, as
    `file.py:function`; one that is not async runs in a thread. The episode begins with the agent's own
    messages, in place of the row's, and ends with its return, whose value is the last turn's reward. Each
    request has to continue the conversation, else the episode fails: the tokens before would not be those
    that were sampled.

    `tools` of a request are shown to the policy, and what a turn calls comes back as `tool_calls`, read by
    `tool_format`. The agent runs them: their results are the next request's messages of the role tool.
    """

    def __init__(self, agent: str, agent_options: dict[str, Any] | None = None, tool_format: str = "hermes") -> None:
        self._agent: Callable[..., Any] = load_function(agent, "agent")
        self._options = dict(agent_options or {})
        check_format(tool_format)
        self._format = tool_format
        self._server = ChatServer()
        self._pending: Asked | None = None
        self._said: list[Message] = []
        self._tools: tuple[Mapping[str, Any], ...] = ()
        self._num_calls = 0
        self._running: asyncio.Task[Any] | None = None

    async def reset(self, start: Start) -> Observation:
        url = await self._server.start()
        self._running = asyncio.create_task(result_of(self._agent, url, start, **self._options))
        return await self._next()

    async def step(self, turn: Turn) -> Observation:
        """A turn that was cut off is the last: the agent may return a reward; a further request is
        refused."""
        assert self._pending is not None, "the policy answers a request"
        pending_request, self._pending = self._pending, None
        answer = answer_of(turn, pending_request.request, self._format)
        self._num_calls += len(answer.calls)
        self._said.append(said(answer))
        if not pending_request.answer.done():  # the agent may have closed its connection
            pending_request.answer.set_result(answer)
        return await self._next(is_over=turn.finish_reason != "stop")

    async def close(self) -> None:
        """What an agent does in a thread ends with the process at the latest."""
        await self._server.close(self._pending)
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _next(self, *, is_over: bool = False) -> Observation:
        assert self._running is not None
        request = asyncio.create_task(self._server.requests.get())
        await asyncio.wait({request, self._running}, return_when=asyncio.FIRST_COMPLETED)
        info = {"agent_tool_calls": float(self._num_calls)} if self._tools else {}
        if not request.done():
            request.cancel()
            reward = self._running.result()  # raises what the agent raised
            return Observation(reward=None if reward is None else float(reward), done=True, info=info)
        pending_request = request.result()
        if is_over:
            reason = "the conversation has no room for another turn: data.max_response_length"
            pending_request.refuse(Refused(400, reason, "context_length_exceeded", "messages"))
            return Observation(done=True, info=info)
        is_first, reason = not self._said, ""
        if not continues(self._said, pending_request.request.messages):
            reason = "it does not continue the conversation: its messages so far, with the answers that it got, and new ones"
        elif not is_first and pending_request.request.tools != self._tools:
            reason = "its tools are not those of the conversation's first request, which the policy was shown"
        if reason:
            pending_request.refuse(Refused(409, reason, "conversation_rewritten", "messages"))
            raise ValueError(
                f"the agent's request cannot be a turn of its conversation: {reason}; a conversation is one growing list of messages"
            )
        new = pending_request.request.messages[len(self._said) :]
        self._pending, self._tools = pending_request, pending_request.request.tools
        self._said += new
        messages = tuple(self._named(message) for message in new)
        return Observation(messages, replaces_prompt=is_first, tools=self._tools if is_first else (), info=info)

    def _named(self, message: Message) -> Message:
        """Some templates write the name of a message's tool, and clients leave it out."""
        if message["role"] != "tool" or "name" in message:
            return message
        name_of = {call["id"]: call["name"] for earlier in self._said for call in earlier.get("tool_calls", ())}
        name = name_of.get(message["tool_call_id"])
        return message if name is None else message | {"name": name}


@dataclass(slots=True)
class Asked:
    request: ChatRequest
    answer: asyncio.Future[ChatAnswer]

    def refuse(self, refused: Refused) -> None:
        if not self.answer.done():
            self.answer.set_exception(refused)


class ChatServer:
    """`POST .../v1/chat/completions` and `GET .../v1/models` under a secret path, on this machine alone."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[Asked] = asyncio.Queue()
        self._token = secrets.token_urlsafe(16)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[Any]] = set()
        self._strangers: dict[asyncio.StreamReader, asyncio.StreamWriter] = {}

    async def start(self) -> str:
        """Returns the base URL, which ends with /v1."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=LONGEST_HEAD, backlog=ACCEPTED_AT_ONCE)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/{self._token}/v1"

    async def close(self, waiting: Asked | None) -> None:
        """Tell pending requests that the conversation is over, and listen no more."""
        if waiting is not None:
            self.requests.put_nowait(waiting)
        while not self.requests.empty():
            self.requests.get_nowait().refuse(Refused(410, "the episode is over", "episode_over"))
        if self._server is not None:
            self._server.close()
        if self._connections:  # what was answered or refused a moment ago may not be written yet
            await asyncio.wait(self._connections, timeout=LAST_ANSWERS_S)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        self._strangers[reader] = writer
        if len(self._strangers) > MOST_STRANGERS:
            # Its task ends by itself then, as of a client that has gone.
            self._strangers.pop(next(iter(self._strangers))).transport.abort()
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                try:
                    await self._answer(reader, writer)
                except Refused as refused:
                    # Clients of OpenAI try 409 and 5xx again by themselves, unless they are asked not to.
                    _write(writer, refused.status, refused.body(), "x-should-retry: false\r\n")
                await writer.drain()
        finally:
            self._strangers.pop(reader, None)
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> tuple[str, str, bytes]:
        """Method, path below the token, and body; no body is read without the token."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        except asyncio.LimitOverrunError:
            raise Refused(431, "the head of the request is too long") from None
        method, path, *_ = [*head[0].split(" "), "", ""]
        _, token, *below = [*path.split("/", 2), ""]
        if not secrets.compare_digest(token.encode(), self._token.encode()):
            raise _nowhere()
        self._strangers.pop(reader, None)
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        if method == "POST" and "content-length" not in headers:
            raise Refused(411, "a request needs a Content-Length")
        size = headers.get("content-length", "0")
        if not re.fullmatch("[0-9]{1,9}", size) or int(size) > LONGEST_REQUEST:
            raise Refused(413, f"a request has a Content-Length of at most {LONGEST_REQUEST} bytes")
        return method, below[0], await reader.readexactly(int(size))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
        pending_request = Asked(request, asyncio.get_running_loop().create_future())
        await self.requests.put(pending_request)
        answer = await pending_request.answer
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
