"""An agent written elsewhere as an environment: it asks an OpenAI-compatible endpoint, behind which the policy answers.

The agent is a function of the user's. It gets a base URL and talks to `/v1/chat/completions` there with any client; its requests
become the observations of an episode, the policy's turns their answers. So an existing agent is trained by another
`base_url`, and every conversation is recorded token for token as all episodes are.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from grpo_rl.envs.contract import Message, Observation, Start, Turn
from grpo_rl.envs.endpoint.chat_format import Refused, answer_of, continues, said
from grpo_rl.envs.endpoint.chat_server import Asked, ChatServer
from grpo_rl.envs.tool_formats import check_format
from grpo_rl.registry import load_function

_REWRITTEN = "it does not continue the conversation: its messages so far, with the answers that it got, and new ones"
_OTHER_TOOLS = "its tools are not those of the conversation's first request, which the policy was shown"


class ChatEndpoint:
    """The environment `endpoint`: one conversation of a user's agent with the policy.

    `agent` names a function `agent(base_url, start, **agent_options) -> reward or None`, async or not, as
    `file.py:function`; one that is not async runs in a thread. The episode begins with the agent's own messages, in place of the row's, and
    ends with the agent's return, whose value is the last turn's reward. Each request has to continue the conversation: an agent
    that rewrites it fails its episode, because the tokens before would not be those that were sampled.

    `tools` of a request are shown to the policy by its chat template, and what a turn calls comes back as `tool_calls`, read by
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
        """Start the agent, and wait for its first request."""
        url = await self._server.start()
        self._running = asyncio.get_running_loop().create_task(self._run(url, start))
        return await self._next()

    async def step(self, turn: Turn) -> Observation:
        """Answer the agent's request with the policy's turn, and wait for its next one.

        A turn that was cut off is the last one: the agent may still return a reward, and a further request is refused.
        """
        assert self._pending is not None, "the policy answers a request"
        asked, self._pending = self._pending, None
        answer = answer_of(turn, asked.request, self._format)
        self._num_calls += len(answer.calls)
        self._said.append(said(answer))
        if not asked.answer.done():  # the agent may have closed its connection
            asked.answer.set_result(answer)
        return await self._next(is_over=turn.finish_reason != "stop")

    async def close(self) -> None:
        """End the agent's task and the server. What an agent does in a thread ends with the process at the latest."""
        await self._server.close(self._pending)
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    # ---- the agent -----------------------------------------------------------------------------------------

    async def _run(self, url: str, start: Start) -> Any:
        if inspect.iscoroutinefunction(self._agent):
            return await self._agent(url, start, **self._options)
        return await asyncio.to_thread(self._agent, url, start, **self._options)

    async def _next(self, *, is_over: bool = False) -> Observation:
        """Return the agent's next request as an observation, or the end of the episode where the agent has returned."""
        assert self._running is not None
        request = asyncio.ensure_future(self._server.requests.get())
        await asyncio.wait({request, self._running}, return_when=asyncio.FIRST_COMPLETED)
        info = {"agent_tool_calls": float(self._num_calls)} if self._tools else {}
        if not request.done():
            request.cancel()
            reward = self._running.result()  # raises what the agent raised
            return Observation(reward=None if reward is None else float(reward), done=True, info=info)
        asked = request.result()
        if is_over:
            reason = "the conversation has no room for another turn: data.max_response_length"
            asked.refuse(Refused(400, reason, "context_length_exceeded", "messages"))
            return Observation(done=True, info=info)
        is_first = not self._said
        new = list(asked.request.messages[len(self._said) :])
        if not continues(self._said, asked.request.messages) or any(message["role"] == "assistant" for message in new):
            self._rewritten(asked, _REWRITTEN)
        if not is_first and asked.request.tools != self._tools:
            self._rewritten(asked, _OTHER_TOOLS)
        self._pending, self._tools = asked, asked.request.tools
        self._said += new
        messages = tuple(self._named(message) for message in new)
        return Observation(messages, replaces_prompt=is_first, tools=self._tools if is_first else (), info=info)

    def _rewritten(self, asked: Asked, reason: str) -> None:
        asked.refuse(Refused(409, reason, "conversation_rewritten", "messages"))
        raise ValueError(
            f"the agent's request cannot be a turn of its conversation: {reason}; a conversation is one growing list of messages"
        )

    def _named(self, message: Message) -> Message:
        """Return a tool's message with the name of the tool, which some templates write, and which clients leave out."""
        if message["role"] != "tool" or "name" in message:
            return message
        calls = [call for one in self._said for call in one.get("tool_calls", ()) if call["id"] == message["tool_call_id"]]
        return message | ({"name": calls[-1]["name"]} if calls else {})
