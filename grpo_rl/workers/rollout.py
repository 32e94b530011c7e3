"""A rollout replica: an engine, the thread that steps it, and the calls that may come while it samples."""

from __future__ import annotations

import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import resource_tracker, util
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from grpo_rl import freed_memory
from grpo_rl.columns import Block
from grpo_rl.errors import ClusterError
from grpo_rl.faults import fault_point
from grpo_rl.rollout.engine import EngineSpec, NcclRendezvous, RolloutEngine, Wakeable
from grpo_rl.rollout.engines import ENGINES
from grpo_rl.rollout.reports import Report, pack
from grpo_rl.rollout.weights import WeightBucket
from grpo_rl.types import Completion, Request

if TYPE_CHECKING:
    from grpo_rl.rollout.adapter_merge import AdapterMerge

T = TypeVar("T")
_Command = tuple[str, Callable[[RolloutEngine], Any], "Future[Any]"]

_IDLE_WAIT_S = 1.0
MIN_BATCH_S = 0.005


class RolloutWorker:
    """One engine and the thread that steps it.

    The engine lives in that thread alone. Other calls run between two steps, from any number of threads; each
    waits at most `call_timeout_s`. An error of a call is raised to its caller; an error in a step ends the
    worker, and every later call raises it. During a weight update the thread takes buckets and steps no
    further.
    """

    def __init__(self, spec: EngineSpec, start_timeout_s: float, call_timeout_s: float) -> None:
        # It imports transformers, which a process that only describes workers does not need.
        from grpo_rl.rollout.model_info import response_decoder

        if spec.tensor_parallel_size > 1 or spec.separate_process:
            track_apart()
        self.spec = spec
        self._call_timeout_s = call_timeout_s
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._ended: list[Completion] = []
        self._has_more = False
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._closed = False
        self._updating = False
        """Read and written in the engine's thread."""
        self._late: list[Request] = []
        """Requests that came during an update."""
        self._decode = response_decoder(spec)
        self._merge: AdapterMerge | None = None
        """Adds adapters that arrive alone to the model's weights."""
        if spec.adapter_scaling is not None:
            from grpo_rl.rollout.adapter_merge import AdapterMerge

            self._merge = AdapterMerge(spec)
        self._at: tuple[str, float] | None = None
        self._longest: dict[str, float] = {}
        started: Future[None] = Future()
        self.thread = threading.Thread(target=self._run, args=(started,), name="rollout-engine", daemon=True)
        self.thread.start()
        self._wait(started, start_timeout_s, "start")

    def submit(self, requests: Sequence[Request]) -> None:
        """Raises ValueError, and queues none, if one of the requests does not fit."""
        self._call("submit", lambda engine: self._add(engine, requests))
        fault_point("rollout.submitted")

    def _add(self, engine: RolloutEngine, requests: Sequence[Request]) -> None:
        if self._updating:  # a report that brought them was overtaken by the start of an update
            self._late += requests
        else:
            engine.submit(requests)

    def poll(self, timeout_s: float, longest_batch_s: float = 0.0, enough: int = 1) -> list[Completion]:
        """Return what ended since the last poll, as soon as there is something, or nothing after `timeout_s`.

        It waits `MIN_BATCH_S` more after the first, and up to `longest_batch_s` for `enough`.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._ended:
                self._check_alive()
                seconds_left = deadline - time.monotonic()
                if seconds_left <= 0:
                    return []
                self._changed.wait(seconds_left)
        began = time.monotonic()
        time.sleep(min(MIN_BATCH_S, max(0.0, deadline - began)))
        deadline = min(deadline, began + longest_batch_s)
        with self._changed:
            while 0 < len(self._ended) < enough and self._has_more and (seconds_left := deadline - time.monotonic()) > 0:
                self._changed.wait(seconds_left)
            ended, self._ended = self._ended, []
        return [replace(completion, text=self._decode(np.asarray(completion.response_ids))) for completion in ended]

    def report(
        self, further: Sequence[Request], timeout_s: float, longest_batch_s: float, enough: int
    ) -> tuple[list[Report], Block]:
        """Queue further requests; return `poll`'s as reports, and tokens that stay in the object store."""
        if further:
            self.submit(further)
        return pack(self.poll(timeout_s, longest_batch_s=longest_batch_s, enough=enough))

    def connect(self, rendezvous: NcclRendezvous) -> None:
        self._call("connect", lambda engine: engine.connect(rendezvous))

    def updates_in_flight(self) -> bool:
        return self._call("updates_in_flight", lambda engine: engine.updates_in_flight)

    def start_weight_update(self, version: int) -> None:
        def start(engine: RolloutEngine) -> None:
            engine.start_weight_update(version)
            self._updating = True

        self._call("start_weight_update", start)

    def load_bucket(self, bucket: WeightBucket) -> None:
        fault_point("rollout.weights.bucket")
        load = None if self._merge is None else self._merge.receive
        self._call("load_bucket", lambda engine: (load or engine.load_bucket)(bucket))

    def finish_weight_update(self, keep_cache: bool = False) -> int:
        """Return the version that is live now; see RolloutEngine for `keep_cache`."""
        fault_point("rollout.weights.before_finish")

        def finish(engine: RolloutEngine) -> int:
            for bucket in () if self._merge is None else self._merge.buckets():
                engine.load_bucket(bucket)
            engine.finish_weight_update(keep_cache)
            self._updating = False
            freed_memory.give_back()
            late, self._late = self._late, []
            if late:
                engine.submit(late)
            return engine.weight_version

        return self._call("finish_weight_update", finish)

    def received_digests(self) -> dict[str, str]:
        merge = self._merge
        return self._call(
            "received_digests", lambda engine: engine.received_digests() if merge is None else dict(merge.digests)
        )

    def sleep(self) -> None:
        self._call("sleep", lambda engine: engine.sleep())

    def wake_up(self, what: Wakeable = "all") -> None:
        self._call("wake_up", lambda engine: engine.wake_up(what))

    def activity(self) -> tuple[str, float, float | None] | None:
        """What the engine's thread does, for how many seconds, the longest so far (None if it compiles)."""
        at = self._at
        compiles = self.spec.device == "cuda" or not self.spec.enforce_eager
        return None if at is None else (at[0], time.monotonic() - at[1], None if compiles else self._longest.get(at[0]))

    def close(self, timeout_s: float = 60.0) -> None:
        """Stop the thread and free the engine, also twice. Raises ClusterError if it does not stop."""
        self._closed = True
        self._commands.put(None)
        self.thread.join(timeout_s)
        if self.thread.is_alive():
            raise ClusterError(f"the rollout engine did not stop within {timeout_s:g} s")

    def _call(self, what: str, function: Callable[[RolloutEngine], T]) -> T:
        answer: Future[T] = Future()
        with self._changed:
            self._check_alive()
            self._commands.put((what, function, answer))
        return self._wait(answer, self._call_timeout_s, what)

    def _wait(self, answer: Future[T], timeout_s: float, what: str) -> T:
        try:
            return answer.result(timeout_s)
        except TimeoutError as error:
            if answer.done():
                raise  # the function's own TimeoutError
            raise ClusterError(f"the rollout engine did not answer {what} within {timeout_s:g} s") from error

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise ClusterError(f"the rollout engine failed: {type(self._failure).__name__}: {self._failure}") from self._failure
        if self._closed:
            raise ClusterError("the rollout worker is closed")

    def _run(self, started: Future[None]) -> None:
        try:
            engine = ENGINES.get(self.spec.name)(self.spec)
        except BaseException as error:  # whatever it is belongs to the caller that waits
            self._fail(error)
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            while self._serve(engine):
                if engine.num_unfinished and not self._updating:
                    with self._doing("an engine step"):
                        self._step(engine)
        except BaseException as error:  # handed to every caller from now on
            self._fail(error)
        finally:
            self._refuse_waiting()
            engine.close()

    def _serve(self, engine: RolloutEngine) -> bool:
        """Run the commands that wait; if there is nothing to sample, wait for one. False: stop."""
        try:
            while True:
                idle = self._updating or engine.num_unfinished == 0
                command = self._commands.get(idle, _IDLE_WAIT_S)
                if command is None:
                    return False
                what, function, answer = command
                with self._doing(what):
                    try:
                        answer.set_result(function(engine))
                    except Exception as error:  # the caller's to handle; the engine goes on
                        answer.set_exception(error)
        except queue.Empty:
            return True

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        self._at = (what, began)
        try:
            yield
        finally:
            self._at = None
            self._longest[what] = max(self._longest.get(what, 0.0), time.monotonic() - began)

    def _step(self, engine: RolloutEngine) -> None:
        fault_point("rollout.step")
        ended = engine.step()
        with self._changed:
            self._has_more = engine.num_unfinished > 0
            if ended:
                self._ended.extend(ended)
                self._changed.notify_all()
        if not engine.num_unfinished:
            freed_memory.give_back()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure, self._has_more = error, False
            self._changed.notify_all()

    def _refuse_waiting(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            if command is not None:
                command[2].set_exception(ClusterError(f"the rollout engine stopped: {self._failure or 'closed'}"))


_trackers: list[subprocess.Popen[bytes]] = []


def track_apart() -> None:
    """Ray ends a dead worker's group: without Python's tracker, children's shared memory would stay."""

    def spawn(path: str, arguments: Sequence[Any], passed: Sequence[int]) -> int:
        words = [os.fsdecode(word) for word in arguments]
        tracker = subprocess.Popen(words, executable=path, pass_fds=passed, process_group=0)
        # It is told from others by its command line (`launcher.is_tracker`), which is empty for an instant of its start.
        while not Path(f"/proc/{tracker.pid}/cmdline").read_bytes() and tracker.poll() is None:
            time.sleep(0.001)
        # Kept, or its destructor would warn of a child that still runs.
        _trackers.append(tracker)
        return tracker.pid

    original_spawn = util.spawnv_passfds
    util.spawnv_passfds = spawn  # type: ignore[assignment]
    try:
        resource_tracker.ensure_running()
    finally:
        util.spawnv_passfds = original_spawn
