"""Episodes of several turns as a stream of rollouts, above the rollout pool and the environment processes.

A turn is one request to the engines, whose prompt is the episode's context so far. Engines and environments
never wait for each other.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from grpo_rl.control_words import outside
from grpo_rl.data.chat_deltas import ChatDeltas
from grpo_rl.envs.contract import Message
from grpo_rl.envs.runtime.environment_pool import Event
from grpo_rl.errors import ClusterError, ConfigError, DataError
from grpo_rl.protocols import TurnPool
from grpo_rl.rollout.conversation import Conversation
from grpo_rl.rollout.requests import WholeBatches, rollout_id, sample_seed, sampling_of, turn_sampling
from grpo_rl.types import GREEDY, Ending, Metrics, Prompt, Rollout, Sampling

LOOK_S = 0.02
"""To wait for turns before another look at environments that are at work."""
DRAIN_S = 0.001
"""To wait for further turns that have ended with the first."""

LONGEST_TOKEN = 16
"""Characters of a token: messages with more for each token of a context are refused unread."""
MOST_TOOL_LISTS = 64


class Environments(Protocol):
    """An `EnvironmentPool`, or those of all nodes of a run."""

    @property
    def num_waiting(self) -> int: ...

    def begin(self, episode: str, start: Mapping[str, Any]) -> None:
        """The answer is an event."""

    def step(self, episode: str, turn: Mapping[str, Any]) -> None:
        """The answer is an event."""

    def end(self, episode: str) -> None:
        """No event comes for the episode any more."""

    def events(self, wait_s: float = 0.0) -> list[Event]:
        """Waits up to `wait_s` for the first event. Raises ClusterError if no more can come."""

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class Playing(Conversation):
    """The prompt is the row's, with what the environment adds to it in `reset`."""

    id: str
    row: Prompt
    sample: int
    sampling: Sampling
    """Of the first turn; `max_tokens` is for all turns and what comes between."""
    seed: int = 0
    attempt: int = 0
    wave: int = 0
    """Calls of `forget` before this episode: engines may still answer requests of those."""
    asked: str | None = None
    """The id of the turn that is being sampled."""
    began: float = math.inf
    """time.monotonic() of the first request."""
    counts: Counter[str] = field(default_factory=Counter)
    waits_s: list[float] = field(default_factory=list)
    info: dict[str, float] = field(default_factory=dict)
    deltas: ChatDeltas | None = None
    """None if the environment has shown no tools of its own."""

    def __post_init__(self) -> None:
        self.prompt, self.keeps_support = self.row, self.sampling.returns_support

    @property
    def name(self) -> str:
        """The name of this attempt for the environment processes."""
        return f"{self.id}#{self.attempt}" if self.wave == 0 else f"{self.id}#{self.wave}.{self.attempt}"

    def room(self, max_model_len: int) -> int:
        """Return how many further tokens fit."""
        return min(self.sampling.max_tokens, max_model_len - len(self.prompt.token_ids)) - self.length

    def again(self) -> Playing:
        retried = Playing(self.id, self.row, self.sample, self.sampling, self.seed, self.attempt + 1, self.wave)
        retried.counts["retries"] = self.attempt + 1
        return retried

    def comes_to(self, state: str | None, messages: Sequence[Message]) -> None:
        """The state that the environment names, else what its messages say."""
        named = "\0".join(f"{message['role']}\0{message['content']}" for message in messages) if state is None else state
        digest = hashlib.blake2b(named.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        self.state = int.from_bytes(digest, "big", signed=True)

    def rollout(self, ended: Ending, failure: tuple[str, str] | None = None) -> Rollout:
        kind, cause = failure if failure is not None else (None, None)
        rollout = self.joined(
            self.sample,
            ended,
            counts={name: float(value) for name, value in self.counts.items()},
            waits_s=tuple(self.waits_s),
            info=dict(self.info),
            failure=kind,
            failure_cause=cause,
        )
        return rollout if self.turns else dataclasses.replace(rollout, prompt=self.row)


class EpisodePool(WholeBatches):
    """Used from one thread, as the pool below it.

    An episode's tokens are a single sequence: the prompt, then turns as they were sampled, with the context
    between them (`chat_deltas.py`). The same prompt, seed and answers of the environment give the same
    episode.
    """

    longest_wait_s = 0.5

    def __init__(
        self,
        turns: TurnPool,
        environments: Environments,
        deltas: ChatDeltas,
        *,
        max_model_len: int,
        max_turns: int | None = None,
        timeout_s: float | None = None,
        retries: int = 2,
        quiet_s: float = 3600.0,
    ) -> None:
        """`timeout_s` is from the first turn, `retries` for lost processes, `quiet_s` without turn or
        answer."""
        self.turns, self.environments, self.deltas = turns, environments, deltas
        self.max_model_len, self.max_turns, self.timeout_s = max_model_len, max_turns or math.inf, timeout_s or math.inf
        self.retries, self.quiet_s = retries, quiet_s
        self._wanted: dict[str, Playing] = {}
        self._of_turn: dict[str, Playing] = {}
        """Episodes by the id of the turn that is being sampled."""
        self._ended: dict[str, Rollout] = {}
        self._due: dict[str, tuple[Prompt, Sampling]] = {}
        """By the episode's id."""
        self._shown: dict[tuple[str, str], Prompt] = {}
        """Equal prompts are one object."""
        self._deltas_with = lru_cache(MOST_TOOL_LISTS)(lambda tools: self.deltas.with_tools(json.loads(tools)))
        """Most episodes show the same tools."""
        self._last_news = time.monotonic()
        self._wave = 0

    @property
    def version(self) -> int:
        return self.turns.version

    def sync_weights(self, actor: Any) -> Metrics:
        """Episodes go on with the new weights from their next token."""
        return self.turns.sync_weights(actor)

    def keep_weights(self) -> AbstractContextManager[None]:
        return self.turns.keep_weights()

    def submit(self, prompts: Sequence[Prompt], n: int, sampling: Sampling, *, greedy: bool = False) -> list[str]:
        """Returns ids, by prompt and sample. `sampling.max_tokens` is for all that follows the prompt."""
        prompt_samples = [(prompt, sample) for prompt in prompts for sample in [*range(n), *([GREEDY] if greedy else [])]]
        ids = [rollout_id(prompt, sample) for prompt, sample in prompt_samples]
        if len({*ids} - self._wanted.keys() - self._ended.keys()) < len(ids):
            raise ValueError(f"some of these rollouts are being sampled already, or a prompt comes twice: {', '.join(ids[:5])}")
        self._last_news = time.monotonic()
        for name, (prompt, sample) in zip(ids, prompt_samples, strict=True):
            seed = sample_seed(sampling.seed, prompt.uid, sample) or 0
            self._begin(Playing(name, prompt, sample, sampling_of(sampling, prompt.uid, sample), seed, wave=self._wave))
        return ids

    def _hand_over(self, request_id: str) -> Rollout:
        return self._ended.pop(request_id)

    def forget(self, ids: Collection[str]) -> None:
        forgotten = [self._wanted.pop(name) for name in ids if name in self._wanted]
        self._wave += bool(forgotten)
        self._withdraw(*forgotten)
        for playing in forgotten:
            self.environments.end(playing.name)
        for name in ids:
            self._ended.pop(name, None)

    def rest(self) -> None:
        if not self._wanted and not self._ended:
            self.turns.rest()

    def close(self) -> None:
        self.environments.close()

    def _collect(self, wait_s: float) -> None:
        """Take in what turns and environments have ended, for up to `wait_s`, and ask for what follows."""
        news = self._hear(0.0)
        self._ask_due()
        if news or self._ended:
            wait_s = 0.0
        if self._of_turn:
            first = min(wait_s, LOOK_S) if self.environments.num_waiting else wait_s
            news += self._take_turns(max(first, DRAIN_S))
        elif wait_s and self.environments.num_waiting:
            news += self._hear(wait_s)
        self._ask_due()
        self._past_deadlines()
        if news:
            self._last_news = time.monotonic()
        elif time.monotonic() - self._last_news > self.quiet_s:
            raise ClusterError(
                f"no turn and no answer of an environment for {self.quiet_s:.0f} s; {len(self._of_turn)} turns are being "
                f"sampled, {self.environments.num_waiting} environments are at work"
            )

    def _hear(self, wait_s: float) -> int:
        """Take in what environments have answered; return the number of answers."""
        events = self.environments.events(wait_s)
        for event in events:
            self._happened(event)
        return len(events)

    def _take_turns(self, wait_s: float) -> int:
        """Take in the turns that have ended; return their number."""
        turns = list(itertools.islice(self.turns.completed(wait_s), 1))
        if turns:
            turns += self.turns.completed(DRAIN_S)
        for turn in turns:
            self._turned(turn)
        return len(turns)

    def _ask_due(self) -> None:
        due, self._due = self._due, {}
        if due:
            episodes = [self._wanted[name] for name in due]
            ids = self.turns.ask([(*due[episode.id], episode.name) for episode in episodes])
            for turn, playing in zip(ids, episodes, strict=True):
                playing.asked, self._of_turn[turn] = turn, playing

    def _past_deadlines(self) -> None:
        first = time.monotonic() - self.timeout_s
        for playing in [episode for episode in self._wanted.values() if episode.began < first]:
            self._withdraw(playing)
            self._finish(playing, "time")

    def _begin(self, playing: Playing) -> None:
        row = playing.row
        self._wanted[playing.id] = playing
        messages: Sequence[Mapping[str, Any]] = row.messages or ({"role": "user", "content": row.text},)
        start = {
            "uid": row.uid,
            "data_source": row.data_source,
            "messages": [dict(message) for message in messages],
            "ground_truth": row.ground_truth,
            "extra_info": row.extra_info,
            "seed": playing.seed,
        }
        self.environments.begin(playing.name, start)

    def _happened(self, event: Event) -> None:
        playing = self._wanted.get(event.episode.rpartition("#")[0])
        if playing is None or playing.name != event.episode:  # of an attempt that is over
            return
        if event.what == "lost":
            self._try_again(playing, event.cause)
            return
        playing.waits_s.append(event.seconds)
        if event.what == "timeout":
            if not playing.turns:
                self._fail(playing, "environment_timeout", event.cause)
            else:
                playing.counts["environment_timeouts"] += 1
                self._finish(playing, "time")
        elif event.what == "failed" or event.answer is None:
            self._fail(playing, "environment_error", outside(event.cause))
        else:
            self._answered(playing, event.answer)

    def _answered(self, playing: Playing, answer: Mapping[str, Any]) -> None:
        answer = outside(answer)
        playing.info |= answer["info"]
        playing.counts.update(answer["counts"])
        try:
            self._go_on(playing, answer, answer["messages"])
        except (ConfigError, DataError) as error:
            self._fail(playing, "environment_error", str(error))

    def _go_on(self, playing: Playing, answer: Mapping[str, Any], messages: list[Any]) -> None:
        """Finish the episode, or have its next turn sampled. Raises ConfigError and DataError."""
        size = sum(len(message["content"]) for message in messages)
        # Known before the messages are tokens.
        is_too_long = size > LONGEST_TOKEN * self.max_model_len
        if not playing.turns:
            if is_too_long:
                raise DataError(f"the environment adds {size:,} characters to the prompt")
            if answer["done"]:
                raise DataError("the environment was done before the first turn")
            if answer["tools"]:
                playing.deltas = self._deltas_with(json.dumps(answer["tools"]))
            self._shown_first(playing, messages, replaces=bool(answer["replaces_prompt"]))
        else:
            if answer["reward"] is not None:
                playing.turns[-1] = dataclasses.replace(playing.turns[-1], reward=answer["reward"])
            ended: Ending | None = None
            if answer["done"]:
                ended = "done"
            elif playing.finish_reason != "stop":
                ended = "tokens"
            elif len(playing.turns) >= self.max_turns:
                ended = "turns"
            elif is_too_long:
                ended = "tokens"
            elif not messages:
                raise DataError("an observation that does not end the episode has no message")
            if ended is None:
                between = (playing.deltas or self.deltas).between
                plain = playing.prompt.messages is None
                delta = between(messages, ended=playing.finish_reason == "stop", plain=plain)
                playing.add_context(delta.token_ids)
                if delta.control_words:
                    playing.counts["control_words"] += 1
            playing.messages += messages
            if ended is not None:
                self._finish(playing, ended)
                return
        playing.comes_to(answer["state"], messages)
        self._next_turn(playing)

    def _shown_first(self, playing: Playing, messages: list[Any], *, replaces: bool) -> None:
        """The environment adds messages to the prompt, or `replaces` it by them."""
        if not messages:
            return
        row = playing.row
        deltas = playing.deltas or self.deltas
        key = (row.uid, deltas.shown_tools + repr(messages))
        if key not in self._shown:
            if row.messages is None and not replaces:
                delta = deltas.between(messages, ended=False, plain=True)
                text, all_messages = row.text + delta.text, None
                ids = [*row.token_ids.tolist(), *delta.token_ids.tolist()]
            else:
                kept_messages = () if replaces else row.messages or ()
                all_messages = (*kept_messages, *messages)
                delta = deltas.prompt(kept_messages, messages)
                text, ids = delta.text, delta.token_ids.tolist()
            self._shown[key] = dataclasses.replace(
                row, token_ids=np.asarray(ids, dtype=np.int32), text=text, messages=all_messages
            )
            if len(self._shown) > 4 * len(self._wanted) + 16:
                del self._shown[next(iter(self._shown))]
        playing.prompt = self._shown[key]

    def _next_turn(self, playing: Playing) -> None:
        room = playing.room(self.max_model_len)
        if room < 1:
            if not playing.turns:
                limit = f"the engine's longest sequence of {self.max_model_len} tokens"
                raise DataError(f"the prompt with what the environment adds leaves no room in {limit}")
            self._finish(playing, "tokens")
            return
        playing.began = min(playing.began, time.monotonic())
        sampling = turn_sampling(playing.sampling, len(playing.turns), room)
        uid = f"{playing.name}/turn-{len(playing.turns)}"
        prompt = Prompt(uid, playing.context(), "", playing.prompt.data_source)
        self._due[playing.id] = prompt, sampling

    def _turned(self, turn: Rollout) -> None:
        playing = self._of_turn.pop(rollout_id(turn.prompt, turn.sample_index), None)
        if playing is None:
            return
        playing.asked = None
        ids = np.asarray(turn.response_ids)
        text = self.deltas.turn_text(ids, special=False)
        playing.add_turn(turn, text)
        # Calls inside of a thought are none, also of one that the template has opened.
        opened = self.deltas.opened_thought if playing.prompt.messages is not None else ""
        self.environments.step(
            playing.name,
            {
                "index": len(playing.turns) - 1,
                "text": text,
                "raw_text": opened + self.deltas.turn_text(ids, special=True),
                "finish_reason": turn.finish_reason,
                "token_ids": ids.tolist(),
                "is_last": len(playing.turns) >= self.max_turns,
                "context_tokens": playing.turns[-1].context_tokens,
            },
        )

    def _try_again(self, playing: Playing, cause: str) -> None:
        self._withdraw(playing)
        if playing.attempt >= self.retries:
            self._fail(playing, "environment_error", f"{cause} ({playing.attempt + 1} attempts)")
            return
        self._begin(playing.again())

    def _withdraw(self, *episodes: Playing) -> None:
        for playing in episodes:
            self._due.pop(playing.id, None)
        if turn_ids := [playing.asked for playing in episodes if playing.asked is not None]:
            for turn in turn_ids:
                del self._of_turn[turn]
            self.turns.forget(turn_ids)

    def _fail(self, playing: Playing, kind: str, cause: str) -> None:
        self._finish(playing, "failed", (kind, cause))

    def _finish(self, playing: Playing, ended: Ending, failure: tuple[str, str] | None = None) -> None:
        self.environments.end(playing.name)
        del self._wanted[playing.id]
        self._ended[playing.id] = playing.rollout(ended, failure)
