"""An agent that talks to an OpenAI-compatible endpoint, and whose conversation is an episode."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_rl.envs import endpoint
from grpo_rl.envs.contract import Observation, Start, Turn
from grpo_rl.envs.endpoint import ChatEndpoint, ChatServer

AGENT = """
import json, urllib.error, urllib.request

def post(url, messages, **more):
    body = json.dumps({"model": "any", "messages": messages, **more}).encode()
    request = urllib.request.Request(url + "/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=240) as answer:
        return json.load(answer)

def guess(url, start, limit=2, **how):
    messages = [{"role": "system", "content": "guess " + str(start.ground_truth)}, {"role": "user", "content": "begin"}]
    for _ in range(limit):
        answer = post(url, messages, **how)["choices"][0]
        messages += [answer["message"], {"role": "user", "content": "again"}]
        if start.ground_truth in answer["message"]["content"]:
            return 1
    return 0.25

def rewrites(url, start):
    post(url, [{"role": "user", "content": "one"}])
    post(url, [{"role": "user", "content": "two"}])

def refused(url, start):
    for more in ({"n": 2}, {"stop": ["x"]}, {"logprobs": True}, {"tools": [{}]}, {"tool_choice": "required"}, {"messages": "?"}):
        try:
            post(url, more.pop("messages", [{"role": "user", "content": "?"}]), **more)
            raise AssertionError(more)
        except urllib.error.HTTPError as error:
            assert error.code == 400, error.code
            said = json.load(error)["error"]
            assert said["type"] == "invalid_request_error" and said["message"]
    try:
        urllib.request.urlopen(url.replace("/v1", "x/v1") + "/models", timeout=240)
    except urllib.error.HTTPError as error:
        assert error.code == 404
    assert json.load(urllib.request.urlopen(url + "/models", timeout=240))["data"][0]["id"] == "policy"
    return guess(url, start, limit=1)
"""

CLIENT = """
import openai

ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}}}

def client_of(url):
    return openai.OpenAI(base_url=url, api_key="none", timeout=240)

def note(start, *lines):
    with open(start.extra_info["path"], "a") as file:
        file.write("".join(json.dumps(line) + chr(10) for line in lines))

def streamed(url, start):
    messages = [{"role": "user", "content": "hello"}]
    events = list(client_of(url).chat.completions.create(
        model="mine", messages=messages, stream=True, stream_options={"include_usage": True}))
    pieces = [event.choices[0].delta.content or "" for event in events if event.choices]
    note(start, "".join(pieces), len([piece for piece in pieces if piece]), events[0].choices[0].delta.role,
         [event.choices[0].finish_reason for event in events if event.choices][-1], events[-1].usage.total_tokens,
         len({event.id for event in events}))
    return 1

def uses_tools(url, start, stream=False):
    client, messages = client_of(url), [{"role": "user", "content": "2+3, 4+5"}]
    for _ in range(4):
        if stream:
            with client.chat.completions.stream(model="m", messages=messages, tools=[ADD]) as events:
                for event in events:
                    pass
                choice = events.get_final_completion().choices[0]
        else:
            answer = client.chat.completions.create(model="m", messages=messages, tools=[ADD])
            choice, usage = answer.choices[0], answer.usage
            assert [client.models.list().data[0].id, answer.object, answer.model] == ["policy", "chat.completion", "m"]
            assert [usage.prompt_tokens, usage.completion_tokens, usage.total_tokens] == [10, 3, 13]
        message = choice.message
        calls = message.tool_calls or []
        note(start, [choice.finish_reason, message.content, [[c.id, c.function.name, json.loads(c.function.arguments)] for c in calls]])
        messages.append({"role": "assistant", "content": message.content, "tool_calls": [c.model_dump(exclude={"function": {"parsed_arguments"}}) for c in calls]} if calls
                        else {"role": "assistant", "content": message.content})
        if not calls:
            return 3
        for call in calls:
            given = json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(given["a"] + given["b"])})

async def in_an_event_loop(url, start):
    client = openai.AsyncOpenAI(base_url=url, api_key="none", timeout=240)
    stream = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}], stream=True)
    note(start, "".join([event.choices[0].delta.content or "" async for event in stream]))
    return 1

def goes_on_after_the_end(url, start):
    client, messages = client_of(url), [{"role": "user", "content": "hello"}]
    choice = client.chat.completions.create(model="m", messages=messages).choices[0]
    messages += [{"role": "assistant", "content": choice.message.content}, {"role": "user", "content": "go on"}]
    try:
        client.chat.completions.create(model="m", messages=messages)
    except openai.BadRequestError as error:
        note(start, [choice.finish_reason, error.code, error.type, error.param])

def returns_after_the_end(url, start):
    return len(client_of(url).chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}]).choices)

def is_left_waiting(url, start):
    try:
        client_of(url).chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])
    except openai.APIStatusError as error:
        note(start, [error.status_code, error.code])
