"""Measures what the controller costs in a step of the synchronous schedule: its processor time and its memory.

    python scripts/bench_controller.py --rollouts 2048 --tokens 1024 --ranks 8

There is no model. Ray, the pool of replicas, the schedule and the roles are the real ones; replicas answer with random
tokens, rewards are random numbers (or, with `--reward`, those of a rule or of programs in the sandbox, computed by the function hosts
of a run or, with `--reward-here`, by child processes of the controller), and ranks put their shards together and do nothing with them. Everything runs on one
machine, so wall-clock times contain the work of all processes; the controller's own is its processor time, in all its
threads. Memory is counted per response token: the largest resident size of the controller in a step beyond that before
it, and what Ray's object store holds when the ranks are called.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import random
import resource
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

STORE_BYTES = 6 * 2**30
REWARDS = {"random": "", "rule": "exact_match", "program": "code"}
"""The functions of rewards, by the words for them."""
ANSWER = "\n```python\nprint(42)\n```"
GOLDS = {"random": "42", "rule": "42", "program": {"inputs": [""], "outputs": ["42"]}}
START_S = 500.0


class Replica:
    """A rollout process that answers at once; with as much of `RolloutWorker` as the pool calls."""

    def __init__(self, chars_per_token: float, reply: int, answer: str) -> None:
        self.reply = reply
        self.answer = answer
        self.chars = chars_per_token
        self.waiting: list[Any] = []
        self.random = np.random.default_rng(0)

    def submit(self, requests: Sequence[Any]) -> None:
        self.waiting += requests

    def poll(self, count: int) -> list[Any]:
        from grpo_rl.types import Completion

        ended, self.waiting = self.waiting[:count], self.waiting[count:]
        made = []
        for request in ended:
            num = request.sampling.max_tokens
            ids = self.random.integers(0, 150_000, num, dtype=np.int32)
            logprobs = -self.random.random(num, dtype=np.float32)
            text = "x" * int(num * self.chars) + self.answer
            made.append(Completion(request.request_id, ids, logprobs, "stop", ((0, num),), text=text))
        return made

    def report(self, further: Sequence[Any], timeout_s: float, longest_batch_s: float, enough: int) -> Any:
        from grpo_rl.rollout.reports import pack

        self.submit(further)
        return pack(self.poll(max(enough, self.reply)))


class PretendedRank:
    """A rank that has its shard, and computes nothing."""

    def logprobs(self, shard: Any, micro_batches: Sequence[Sequence[int]], *_: Any) -> Any:
        num_tokens = int(sum(shard.trained_lengths_N[list(rows)].sum() for rows in micro_batches))
        return True, {"logprobs_T": np.zeros(num_tokens, dtype=np.float32)}

    def update(self, shard: Any, update: Any) -> list[dict[str, float]]:
        assert len(shard.token_ids_S) == int(shard.sequence_lengths_N.sum())
        return [{"sum/entropy": 0.0, "same/grad_norm": 1.0} for _ in update.steps]


class Prompts:
    """A data set of prompts of equal lengths, with as much as a schedule reads."""

    fingerprint: ClassVar[dict[str, Any]] = {}

    def __init__(self, count: int, num_tokens: int, gold: Any) -> None:
        self.count = count
        self.num_tokens = num_tokens
        self.gold = gold

    def __len__(self) -> int:
        return self.count

    def entry_sizes(self) -> list[int]:
        return [self.count]

    def usable(self, row: int) -> bool:
        return True

    def prompt(self, row: int, uid: str) -> Any:
        from grpo_rl.types import Prompt

        ids = np.random.default_rng(row).integers(0, 150_000, self.num_tokens, dtype=np.int32)
        return Prompt(uid, ids, "?", "bench", self.gold)


class Rewarder:
    """Random rewards at once: scoring is the reward processes' work, and sending them jobs is measured elsewhere."""

    def __init__(self) -> None:
        self.factors = {"bench": 1.0}

    def submit(self, rollout: Any) -> None:
        pass

    def wait(self, rollouts: Sequence[Any]) -> list[Any]:
        for rollout in rollouts:
            rollout.reward = random.random()
            rollout.reward_parts = {"bench": rollout.reward}
        return list(rollouts)


@dataclass
class Clock:
    """The controller's seconds between the beginnings of phases, and the store's size at each."""

    store_bytes: Any
    wall: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    own: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    stored: int = 0
    _phase: str = ""
    _began: tuple[float, float] = (0.0, 0.0)

    def __call__(self, phase: str) -> None:
        """Note that a phase begins; what follows a phase up to the next one counts as part of it."""
        if self._phase:
            self.wall[self._phase] += time.perf_counter() - self._began[0]
            self.own[self._phase] += time.process_time() - self._began[1]
        if phase in ("update_actor", ""):
            self.stored = max(self.stored, self.store_bytes())
        self._phase, self._began = phase, (time.perf_counter(), time.process_time())


