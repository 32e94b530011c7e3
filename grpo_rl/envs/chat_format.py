"""Requests and answers of `/v1/chat/completions`, with the fields of OpenAI's API reference."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_rl.envs.contract import Message, ToolCall, Turn
from grpo_rl.envs.tool_formats import parse, spoken
from grpo_rl.frozen import frozen

_ROLES = ("system", "developer", "user", "assistant", "tool")
_ONE_ANSWER: dict[str, tuple[Any, ...]] = {
    "n": (1, None),
    "stop": ([], "", None),
    "logprobs": (False, None),
    "functions": ([], None),
    "response_format": ({"type": "text"}, None),
    "tool_choice": ("auto", "none", None),
}
"""Fields that would make another answer than the policy's turn, with the values that do not."""


class Refused(Exception):
    """A request that cannot be answered, with the status, the reason, and OpenAI's code."""

    def __init__(self, status: int, reason: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(reason)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@frozen
class ChatRequest:
    messages: tuple[Message, ...]
    model: str = "policy"
    tools: tuple[Mapping[str, Any], ...] = ()
    """In OpenAI's form."""
    most_calls: int | None = None
    """0 if tool_choice is none or there are no tools, 1 if parallel_tool_calls is false, else all count."""
    streams: bool = False
    with_usage: bool = False


@frozen
class ChatAnswer:
    content: str
    calls: tuple[ToolCall, ...]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int

    def message(self) -> Message:
        message: Message = {"role": "assistant", "content": self.content or (None if self.calls else "")}
        return message | ({"tool_calls": [_written(call) for call in self.calls]} if self.calls else {})

    def usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self.completion_tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens, "total_tokens": total}


def read_request(body: bytes) -> ChatRequest:
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        raise Refused(400, "the body is no JSON") from None
    if not isinstance(request, dict) or not isinstance(request.get("messages"), list) or not request["messages"]:
        raise Refused(400, "the body has no messages", param="messages")
    for name, allowed in _ONE_ANSWER.items():
        if request.get(name) not in allowed:
            reason = f"{name}={request[name]!r:.60} is not answered here: an answer is the policy's whole turn, and one of them"
            raise Refused(400, reason, "unsupported_value", name)
    streaming, one_call = request.get("stream_options"), request.get("parallel_tool_calls") is False
    tools = _tools(request.get("tools"))
    return ChatRequest(
        messages=tuple(_message(message, number) for number, message in enumerate(request["messages"])),
        model=str(request.get("model", "policy")),
        tools=tools,
        most_calls=0 if not tools or request.get("tool_choice") == "none" else 1 if one_call else None,
        streams=request.get("stream") is True,
        with_usage=isinstance(streaming, Mapping) and streaming.get("include_usage") is True,
    )


def _message(message: Any, number: int) -> Message:
    where = f"messages[{number}]"
    message = message if isinstance(message, Mapping) else {}
    role, content = message.get("role"), message.get("content")
    calls = message.get("tool_calls") if role == "assistant" else None
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if content is None and role == "assistant":
        content = ""
    if not isinstance(content, str) or role not in _ROLES:
        raise Refused(400, f"{where} is no {{role, content}} with a text, of the role {', '.join(_ROLES)}", param=where)
    parsed_message: Message = {"role": "system" if role == "developer" else role, "content": content}
    if calls:
        if not isinstance(calls, list) or not all(
            isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls
        ):
            raise Refused(400, f"{where}.tool_calls is no list of {{id, type, function}}", param=where)
        parsed_message["tool_calls"] = [_compared(call) for call in calls]
    if role == "tool":
        if not isinstance(message.get("tool_call_id"), str):
            raise Refused(400, f"{where} has no tool_call_id", param=where)
        parsed_message["tool_call_id"] = message["tool_call_id"]
    return parsed_message | ({"name": message["name"]} if isinstance(message.get("name"), str) else {})


def _tools(tools: Any) -> tuple[Mapping[str, Any], ...]:
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise Refused(400, "tools is no list", param="tools")
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type", "function") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refused(400, f"tools[{number}] is no {{type: function, function: {{name, ...}}}}", param="tools")
    return tuple(tools)


def _compared(call: Mapping[str, Any]) -> dict[str, Any]:
    """Two spellings of the same JSON are one."""
    arguments = call["function"].get("arguments", "{}")
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        value = arguments
    return {"id": call.get("id"), "name": call["function"].get("name"), "arguments": value}


def answer_of(turn: Turn, request: ChatRequest, tool_format: str) -> ChatAnswer:
    """Calls if the request has tools and the turn has whole ones, else all as text.

    Ids are nine letters and digits, and differ between turns, as templates such as Mistral's want.
    """
    may_call = request.most_calls != 0 and turn.finish_reason == "stop"
    parsed_calls = parse(tool_format, turn.raw_text)[0][: request.most_calls] if may_call else ()
    calls = tuple(
        ToolCall(call.name, call.arguments, f"call{turn.index % 1000:03d}{number % 100:02d}")
        for number, call in enumerate(parsed_calls)
    )
    reason = "tool_calls" if calls else "stop" if turn.finish_reason == "stop" else "length"
    tokens = 0 if turn.token_ids is None else len(turn.token_ids)
    content = spoken(tool_format, turn.text) if calls else turn.text
    return ChatAnswer(content, calls, reason, turn.context_tokens, tokens)


def said(answer: ChatAnswer) -> Message:
    """As `read_request` reads the message when the agent sends it back."""
    return _message(answer.message(), 0)


def continues(before: list[Message], messages: tuple[Message, ...]) -> bool:
    """Whether `messages` begin with what was said, up to blanks, and then have no assistant message."""
    new = messages[len(before) :]
    same = list(map(_compared_message, before)) == list(map(_compared_message, messages[: len(before)]))
    return same and bool(new) and all(message["role"] != "assistant" for message in new)


def _compared_message(message: Message) -> tuple[Any, ...]:
    return message["role"], message["content"].strip(), message.get("tool_calls")


def completion(answer: ChatAnswer, model: str) -> dict[str, Any]:
    choice = {"index": 0, "message": answer.message(), "finish_reason": answer.finish_reason, "logprobs": None}
    return {**_head("chat.completion", model), "choices": [choice], "usage": answer.usage()}


def stream(answer: ChatAnswer, request: ChatRequest) -> Iterator[bytes]:
    """Server-sent events; the turn is whole before the first one."""
    head = _head("chat.completion.chunk", request.model) | ({"usage": None} if request.with_usage else {})
    message = answer.message()
    if answer.calls:
        message["tool_calls"] = [{"index": number, **call} for number, call in enumerate(message["tool_calls"])]
    for delta, finish_reason in ((message, None), ({}, answer.finish_reason)):
        yield _event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}]})
    if request.with_usage:
        yield _event({**head, "choices": [], "usage": answer.usage()})
    yield b"data: [DONE]\n\n"


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def _head(kind: str, model: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{secrets.token_hex(8)}", "object": kind, "created": int(time.time()), "model": model}


def _written(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)}
    return {"id": call.call_id, "type": "function", "function": function}
