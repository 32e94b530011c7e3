"""A session whose roles live in this process: an embedded model on the CPU and no Ray, for tests of loops and functions.

    from grpo_rl import testing
    from grpo_rl.schedules import sync

    with testing.session("recipe=arithmetic/grpo", "reward.functions=[my_reward.py:brief]") as s:
        sync.train(s)
        assert s.version == 2

The model, its updates, the sampling and the rewards are those of a run; only Ray, and so everything about processes, is left out.
"""

from __future__ import annotations

import datetime
import importlib
import io
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from grpo_rl.cluster.inputs import Inputs, read_inputs
from grpo_rl.cluster.role_specs import actor_spec, rank_of, roles_over
from grpo_rl.config import effects
from grpo_rl.config.compose import Composed, compose
from grpo_rl.config.derived import Machine
from grpo_rl.config.schema.fields import replaced, value_of
from grpo_rl.envs.runtime.environment_pool import EnvironmentPool
from grpo_rl.errors import ConfigError
from grpo_rl.models import builtin
from grpo_rl.plan.decisions import RoleName
from grpo_rl.plan.make import plan_without_page
from grpo_rl.rewards.audit import Audit
from grpo_rl.rollout.model_info import stop_token_ids
from grpo_rl.rollout.requests import RequestPool
from grpo_rl.telemetry.metrics.sinks import Sinks
from grpo_rl.telemetry.rollout_log import RolloutLog
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.telemetry.terminal.console import Console
from grpo_rl.trainer.parts import Output, Roles
from grpo_rl.trainer.run import RunLoop
from grpo_rl.trainer.session import Session
from grpo_rl.types import Completion, FinishReason, Metrics, Prompt, Request, extended
from grpo_rl.workers.rollout import RolloutWorker
from grpo_rl.workers.specs import Rank

SMALL = {
    "actor_rollout_ref.actor.ppo_mini_batch_size": "4",
    "actor_rollout_ref.rollout.n": "4",
    "actor_rollout_ref.rollout.n_gpus_per_node": "1",
    "actor_rollout_ref.rollout.name": "hf",
    "actor_rollout_ref.rollout.nnodes": "1",
    "data.train_batch_size": "4",
    "data.val_files": "[]",
    "reward.num_workers": "1",
    "trainer.device": "cpu",
    "trainer.logger": "[console]",
    "trainer.n_gpus_per_node": "1",
    "trainer.nnodes": "1",
    "trainer.save_at_end": "false",
    "trainer.test_freq": "-1",
    "trainer.total_training_steps": "2",
}
"""The values of keys that the words of a test leave open."""
CPU = Machine(num_gpus=0, num_cpus=1, device="cpu")
RANKS = ThreadPoolExecutor(1, "ranks")
"""One thread for all ranks and batches: oneDNN compiles its kernels anew in each."""
LOGPROB = -1.0
WAIT_S = 60.0

Answers = Callable[[Prompt, int], str]
"""(prompt, sample index; -1 for a greedy response) -> the text of the response."""


@contextmanager
def session(
    *words: str,
    answers: Answers | None = None,
    slots: int | None = None,
    tokens_per_update: int = 4,
    folder: str | Path | None = None,
) -> Iterator[Session]:
    """Yield the session of a small run with the words of a command line, in a second or two.

    `SMALL` has what the words leave open. An embedded model has random weights. `answers` gives the responses
    in place of the engine: each at once, or with `slots` token by token to so many requests at a time, a token
    of the present weights at each look, and `tokens_per_update` looks while a batch is trained beside. The
    run's folder is a temporary one, or lies in `folder`; a named run (trainer.experiment_name) goes on from
    its newest checkpoint there.

    Raises what `grpo_rl.session` raises, and ConfigError for a layout of several ranks.
    """
    with ExitStack() as stack:
        if any(word.startswith("trainer.default_local_dir=") for word in words):
            folder = None
        elif folder is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="grpo_rl-testing-"))
        training = stack.enter_context(run_loop(composed(words), folder, answers, slots, tokens_per_update))
        checkpoint = training.store.latest(training.output.console.warn)
        if checkpoint is not None:
            training.resume(checkpoint)
        with training.guarded():
            yield training.session
            training.leave()