def main() -> None:
    """Parse the sizes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=1024, help="of each response")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--group", type=int, default=16, help="responses to one prompt")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--reply", type=int, default=16, help="completions that a replica reports at once, at least")
    parser.add_argument("--chars-per-token", type=float, default=4.0, help="text that a response has for rewards")
    parser.add_argument("--reward", choices=REWARDS, default="random", help="what scores the responses")
    parser.add_argument("--reward-here", action="store_true", help="in child processes of the controller")
    parser.add_argument("--log", action="store_true", help="write all rollouts, beside the steps")
    parser.add_argument("--mini-batches", type=int, default=1, help="with more than one, ranks compute old log-probs")
    parser.add_argument("--reference", action="store_true", help="the ranks compute reference log-probs, too")
    parser.add_argument("--steps", type=int, default=3, help="measured ones, after one that warms everything up")
    parser.add_argument("--profile", type=int, default=0, metavar="LINES", help="functions of the controller to list")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench(options, Path(folder))


def bench(options: argparse.Namespace, folder: Path) -> None:
    """Run the steps and print where the controller's time and memory go."""
    from grpo_rl.cluster.session import ray_session as session

    session.set_environment()  # before the import of Ray
    import ray
    from ray._private.internal_api import node_stats

    from grpo_rl.config.schema.tree import RayInitConfig
    from grpo_rl.schedules import sync
    from grpo_rl.trainer.run import single_step

    session.LEAST_STORE_BYTES = STORE_BYTES
    with ExitStack() as stack:
        stack.enter_context(session.ray_session(RayInitConfig(), 2))
        node = ray.nodes()[0]
        place = node["NodeManagerAddress"], node["NodeManagerPort"]

        def store_bytes() -> int:
            return int(node_stats(*place, include_memory_info=False).store_stats.object_store_bytes_used)

        verbs = make_session(options, folder, stack)
        clocks: list[Clock] = []
        peaks: list[int] = []
        profile = cProfile.Profile()
        gc.freeze()  # as a run does once everything is imported
        for number in range(options.steps + 1):
            clock = Clock(store_bytes)
            verbs.progress.on_phase = clock
            gc.collect()
            before = reset_peak()
            if options.profile and number:
                profile.enable()
            single_step(verbs, sync.train)
            clock("")
            profile.disable()
            verbs.begin_step()
            verbs.actor.version = 0
            if number:
                clocks.append(clock)
                peaks.append(peak() - before)
        report(options, clocks, peaks)
        if options.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(options.profile)


def make_session(options: argparse.Namespace, folder: Path, stack: ExitStack) -> Any:
    """Return a session over replicas and ranks that do no work."""
    from grpo_rl.algos.objective import Objective
    from grpo_rl.cluster.processes.placement import Pool
    from grpo_rl.cluster.processes.worker_group import WorkerGroup, wait_all
    from grpo_rl.cluster.recovery.replicas import Replicas
    from grpo_rl.cluster.recovery.supervisor import Recoveries, Supervisor
    from grpo_rl.cluster.roles.reference_role import ReferenceRole
    from grpo_rl.cluster.roles.rollout_pool import PoolOptions, ReplicaPool, Transfer
    from grpo_rl.cluster.roles.trained_roles import ActorRole
    from grpo_rl.config.derived import MicroBatchRule
    from grpo_rl.telemetry.metrics.timeline import Timeline
    from grpo_rl.telemetry.rollout_log import RolloutLog
    from grpo_rl.telemetry.rundir import RunDir
    from grpo_rl.trainer.parts import Roles
    from grpo_rl.trainer.session import Session

    slots = Pool(1, 2, use_gpu=False, timeout_s=60.0).slots()

    def started(role: str, size: int, factory: Any, arguments: tuple[Any, ...]) -> WorkerGroup:
        made = WorkerGroup(
            role, [slots[rank % 2] for rank in range(size)], log_dir=folder, environment={}, call_timeout_s=600.0
        )
        stack.callback(made.shutdown)
        made.where(START_S)
        wait_all(made.workers, made.start_build(factory, [arguments] * size), START_S, f"start {role}")
        return made

    ranks = started("actor", options.ranks, PretendedRank, ())
    replicas = started("rollout", options.replicas, Replica, (options.chars_per_token, options.reply, ANSWER))
    config, num_prompts = configuration(options), options.rollouts // options.group
    actor = config.actor_rollout_ref.actor
    rule = MicroBatchRule(2 * (options.tokens + options.prompt_tokens), None)
    role = ActorRole(
        ranks,
        actor,
        train_rule=rule,
        forward_rule=rule,
        old_logprobs="none" if options.mini_batches == 1 else "actor",
        objective=Objective.from_config(actor),
    )
    reference = None
    if options.reference:
        reference = ReferenceRole(ranks, rule=rule, want_hidden=False)
    settings = PoolOptions(max_num_seqs=256, sleeps=False, step_timeout_s=600.0)
    supervisor = Supervisor(config.trainer, Recoveries(config.trainer, print))
    stack.callback(supervisor.close)
    pool = ReplicaPool(Replicas(replicas, supervisor), Transfer("object_store", ranks, replicas, 1, START_S), settings)
    train: Any = Prompts(2 * num_prompts, options.prompt_tokens, GOLDS[options.reward])
    log = None
    if options.log:
        log = RolloutLog(RunDir.create(folder, "bench"))
        stack.callback(log.close)
    output: Any = SimpleNamespace(
        console=SimpleNamespace(warn=print), rollouts=log, timeline=Timeline()
    )  # nothing else is written
    rewarder = make_rewarder(options, folder, supervisor, stack)
    roles = Roles(actor=role, rollout=pool, rewarder=rewarder, reference=reference)
    return Session(config, roles, output, train_data=train, total_steps=options.steps + 1)


