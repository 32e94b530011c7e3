"""An agent that talks to an OpenAI-compatible endpoint, and whose conversation is an episode."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_rl.envs.chat_endpoint import ChatEndpoint
from grpo_rl.envs.contract import Observation, Start, Turn

AGENT = """
import asyncio, json, urllib.error, urllib.request

def post(url, messages, **more):
    body = json.dumps({"model": "any", "messages": messages, **more}).encode()
    request = urllib.request.Request(url + "/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)

def guess(url, start, limit=2, **how):
    messages = [{"role": "system", "content": "guess " + str(start.ground_truth)}, {"role": "user", "content": "begin"}]
    for _ in range(limit):
        answer = post(url, messages, **how)["choices"][0]
        messages += [answer["message"], {"role": "user", "content": "again"}]
        if start.ground_truth in answer["message"]["content"]:
            return 1
    return 0.25

async def guess_async(url, start):
    return await asyncio.to_thread(guess, url, start)

def rewrites(url, start):
    post(url, [{"role": "user", "content": "one"}])
    try:
        post(url, [{"role": "user", "content": "two"}])
    except urllib.error.HTTPError as error:
        open(start.extra_info["path"], "w").write(f"{error.code} {error.read().decode()}")

def fails(url, start):
    raise KeyError("no such tool")

def refused(url, start):
    for number, more in enumerate(({"stream": True}, {"n": 2}, {"tools": [{}]}, {"messages": "?"})):
        try:
            post(url, more.pop("messages", [{"role": "user", "content": "?"}]), **more)
        except urllib.error.HTTPError as error:
            assert error.code == 400, error.code
    try:
        urllib.request.urlopen(url.replace("/v1", "x/v1") + "/models", timeout=30)
    except urllib.error.HTTPError as error:
        assert error.code == 404
    assert json.load(urllib.request.urlopen(url + "/models", timeout=30))["data"][0]["id"] == "policy"
    return guess(url, start, limit=1)
"""


@pytest.fixture
def played(tmp_path: Path) -> Callable[..., list[Observation]]:
    (tmp_path / "agent.py").write_text(AGENT)

    def play(name: str, *answers: str, **options: Any) -> list[Observation]:
        async def course() -> list[Observation]:
            endpoint = ChatEndpoint(f"{tmp_path / 'agent.py'}:{name}", options)
            start = Start("p", "test", ({"role": "user", "content": "row"},), "42", {"path": str(tmp_path / "answer")})
            try:
                found = [await endpoint.reset(start)]
                for index, text in enumerate(answers):
                    found.append(await endpoint.step(Turn(index, text, token_ids=np.array([1, 2]))))
                return found
            finally:
                await endpoint.close()

        return asyncio.run(course())

    return play


@pytest.mark.parametrize("name", ["guess", "guess_async"])
def test_an_agents_requests_are_observations_and_its_return_is_the_reward(played, name: str) -> None:
    first, second, last = played(name, "is it 7?", "42!")
    assert first.replaces_prompt and [m["content"] for m in first.messages] == ["guess 42", "begin"]
    assert [(m["role"], m["content"]) for m in second.messages] == [("user", "again")] and not second.replaces_prompt
    assert (last.reward, last.done) == (1.0, True)
    assert [one.done for one in played(name, "1", "2")] == [False, False, True]


def test_an_agent_that_rewrites_its_conversation_is_told_and_fails(played, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not continue its conversation"):
        played("rewrites", "hm")


def test_what_an_agent_raises_is_the_episodes_failure(played) -> None:
    with pytest.raises(KeyError, match="no such tool"):
        played("fails")


def test_requests_that_are_no_single_answer_as_text_are_refused(played) -> None:
    assert [one.done for one in played("refused", "42")] == [False, True]
