"""Who samples what: every request is answered once, whatever becomes of those who were asked."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from grpo_rl.types import Request

W = TypeVar("W", bound=Hashable)


class Ledger(Generic[W]):
    """The requests of one generation: waiting, in flight with one owner each, or answered."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self.waiting: deque[Request] = deque(requests)
        self.in_flight: dict[W, dict[str, Request]] = {}
        """What each one that may be asked is at, in the order given."""

    @property
    def open(self) -> bool:
        """Whether an answer is still missing."""
        return bool(self.waiting) or any(self.in_flight.values())

    def join(self, worker: W) -> None:
        """From now on this one may be asked."""
        self.in_flight.setdefault(worker, {})

    def leave(self, worker: W) -> int:
        """This one will not answer: what it was at is asked of others, first of all. How many requests that are."""
        unfinished = self.in_flight.pop(worker, {})
        self.waiting.extendleft(reversed(unfinished.values()))
        return len(unfinished)

    def shares(self, capacity: int) -> dict[W, list[Request]]:
        """Waiting requests for those with the fewest in flight, up to `capacity` each; they are in flight then."""
        shares: dict[W, list[Request]] = {}
        while self.waiting and self.in_flight:
            worker = min(self.in_flight, key=lambda w: len(self.in_flight[w]))
            if len(self.in_flight[worker]) >= capacity:
                break
            request = self.waiting.popleft()
            self.in_flight[worker][request.request_id] = request
            shares.setdefault(worker, []).append(request)
        return shares

    def answered(self, worker: W, request_id: str) -> bool:
        """Whether this is the answer that was waited for: from the request's owner, and its first."""
        return self.in_flight.get(worker, {}).pop(request_id, None) is not None
