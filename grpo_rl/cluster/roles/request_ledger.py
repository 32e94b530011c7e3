"""A record of requests and their replicas: each request is answered once, whatever becomes of the replicas."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Hashable, Iterable
from typing import Generic, TypeVar

from grpo_rl.types import Request

HOMES = 2**17
"""Conversations whose replica is remembered."""
W = TypeVar("W", bound=Hashable)


class Ledger(Generic[W]):
    """The unanswered requests: waiting, or in flight at exactly one replica. More may be added at any time."""

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        self.waiting: deque[Request] = deque(requests)
        self.in_flight: dict[W, dict[str, Request]] = {}
        """The replicas that may be asked, and the requests that each has, in the order given."""
        self._homes: OrderedDict[str, W] = OrderedDict()
        """The replica that each conversation was last at, of the newest ones."""

    @property
    def open(self) -> bool:
        """Return whether an answer is still missing."""
        return bool(self.waiting) or self.begun

    @property
    def begun(self) -> bool:
        """Return whether a replica has a request that it has not answered."""
        return any(self.in_flight.values())

    def add(self, requests: Iterable[Request]) -> None:
        """Queue more requests, behind those that wait."""
        self.waiting.extend(requests)

    def join(self, worker: W) -> None:
        """Let a replica be asked from now on."""
        self.in_flight.setdefault(worker, {})

    def leave(self, worker: W) -> int:
        """Ask a replica no more: its unanswered requests wait again, before all others. Return their number."""
        unfinished = self.in_flight.pop(worker, {})
        self.waiting.extendleft(reversed(unfinished.values()))
        return len(unfinished)

    def dispatch(self, capacity: int, refill_below: int | None = None) -> dict[W, list[Request]]:
        """Take waiting requests for the replicas with the fewest in flight, up to `capacity` each; they are in flight then.

        Replicas with `refill_below` or more get none now, so that each is sent many at a time. A request of a conversation goes
        where that was before, as long as there is room: that replica's prefix cache has what came before.
        """
        given: dict[W, list[Request]] = {}
        below = capacity if refill_below is None else refill_below
        hungry = [worker for worker, mine in self.in_flight.items() if len(mine) < below]
        while self.waiting and hungry:
            home = self._home(self.waiting[0], capacity)
            worker = min(hungry, key=lambda w: len(self.in_flight[w])) if home is None else home
            if len(self.in_flight[worker]) >= capacity:
                break
            request = self.waiting.popleft()
            if request.conversation:
                self._homes[request.conversation] = worker
                self._homes.move_to_end(request.conversation)
                if len(self._homes) > HOMES:
                    self._homes.popitem(last=False)
            self.in_flight[worker][request.request_id] = request
            given.setdefault(worker, []).append(request)
        return given

    def _home(self, request: Request, capacity: int) -> W | None:
        """Return the replica that has the conversation of a request, where it has room; None otherwise."""
        worker = self._homes.get(request.conversation) if request.conversation else None
        return worker if worker is not None and len(self.in_flight.get(worker, range(capacity))) < capacity else None

    def answered(self, worker: W, request_id: str) -> bool:
        """Note an answer; return whether it is the one that counts: the first, and from the request's replica."""
        return self.in_flight.get(worker, {}).pop(request_id, None) is not None

    def forget(self, request_ids: Collection[str]) -> None:
        """Expect no answer to these requests any more."""
        self.waiting = deque(request for request in self.waiting if request.request_id not in request_ids)
        for mine in self.in_flight.values():
            for request_id in mine.keys() & set(request_ids):
                del mine[request_id]
