"""Measures what tools that wait cost: many episodes with tools that sleep at random, and the same without any wait.

    python scripts/bench_episodes.py                        # 512 episodes of 6 turns, tools that wait 1 s in half of their calls
    python scripts/bench_episodes.py --engine hf            # the same with the transformers engine and an embedded model

The environments are real processes and the driver is a run's own. The engine is one in a thread of its own that takes
`--step-ms` for a step of up to `--slots` requests, as an engine with constant batches does, or with `--engine hf` a real one.
`alone` is the wall clock of the same episodes if no tool waits: the longest chain of sampling alone. The bar is
`waiting <= 1.25 * max(alone, longest)`, with `longest` the longest single episode's own sampling and waits, which no driver can
shorten.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import queue
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from grpo_rl.config.schema.tree import DataConfig
from grpo_rl.data.chat_deltas import ChatDeltas
from grpo_rl.data.prompts import Renderer
from grpo_rl.envs.environments import Named
from grpo_rl.envs.episode_pool import EpisodePool
from grpo_rl.envs.runtime.environment_pool import EnvironmentPool
from grpo_rl.envs.runtime.episode_host import HostSetup
from grpo_rl.models import builtin
from grpo_rl.models.load import load_tokenizer
from grpo_rl.rollout.engine import EngineSpec, RolloutEngine
from grpo_rl.rollout.hf.hf_engine import HfEngine
from grpo_rl.rollout.reports import pack, unpack
from grpo_rl.rollout.requests import rollout_id
from grpo_rl.types import Completion, Prompt, Request, Rollout, Sampling

ENVIRONMENT = """
import asyncio, random
from grpo_rl.envs.contract import Observation

class Waits:
    def __init__(self, turns: int, wait_s: float, share: float):
        self.turns, self.wait_s, self.share = turns, wait_s, share

    async def reset(self, start):
        self.random = random.Random(start.seed)
        return Observation()

    async def step(self, turn):
        if self.wait_s and self.random.random() < self.share:
            await asyncio.sleep(self.wait_s)
        done = turn.index + 1 >= self.turns
        return Observation(() if done else ({"role": "user", "content": "1+1="},), 1.0, done)

    async def close(self):
        pass
