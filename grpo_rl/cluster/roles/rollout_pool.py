"""All rollout replicas together: requests by load, weights in buckets, versions checked."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from grpo_rl.cluster.processes.worker_sets import Worker, WorkerFailed, fetch, settle
from grpo_rl.cluster.recovery.replicas import Replicas
from grpo_rl.cluster.roles.actor_role import ActorRole
from grpo_rl.cluster.roles.request_ledger import Ledger
from grpo_rl.cluster.roles.weight_sync import Transfer
from grpo_rl.errors import ClusterError, WeightVersionError
from grpo_rl.types import GREEDY, Completion, Metrics, Prompt, Request, Rollout, Sampling

# A replica gets a little more than it samples at once, so that it never waits for the controller.
QUEUE_AHEAD = 1.25
POLL_S = 2.0


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """What of the config decides how the pool works."""

    max_num_seqs: int
    sleeps: bool
    """Engines give their memory back between generation and the next weight transfer."""
    verify_checksum: bool
    step_timeout_s: float


class ReplicaPool:
    """roles.RolloutPool over engine replicas in processes of their own.

    Replicas may die or freeze at any time (see `Replicas`): what they had not answered is asked of others, with the same
    seeds, and a new one serves as soon as it has the current weights.
    """

    def __init__(
        self,
        replicas: Replicas,
        transfer: Transfer,
        decode: Callable[[Sequence[int]], str],
        options: PoolOptions,
    ) -> None:
        self.replicas = replicas
        self.transfer = transfer
        self.decode = decode
        self.options = options
        self.version = 0
        """Of the weights that the engines hold: 0 are those of the model folder, which they have loaded."""
        self._actor: ActorRole | None = None
        self._asleep = False

    # ---- weights -------------------------------------------------------------------------------------

    def sync_weights(self, actor: ActorRole) -> Metrics:
        """Bring every replica to the actor's weights; nothing moves when they are already there.

        A replica that fails on the way is replaced; the others get them all, and only those that have them serve.
        """
        self._actor = actor
        self.replicas.drop_lost()
        if self.version == actor.version and not self._asleep:
            return {}
        workers = self.replicas.serving + self.replicas.ready()
        num_bytes = self._update(workers, actor.version, wake=self._asleep) if workers else 0
        self._asleep = False
        self.version = actor.version
        return {"rollout/weight_bytes": float(num_bytes)}

    def _update(self, workers: list[Worker], version: int, *, wake: bool = False) -> int:
        """Give these replicas the actor's weights; those that have them serve from now on. Bytes moved."""
        actor, failed = self._actor, self.replicas.failed
        assert actor is not None
        alive = list(workers)

        def call(method: str, *arguments: Any) -> dict[Worker, Any]:
            nonlocal alive
            refs = [worker.call(method, *arguments) for worker in alive]
            answers = settle(alive, refs, self.options.step_timeout_s, f"rollout.{method}", failed)
            alive = list(answers)
            return answers

        if wake:
            call("wake_up", "weights")
        call("start_weight_update", version)
        lost: set[Worker] = set()

        def left(worker: Worker, error: WorkerFailed) -> None:
            lost.add(worker)
            failed(worker, error)

        num_bytes = self.transfer.run(actor, alive, left)
        alive = [worker for worker in alive if worker not in lost]
        if self.options.verify_checksum:
            self.transfer.check(actor, alive, left)
            alive = [worker for worker in alive if worker not in lost]
        versions = call("finish_weight_update")
        actor.worker_set.call("end_weight_sync")
        if wake:
            call("wake_up", "kv_cache")
        for worker, live in versions.items():
            if live != version:
                raise WeightVersionError(f"{worker.name} serves weights of version {live} after an update to {version}")
        for worker in alive:
            if worker not in self.replicas.serving:
                self.replicas.serve(worker, version)
        return num_bytes

    # ---- sampling ------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        on_finish: Callable[[Rollout], None] | None = None,
        *,
        greedy: bool = False,
    ) -> list[Rollout]:
        """n rollouts per prompt, by prompt and sample; each is handed to `on_finish` as it ends.

        With `greedy` each prompt's are followed by one more, sampled at temperature 0 beside the others,
        whose sample index is `GREEDY`. Raises WeightVersionError for a response that was sampled with other weights than those synced
        last, ClusterError when a replica fails or nothing ends for `trainer.step_timeout_s`.
        """
        wanted: dict[str, tuple[Prompt, int]] = {}
        requests: list[Request] = []
        for prompt in prompts:
            for sample in [*range(n), *([GREEDY] if greedy else [])]:
                request_id = f"{prompt.uid}/{sample}"
                wanted[request_id] = (prompt, sample)
                requests.append(Request(request_id, prompt.token_ids, sampling_of(sampling, prompt.uid, sample)))
        finished: dict[str, Rollout] = {}
        for completion in self._serve(requests):
            prompt, sample = wanted[completion.request_id]
            rollout = self._rollout(prompt, sample, completion)
            finished[completion.request_id] = rollout
            if on_finish is not None:
                on_finish(rollout)
        if self.options.sleeps:
            serving = self.replicas.serving
            calls = [worker.call("sleep") for worker in serving]
            settle(serving, calls, self.options.step_timeout_s, "rollout.sleep", self.replicas.failed)
            self._asleep = True
        return [finished[request_id] for request_id in wanted]

    def _serve(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Completions of all requests as they end; each replica is topped up as soon as it reports."""
        capacity = int(self.options.max_num_seqs * QUEUE_AHEAD)
        ledger: Ledger[Worker] = Ledger(requests)
        polls: dict[ray.ObjectRef, Worker] = {}
        last_news = time.monotonic()
        while ledger.open:
            self._admit(ledger)
            polls = {ref: worker for ref, worker in polls.items() if worker in ledger.in_flight}
            self._top_up(ledger, capacity)
            for worker, mine in ledger.in_flight.items():
                if mine and worker not in polls.values():
                    polls[worker.call("poll", POLL_S)] = worker
            done = ray.wait(list(polls), num_returns=1, timeout=POLL_S * 2)[0] if polls else []
            if not polls:
                self.replicas.wait_for_one(POLL_S)
            for ref in done:
                worker = polls.pop(ref)
                try:
                    completions = fetch(worker, ref, "sampling")
                except WorkerFailed as error:
                    self.replicas.failed(worker, error)
                    continue
                for completion in completions:
                    if ledger.answered(worker, completion.request_id):
                        last_news = time.monotonic()
                        yield completion
            if time.monotonic() - last_news > self.options.step_timeout_s:
                waiting = ", ".join(f"{w.name} ({len(mine)} in flight)" for w, mine in ledger.in_flight.items() if mine)
                raise ClusterError(f"no response ended for {self.options.step_timeout_s:.0f} s on {waiting or 'no replica'}")

    def _admit(self, ledger: Ledger[Worker]) -> None:
        """Bring the ledger up to date with who serves; replacements that are ready get the weights first."""
        for worker in self.replicas.drop_lost():
            if number := ledger.leave(worker):
                self.replicas.note_resampled(number)
        ready = self.replicas.ready()
        if self.version == 0:
            for worker in ready:
                self.replicas.serve(worker, 0)
        # An actor that has trained on has other weights by now: who comes late waits for the next update.
        elif ready and self._actor is not None and self._actor.version == self.version:
            self._update(ready, self.version)
        for worker in self.replicas.serving:
            ledger.join(worker)

    def _top_up(self, ledger: Ledger[Worker], capacity: int) -> None:
        """Give waiting requests to the replicas with the fewest in flight, up to their capacity."""
        calls = {worker: worker.call("submit", share) for worker, share in ledger.shares(capacity).items()}
        settle(list(calls), list(calls.values()), self.options.step_timeout_s, "rollout.submit", self.replicas.failed)

    def _rollout(self, prompt: Prompt, sample: int, completion: Completion) -> Rollout:
        if completion.weight_version != self.version:
            raise WeightVersionError(
                f"rollout {completion.request_id} was sampled with weights of version {completion.weight_version}, "
                f"the actor's are {self.version}"
            )
        return Rollout(
            prompt=prompt,
            sample_index=sample,
            response_ids=completion.response_ids,
            rollout_logprobs=completion.logprobs,
            finish_reason=completion.finish_reason,
            weight_version=completion.weight_version,
            text=self.decode(completion.response_ids),
            support=completion.support,
        )


def sampling_of(sampling: Sampling, uid: str, sample: int) -> Sampling:
    """How one response is sampled: with a seed of its own, or greedily."""
    if sample == GREEDY:
        return replace(sampling, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0, keep_support=False, seed=None)
    return replace(sampling, seed=sample_seed(sampling.seed, uid, sample))


def sample_seed(seed: int | None, uid: str, sample: int) -> int | None:
    """A seed of its own for every response, the same wherever and whenever it is sampled."""
    if seed is None:
        return None
    digest = hashlib.blake2b(f"{seed}:{uid}:{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
