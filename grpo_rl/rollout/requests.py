"""Names and seeds of requests, the same wherever a response is sampled, and pools of engines."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from grpo_rl.errors import WeightVersionError
from grpo_rl.types import GREEDY, Completion, Episode, Prompt, Request, Rollout, Sampling

if TYPE_CHECKING:
    from grpo_rl.protocols import RolloutPool


def rollout_id(prompt: Prompt, sample: int) -> str:
    return f"{prompt.uid}/{sample}"


def sampling_of(sampling: Sampling, uid: str, sample: int) -> Sampling:
    if sample == GREEDY:
        return replace(sampling, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0, keep_support=False, seed=None)
    return replace(sampling, seed=sample_seed(sampling.seed, uid, sample))


def sample_seed(seed: int | None, uid: str, sample: int) -> int | None:
    if seed is None:
        return None
    digest = hashlib.blake2b(f"{seed}:{uid}:{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def turn_sampling(sampling: Sampling, turn: int, max_tokens: int) -> Sampling:
    """The first turn is sampled as a response would be, the others with further seeds."""
    seed = sampling.seed if turn == 0 else sample_seed(sampling.seed, "turn", turn)
    return replace(sampling, seed=seed, max_tokens=max_tokens)


class WholeBatches:
    """Rollouts by their ids: those that are `_wanted`, and those that have `_ended`."""

    longest_wait_s = 4.0
    _wanted: dict[str, Any]
    _ended: dict[str, Any]

    def _collect(self, wait_s: float) -> None:
        """Add completions to `_ended`; wait up to `wait_s` for the first."""
        raise NotImplementedError

    def _hand_over(self, request_id: str) -> Rollout:
        raise NotImplementedError

    def completed(self, wait_s: float | None = None, only: Collection[str] | None = None) -> Iterator[Rollout]:
        """Yield rollouts as they end, until none of `only` is missing, or for `wait_s` seconds.

        Others are kept for a later call. More may be submitted meanwhile, and an iteration that is given up
        loses nothing. Raises WeightVersionError for a token of weights older than `max_staleness` allows,
        ClusterError if a replica cannot be replaced, or nothing ends for `trainer.step_timeout_s`.
        """
        deadline = None if wait_s is None else time.monotonic() + wait_s
        chosen = None if only is None else set(only)
        while True:
            ready = [name for name in self._ended if chosen is None or name in chosen]
            for name in ready:
                # The caller may do anything between two of them, such as to forget some.
                if name in self._ended:
                    yield self._hand_over(name)
            if ready:
                continue
            if not self._wanted or (chosen is not None and chosen.isdisjoint(self._wanted)):
                return
            left_s = self.longest_wait_s if deadline is None else min(self.longest_wait_s, deadline - time.monotonic())
            if left_s < 0:
                return
            self._collect(left_s)

    def generate(
        self: RolloutPool,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        on_finish: Callable[[Rollout], None] | None = None,
        *,
        greedy: bool = False,
    ) -> list[Rollout]:
        ids = self.submit(prompts, n, sampling, greedy=greedy)
        finished: dict[str, Rollout] = {}
        try:
            for rollout in self.completed(only=ids):
                finished[rollout_id(rollout.prompt, rollout.sample_index)] = rollout
                if on_finish is not None:
                    on_finish(rollout)
        except BaseException:
            self.forget(ids)
            raise
        self.rest()
        return [finished[request_id] for request_id in ids]


class RequestPool(WholeBatches):
    """What pools of engines share; `protocols.RolloutPool` documents its methods."""

    def __init__(self, max_staleness: int | None) -> None:
        self.max_staleness = max_staleness
        self.version = 0
        self._wanted: dict[str, tuple[Prompt, int]] = {}
        self._ended: dict[str, Completion] = {}
        """Not handed over yet, in the order of their ends."""

    def _send(self, requests: list[Request], *, at_once: bool) -> None:
        """Give requests to the engines now, or with the next `_collect`."""
        raise NotImplementedError

    def submit(self, prompts: Sequence[Prompt], n: int, sampling: Sampling, *, greedy: bool = False) -> list[str]:
        """Raises ValueError, and asks for none, if a rollout of this prompt was not handed over yet."""
        samples = [*range(n), *([GREEDY] if greedy else [])]
        asked = [(prompt, sample, sampling_of(sampling, prompt.uid, sample), "") for prompt in prompts for sample in samples]
        return self._add(asked, at_once=True)

    def ask(self, turns: Sequence[tuple[Prompt, Sampling, str]]) -> list[str]:
        """Raises ValueError as `submit` does. Requests go to the engines with the next `completed`."""
        return self._add([(prompt, 0, sampling, conversation) for prompt, sampling, conversation in turns], at_once=False)

    def _add(self, asked: Sequence[tuple[Prompt, int, Sampling, str]], *, at_once: bool) -> list[str]:
        rollouts = {rollout_id(prompt, sample): (prompt, sample) for prompt, sample, *_ in asked}
        requests = [
            Request(rollout_id(prompt, sample), prompt.token_ids, sampling, conversation)
            for prompt, sample, sampling, conversation in asked
        ]
        taken = sorted(rollouts.keys() & self._wanted.keys())
        if taken or len(rollouts) < len(requests):
            raise ValueError(f"rollouts are being sampled already: {', '.join(taken[:5]) or 'a prompt comes twice'}")
        self._wanted |= rollouts
        self._send(requests, at_once=at_once)
        return list(rollouts)

    def forget(self, ids: Collection[str]) -> None:
        for name in ids:
            self._wanted.pop(name, None)
            self._ended.pop(name, None)

    def _hand_over(self, request_id: str) -> Rollout:
        completion, asked = self._ended.pop(request_id), self._wanted.pop(request_id)
        check_versions(completion, self.version, self.max_staleness)
        return rollout_of(*asked, completion)


def rollout_of(prompt: Prompt, sample: int, completion: Completion, episode: Episode | None = None) -> Rollout:
    return Rollout(
        prompt=prompt,
        sample_index=sample,
        response_ids=completion.response_ids,
        rollout_logprobs=completion.logprobs,
        finish_reason=completion.finish_reason,
        versions=completion.versions,
        support=completion.support,
        text=completion.text,
        episode=episode,
        cached_tokens=completion.cached_tokens,
    )


def check_versions(completion: Completion, version: int, max_staleness: int | None) -> None:
    """Raise WeightVersionError unless every token's weights are at most `max_staleness` versions old."""
    name = f"rollout {completion.request_id}"
    for sampled_with, _ in completion.versions:
        oldest = 0 if max_staleness is None else version - max_staleness
        if not oldest <= sampled_with <= version:
            allowed = f", and at most {max_staleness} versions older are allowed" if max_staleness else ""
            raise WeightVersionError(
                f"{name} was sampled with weights of version {sampled_with}, the actor's are {version}{allowed}"
            )
    labelled = sum(num_tokens for _, num_tokens in completion.versions)
    if labelled != completion.num_tokens:
        raise WeightVersionError(f"{name} has {completion.num_tokens} tokens, and weight versions for {labelled}")
