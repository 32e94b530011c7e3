"""A language model as judge: a process that asks an OpenAI-compatible endpoint about many responses at once.

It loads no torch; a user's parser runs in it alone.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import Any

import httpx

from grpo_rl.config.schema.reward import JudgeConfig
from grpo_rl.control_words import outside
from grpo_rl.errors import RewardError
from grpo_rl.processes.child import Parent, serve
from grpo_rl.rewards.contract import LARGEST_REWARD, Outcome, RewardFailure, RewardResult, Sample, message_of
from grpo_rl.rewards.models.judge_answers import Criterion, Parser, aggregated, criteria_of, mark_of, parser_for
from grpo_rl.rewards.models.judge_question import ERROR, INVALID, TIMEOUT, JudgeSpec, question

FIRST_ANSWER_S = 10.0
"""For an answer to the check before the start."""
RETRIED = (408, 425, 429)
"""Statuses that may be over at the next try, as all of 5xx."""
LARGEST_ANSWER = 4_000_000
"""Bytes of an answer."""
SHOWN = 200
LONGEST_BACKOFF_S = 60.0


class _Passing(RewardFailure):
    """May be over at the next try, which begins after `after_s` seconds at the earliest."""

    def __init__(self, kind: str, cause: str, after_s: float = 0.0) -> None:
        super().__init__(kind, cause)
        self.after_s = after_s


class Judge:
    def __init__(self, spec: JudgeSpec, progressed: Callable[[], None] = lambda: None) -> None:
        """`progressed` is called after each request that has ended."""
        self.config, self._spec, self._progressed = spec.config, spec, progressed
        self._key = os.environ.get(self.config.api_key_env or "")
        self._headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._parser = parser_for(self.config.parser)
        self._client = httpx.AsyncClient(
            base_url=str(self.config.base_url).rstrip("/"),
            headers=self._headers | {"Content-Type": "application/json"},
            timeout=self.config.timeout_s,
            limits=httpx.Limits(max_connections=self.config.max_concurrency),
        )
        self._changed = asyncio.Condition()
        self._num_running, self._most_running, self._interval_s, self._next_start = 0, 0, 0.0, 0.0

    async def allow(self, most_running: int, interval_s: float) -> None:
        async with self._changed:
            self._most_running, self._interval_s = most_running, interval_s
            self._changed.notify_all()

    def refuse_absent(self) -> None:
        place = f"reward.judge.base_url={self.config.base_url}"
        try:
            answer = httpx.get(f"{str(self.config.base_url).rstrip('/')}/models", headers=self._headers, timeout=FIRST_ANSWER_S)
        except httpx.HTTPError as error:
            raise RewardError(
                f"{place}: nobody answers there ({type(error).__name__}: {error}); start the server of the judge first"
            ) from error
        if answer.status_code in (401, 403):
            raise RewardError(
                f"{place}: the key is refused ({answer.status_code}); reward.judge.api_key_env names the environment variable "
                f"that has it: {self.config.api_key_env}"
            )

    async def judge(self, sample: Sample) -> Outcome:
        """The marks of a rubric's criteria are the `values`."""
        try:
            if self.config.rubric is None:
                return RewardResult(self._mark(await self._answer(sample), self._parser))
            try:
                criteria = self._spec.rubric or criteria_of(sample.extra_info["rubric"], self.config.rubric_aggregation)
            except ValueError as error:
                raise RewardFailure(INVALID, self._safe(f"extra_info.rubric of its row: {error}")) from error
            calls = [criteria] if self.config.rubric_calls == "together" else [(criterion,) for criterion in criteria]
            answers = await asyncio.gather(*(self._answer(sample, call) for call in calls), return_exceptions=True)
            marks: dict[str, float] = {}
            for call, answer in zip(calls, answers, strict=True):
                if isinstance(answer, BaseException):
                    raise answer
                names = [criterion.name for criterion in call]
                marks |= {name: self._mark(answer, partial(mark_of, name, names)) for name in names}
            return RewardResult(aggregated(criteria, marks, self.config), marks)
        except RewardFailure as failure:
            return failure

    async def _answer(self, sample: Sample, criteria: Sequence[Criterion] = ()) -> str:
        """The deadline counts from the first try, which waits for its turn."""
        body = self._body(question(self._spec.template, sample, criteria))
        async with self._changed:
            await self._changed.wait_for(lambda: self._num_running < self._most_running)
            self._num_running += 1
        try:
            await self._turn()
            async with asyncio.timeout(self.config.deadline_s):
                return await self._ask(body)
        except TimeoutError:
            raise RewardFailure(TIMEOUT, f"no answer within reward.judge.deadline_s={self.config.deadline_s:g}") from None
        finally:
            self._num_running -= 1
            async with self._changed:
                self._changed.notify_all()
            self._progressed()

    async def _ask(self, body: bytes) -> str:
        number = 0
        while True:
            try:
                return await self._try(body)
            except _Passing as failed:
                if number == self.config.retries:
                    tries = f", at the last of {number + 1} tries" if number else ""
                    raise RewardFailure(failed.kind, failed.cause + tries) from failed
                longest = min(LONGEST_BACKOFF_S, self.config.backoff_s * 2**number)
                # Drawn anew for each, so that requests that failed together do not come back together.
                await asyncio.sleep(max(failed.after_s, longest * random.uniform(0.5, 1.0)))
            number += 1
            await self._turn()

    async def _turn(self) -> None:
        """Wait until the rate limit lets the next request start."""
        current_s = time.monotonic()
        start = max(current_s, self._next_start)
        self._next_start = start + self._interval_s
        await asyncio.sleep(start - current_s)

    async def _try(self, body: bytes) -> str:
        received = bytearray()
        try:
            # The client's own limit is for each wait; this one is for the whole request.
            async with asyncio.timeout(self.config.timeout_s):
                async with self._client.stream("POST", "chat/completions", content=body) as response:
                    async for chunk in response.aiter_bytes():
                        received += chunk
                        if len(received) > LARGEST_ANSWER:
                            raise RewardFailure(ERROR, f"an answer of more than {LARGEST_ANSWER:,} bytes")
        except (TimeoutError, httpx.TimeoutException):
            raise _Passing(TIMEOUT, f"no answer within reward.judge.timeout_s={self.config.timeout_s:g}") from None
        except httpx.HTTPError as error:
            raise _Passing(ERROR, self._safe(f"{type(error).__name__}: {error}")) from None
        excerpt = self._safe(bytes(received[: 20 * SHOWN]).decode(errors="replace"))
        if response.status_code != 200:
            state = f"HTTP {response.status_code}{f': {excerpt}' if excerpt else ''}"
            if response.status_code in RETRIED or response.status_code >= 500:
                raise _Passing(ERROR, state, _retry_after(response.headers))
            raise RewardFailure(ERROR, state)
        try:
            answer = json.loads(received)
        except (ValueError, RecursionError) as error:
            raise _Passing(ERROR, f"an answer that is no chat completion ({error}): {excerpt}") from None
        try:
            return self._content_of(answer)
        except ValueError as error:
            # At temperature 0 the next try would say the same.
            is_completion = isinstance(answer, dict) and bool(answer.get("choices"))
            kind = RewardFailure if is_completion and not self.config.temperature else _Passing
            raise kind(ERROR, f"an answer that cannot be read ({error}): {excerpt}") from None

    def _content_of(self, answer: Any) -> str:
        """Raises ValueError for what is no chat completion, and for a text that was cut off."""
        try:
            choice = answer["choices"][0]
            content, reason = choice["message"]["content"], choice.get("finish_reason")
        except (TypeError, LookupError):
            content = reason = None
        if not isinstance(content, str):
            raise ValueError("no choices[0].message.content")
        if reason == "length":
            raise ValueError(
                f"it was cut at reward.judge.max_tokens={self.config.max_tokens}, before its score or inside of it"
            )
        return str(outside(content))

    def _mark(self, answer: str, parser: Parser) -> float:
        excerpt = f"its answer ends {self._safe(answer, end=True)!r}"
        try:
            value = parser(answer)
            number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
        except Exception as error:  # a user's parser may raise anything
            raise RewardFailure(INVALID, f"{self._safe(f'{type(error).__name__}: {error}')}; {excerpt}") from error
        if not math.isfinite(number):
            raise RewardFailure(INVALID, f"{self._safe(str(value))!r} is no finite number; {excerpt}")
        low, high = (0.0, 1.0) if self.config.rubric is not None else (-LARGEST_REWARD, LARGEST_REWARD)
        if self.config.rubric is None and self.config.template is None and self.config.parser == "score":
            low, high = 0.0, 10.0  # the scale that the built-in template names
        low = low if self.config.min_score is None else self.config.min_score
        high = high if self.config.max_score is None else self.config.max_score
        if not low <= number <= high:
            raise RewardFailure(INVALID, f"{number:g} is not within {low:g} to {high:g}; {excerpt}")
        return number

    def _body(self, question: str) -> bytes:
        system = [] if self.config.system is None else [{"role": "system", "content": self.config.system}]
        request = {
            "model": self.config.model,
            "messages": [*system, {"role": "user", "content": question}],
            "max_tokens": self.config.max_tokens,
            "temperature": self.config.temperature,
            **self.config.extra_body,
        }
        # A lone surrogate in a response has no bytes of its own.
        return json.dumps(request, ensure_ascii=False).encode("utf-8", errors="replace")

    def _safe(self, text: str, *, end: bool = False) -> str:
        """One line without the key, which an endpoint may send back."""
        if self._key:
            # Before anything is cut off: what was left of a key would not be found.
            text = text.replace(self._key, "<hidden>")
        text = " ".join(text.split())
        return text[-SHOWN:] if end else text[:SHOWN]


def _retry_after(headers: httpx.Headers) -> float:
    """Seconds; 0 if the endpoint names none, or a date."""
    try:
        return min(max(0.0, float(headers.get("retry-after", ""))), LONGEST_BACKOFF_S)
    except ValueError:
        return 0.0


def begin(setup: dict[str, Any], parent: Parent) -> Callable[[Any], None]:
    rubric = setup["rubric"] and tuple(Criterion(*criterion) for criterion in setup["rubric"])
    spec = JudgeSpec(JudgeConfig(**setup["config"]), setup["template"], rubric, None)
    judge = Judge(spec, progressed=lambda: parent.send({}))
    judge.refuse_absent()
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="judge", daemon=True).start()

    async def answer(number: int, sample: Sample) -> None:
        parent.send({"number": number} | message_of(await judge.judge(sample)))

    def handle(message: dict[str, Any]) -> None:
        if "share" in message:
            work = judge.allow(*message["share"])
        else:
            work = answer(message["number"], Sample(*message["sample"]))
        asyncio.run_coroutine_threadsafe(work, loop)

    return handle


if __name__ == "__main__":
    serve(sys.argv[1:], begin)