@contextmanager
def run_loop(
    settings: Composed,
    folder: str | Path | None,
    answers: Answers | None,
    slots: int | None = None,
    tokens_per_update: int = 4,
) -> Iterator[RunLoop]:
    """Yield the run of `session`, which is not resumed here, and whose state is not saved.

    `folder` takes the place of trainer.default_local_dir.
    """
    if folder is not None:
        config = replaced(settings.config, {"trainer.default_local_dir": str(folder)})
        resolved = settings.resolved | {"trainer": settings.resolved["trainer"] | {"default_local_dir": str(folder)}}
        settings = replace(settings, config=config, resolved=resolved)
    with ExitStack() as stack:
        models = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="grpo_rl-testing-models-")))
        plan = plan_without_page(settings.config, CPU)
        if several := [role.name for role in plan.roles if role.num_workers > 1]:
            raise ConfigError(f"grpo_rl.testing has one process for everything, and the words ask for several of {several[0]}")
        trainer = settings.config.trainer
        run_dir = RunDir.create(trainer.default_local_dir, trainer.experiment_name)
        stack.callback(run_dir.release)
        run_dir.write_config(settings.yaml(), settings.overrides)
        console = Console(io.StringIO())
        disable_progress_bar()
        inputs = read_inputs(plan, run_dir, console)
        stack.enter_context(_one_rank())
        make_pool: Callable[..., LocalPool] = LocalPool
        if answers is not None:
            make_pool = partial(AnsweringPool, answers=answers, slots=slots, tokens_per_update=tokens_per_update)
        roles = _roles(inputs, make_pool, models, stack)
        sinks = Sinks(run_dir, trainer, settings.resolved, console.warn, console.info)
        stack.callback(sinks.close)
        rollouts = WrittenLog(run_dir)
        stack.callback(rollouts.close)
        verbs = Session(
            settings.config,
            roles,
            Output(run_dir, console, sinks, rollouts),
            train_data=inputs.train_data,
            val_data=inputs.val_data,
            rows=inputs.rows,
            total_steps=inputs.plan.sizes.total_steps or 0,
            objective=inputs.plan.objective,
        )
        yield RunLoop(verbs, inputs.plan.schedule)


def composed(words: Sequence[str]) -> Composed:
    """Return the configuration of a small run with these words."""
    named = {word.lstrip("+~").partition("=")[0] for word in words}
    small = {key: value for key, value in SMALL.items() if key not in named}
    settings = compose([*words, *(f"{key}={value}" for key, value in small.items())])
    read = effects.as_read(settings.config, CPU)
    if unread := {key for key in small if value_of(read, key) != value_of(settings.config, key)}:
        settings = compose([*words, *(f"{key}={value}" for key, value in small.items() if key not in unread)])
    return settings


@contextmanager
def _one_rank() -> Iterator[None]:
    """Be a process group of one, and restore the caller's random state and threads."""
    num_threads, joins = torch.get_num_threads(), not dist.is_initialized()
    if joins:
        dist.init_process_group(
            "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=datetime.timedelta(seconds=WAIT_S)
        )
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(num_threads)
        if joins:
            dist.destroy_process_group()


def _roles(inputs: Inputs, make_pool: Callable[..., LocalPool], models: Path, stack: ExitStack) -> Roles:
    """Embedded models are made in `models`; `stack` ends what is not in this process."""
    plan, config = inputs.plan, inputs.plan.config

    def folder_of(path: str | None) -> str:
        if path is None or not path.startswith(builtin.PREFIX):
            return path or ""
        return str(builtin.build(path, models / path.removeprefix(builtin.PREFIX)))

    policy, scorer = folder_of(config.actor_rollout_ref.model.path), folder_of(config.reward.reward_model.model_path)
    teachers = ((name, replace(teacher, model_path=folder_of(teacher.model_path) or None)) for name, teacher in plan.teachers)
    plan = replace(plan, teachers=tuple(teachers))
    engine = None if plan.engine is None else replace(plan.engine, model_path=policy)
    trainer, actor = config.trainer, actor_spec(plan, policy, engine)
    rank = Rank(0, 1, "127.0.0.1", 0, "cpu", trainer.collective_timeout_s, deterministic=trainer.deterministic)
    ranks: dict[RoleName, Any] = {}
    for role in plan.roles:
        if role.name != "rollout":
            worker, spec, options = rank_of(role.name, plan, actor, scorer)
            module, _, kind = worker.rpartition(".")
            made = getattr(importlib.import_module(f"grpo_rl.workers.{module}"), kind)(spec, rank, **options)
            ranks[role.name] = LocalRanks(role.name, made)
    roles = roles_over(plan, ranks, inputs.tokenizer)
    if engine is not None:
        replica = RolloutWorker(engine, WAIT_S, WAIT_S)
        stack.callback(replica.close)
        roles.rollout = pool = make_pool(replica, plan.overlaps, inputs.tokenizer)
        if inputs.episodes is not None:
            environments = EnvironmentPool(inputs.episodes.host, 1)
            stack.callback(environments.close)
            stop_ids = frozenset(stop_token_ids(engine))
            roles.rollout = inputs.episodes.pool(pool, environments, inputs.tokenizer, stop_ids, engine.max_model_len)
    if plan.reward.scores:
        roles.rewarder, _ = inputs.start_rewards(ranks.get("reward_model"), lambda name: None)
        stack.callback(roles.rewarder.close)
    if config.reward.audit and inputs.train_data is not None:
        roles.audit = Audit(config.reward, inputs.audit, stack)
    return roles


