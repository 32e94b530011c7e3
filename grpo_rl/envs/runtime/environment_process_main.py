"""An environment process: `python -m grpo_rl.envs.runtime.environment_process_main CHANNEL PARENT`, started by
`environment_pool.py` only.

It loads no torch. Every episode has an event loop of its own, and each answer is worked out in a thread: an environment that
blocks holds up itself and no other episode. What it prints goes to the log that its parent keeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import Any

from grpo_rl.envs.runtime.episode_host import EpisodeHost, HostSetup, TurnAnswer
from grpo_rl.errors import raised_in
from grpo_rl.processes.inside import LONGEST_CAUSE, Parent, serve


class Played:
    """An episode in this process: its host, the loop that runs it, and what it is doing."""

    def __init__(self, host: EpisodeHost) -> None:
        self.host = host
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[TurnAnswer | None] | None = None

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run the work to its end in this thread."""
        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(work)
        try:
            return self._loop.run_until_complete(self._task)
        finally:
            self._task = None

    def cancel(self) -> None:
        """End what is going on, where it waits for something."""
        task = self._task
        if task is not None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
                self._loop.call_soon_threadsafe(task.cancel)

    def close(self) -> None:
        """Close the environment and the loop."""
        try:
            self.run(self.host.close())
        finally:
            self._loop.close()


class Served:
    """The episodes of this process, by the names that the parent gives them."""

    def __init__(self, parent: Parent, setup: HostSetup) -> None:
        self._parent, self._setup = parent, setup
        self._played: dict[str, Played] = {}

    def handle(self, message: dict[str, Any]) -> None:
        """Begin what a message asks for; the reply follows from another thread."""
        name = message["id"]
        if message["op"] == "cancel":
            if name in self._played:
                self._played[name].cancel()
            self._send({"id": name, "serial": message["serial"], "heard": True})
        else:
            threading.Thread(target=self._answer, args=(message,), daemon=True).start()

    def _answer(self, message: dict[str, Any]) -> None:
        reply: dict[str, Any] = {"id": message["id"], "serial": message["serial"]}
        try:
            answer = self._work(message["op"], message["id"], message.get("values"))
            reply["answer"] = None if answer is None else asdict(answer)
        except asyncio.CancelledError:
            reply["failed"] = "it was cancelled"
        except BaseException as error:  # a user's code may raise anything, and even exit
            reply["failed"] = f"{type(error).__name__}: {error}{raised_in(error)}"[:LONGEST_CAUSE]
        self._send(reply)

    def _work(self, op: str, name: str, values: Any) -> TurnAnswer | None:
        if op == "close":
            if (ended := self._played.pop(name, None)) is not None:
                ended.close()
            return None
        if op == "reset":
            self._played[name] = Played(EpisodeHost(self._setup))
        played = self._played[name]
        answer: TurnAnswer = played.run(played.host.reset(values) if op == "reset" else played.host.step(values))
        return answer

    def _send(self, reply: dict[str, Any]) -> None:
        try:
            self._parent.send(reply)
        except (TypeError, ValueError) as error:
            cause = f"the environment returned what cannot be sent: {error}"
            self._parent.send({"id": reply["id"], "serial": reply["serial"], "failed": cause})


def begin(setup: dict[str, Any], parent: Parent) -> Callable[[Any], None]:
    """Import the user's files, and show now what would fail in every episode."""
    threading.stack_size(2**20)  # the stack of a thread is address space, 8 MiB each by default
    host = HostSetup.read(setup["host"])
    EpisodeHost(host)
    return Served(parent, host).handle


if __name__ == "__main__":
    serve(sys.argv[1:], begin)
