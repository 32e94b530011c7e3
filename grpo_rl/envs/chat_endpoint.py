"""An agent written elsewhere as an environment: it asks an OpenAI-compatible endpoint, behind which the policy answers.

The agent is a function of the user's. It gets a base URL and talks to `/v1/chat/completions` there with any client; its requests
become the observations of an episode, the policy's turns their answers. So an existing agent is trained by another
`base_url`, and every conversation is recorded token for token as all episodes are.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_rl.envs.contract import Message, Observation, Start, Turn
from grpo_rl.registry import load_function

LONGEST_REQUEST = 16 * 2**20
"""Bytes of a request; more is refused."""
_ROLES = ("system", "user", "assistant", "tool")


@dataclass(slots=True)
class _Asked:
    """A request that waits for the policy's turn."""

    messages: list[Message]
    model: str
    answer: asyncio.Future[dict[str, Any]]


class _Refused(Exception):
    """A request that cannot be answered, with its status and the reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class ChatEndpoint:
    """The environment `endpoint`: one conversation of a user's agent with the policy.

    `agent` names a function `agent(base_url, start, **agent_options) -> reward or None`, async or not, as
    `file.py:function`; one that is not async runs in a thread. The episode begins with the agent's own messages, in place of the row's, and
    ends with the agent's return, whose value is the last turn's reward. Each request has to continue the conversation: an agent
    that rewrites it fails its episode, because the tokens before would not be those that were sampled.
    """

    def __init__(self, agent: str, agent_options: dict[str, Any] | None = None) -> None:
        self._agent: Callable[..., Any] = load_function(agent, "agent")
        self._options = dict(agent_options or {})
        self._token = secrets.token_urlsafe(16)
        self._server: asyncio.Server | None = None
        self._requests: asyncio.Queue[_Asked] = asyncio.Queue()
        self._pending: _Asked | None = None
        self._said: list[Message] = []
        self._running: asyncio.Task[Any] | None = None

    async def reset(self, start: Start) -> Observation:
        """Start the agent, and wait for its first request."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}/{self._token}/v1"
        self._running = asyncio.get_running_loop().create_task(self._run(url, start))
        return await self._next()

    async def step(self, turn: Turn) -> Observation:
        """Answer the agent's request with the policy's turn, and wait for its next one."""
        assert self._pending is not None, "the policy answers a request"
        asked, self._pending = self._pending, None
        self._said.append({"role": "assistant", "content": turn.text})
        if not asked.answer.done():  # the agent may have closed its connection
            asked.answer.set_result(_completion(asked, turn))
        if turn.finish_reason != "stop":
            return Observation(done=True)
        return await self._next()

    async def close(self) -> None:
        """End the agent's task and the server. What an agent does in a thread ends with the process at the latest."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        if self._server is not None:
            self._server.close()

    # ---- the agent -----------------------------------------------------------------------------------------

    async def _run(self, url: str, start: Start) -> Any:
        if inspect.iscoroutinefunction(self._agent):
            return await self._agent(url, start, **self._options)
        return await asyncio.to_thread(self._agent, url, start, **self._options)

    async def _next(self) -> Observation:
        """Return the agent's next request as an observation, or the end of the episode where the agent has returned."""
        assert self._running is not None
        request = asyncio.ensure_future(self._requests.get())
        await asyncio.wait({request, self._running}, return_when=asyncio.FIRST_COMPLETED)
        if not request.done():
            request.cancel()
            reward = self._running.result()  # raises what the agent raised
            return Observation(reward=None if reward is None else float(reward), done=True)
        asked = request.result()
        is_first = not self._said
        new = asked.messages[len(self._said) :]
        if not _continues(self._said, asked.messages) or not new or any(message["role"] == "assistant" for message in new):
            self._refuse(
                asked, "it does not continue the conversation: its messages so far, with the answers that it got, and new ones"
            )
            raise ValueError(
                "the agent's request does not continue its conversation; a conversation is one growing list of messages"
            )
        self._pending = asked
        self._said += new
        return Observation(tuple(new), replaces_prompt=is_first)

    @staticmethod
    def _refuse(asked: _Asked, reason: str) -> None:
        if not asked.answer.done():
            asked.answer.set_exception(_Refused(409, reason))

    # ---- the server ----------------------------------------------------------------------------------------

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request of a connection, and close it."""
        try:
            status, body = 200, await self._answered(reader)
        except _Refused as refused:
            status, body = refused.status, {"error": {"message": str(refused), "type": "invalid_request_error"}}
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()
            return
        data = json.dumps(body).encode()
        head = f"HTTP/1.1 {status} {'OK' if status == 200 else 'Refused'}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
        try:
            await writer.drain()
        except ConnectionError:
            return
        finally:
            writer.close()

    async def _answered(self, reader: asyncio.StreamReader) -> dict[str, Any]:
        """Return the answer to the request that is read. Raises _Refused."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        except asyncio.LimitOverrunError:
            raise _Refused(431, "the head of the request is too long") from None
        method, path, *_ = [*head[0].split(" "), "", ""]
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        size = headers.get("content-length", "0")
        if not size.isdecimal() or int(size) > LONGEST_REQUEST:
            raise _Refused(413, f"a request has a Content-Length of at most {LONGEST_REQUEST} bytes")
        body = await reader.readexactly(int(size))
        if method == "GET" and path == f"/{self._token}/v1/models":
            return {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "grpo_rl"}]}
        if method != "POST" or path != f"/{self._token}/v1/chat/completions":
            raise _Refused(404, "there is POST .../v1/chat/completions and GET .../v1/models")
        messages, model = read_request(body)
        asked = _Asked(messages, model, asyncio.get_running_loop().create_future())
        await self._requests.put(asked)
        return await asked.answer


def read_request(body: bytes) -> tuple[list[Message], str]:
    """Return messages and model of a request. Raises _Refused for what is no conversation, or wants what an episode is not."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        raise _Refused(400, "the body is no JSON") from None
    if not isinstance(request, dict) or not isinstance(request.get("messages"), list) or not request["messages"]:
        raise _Refused(400, "the body has no messages")
    for name, allowed in (("stream", (False, None)), ("n", (1, None)), ("tools", ([], None))):
        if request.get(name) not in allowed:
            raise _Refused(400, f"{name}={request[name]!r:.60} is not answered here: one answer at a time, as text")
    messages = []
    for message in request["messages"]:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            content = "".join(str(part.get("text", "")) for part in content)
        if not isinstance(content, str) or message.get("role") not in _ROLES:
            raise _Refused(400, "a message is {role, content} with a text, of the role system, user, assistant or tool")
        messages.append({**message, "content": content})
    return messages, str(request.get("model", "policy"))


def _continues(said: list[Message], messages: list[Message]) -> bool:
    """Return whether a conversation begins with what was said; blanks around a text may have been stripped."""
    return len(messages) > len(said) and all(
        one["role"] == other["role"] and one["content"].strip() == other["content"].strip()
        for one, other in zip(said, messages, strict=False)
    )


def _completion(asked: _Asked, turn: Turn) -> dict[str, Any]:
    tokens = 0 if turn.token_ids is None else len(turn.token_ids)
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": turn.text},
        "finish_reason": "stop" if turn.finish_reason == "stop" else "length",
        "logprobs": None,
    }
    usage = {"prompt_tokens": 0, "completion_tokens": tokens, "total_tokens": tokens}
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": 0,
        "model": asked.model,
        "choices": [choice],
        "usage": usage,
    }
