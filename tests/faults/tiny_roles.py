"""Small stand-ins for an engine and an actor in real processes, whose every answer can be worked out in the test."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo_rl import faults
from grpo_rl.faults import fault_point
from grpo_rl.rollout.engine import EngineSpec
from grpo_rl.rollout.engines import ENGINES
from grpo_rl.rollout.weights import WeightBucket, WeightUpdate, pack
from grpo_rl.types import Batch, Completion, Request
from grpo_rl.workers.rollout import RolloutWorker

NAMES = ("first", "second", "third")
"""The tensors of the model, one bucket each."""
MAY_STEP = threading.Event()
"""The steps of the engine of this process wait for it."""
MAY_STEP.set()
BULK = 40_000
"""A response of so many tokens or more ends at once."""
NO_MODEL = str(Path(__file__).parent)
"""A folder without a tokenizer: responses have no text."""


def token(prompt: int, seed: int, position: int, weights: Sequence[int]) -> int:
    """Return the token that the engine samples: it depends on the request's seed and on all the weights."""
    return (prompt * 31 + seed % 9973 + position * 7 + sum(weights) * 1009) % 100_003


class TinyEngine:
    """Samples one token per request and step, or a bulk of them at once."""

    updates_in_flight = True

    def __init__(self, seconds_per_step: float) -> None:
        self.seconds = seconds_per_step
        self.weights = dict.fromkeys(NAMES, 0)
        self.most_tokens = math.inf
        """The number of tokens at which a request waits."""
        self.running: dict[str, tuple[Request, list[int], list[int]]] = {}
        """Each request with its tokens, and their versions."""
        self.update = WeightUpdate(dict.fromkeys(NAMES, ()), in_flight=True)

    @property
    def num_unfinished(self) -> int:
        return len(self.running)

    @property
    def weight_version(self) -> int:
        return self.update.version

    def submit(self, requests: Sequence[Request]) -> None:
        self.update.check_can_sample()
        self.running |= {request.request_id: (request, [], []) for request in requests}

    def step(self) -> list[Completion]:
        MAY_STEP.wait()
        time.sleep(self.seconds)
        ended = []
        for request, tokens, versions in list(self.running.values()):
            count = request.sampling.max_tokens
            if count >= BULK:
                del self.running[request.request_id]
                ids, spans = bulk_ids(int(request.prompt_ids[0]), count), ((self.weight_version, count),)
                ended.append(Completion(request.request_id, ids, np.full(count, -0.5), "length", spans))
                continue
            if len(tokens) >= self.most_tokens:
                continue
            seed = request.sampling.seed or 0
            tokens.append(token(int(request.prompt_ids[0]), seed, len(tokens), list(self.weights.values())))
            versions.append(self.weight_version)
            if len(tokens) == request.sampling.max_tokens:
                del self.running[request.request_id]
                spans = tuple((version, len(list(same))) for version, same in groupby(versions))
                ended.append(Completion(request.request_id, tokens, [-0.5] * len(tokens), "length", spans))
        return ended

    def abort_all(self) -> None:
        self.running.clear()

    def start_weight_update(self, version: int) -> None:
        self.update.start(version, self.num_unfinished)

    def load_bucket(self, bucket: WeightBucket) -> None:
        self.update.receive(bucket)
        self.weights |= {name: int(tensor) for name, tensor in bucket.tensors()}

    def finish_weight_update(self, keep_cache: bool = False) -> None:
        self.update.finish()

    def close(self) -> None:
        """Nothing is held."""


class TinyRollout(RolloutWorker):
    """A rollout worker, with faults that can be armed while it runs, and requests that can be made to wait."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec, start_timeout_s=60.0, call_timeout_s=600.0)

    def arm(self, spec: str) -> None:
        faults.arm(spec)

    def block_step(self) -> None:
        MAY_STEP.clear()

    def let_step(self) -> None:
        MAY_STEP.set()

    def take_weights_in_flight(self, may: bool) -> None:
        """Take weights while requests are unfinished, or not."""

        def change(engine: Any) -> None:
            engine.updates_in_flight = engine.update._in_flight = may

        self._call("take_weights_in_flight", change)

    def hold(self, most_tokens: float) -> None:
        self._call("hold", lambda engine: setattr(engine, "most_tokens", most_tokens))

    def are_held(self) -> bool:
        """Return whether there are requests, each of which waits."""

        def look(engine: Any) -> bool:
            return bool(engine.running) and all(len(tokens) == engine.most_tokens for _, tokens, _ in engine.running.values())

        return self._call("are_held", look)


class TinyActor:
    """One number per tensor; an update adds to all of them. It remembers its updates as an optimizer does: in its state."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.weights = dict.fromkeys(NAMES, 0)
        self.history: list[int] = []
        self._buckets: Iterator[WeightBucket] = iter(())

    def arm(self, spec: str) -> None:
        faults.arm(spec)

    def update(self, amount: int) -> int:
        fault_point("actor.update.start", rank=self.rank)
        self.weights = {name: value + amount * (1 + len(self.history)) for name, value in self.weights.items()}
        self.history.append(amount)
        fault_point("actor.update.after_optimizer", rank=self.rank)
        return sum(self.weights.values())

    def begin_weight_sync(self) -> int:
        self._buckets = iter([pack([(name, torch.tensor(value))]) for name, value in self.weights.items()])
        return 24

    def next_bucket(self) -> tuple[bool, WeightBucket | None]:
        fault_point("actor.weights.bucket", rank=self.rank)
        bucket = next(self._buckets, None)
        return bucket is not None, bucket

    def end_weight_sync(self) -> None:
        self._buckets = iter(())


def make_actor(rank: int) -> TinyActor:
    return TinyActor(rank)


def make_rollout(seconds_per_step: float) -> TinyRollout:
    ENGINES.register("tiny")(lambda spec: TinyEngine(seconds_per_step))
    return TinyRollout(EngineSpec(model_path=NO_MODEL, max_model_len=64, name="tiny"))


def bulk_ids(prompt: int, count: int) -> np.ndarray:
    """The response of so many tokens to a prompt that begins with this id."""
    return (np.arange(count, dtype=np.int32) * 7 + prompt * 100_003).astype(np.int32)


def checksum(token_ids: np.ndarray) -> int:
    """A number that depends on every id and on its place."""
    places = np.arange(1, len(token_ids) + 1, dtype=np.int64)
    return int((token_ids.astype(np.int64) * places % 1_000_003).sum())


class Reader:
    """A rank that adds up the tokens of its share of a batch, and keeps the share as ranks do."""

    def read(self, share: Batch) -> int:
        assert len(share.rollout_logprobs_T) == int(share.response_lengths_N.sum())
        assert bool((share.rollout_logprobs_T == -0.5).all())
        return checksum(share.token_ids_S.numpy())


def make_reader(rank: int) -> Reader:
    return Reader()
