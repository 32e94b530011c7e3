"""Conversations of OpenAI's client with tools as episodes, over a real environment process: the template's own tokens, as sampled."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from chat_templates import FAMILIES, tokenizer_of
from engine_turns import EngineTurns
from scripted import ScriptedEngine

from grpo_rl.config.schema.tree import DataConfig
from grpo_rl.data.chat_deltas import ChatDeltas
from grpo_rl.data.prompts import Renderer
from grpo_rl.envs.environments import Named
from grpo_rl.envs.episode_pool import EpisodePool
from grpo_rl.envs.runtime.environment_pool import EnvironmentPool
from grpo_rl.envs.runtime.episode_host import HostSetup
from grpo_rl.types import Completion, Prompt, Request, Rollout, Sampling

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
AGENT = f"""
import json, openai

TOOLS = [{ADD!r}]

def solve(url, start, stream=False):
    client = openai.OpenAI(base_url=url, api_key="none", timeout=240)
    messages = [{{"role": "user", "content": start.extra_info["question"]}}]
    while True:
        with client.chat.completions.stream(model="m", messages=messages, tools=TOOLS) as events:
            message = events.get_final_completion().choices[0].message
        if not message.tool_calls:
            return float(message.content == "5")
        calls = [json.loads(call.model_dump_json(include={{"id": True, "type": True, "function": {{"name", "arguments"}}}})) for call in message.tool_calls]
        messages.append({{"role": "assistant", "content": message.content, "tool_calls": calls}})
        for call in message.tool_calls:
            given = json.loads(call.function.arguments)
            messages.append({{"role": "tool", "tool_call_id": call.id, "content": str(given["a"] + given["b"])}})
"""


class Speaking(ScriptedEngine):
    """An engine that answers turn by turn with given texts, token by token, each with a log-prob of its own."""

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        super().__init__((), (), seed=0)
        self.tokenizer, self.texts = tokenizer, texts

    def _completion(self, request: Request) -> Completion:
        number = int(re.findall("turn-([0-9]+)", request.request_id)[0])
        ids = [*self.tokenizer(self.texts[number], add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        return Completion(request.request_id, ids, [-0.125 * (number + 1)] * len(ids), "stop", ((0, len(ids)),))


def played(tmp_path: Path, family: str, *texts: str) -> tuple[Rollout, Any]:
    (tmp_path / "agent.py").write_text(AGENT)
    template, end, kwargs = FAMILIES[family]
    tokenizer = tokenizer_of(template, end)
    deltas = ChatDeltas(
        Renderer(DataConfig(apply_chat_template_kwargs=dict(kwargs)), tokenizer), tokenizer, frozenset([tokenizer.eos_token_id])
    )
    host = HostSetup(Named("endpoint", {"agent": f"{tmp_path / 'agent.py'}:solve"}))
    environments = EnvironmentPool(host, 1, step_timeout_s=30.0)
    try:
        turns = EngineTurns(Speaking(tokenizer, texts))  # type: ignore[arg-type]
        pool = EpisodePool(turns, environments, deltas, quiet_s=60.0, max_model_len=4000)
        prompt = Prompt("p", np.array([1], np.int32), "", "test", extra_info={"question": "2+3?"}, messages=({"role": "user", "content": "row"},))  # fmt: skip
        (rollout,) = pool.generate([prompt], 1, Sampling(max_tokens=2000, seed=1))
        return rollout, tokenizer
    finally:
        environments.close()


def test_a_conversation_with_tools_is_the_templates_own_and_its_turns_are_as_sampled(tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    rollout, tokenizer = played(tmp_path, "qwen25", call, "5")
    assert rollout.episode is not None and rollout.episode.ended == "done", rollout.episode
    assert rollout.episode.turns[-1].reward == 1.0 and rollout.episode.info["agent_tool_calls"] == 1.0
    whole = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "2+3?"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2, "b": 3}}}]},
            {"role": "tool", "name": "add", "content": "5"},
            {"role": "assistant", "content": "5"},
        ],
        tools=[ADD],
        tokenize=False,
    )
    ids = [*rollout.prompt.token_ids.tolist(), *np.asarray(rollout.response_ids).tolist()]
    assert tokenizer.decode(ids) == whole.rstrip("\n")
    assert json.dumps(ADD["function"]["name"]) in rollout.prompt.text  # type: ignore[index]
    sampled = [[*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for text in (call, "5")]
    response, logprobs = np.asarray(rollout.response_ids), np.asarray(rollout.rollout_logprobs)
    assert [response[begin : begin + length].tolist() for begin, length in rollout.spans] == sampled
    assert [set(logprobs[begin : begin + length].tolist()) for begin, length in rollout.spans] == [{-0.125}, {-0.25}]


def test_tools_that_the_template_cannot_show_fail_the_episode_with_the_reason(tmp_path: Path) -> None:
    rollout, _ = played(tmp_path, "gemma", "5")
    assert rollout.episode is not None and rollout.episode.failure == "environment_error"
    assert "answers of tools" in str(rollout.episode.failure_cause)