"""
TOKENS_PER_TURN = 24


class SteadyEngine:
    """An engine whose every step takes the same time: it gives each of up to `slots` requests one token."""

    def __init__(self, slots: int, step_s: float, stop_id: int) -> None:
        self.slots, self.step_s, self.stop_id = slots, step_s, stop_id
        self.weight_version = 0
        self._waiting: list[Request] = []
        self._running: list[list[Any]] = []

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._running)

    def submit(self, requests: Sequence[Request]) -> None:
        self._waiting += requests

    def step(self) -> list[Completion]:
        free = self.slots - len(self._running)
        for request in self._waiting[:free]:
            digest = int(hashlib.md5(request.request_id.encode()).hexdigest()[:8], 16)
            self._running.append([request, 1 + digest % (2 * TOKENS_PER_TURN)])
        del self._waiting[:free]
        time.sleep(self.step_s)
        ended = []
        for one in self._running:
            one[1] -= 1
            if one[1] == 0:
                ids = np.array([20, 21, self.stop_id], dtype=np.int32)
                ended.append(Completion(one[0].request_id, ids, np.zeros(3, np.float32), "stop", ((0, 3),)))
        self._running = [one for one in self._running if one[1]]
        return ended


class Turns:
    """A pool of single turns over an engine in a thread."""

    def __init__(self, engine: SteadyEngine | RolloutEngine) -> None:
        self._engine = engine
        self._wanted: dict[str, tuple[Prompt, int, float]] = {}
        self._new: queue.SimpleQueue[list[Request]] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self.version = 0
        self.chain_s: dict[str, float] = {}
        """Seconds of sampling of each episode, waits for a place in the engine included."""
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            while self._engine.num_unfinished == 0 or not self._new.empty():
                self._engine.submit(self._new.get())
            for completion in self._engine.step():
                self._ended.put(completion)

    def ask(self, turns: Sequence[tuple[Prompt, Sampling, str]]) -> list[str]:
        now = time.monotonic()
        self._wanted |= {rollout_id(prompt, 0): (prompt, 0, now) for prompt, _, _ in turns}
        self._new.put([Request(rollout_id(prompt, 0), prompt.token_ids, sampling) for prompt, sampling, _ in turns])
        return [rollout_id(prompt, 0) for prompt, _, _ in turns]

    def completed(self, wait_s: float | None = None, only: Collection[str] | None = None) -> Iterator[Rollout]:
        until = time.monotonic() + (wait_s or 0.0)
        while self._wanted:
            try:
                completion = self._ended.get(timeout=max(0.0, until - time.monotonic()) or None if wait_s else None)
            except queue.Empty:
                return
            prompt, sample, asked = self._wanted.pop(completion.request_id)
            episode = prompt.uid.partition("#")[0]
            self.chain_s[episode] = self.chain_s.get(episode, 0.0) + time.monotonic() - asked
            (found,) = unpack(*pack([completion]))
            yield Rollout(
                prompt, sample, found.response_ids, found.logprobs, found.finish_reason, found.versions, text=found.text
            )
            if time.monotonic() >= until:
                return

    def forget(self, ids: Collection[str]) -> None: ...

    def rest(self) -> None: ...

    def keep_weights(self) -> Any:
        return nullcontext()


def measure(options: argparse.Namespace, folder: Path, wait_s: float) -> dict[str, float]:
    """Play all episodes once; return the wall clock, and what the slowest episode took by itself."""
    tokenizer = load_tokenizer(str(folder))
    longest = 64 + options.turns * 2 * TOKENS_PER_TURN
    stop_ids = frozenset([tokenizer.eos_token_id])
    engine: Any = SteadyEngine(options.slots, options.step_ms / 1000, tokenizer.eos_token_id)
    if options.engine == "hf":
        ends = [tokenizer.eos_token_id, *range(40, 56)]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        engine, stop_ids = (
            HfEngine(EngineSpec(str(folder), longest, name="hf", max_num_seqs=options.slots, threads=1)),
            frozenset(ends),
        )
    named = Named(f"{folder / 'waits.py'}:Waits", {"turns": options.turns, "wait_s": wait_s, "share": options.share})
    environments = EnvironmentPool(HostSetup(named), options.workers, max_episodes=options.episodes)
    turns = Turns(engine)
    deltas = ChatDeltas(Renderer(DataConfig(), tokenizer), tokenizer, stop_ids)
    pool = EpisodePool(turns, environments, deltas, max_model_len=longest)  # type: ignore[arg-type]
    messages = ({"role": "user", "content": "1+1="},)
    shown = deltas.prompt(messages)
    prompts = [Prompt(f"p{i}", shown.token_ids, shown.text, "bench", messages=messages) for i in range(options.episodes // 8)]
    pool.generate(prompts[:1], 1, Sampling(max_tokens=longest - 40, seed=1))  # processes are there, libraries loaded
    turns.chain_s.clear()
    began, cpu = time.monotonic(), time.process_time()
    rollouts = pool.generate(prompts, 8, Sampling(max_tokens=longest - 40, seed=1))
    wall, busy = time.monotonic() - began, time.process_time() - cpu
    pool.close()
    own = [
        turns.chain_s[rollout_id(one.prompt, one.sample_index)] + sum(one.episode.waits_s) for one in rollouts if one.episode
    ]
    num_turns = sum(len(one.episode.turns) for one in rollouts if one.episode)
    return {"wall": wall, "cpu": busy, "longest": max(own), "turns": float(num_turns)}


def main() -> None:
    """Print the measurements and whether the bar is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["steady", "hf"], default="steady")
    for name, default in (("episodes", 512), ("turns", 6), ("slots", 128), ("workers", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, value in (("wait-s", 1.0), ("share", 0.5), ("step-ms", 20.0)):
        parser.add_argument(f"--{name}", type=float, default=value)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = builtin.build("builtin:arithmetic", Path(temporary) / "model")
        (folder / "waits.py").write_text(ENVIRONMENT)
        alone, waiting = measure(options, folder, 0.0), measure(options, folder, options.wait_s)
    chain = max(alone["wall"], waiting["longest"])
    print(
        f"{options.episodes} episodes, {waiting['turns']:.0f} turns, engine {options.engine}, {options.workers} environment processes"
    )
    print(f"alone    {alone['wall']:6.1f} s   (driver and engine {alone['cpu']:.1f} s of a core)")
    print(f"waiting  {waiting['wall']:6.1f} s   longest single episode {waiting['longest']:.1f} s")
    print(
        f"waiting / max(alone, longest) = {waiting['wall'] / chain:.2f}; waiting / alone = {waiting['wall'] / alone['wall']:.2f}"
    )


if __name__ == "__main__":
    main()