def make_rewarder(options: argparse.Namespace, folder: Path, supervisor: Any, stack: ExitStack) -> Any:
    """Return what scores the responses."""
    import ray

    from grpo_rl.cluster.processes.placement import NodeSlot
    from grpo_rl.cluster.processes.worker_group import WorkerGroup, wait_all
    from grpo_rl.cluster.roles.function_host import FunctionSpec, ScorerSpec
    from grpo_rl.cluster.roles.function_pool import FunctionPool
    from grpo_rl.config.schema.tree import RewardConfig
    from grpo_rl.rewards.compose import RewardFunction
    from grpo_rl.rewards.runtime.runner import RewardRunner

    if not (name := REWARDS[options.reward]):
        return Rewarder()
    config = RewardConfig(functions=[name], num_workers=2, timeout_s=60.0)
    function = RewardFunction.from_config(config)
    if options.reward_here:
        runner = RewardRunner(function, config)
        stack.callback(runner.close)
        runner.check_started()
        return runner
    slot = NodeSlot(ray.nodes()[0]["NodeID"], 0.1)
    host = WorkerGroup("functions", [slot], log_dir=folder, environment={}, call_timeout_s=600.0)
    spec = FunctionSpec({"reward": ScorerSpec(config, ())}, None, False, folder)
    pool = FunctionPool(host, spec, [2], supervisor)
    stack.callback(pool.close)
    wait_all(host.workers, pool.start_build(), START_S, "start functions")
    pool.listen()
    return RewardRunner(function, config, lambda done, broken: pool.scorer("reward", done, broken))


def configuration(options: argparse.Namespace) -> Any:
    """Return the configuration of a run with these sizes."""
    from grpo_rl.config.schema.tree import Config

    num_prompts, config = options.rollouts // options.group, Config()
    parts = config.actor_rollout_ref
    actor = replace(parts.actor, ppo_mini_batch_size=num_prompts // options.mini_batches, use_kl_loss=False)
    parts = replace(parts, actor=actor, rollout=replace(parts.rollout, n=options.group))
    data = replace(config.data, train_batch_size=num_prompts, max_response_length=options.tokens)
    trainer = replace(config.trainer, save_rollouts=options.log)
    return replace(config, actor_rollout_ref=parts, data=data, trainer=trainer)


def reset_peak() -> int:
    """Begin to measure the largest resident size anew; return the size now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """Return the largest resident size of this process since the last reset, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def report(options: argparse.Namespace, clocks: Sequence[Clock], peaks: Sequence[int]) -> None:
    """Print medians over the measured steps."""
    tokens = options.rollouts * options.tokens
    print(f"{options.rollouts:,} rollouts of {options.tokens:,} tokens, {options.ranks} ranks, {len(clocks)} steps")
    print(f"{'phase, with what follows it':<30}{'controller s':>14}{'wall s':>10}")
    for phase in clocks[0].own:
        own = statistics.median(clock.own[phase] for clock in clocks)
        wall = statistics.median(clock.wall[phase] for clock in clocks)
        print(f"{phase:<30}{own:>14.2f}{wall:>10.2f}")
    total = [sum(clock.own.values()) for clock in clocks]
    whole = [sum(clock.wall.values()) for clock in clocks]
    print(f"{'all':<30}{statistics.median(total):>14.2f}{statistics.median(whole):>10.2f}")
    print(f"controller, seconds per million tokens: {statistics.median(total) / tokens * 1e6:.3f}")
    print(f"controller, resident bytes per token:   {max(peaks) / tokens:.2f}")
    print(f"object store, bytes per token:          {max(clock.stored for clock in clocks) / tokens:.2f}")
    print(f"controller, largest resident size ever: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
