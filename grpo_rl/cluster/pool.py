"""All rollout replicas together: requests by load, weights in buckets, versions checked."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import ray

from grpo_rl.cluster.groups import Worker, WorkerGroup, fetch, wait_all
from grpo_rl.cluster.roles import ActorGroup
from grpo_rl.cluster.transfer import Transfer
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
    """roles.RolloutPool over engine replicas in processes of their own."""

    def __init__(
        self, group: WorkerGroup, transfer: Transfer, decode: Callable[[Sequence[int]], str], options: PoolOptions
    ) -> None:
        self.group = group
        self.transfer = transfer
        self.decode = decode
        self.options = options
        self.version = 0
        """Of the weights that the engines hold: 0 are those of the model folder, which they have loaded."""
        self._asleep = False

    # ---- weights -------------------------------------------------------------------------------------

    def sync_weights(self, actor: ActorGroup) -> Metrics:
        """Bring every replica to the actor's weights; nothing moves when they are already there."""
        if self.version == actor.version and not self._asleep:
            return {}
        self._wake("weights")
        self.group.call("start_weight_update", actor.version)
        num_bytes = self.transfer.run(actor)
        if self.options.verify_checksum:
            self.transfer.check(actor)
        self.group.call("finish_weight_update")
        actor.group.call("end_weight_sync")
        self._wake("kv_cache")
        self._asleep = False
        self.version = actor.version
        return {"rollout/weight_bytes": float(num_bytes)}

    def _wake(self, what: str) -> None:
        if self._asleep:
            self.group.call("wake_up", what)

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
        requests: deque[Request] = deque()
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
            self.group.call("sleep")
            self._asleep = True
        return [finished[request_id] for request_id in wanted]

    def _serve(self, requests: deque[Request]) -> Iterator[Completion]:
        """Completions of all requests as they end; each replica is topped up as soon as it reports."""
        capacity = int(self.options.max_num_seqs * QUEUE_AHEAD)
        in_flight = dict.fromkeys(self.group.workers, 0)
        polls: dict[ray.ObjectRef, Worker] = {}
        last_news = time.monotonic()
        while requests or any(in_flight.values()):
            self._top_up(requests, in_flight, capacity)
            for worker, count in in_flight.items():
                if count and worker not in polls.values():
                    polls[worker.call("poll", POLL_S)] = worker
            done, _ = ray.wait(list(polls), num_returns=1, timeout=POLL_S * 2)
            for ref in done:
                worker = polls.pop(ref)
                for completion in fetch(worker, ref, "sampling"):
                    in_flight[worker] -= 1
                    last_news = time.monotonic()
                    yield completion
            if time.monotonic() - last_news > self.options.step_timeout_s:
                waiting = ", ".join(f"{worker.name} ({count} in flight)" for worker, count in in_flight.items() if count)
                raise ClusterError(f"no response ended for {self.options.step_timeout_s:.0f} s on {waiting}")

    def _top_up(self, requests: deque[Request], in_flight: dict[Worker, int], capacity: int) -> None:
        """Give waiting requests to the replicas with the fewest in flight, up to their capacity."""
        shares: dict[Worker, list[Request]] = {}
        while requests:
            worker = min(in_flight, key=lambda w: in_flight[w])
            if in_flight[worker] >= capacity:
                break
            shares.setdefault(worker, []).append(requests.popleft())
            in_flight[worker] += 1
        calls = [(worker, worker.call("submit", share)) for worker, share in shares.items()]
        wait_all([w for w, _ in calls], [ref for _, ref in calls], self.options.step_timeout_s, "rollout.submit")

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
        )


def sampling_of(sampling: Sampling, uid: str, sample: int) -> Sampling:
    """How one response is sampled: with a seed of its own, or greedily."""
    if sample == GREEDY:
        return replace(sampling, temperature=0.0, top_p=1.0, top_k=-1, seed=None)
    return replace(sampling, seed=sample_seed(sampling.seed, uid, sample))


def sample_seed(seed: int | None, uid: str, sample: int) -> int | None:
    """A seed of its own for every response, the same wherever and whenever it is sampled."""
    if seed is None:
        return None
    digest = hashlib.blake2b(f"{seed}:{uid}:{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