"""


def turn(index: int, text: str) -> Turn:
    """Return a turn of three tokens behind ten; one that ends with ... was cut off."""
    ended: Any = "length" if text.endswith("...") else "stop"
    return Turn(index, text, finish_reason=ended, token_ids=np.array([1, 2, 3]), raw_text=text, context_tokens=10)


@pytest.fixture
def played(tmp_path: Path) -> Callable[..., list[Observation]]:
    (tmp_path / "agent.py").write_text(AGENT + CLIENT)

    def play(name: str, *answers: str, **options: Any) -> list[Observation]:
        async def course() -> list[Observation]:
            agent = ChatEndpoint(f"{tmp_path / 'agent.py'}:{name}", options)
            start = Start("p", "test", ({"role": "user", "content": "row"},), "42", {"path": str(tmp_path / "answer")})
            try:
                found = [await agent.reset(start)]
                for index, text in enumerate(answers):
                    found.append(await agent.step(turn(index, text)))
                return found
            finally:
                await agent.close()

        return asyncio.run(course())

    return play


def test_an_agents_requests_are_observations_and_its_return_is_the_reward(played) -> None:
    first, second, last = played("guess", "is it 7?", "42!")
    assert first.replaces_prompt and [m["content"] for m in first.messages] == ["guess 42", "begin"]
    assert [(m["role"], m["content"]) for m in second.messages] == [("user", "again")] and not second.replaces_prompt
    assert (last.reward, last.done) == (1.0, True)
    assert [one.done for one in played("guess", "1", "2")] == [False, False, True]


def test_an_agent_that_rewrites_its_conversation_fails(played) -> None:
    with pytest.raises(ValueError, match="does not continue the conversation"):
        played("rewrites", "hm")


def test_requests_that_are_no_single_answer_as_text_are_refused(played) -> None:
    assert [one.done for one in played("refused", "42")] == [False, True]


CALLS = (
    'Both.<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    '<tool_call>{"name": "add", "arguments": {"b": 5, "a": 4}}</tool_call>'
)


def noted(tmp_path: Path) -> list[Any]:
    return [json.loads(line) for line in (tmp_path / "answer").read_text().splitlines()]


def test_openais_client_reads_a_stream(played, tmp_path: Path) -> None:
    text = " one two\n\n  three \u00e4\n "
    assert played("streamed", text)[-1].done
    assert noted(tmp_path) == [text, 1, "assistant", "stop", 13, 1]
    (tmp_path / "answer").unlink()
    assert played("in_an_event_loop", text)[-1].done and noted(tmp_path) == [text]


@pytest.mark.parametrize("stream", [False, True])
def test_a_turns_calls_are_the_clients_tool_calls_and_their_results_the_next_observation(
    played, tmp_path: Path, stream: bool
) -> None:
    first, second, last = played("uses_tools", CALLS, "5 and 9", stream=stream)
    assert [tool["function"]["name"] for tool in first.tools] == ["add"] and first.replaces_prompt
    assert second.tools == () and second.messages == (
        {"role": "tool", "tool_call_id": "call00000", "content": "5", "name": "add"},
        {"role": "tool", "tool_call_id": "call00001", "content": "9", "name": "add"},
    )
    assert (last.done, last.reward, last.info) == (True, 3.0, {"agent_tool_calls": 2.0})
    calls = [["call00000", "add", {"a": 2, "b": 3}], ["call00001", "add", {"a": 4, "b": 5}]]
    assert noted(tmp_path) == [["tool_calls", "Both.", calls], ["stop", "5 and 9", []]]


def test_a_turn_that_was_cut_off_says_so_and_is_the_last_one(played, tmp_path: Path) -> None:
    _, last = played("goes_on_after_the_end", "and so...")
    assert (last.done, last.reward) == (True, None)
    assert noted(tmp_path) == [["length", "context_length_exceeded", "invalid_request_error", "messages"]]
    assert played("returns_after_the_end", "and so...")[-1].reward == 1.0


def test_an_agent_that_still_waits_when_its_episode_ends_reads_that_it_is_over(played, tmp_path: Path) -> None:
    assert len(played("is_left_waiting")) == 1
    for _ in range(1500):  # the agent's thread writes after its episode has ended
        if (tmp_path / "answer").exists() and noted(tmp_path):
            break
        time.sleep(0.02)
    assert noted(tmp_path) == [[410, "episode_over"]]


def test_other_users_of_the_machine_hold_neither_memory_nor_connections_of_the_server(monkeypatch) -> None:
    large, digits = f"Content-Length: {endpoint.LONGEST_REQUEST}", f"Content-Length: {'9' * 5000}"

    async def course() -> None:
        server = ChatServer()
        url = await server.start()
        host, token = url.removeprefix("http://").split("/")[:2]

        async def connect(request: str = "") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection(*host.split(":"))
            writer.write(request.encode())
            return reader, writer

        async def status(path: str, header: str, body: str = "") -> int:
            """Return what a request is answered of whose body no more than this comes."""
            reader, writer = await connect(f"POST /{path}/v1/chat/completions HTTP/1.1\r\n{header}\r\n\r\n{body}")
            answer = await asyncio.wait_for(reader.read(), 30)
            writer.close()
            return int(answer.split()[1])

        assert await status("x" * len(token), large) == 404
        assert await status("", digits) == 404 and await status(token, digits) == 413
        monkeypatch.setattr(endpoint, "REQUEST_S", 0.5)
        assert await status(token, large, "{") == 408
        monkeypatch.setattr(endpoint, "REQUEST_S", 600.0)
        problems: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        silent = [await connect() for _ in range(endpoint.MOST_STRANGERS + 1)]
        assert await asyncio.wait_for(silent[0][0].read(), 30) == b""
        assert await status(token, "Content-Length: 2", "{}") == 400
        assert not silent[-1][0].at_eof()
        for _, writer in silent:
            writer.close()
        # Requests of the agent under a flood: each of them is answered.
        flood = asyncio.gather(*(connect() for _ in range(800)), return_exceptions=True)
        answered = await asyncio.gather(*(status(token, "Content-Length: 2", "{}") for _ in range(40)))
        assert answered == [400] * 40
        for _, writer in await flood:
            writer.close()
        await server.close(None)
        assert problems == [], "no traceback for a stranger"

    asyncio.run(course())
