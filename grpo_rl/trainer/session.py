"""A session: the roles of a run as verbs, of which every schedule is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import numpy as np
import torch

from grpo_rl.algos.aggregate import group_tokens
from grpo_rl.algos.objective import Objective
from grpo_rl.background import in_background
from grpo_rl.config.derived import max_staleness, overlaps
from grpo_rl.config.schema.tree import Config
from grpo_rl.data.collate import collate
from grpo_rl.data.dataset import PromptDataset
from grpo_rl.data.row_set import TrainingRows
from grpo_rl.data.training_rows.pairs import Pair, pair_batch, pairs_of_groups, with_sides
from grpo_rl.errors import WeightVersionError
from grpo_rl.protocols import Actor, MovingReference, Rewarder, RolloutPool
from grpo_rl.rewards.combined import by_rule
from grpo_rl.rewards.validation_metrics import validation_metrics
from grpo_rl.trainer.in_flight import Choose, InFlight
from grpo_rl.trainer.metrics import (
    batch_metrics,
    logged_advantages,
    pair_metrics,
    rollout_metrics,
    staleness_metrics,
    throughput,
)
from grpo_rl.trainer.parts import Output, Roles, Step, StepProgress, advancing, training_sampling, validation_sampling
from grpo_rl.trainer.replay import GroupReplay, PairReplay
from grpo_rl.trainer.rows import Rows, with_kl
from grpo_rl.trainer.sampled.sampler import Sampler
from grpo_rl.trainer.sampled.selection import Selection
from grpo_rl.trainer.sampled.trained import (
    Advantage,
    check_finite,
    penalize_overlong,
    scored,
    trained_tokens,
    with_baselines,
    with_reward,
)
from grpo_rl.types import Batch, Counts, Metrics, Prompt, Rollout, Sampling


class Session:
    """The roles of a run as verbs, which note their seconds and metrics, for a loop over `steps()`."""

    def __init__(
        self,
        config: Config,
        roles: Roles,
        output: Output,
        *,
        train_data: PromptDataset | None = None,
        val_data: PromptDataset | None = None,
        rows: TrainingRows | None = None,
        total_steps: int = 0,
        objective: Objective | None = None,
        collected: Metrics | None = None,
        code: str = "",
    ) -> None:
        """`collected`: metrics of the responses that were sampled before the first step."""
        self.config, self.roles, self.output = config, roles, output
        self.train_data, self.val_data, self.total_steps = train_data, val_data, total_steps
        self.objective = objective or Objective()
        self.collected, self.code = collected or {}, code
        self.step = 0  # the number of the current or last step; 0 before the first one
        self.progress = StepProgress(output.timeline)
        self.state: dict[str, Any] = {}  # what the loop needs to go on after a resume; a part of every checkpoint, as JSON
        self.run_steps: Callable[[], Iterator[Step]] = lambda: iter(())
        self._reason_to_end: str | None = None
        self.overlaps = overlaps(config)
        self.compares = self.objective.needs_pairs  # True if the loss compares the best and the worst response of each group
        self.rows = None if rows is None else Rows(config, rows, roles, self.objective, output.console)
        self.replay: GroupReplay | None = None
        self.pair_replay: PairReplay | None = None
        algorithm, iterate = config.algorithm, config.trainer.iterate
        if algorithm.replay.max_age and train_data is not None:
            self.replay = GroupReplay(algorithm.replay, config.data.train_batch_size, config.rollout.n)
        if config.is_iterated and roles.reward_model is not None:
            self.pair_replay = PairReplay(iterate.replay_pairs, iterate.replay_share, config.trainer.seed)
        roles.replays = [replay for replay in (self.replay, self.pair_replay) if replay is not None]
        factors = {} if roles.rewarder is None else roles.rewarder.factors
        self.advantage = Advantage(algorithm, factors, of_turns=config.rollout.multi_turn.enable)
        self.samples_greedily = "baselines" in self.advantage.needs
        """True if each prompt's responses are followed by its greedy one."""
        self.sampler = Sampler(self)
        self._selection = None if train_data is None else Selection(config, train_data, factors)
        self._flight = None if train_data is None else InFlight(self)
        self.begin_step()

    def steps(self) -> Iterator[Step]:
        """Yield the steps to come, each followed by what is due. Raises Preempted after a signal."""
        return self.run_steps()

    def end(self, reason: str) -> None:
        """Make this step the last one of the run, for a reason that the run prints."""
        self._reason_to_end = reason

    def begin_step(self) -> None:
        """Forget the notes of the last step; the run calls it."""
        self._metrics: Metrics = {}
        self._timings: Metrics = {}
        self.sampled: list[Rollout] = []  # all rollouts that were scored in this step
        self.trained: list[Rollout] = []  # the rollouts that this step trains on
        self.has_trained = False  # True once weights have changed in this step
        self.sampler.begin_step()
        self._row_of: dict[str, int] = {}
        self._batch: Batch | None = None
        self._parts_of: Counts | None = None  # the counts of the mini-batch whose gradient is adding up
        if self._flight is not None:
            self._flight.has_taken = False

    def _timer(self, phase: str) -> AbstractContextManager[None]:
        return self.progress.timed(phase, self._timings)

    def end_step(self, step: Step) -> None:
        if self._parts_of is not None:
            raise ValueError("the step ends with gradients of forward_backward() that optim_step() has not taken")
        metrics = self._metrics
        if self.sampled:
            metrics = rollout_metrics(self.sampled) | metrics | {"trainer/epoch": float(self.selection.sampler.epoch)}
            rollouts = self.sampled
            if self.roles.audit is not None:
                metrics |= self.roles.audit.wait(self.output.console.warn)
                rollouts = self.roles.audit.logged(rollouts)
            if self.config.trainer.save_rollouts:
                advantages = logged_advantages(rollouts, self.trained, self._batch)
                self.output.rollouts.write("rollouts", self.step, rollouts, advantages)
        if self._batch is not None:
            seconds = sum(self._timings.values())
            if self.rows is None:
                metrics |= batch_metrics(self._batch, seconds)
            else:
                metrics |= {"trainer/epoch": float(self.rows.order.epoch)} | throughput(self._batch, seconds)
        step.metrics = metrics | step.metrics | self._timings

    @property
    def actor(self) -> Actor:
        """The policy that is trained."""
        return _required(self.roles.actor, "actor")

    @property
    def rollout(self) -> RolloutPool:
        """The engines that sample."""
        return _required(self.roles.rollout, "rollout")

    @property
    def rewarder(self) -> Rewarder:
        """What scores rollouts."""
        return _required(self.roles.rewarder, "rewarder")

    @property
    def selection(self) -> Selection:
        """The order of the prompts, and the choice of groups."""
        return _required(self._selection, "training data")

    @property
    def version(self) -> int:
        """The version of the actor's weights: the number of batches that they were trained on."""
        return self.actor.version

    @property
    def engine_version(self) -> int:
        """The version of the engines' weights."""
        return self.rollout.version

    def next_prompts(self, rows: Sequence[int] | None = None) -> list[Prompt]:
        """Return the next `data.train_batch_size` prompts, or those of the training data's `rows` (numbers from 0 on).

        Raises DataError for a row that cannot be used, ValueError for one that is not there.
        """
        drawn = self.selection.prompts(rows)
        self._row_of |= {prompt.uid: row for row, prompt in drawn}
        return [prompt for _, prompt in drawn]

    def sample(self, prompts: Sequence[Prompt], n: int | None = None, sampling: Sampling | None = None) -> list[Rollout]:
        """Return n responses to each prompt (`rollout.n`, if None), ordered by prompt, and begin to score
        them.

        A greedy response follows if the estimator needs one. `rollout.function` makes the rollouts unless n
        or the sampling are given.
        """
        function = self.config.rollout.function
        if function is not None and n is None and sampling is None:
            with self._timer("gen"):
                return self.sampler.played(function, prompts)
        n = self.sampler.n if n is None else n
        sampling, greedy = sampling or training_sampling(self.config, self.step), self.samples_greedily
        with self._timer("gen"):
            on_finish = self.progress.counting(self.rewarder.submit, len(prompts) * (n + greedy))
            return self.rollout.generate(prompts, n, sampling, on_finish, greedy=greedy)

    def score(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return the rollouts with `reward`, `reward_parts` and `steps`, or with `failure`; greedy ones become baselines of the others."""
        with self._timer("reward"):
            rewarded = self.rewarded(rollouts)
        self.selection.note(self._row_of, rewarded)
        sampled, self.flight.rejected = [*rewarded, *self.flight.rejected], []
        self.sampled += sampled
        if self.roles.audit is not None:
            self.roles.audit.submit(sampled)
        return rewarded

    def rewarded(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return what `score` returns without noting anything: for any thread. What has its reward keeps it."""
        unscored = [rollout for rollout in rollouts if rollout.reward is None and rollout.failure is None]
        scored(self.rewarder, unscored, self.output.console.warn)
        penalize_overlong(unscored, self.config.reward.overlong_buffer, self.config.data.max_response_length)
        return with_baselines(rollouts)

    def select(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return the rollouts with a reward of the groups that `algorithm.filter_groups` keeps.

        With `filter_groups.refill` further prompts are sampled until `data.train_batch_size` groups have a
        signal; raises DataError after `max_num_gen_batches`. With a loss over pairs: the best and the worst
        of each group. With `algorithm.replay`: earlier groups in place of those without a signal. Raises
        WeightVersionError for a token older than the schedule declared.
        """
        if self.selection.refills and self.flight.has_taken:
            trained, metrics = with_reward(rollouts), self.flight.refilling
        else:
            num_spared = 0 if self.replay is None else len(self.replay.of_step(self.step))
            trained, metrics = self.selection.choose(rollouts, lambda: self.score(self.sample(self.next_prompts())), num_spared)
        self._metrics |= metrics
        if self.overlaps:
            staleness, bound = staleness_metrics(trained, self.version), max_staleness(self.config)
            if (oldest := staleness.get("staleness/max", 0.0)) > bound:
                raise WeightVersionError(
                    f"a token was sampled with weights {oldest:g} versions older than those it trains; at most {bound} are allowed"
                )
            self._metrics |= staleness
        if self.compares:
            pairs = pairs_of_groups(trained)
            self._metrics |= pair_metrics(pairs, len({rollout.prompt.uid for rollout in self.sampled}))
            trained = [rollout for pair in pairs for rollout in pair]
        elif self.replay is not None:
            trained, replayed = self.replay.fill(trained, self.step)
            self._metrics |= replayed
        return trained

    @property
    def flight(self) -> InFlight:
        """The groups that were drawn and not trained."""
        return _required(self._flight, "training data")

    @property
    def num_in_flight(self) -> int:
        """The number of groups that were asked for and not handed over."""
        return len(self.flight.requested())

    def submit(self, num_groups: int, *, in_order: bool = True) -> None:
        """Ask for groups until `num_groups` are in flight, or as many as the steps left train.

        `in_order`: batches take the first groups that were drawn. Raises DataError as `next_prompts` and
        `select`.
        """
        if (function := self.config.rollout.function) is not None:
            raise ValueError(
                f"submit() samples single responses, and rollout.function={function} makes whole batches: use sample()"
            )
        self.flight.room, self.flight.in_order = num_groups, in_order
        self.flight.top_up()

    def completed(self, choose: Choose | None = None) -> list[Rollout]:
        """Wait for a batch of the groups in flight, and return their responses in the order of the draws.

        `choose(ready, asked, size)` is called whenever a group has ended, and returns `size` of the ready
        groups, or None to wait; without it a batch has the first groups that were drawn.
        """
        with self._timer("wait_for_rollouts"):
            groups = self.flight.take(choose)
        if not self.selection.refills:  # otherwise they were noted when they were judged
            self._row_of |= {group.prompt.uid: group.row for group in groups}
        return [rollout for group in groups for rollout in group.ordered()]

    def finish_sampling(self) -> None:
        """Wait until all responses in flight have ended."""
        self.flight.finish()

    def train_beside_sampling(self, rollouts: Sequence[Rollout]) -> Metrics:
        """Return what `train` returns, done in a thread, while what is in flight is sampled.

        That thread alone uses the ranks then. A replica that comes back meanwhile gets its weights
        afterwards: the ranks would hand out new ones under the old version, or meet in different collectives.
        Raises ValueError for a schedule that has not declared it.
        """
        if not self.overlaps:
            raise ValueError(
                "train_beside_sampling() is for a schedule that declares how old its tokens may be: put "
                "@grpo_rl.registry.samples_ahead(versions=1) on its function, and name it by trainer.schedule"
            )
        # A signal must not leave the main thread while the weights change.
        self.output.stop.finishing()
        with self.rollout.keep_weights():
            return self.flight.sample_beside(in_background("training", lambda: self.train(rollouts)))

    def train(self, rollouts: Sequence[Rollout]) -> Metrics:
        """Return the metrics of `batch`, `logprobs`, `values`, `advantages` and `update`; none without rollouts."""
        if not rollouts:
            return {}
        return self.update(self.advantages(self.values(self.logprobs(self.batch(rollouts)))))

    def batch(self, rollouts: Sequence[Rollout]) -> Batch:
        """Return the rollouts as columns over flat axes (`grpo_rl.types.Batch`). Raises ValueError without any."""
        if not rollouts:
            raise ValueError("there are no rollouts to train: go on with the next step if select() returns none")
        self.trained = list(rollouts)
        return with_sides(collate(rollouts)) if self.compares else collate(rollouts, self.advantage.parts)

    def next_rows(self) -> Batch:
        """Return the next `data.train_batch_size` rows as a batch. Raises DataError for a row that cannot be used."""
        rows = _required(self.rows, "rows")
        with self._timer("data"):
            self._batch = batch = rows.draw()
        if self.objective.needs_kl:
            with self._timer("kl"):
                self._batch = batch = with_kl(batch, self.actor)
        return batch

    def logprobs(self, batch: Batch, of: Literal["old", "reference", "teacher"] | None = None) -> Batch:
        """Return the batch with `old_logprobs_T`, `ref_logprobs_T` or `teacher_logprobs_T` of its trained tokens, in nats.

        None: those that the configuration needs. Raises ValueError for a role that it does not have.
        """
        if of is None:
            batch = batch if self.rows is not None else self.logprobs(batch, "old")
            batch = batch if self.roles.reference is None else self.logprobs(batch, "reference")
            return batch if self.roles.teacher is None else self.logprobs(batch, "teacher")
        if of == "old":
            with self._timer("old_logprobs"):
                return self.actor.old_logprobs(batch)
        if of == "reference" and self.roles.reference is not None:
            with self._timer("ref"):
                return self.roles.reference.logprobs(batch)
        if of == "teacher" and self.roles.teacher is not None:
            with self._timer("teacher"):
                batch, metrics = self.roles.teacher.logprobs(batch, self.trained)
            self._metrics |= metrics
            return batch
        raise ValueError(f"logprobs(of={of!r}): this run has no such role; nothing in its configuration needs one")

    def values(self, batch: Batch) -> Batch:
        """Return the batch with the critic's `values_T`, if there is a critic."""
        if self.roles.critic is None:
            return batch
        with self._timer("values"):
            return self.roles.critic.values(batch)

    def advantages(self, batch: Batch) -> Batch:
        """Return the batch with advantages by `algorithm.adv_estimator`, without the tokens that are not to be trained.

        Pairs are trained whole and have none. Raises DivergedError for log-probs that are not finite.
        """
        with self._timer("adv"):
            distillation = self.objective.distillation
            if self.compares:
                check_finite(batch)
                self._batch = batch
                return batch
            if distillation is not None and not distillation.task:
                batch = batch.replace(advantages_N=torch.zeros(batch.num_rollouts))  # the ranks make all of them
            else:
                batch, metrics = self.advantage(batch)
                self._metrics |= metrics
            self._batch = batch
            trained, metrics = trained_tokens(batch, self.config.algorithm)
            self._metrics |= metrics
            if self.objective.needs_group_tokens:  # before anybody takes a part of it
                trained = trained.replace(group_tokens_N=group_tokens(trained.trained_lengths_N, trained.group_N))
        return trained

    def update(self, batch: Batch) -> Metrics:
        """Take all optimizer steps of actor and critic (epochs x mini-batches), and return their metrics.

        The actor takes none in the first `trainer.critic_warmup` steps. Raises ValueError for a batch without
        advantages.
        """
        if self._parts_of is not None:
            raise ValueError("update() after forward_backward(): optim_step() takes the step of its gradients first")
        return self._of_trained("update", batch)

    def forward_backward(self, batch: Batch, whole: Batch | None = None) -> None:
        """Add the gradient of a batch, or of a part of the `whole` one (`whole.select([0, 1, ...])`); `optim_step` takes the step.

        The loss is averaged over the whole, so that its parts have the gradient that `update` has on a mini-batch of it. Raises
        ValueError for parts of different batches, and for a loss that looks at all of a mini-batch at once.
        """
        counts = (batch if whole is None else whole).counts()
        if self._parts_of not in (None, counts):
            raise ValueError(
                f"forward_backward() of a part of {counts}, after parts of {self._parts_of}: optim_step() comes between"
            )
        self._of_trained("forward_backward", batch, counts)
        self._parts_of = counts

    def optim_step(self) -> Metrics:
        """Take one optimizer step of actor and critic, and return their metrics. Raises ValueError without `forward_backward`."""
        if (counts := self._parts_of) is None:
            raise ValueError("optim_step() needs the gradients of forward_backward() in this step")
        self._parts_of = None
        return self._of_trained("optim_step", counts)

    def _of_trained(self, verb: Literal["update", "forward_backward", "optim_step"], *arguments: Any) -> Metrics:
        """Call the critic's verb, and the actor's after the critic's warm-up; return their metrics."""
        if self._batch is None:
            raise ValueError(f"{verb}() needs a batch that advantages() has returned in this step")
        actor = self.actor if self.step > self.config.trainer.critic_warmup else None
        metrics: Metrics = {}
        for phase, role in (("update_critic", self.roles.critic), ("update_actor", actor)):
            if role is not None:
                with self._timer(phase):
                    self.has_trained = True
                    metrics |= getattr(role, verb)(*arguments) or {}
        return metrics

    def sync_weights(self) -> None:
        """Bring the actor's weights to every engine."""
        with self._timer("sync_weights"):
            self.rollout.sync_weights(self.actor)

    def refresh_reference(self) -> None:
        """Make a reference that moves the present policy."""
        if isinstance(self.roles.reference, MovingReference):
            with self._timer("refresh_reference"):
                self.roles.reference.become(self.actor)

    def update_reward_model(self, batch: Batch) -> Metrics:
        """Take one optimizer step on a batch of pairs or of rated steps, and return its metrics."""
        with self._timer("update_reward_model"):
            self.has_trained = True
            return _required(self.roles.reward_model, "reward_model").update(batch)

    def train_reward_model(self, pairs: Sequence[tuple[Rollout, Rollout]], iteration: int) -> Metrics:
        """Take one step of the reward model on pairs (better, worse), if any, and on replayed ones."""
        history = _required(self.pair_replay, "reward_model")
        replayed = history.draw(len(pairs), iteration, self.step)
        metrics = {"reward_model/new_pairs": float(len(pairs)), "reward_model/replayed_pairs": float(len(replayed))}
        if pairs:
            rows = [
                Pair(best.prompt.token_ids, np.asarray(best.response_ids), np.asarray(worst.response_ids))
                for best, worst in (*pairs, *replayed)
            ]
            metrics |= self.update_reward_model(pair_batch(rows))
            history.add(pairs, iteration)
        self.trained = [rollout for pair in pairs for rollout in pair]
        return metrics

    def evaluate(self) -> Metrics:
        """Return metrics of the present weights on the validation rows and prompts; empty without any.

        Responses go to `val/step_N.jsonl`. In iterated training the reward of the rules is measured.
        """
        metrics, timings, console = dict[str, float](), dict[str, float](), self.output.console
        if self.rows is not None and "val" in self.rows.sets:
            with self.progress.timed("testing", timings):
                metrics |= self.rows.measure()
        if self.val_data is not None:
            n = self.config.rollout.val_kwargs.n
            prompts = [self.val_data.prompt(row, f"val-{row}") for row in range(len(self.val_data))]
            with self.progress.timed("testing", timings), console.progress("validating", len(prompts) * n, keep=False) as bar:
                if self.roles.actor is not None:
                    self.rollout.sync_weights(self.roles.actor)
                on_finish = advancing(bar, self.rewarder.submit)
                rollouts = self.rollout.generate(prompts, n, validation_sampling(self.config), on_finish)
                rollouts = by_rule(scored(self.rewarder, rollouts, console.warn))
            self.output.rollouts.write("val", self.step, rollouts)
            metrics |= validation_metrics(rollouts, n)
        return metrics | timings

    @property
    def validates(self) -> bool:
        """True if there is anything to validate on."""
        return self.val_data is not None or (self.rows is not None and "val" in self.rows.sets)

    def ended(self) -> str | None:
        """Return why no further step can be done, and what to do about it; None while there is one."""
        if self.config.trainer.val_only:
            return "trainer.val_only=true validates and trains nothing"
        if self._reason_to_end is not None:
            return self._reason_to_end
        if self._selection is None or not self._selection.exhausted or self.flight.has_batch:
            return None
        return (
            "fewer prompts than a batch are left, the others passed often enough to retire; give harder data, or raise "
            "data.retire_above"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what decides the steps to come besides the weights, as JSON."""
        state: dict[str, Any] = {"loop": self.state}
        if self.rows is not None:
            return state | {"sampler": self.rows.state_dict(), "num_rows": len(self.rows.sets["train"])}
        if self._selection is None:
            return state
        state |= {"sampler": self.selection.state_dict(), "advantage": self.advantage.kl_controller.state_dict()}
        state["num_rows"] = len(self.selection.data)
        if self.config.rollout.function is not None:
            state["rollout_function"] = self.sampler.state
        return state | {"groups": self.flight.state_dict()} if self.flight.num_batches else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from this state. Raises CheckpointError for other training data."""
        if self.config.trainer.val_only:  # the state is that of the schedule which trained
            return
        self.state = state.get("loop", {name: state[name] for name in ("iterate",) if name in state})
        if self.rows is not None:
            self.rows.load_state_dict(state["sampler"])
        elif self._selection is not None:
            same_data = self.selection.load_state_dict(state["sampler"])
            self.advantage.kl_controller.load_state_dict(state["advantage"])
            self.sampler.state = state.get("rollout_function", {})
            groups = state.get("groups", {"num_batches": 0, "waiting": []})
            self.flight.load_state_dict(groups, same_data=same_data)


def _required(part: Any, name: str) -> Any:
    if part is None:
        raise ValueError(f"this verb needs {name}, which this run has not; its schedule did not name it, or nothing needs it")
    return part


Schedule = Callable[[Session], None]  # A loop over the steps of a session
