"""An environment process and the episodes in it.

It loads no torch. Every episode has an event loop of its own, and each answer is worked out in a thread: an
environment that blocks holds up no other episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from grpo_rl.envs.contract import Environment, Message, Observation, Start, Tool, ToolCall, ToolResult, Turn, result_of
from grpo_rl.envs.environments import ENVIRONMENTS, TOOLS, Named, made, schema_of
from grpo_rl.envs.tool_formats import argument_problem, parse
from grpo_rl.errors import ConfigError, raised_in
from grpo_rl.frozen import frozen
from grpo_rl.processes.child import LONGEST_CAUSE, Parent, serve
from grpo_rl.rewards.contract import LARGEST_REWARD

_shown: set[str] = set()
"""Tools of which the log has an error already."""


@frozen
class HostSetup:
    """Plain values, which can be sent to a process."""

    environment: Named | None
    tools: tuple[Named, ...] = ()
    format: str = "hermes"
    tool_timeout_s: float = 30.0
    max_parallel_calls: int = 1
    max_tool_response_length: int = 256
    truncate_side: str = "middle"

    @staticmethod
    def read(values: Mapping[str, Any]) -> HostSetup:
        environment = values["environment"] and Named(**values["environment"])
        return HostSetup(**{**values, "environment": environment, "tools": tuple(Named(**entry) for entry in values["tools"])})


class EpisodeHost:
    """Answers are observations as plain values, with `counts` of what happened."""

    def __init__(self, setup: HostSetup) -> None:
        self.setup = setup
        self.environment: Environment | None = None
        if setup.environment is not None:
            self.environment = made(setup.environment, ENVIRONMENTS, "environment")
        self.tools: dict[str, Tool] = {}
        self.schemas: dict[str, dict[str, Any]] = {}
        for named in setup.tools:
            tool = made(named, TOOLS, "tool")
            schema = schema_of(named, tool)
            if schema["name"] in self.tools:
                raise ConfigError(f"two tools are called {schema['name']}")
            self.tools[schema["name"]], self.schemas[schema["name"]] = tool, schema

    async def reset(self, values: Mapping[str, Any]) -> dict[str, Any]:
        start = Start(**{**values, "messages": tuple(values["messages"])})
        for tool in self.tools.values():
            await result_of(tool.begin, start)
        return _plain(Observation() if self.environment is None else await result_of(self.environment.reset, start))

    async def step(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """A turn that was cut off, or that is the last one allowed, calls no tools."""
        turn_fields = dict(values)
        is_last, token_ids = turn_fields.pop("is_last"), np.asarray(turn_fields.pop("token_ids"), dtype=np.int32)
        turn = Turn(**turn_fields, token_ids=token_ids)
        if self.tools:
            calls, malformed = parse(self.setup.format, turn.raw_text)
            turn = replace(turn, tool_calls=calls, malformed=malformed)
        counts: Counter[str] = Counter(malformed_calls=len(turn.malformed))
        if turn.finish_reason == "stop" and not is_last and (turn.tool_calls or turn.malformed):
            answer = await self._with_calls(turn, counts)
        elif self.environment is not None:
            answer = await result_of(self.environment.step, turn)
        else:
            answer = Observation(done=turn.finish_reason == "stop" and not turn.tool_calls)
        return _plain(answer, counts)

    async def close(self) -> None:
        """Release the environment and every tool, whichever of them fail."""
        holders: list[Any] = [*self.tools.values(), *([] if self.environment is None else [self.environment])]
        results = await asyncio.gather(*(result_of(holder.close) for holder in holders), return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _with_calls(self, turn: Turn, counts: Counter[str]) -> Observation:
        """What could not be read goes back to the policy like a failed call."""
        calls = turn.tool_calls[: self.setup.max_parallel_calls]
        counts["left_out_calls"] += len(turn.tool_calls) - len(calls)
        counts["tool_calls"] += len(calls)
        results = await asyncio.gather(*(self._call(call, counts) for call in calls))
        answered = [*zip(calls, results, strict=True)]
        for number, problem in enumerate(turn.malformed):
            answered.append((ToolCall("error", {}, f"error{number:04d}"), _failed(problem)))
        messages = tuple(
            {
                "role": "tool",
                "name": call.name,
                "tool_call_id": call.call_id,
                "content": cut(str(result.text), self.setup.max_tool_response_length, self.setup.truncate_side),
            }
            for call, result in answered
        )
        rewards = [result.reward for result in results if result.reward is not None]
        return Observation(messages, sum(rewards) if rewards else None)

    async def _call(self, call: ToolCall, counts: Counter[str]) -> ToolResult:
        tool = self.tools.get(call.name)
        if tool is None:
            result = _failed(f"there is no tool {call.name!r}; there is {', '.join(sorted(self.tools))}")
        elif problem := argument_problem(self.schemas[call.name], call.arguments):
            result = _failed(problem)
        else:
            result = await self._run(tool, call, counts)
        counts["failed_calls"] += result.failed
        return result

    async def _run(self, tool: Tool, call: ToolCall, counts: Counter[str]) -> ToolResult:
        timeout_s = self.setup.tool_timeout_s
        counts[f"tool_calls/{call.name}"] += 1
        try:
            result = await asyncio.wait_for(result_of(tool.call, call.arguments), timeout_s)
            if not isinstance(result, str | ToolResult):
                raise TypeError(f"tool {call.name!r} returned a {type(result).__name__}, not a text or a ToolResult")
        except TimeoutError:
            counts["tool_timeouts"] += 1
            counts[f"tool_errors/{call.name}"] += 1
            return _failed(f"{call.name} took longer than {timeout_s:g} s")
        except Exception as error:  # a user's code: the policy reads what went wrong
            counts["tool_errors"] += 1
            counts[f"tool_errors/{call.name}"] += 1
            if call.name not in _shown:
                _shown.add(call.name)
                traceback.print_exc()  # the policy reads one line of it
            return _failed(f"{type(error).__name__}: {error}".strip().splitlines()[-1])
        return ToolResult(result) if isinstance(result, str) else result


def _failed(reason: str) -> ToolResult:
    return ToolResult(f"Error: {reason}", failed=True)


def _plain(observation: Observation, counts: Mapping[str, int] | None = None) -> dict[str, Any]:
    if not isinstance(observation, Observation):
        raise TypeError(f"the environment returned a {type(observation).__name__}, not an Observation")
    return {
        "messages": [checked(message) for message in observation.messages],
        "reward": None if observation.reward is None else _finite(observation.reward),
        "done": bool(observation.done),
        "info": {str(name): _finite(value) for name, value in observation.info.items()},
        "counts": dict(counts or {}),
        "replaces_prompt": bool(observation.replaces_prompt),
        "tools": [dict(tool) for tool in observation.tools],
        "state": None if observation.state is None else str(observation.state),
    }


def checked(message: Any) -> Message:
    if not isinstance(message, Mapping) or not all(isinstance(message.get(part), str) for part in ("role", "content")):
        raise TypeError(f"a message is {{role, content}} with texts, not {message!r:.80}")
    if message["role"] not in ("user", "tool", "system"):
        raise TypeError("an environment writes user, tool and system messages; those of the assistant are the policy's")
    return dict(message)


def cut(text: str, length: int, side: str) -> str:
    """With a mark if something is left out (as verl does)."""
    if len(text) <= length:
        return text
    if side == "left":
        return f"{text[:length]}...(truncated)"
    if side == "right":
        return f"(truncated)...{text[-length:]}"
    half = max(1, length // 2)
    return f"{text[:half]}...(truncated)...{text[-half:]}"


def _finite(value: Any) -> float:
    number = float(value)
    if not abs(number) <= LARGEST_REWARD:
        raise ValueError(f"a reward or a logged number is {number:g}; a finite number of at most {LARGEST_REWARD:g} is needed")
    return number


CANCEL_S = 1.0
"""For cancelled work to end, and for a process to notice."""


class Episodes:
    def __init__(self, setup: HostSetup, parent: Parent) -> None:
        self._parent, self._setup = parent, setup
        self._hosts: dict[str, tuple[EpisodeHost, asyncio.AbstractEventLoop]] = {}
        self._threads: dict[str, threading.Thread] = {}
        """The thread of the last work on each episode."""
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        """That has not ended."""

    def handle(self, message: dict[str, Any]) -> None:
        """The reply follows from another thread."""
        name = message["id"]
        if message["op"] == "close":
            self._send(message, heard=True)
        previous_thread = self._threads.get(name)
        self._threads[name] = threading.Thread(target=self._answer, args=(message, previous_thread), daemon=True)
        self._threads[name].start()

    def _answer(self, message: dict[str, Any], previous: threading.Thread | None) -> None:
        name, op, values = message["id"], message["op"], message["values"]
        answer: dict[str, Any] | None = None
        try:
            if op == "reset":
                self._hosts[name] = EpisodeHost(self._setup), asyncio.new_event_loop()
            elif op == "close" and previous is not None and not self._cancelled(name, previous):
                self._send(message, stuck=True)
                return
            if name in self._hosts:
                host, loop = self._hosts[name]
                work = host.close() if op == "close" else host.reset(values) if op == "reset" else host.step(values)
                answer = self._run(name, loop, work)
        except BaseException as error:  # a user's code may raise anything, and even exit
            self._send(message, failed=f"{type(error).__name__}: {error}{raised_in(error)}"[:LONGEST_CAUSE])
        else:
            self._send(message, answer=answer)
        finally:
            if op == "close":
                self._threads.pop(name, None)
                closed = self._hosts.pop(name, None)
                if closed is not None and not closed[1].is_running():
                    closed[1].close()

    def _cancelled(self, name: str, thread: threading.Thread) -> bool:
        """Cancel the work on an episode; return whether its thread has ended."""
        if (task := self._tasks.get(name)) is not None:
            with contextlib.suppress(RuntimeError):  # its loop has ended meanwhile
                task.get_loop().call_soon_threadsafe(task.cancel)
        thread.join(CANCEL_S)
        return not thread.is_alive()

    def _run(self, name: str, loop: asyncio.AbstractEventLoop, work: Any) -> Any:
        asyncio.set_event_loop(loop)
        task = self._tasks[name] = loop.create_task(work)
        try:
            return loop.run_until_complete(task)
        finally:
            self._tasks.pop(name, None)

    def _send(self, message: Mapping[str, Any], **reply: Any) -> None:
        place = {"id": message["id"], "serial": message["serial"]}
        try:
            self._parent.send(place | reply)
        except (TypeError, ValueError) as error:
            self._parent.send(place | {"failed": f"the environment returned what cannot be sent: {error}"})


def begin(setup: dict[str, Any], parent: Parent) -> Callable[[Any], None]:
    """Show now what would fail in every episode."""
    threading.stack_size(2**20)  # the stack of a thread is address space, 8 MiB each by default
    host = HostSetup.read(setup["host"])
    EpisodeHost(host)
    return Episodes(host, parent).handle


if __name__ == "__main__":
    serve(sys.argv[1:], begin)
