"""A session: the verbs of which a training loop of a user's own is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal

from grpo_rl.data.collate import collate
from grpo_rl.data.training_rows.pairs import pairs_of_groups, with_sides
from grpo_rl.trainer.metrics import batch_metrics, pair_metrics, rollout_metrics
from grpo_rl.trainer.progress import Timer
from grpo_rl.trainer.sampled.selection import Selected
from grpo_rl.trainer.schedule import Context, Step, training_sampling
from grpo_rl.trainer.sync import SyncSchedule
from grpo_rl.types import Batch, Metrics, Prompt, Rollout, Sampling


class Session(SyncSchedule):
    """The roles of a run as verbs, for a loop over `steps()`. `trainer.schedule=sync` is

        for step in s.steps():
            s.sync_weights()
            rollouts = s.score(s.sample(s.next_prompts()))
            if trained := s.select(rollouts):
                batch = s.values(s.logprobs(s.batch(trained)))
                step.log(s.update(s.advantages(batch)))

    Every verb notes its seconds and its metrics for the step that is going on, under the names that `sync` has. Between two steps
    the run validates, saves, logs, and answers signals.
    """

    loop: ClassVar[Callable[[Session], None] | None] = None
    """The user's function; None in a session that a script or a notebook drives."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.state: dict[str, Any] = {}
        """What the loop needs to go on after a resume; a part of every checkpoint, as JSON."""
        self._row_of: dict[str, int] = {}
        self._begin_step()

    def _begin_step(self) -> None:
        self._timer: Timer = self.context.progress.timer()
        self._metrics: Metrics = {}
        self._sampled: list[Rollout] = []
        self._trained: list[Rollout] = []
        self._batch: Batch | None = None
        self._num_draws = 0

    def steps(self) -> Iterator[Step]:
        """Yield the steps to come, from the first or from a checkpoint on; what is due after a step happens before the next one.

        Raises Preempted after a signal, with the state saved.
        """
        for step in self.context.steps():
            self._begin_step()
            try:
                yield step
            finally:
                if step.metrics or self._sampled:
                    self._end_step(step)

    def _end_step(self, step: Step) -> None:
        metrics = self._metrics
        if self._sampled:
            metrics = rollout_metrics(self._sampled) | metrics | {"trainer/epoch": float(self.selection.epoch)}
            metrics |= self._keep_rollouts(Selected(self._trained, self._sampled, {}), self._batch)
        if self._batch is not None:
            metrics |= batch_metrics(self._batch, self._timer)
        self.trained = self._trained
        step.metrics = metrics | step.metrics | self._timer.metrics()

    # ---- sampling ----------------------------------------------------------------------------------------

    def next_prompts(self) -> list[Prompt]:
        """Return the next `data.train_batch_size` prompts. Raises DataError for a row that cannot be used."""
        drawn = self.selection.prompts()
        self._row_of |= {prompt.uid: row for row, prompt in drawn}
        return [prompt for _, prompt in drawn]

    def sample(self, prompts: Sequence[Prompt], n: int | None = None, sampling: Sampling | None = None) -> list[Rollout]:
        """Return n responses to each prompt (`rollout.n`, if None), ordered by prompt; each is scored as it ends.

        With an estimator that needs a greedy baseline, each prompt's responses are followed by its greedy one.
        """
        count = self.config.actor_rollout_ref.rollout.n if n is None else n
        greedy = "baselines" in self.advantage.needs
        self._num_draws += 1
        with self._timer("gen"):
            on_finish = self.context.progress.counting(self.rewarder.submit, len(prompts) * (count + greedy))
            sampling = sampling or training_sampling(self.config, self.context.step)
            return self.rollout.generate(prompts, count, sampling, on_finish, greedy=greedy)

    def score(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return the rollouts with `reward`, `reward_parts` and `steps`, or with `failure`; greedy ones become baselines of the others."""
        rewarded = self.scored(rollouts, self._timer)
        self._sampled += rewarded
        if self.context.roles.audit is not None:
            self.context.roles.audit.submit(rewarded)
        return rewarded

    def select(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return the rollouts to train: those with a reward, of the groups that `algorithm.filter_groups` keeps.

        With `filter_groups.refill` further prompts are sampled until `data.train_batch_size` groups have a signal; raises
        DataError after `max_num_gen_batches`. With a loss that compares pairs, the best and the worst of each group.
        """
        replay = self.replay
        spared = 0 if replay is None else len(replay.of_step(self.context.step))
        draw_more = self._more_rollouts if self.selection.refills else None
        selected = self.selection.of_batch(self._row_of, list(rollouts), draw_more, spared)
        self._metrics |= selected.metrics
        trained = selected.trained
        if self.compares:
            pairs = pairs_of_groups(trained)
            self._metrics |= pair_metrics(pairs, len({rollout.prompt.uid for rollout in self._sampled}))
            trained = [rollout for pair in pairs for rollout in pair]
        elif replay is not None:
            trained, replayed = replay.fill(trained, self.context.step)
            self._metrics |= replayed
        return trained

    def _more_rollouts(self) -> list[Rollout]:
        return self.score(self.sample(self.next_prompts()))

    # ---- from rollouts to new weights --------------------------------------------------------------------

    def batch(self, rollouts: Sequence[Rollout]) -> Batch:
        """Return the rollouts as columns over flat axes (`grpo_rl.types.Batch`). Raises ValueError without any."""
        if not rollouts:
            raise ValueError("there are no rollouts to train: go on with the next step if select() returns none")
        self._trained = list(rollouts)
        return with_sides(collate(rollouts)) if self.compares else collate(rollouts, self.advantage.parts)

    def logprobs(self, batch: Batch, of: Literal["old", "reference", "teacher"] | None = None) -> Batch:
        """Return the batch with log-probs of its trained tokens, in nats: `old_logprobs_T`, `ref_logprobs_T`, `teacher_logprobs_T`.

        None: those that the configuration needs. Raises ValueError for a role that it does not have.
        """
        if of is None:
            batch = self.logprobs(batch, "old")
            batch = batch if self.reference is None else self.logprobs(batch, "reference")
            return batch if self.teacher is None else self.logprobs(batch, "teacher")
        if of == "old":
            with self._timer("old_logprobs"):
                return self.actor.old_logprobs(batch)
        if of == "reference" and self.reference is not None:
            with self._timer("ref"):
                return self.reference.logprobs(batch)
        if of == "teacher" and self.teacher is not None:
            with self._timer("teacher"):
                batch, metrics = self.teacher.logprobs(batch, self._trained)
            self._metrics |= metrics
            return batch
        raise ValueError(f"logprobs(of={of!r}): this run has no such role; nothing in its configuration needs one")

    def values(self, batch: Batch) -> Batch:
        """Return the batch with the critic's `values_T`; as it is without a critic."""
        if self.critic is None:
            return batch
        with self._timer("values"):
            return self.critic.values(batch)

    def advantages(self, batch: Batch) -> Batch:
        """Return the batch with advantages by `algorithm.adv_estimator`, without the tokens that are not to be trained."""
        with self._timer("adv"):
            self._batch, trained, metrics = self._weighed(batch)
        self._metrics |= metrics
        return trained

    def update(self, batch: Batch) -> Metrics:
        """Take all optimizer steps of actor and critic on the batch (epochs x mini-batches), and return their metrics.

        The actor's are left out in the first `trainer.critic_warmup` steps. Raises ValueError for a batch without advantages.
        """
        if self._batch is None:
            raise ValueError("update() needs a batch that advantages() has returned in this step")
        metrics: Metrics = {}
        if self.critic is not None:
            with self._timer("update_critic"):
                metrics |= self.critic.update(batch)
        if self.context.step > self.config.trainer.critic_warmup:
            with self._timer("update_actor"):
                metrics |= self.actor.update(batch)
        return metrics

    def sync_weights(self) -> None:
        """Bring the actor's weights to every engine."""
        with self._timer("sync_weights"):
            self.rollout.sync_weights(self.actor)

    # ---- the contract of a schedule ----------------------------------------------------------------------

    def step(self) -> Metrics:
        raise AssertionError("a session is driven by a loop over steps()")

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"loop": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.state = state.get("loop", {})