class WrittenLog(RolloutLog):
    """A step's rollouts are on the disk when the step is over, for tests that read them in the session's block."""

    def write(self, *arguments: Any) -> Path:
        path = super().write(*arguments)
        self.flush()
        return path


class LocalBlock(dict[str, Any]):
    @property
    def ref(self) -> LocalBlock:
        return self


class LocalRanks:
    """What the roles ask of `WorkerGroup`, for one rank in this process."""

    call_timeout_s = WAIT_S

    def __init__(self, role: str, worker: Any) -> None:
        self.role, self.worker = role, worker

    def __len__(self) -> int:
        return 1

    def store(self, shards: Sequence[Any]) -> list[Any]:
        return list(shards)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return self.call_each(method, [arguments])

    def call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        calls = [RANKS.submit(getattr(self.worker, method), *map(_read, of_rank)) for of_rank in arguments]
        return [call.result(self.call_timeout_s) for call in calls]

    def call_for_two(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[tuple[Any, LocalBlock]]:
        return [(first, LocalBlock(second)) for first, second in self.call_each(method, arguments)]


def _read(argument: Any) -> Any:
    local = getattr(argument, "local", None)
    return argument if local is None else local(lambda blocks: [block.read() for block in blocks])


class LocalPool(RequestPool):
    """The `protocols.RolloutPool` of one replica in this process."""

    longest_wait_s = WAIT_S

    def __init__(self, worker: RolloutWorker, overlaps: bool, tokenizer: Any) -> None:
        super().__init__(None if overlaps else 0)
        self.worker, self.tokenizer = worker, tokenizer
        self._queue: list[Request] = []

    def sync_weights(self, actor: Any) -> Metrics:
        if self.version == actor.version:
            return {}
        ranks = actor.worker_group
        [num_bytes] = ranks.call("begin_weight_sync")
        self.worker.start_weight_update(actor.version)
        while (bucket := ranks.call("next_bucket")[0][1]) is not None:
            self.worker.load_bucket(bucket)
        self.version = self.worker.finish_weight_update()
        ranks.call("end_weight_sync")
        return {"rollout/weight_bytes": float(num_bytes)}

    def keep_weights(self) -> AbstractContextManager[None]:
        return nullcontext()

    def rest(self) -> None: ...

    def _send(self, requests: list[Request], *, at_once: bool) -> None:
        self._queue += requests

    def _collect(self, wait_s: float) -> None:
        queue, self._queue = self._queue, []
        self.worker.submit(queue)
        deadline = time.monotonic() + wait_s
        while not (ended := self.worker.poll(min(1.0, wait_s))) and time.monotonic() < deadline:
            continue
        self._ended |= {completion.request_id: completion for completion in ended if completion.request_id in self._wanted}


class AnsweringPool(LocalPool):
    """Answers that a test gives in place of the engine, which gets the weights."""

    def __init__(self, *engine: Any, answers: Answers, slots: int | None, tokens_per_update: int) -> None:
        super().__init__(*engine)
        self.answers, self.slots, self.tokens_per_update = answers, slots, tokens_per_update
        self._answering: dict[str, Completion] = {}
        self._looks_left: int | None = None
        """The looks that the present training leaves time for; None if nothing is trained beside."""

    @contextmanager
    def keep_weights(self) -> Iterator[None]:
        self._looks_left = self.tokens_per_update if self.slots else None
        try:
            yield
            while self._looks_left and self._answering:
                self._collect(0.0)
        finally:
            self._looks_left = None

    def forget(self, ids: Collection[str]) -> None:
        super().forget(ids)
        for name in ids:
            self._answering.pop(name, None)

    def _send(self, requests: list[Request], *, at_once: bool) -> None:
        self._answering |= {request.request_id: self._answered(request) for request in requests}

    def _collect(self, wait_s: float) -> None:
        if self._looks_left == 0:
            time.sleep(min(wait_s, 0.001))
            return
        if self._looks_left is not None:
            self._looks_left -= 1
        for name, answer in list(self._answering.items())[: self.slots]:
            versions = extended(answer.versions, self.version, 1 if self.slots else answer.num_tokens)
            self._answering[name] = replace(answer, versions=versions)
            if sum(num_tokens for _, num_tokens in versions) == answer.num_tokens:
                self._ended[name] = self._answering.pop(name)

    def _answered(self, request: Request) -> Completion:
        prompt, sample = self._wanted[request.request_id]
        text = self.answers(prompt, sample)
        token_ids = [*self.tokenizer(text, add_special_tokens=False).input_ids, self.tokenizer.eos_token_id]
        ids = np.asarray(token_ids[: request.sampling.max_tokens], dtype=np.int32)
        logprobs = np.full(len(ids), LOGPROB, dtype=np.float32)
        ending: FinishReason = "stop" if len(ids) == len(token_ids) else "length"
        return Completion(request.request_id, ids, logprobs, ending, (), text=text)
