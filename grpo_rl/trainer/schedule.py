"""The contract between a run and its schedule: what a schedule is given, and what the run asks of it.

A schedule decides what one training step does. `trainer/run.py` does everything else: it counts the steps, validates,
saves, logs, resumes, and answers signals. `trainer/schedules.py` lists the schedules by name; a user's own one is named
`my_package.module:Class` or `path/to/file.py:Class`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from grpo_rl.algos.objective import Objective
from grpo_rl.config.schema.tree import Config
from grpo_rl.data.dataset import PromptDataset
from grpo_rl.data.row_set import TrainingRows
from grpo_rl.protocols import (
    Actor,
    Critic,
    MovingReference,
    Reference,
    Rewarder,
    RolloutPool,
    Saved,
    StepInstruments,
    Teacher,
    TrainedRewardModel,
)
from grpo_rl.telemetry.metrics.timeline import Timeline
from grpo_rl.telemetry.page.beside_run import PageBeside
from grpo_rl.telemetry.rollout_log import RolloutLog
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.telemetry.status import Status
from grpo_rl.trainer.progress import StepProgress
from grpo_rl.trainer.stopping import Stop
from grpo_rl.types import Metrics, Rollout, Sampling

if TYPE_CHECKING:
    # The plan looks up the schedule, and need not wait for what draws: TensorBoard, rich.
    from grpo_rl.rewards.audit import Audit
    from grpo_rl.telemetry.metrics.sinks import Sinks
    from grpo_rl.telemetry.terminal.console import Console

Role = TypeVar("Role")
VALIDATION = -1
"""The number that stands for a step's where sampling is seeded for validation."""


@dataclasses.dataclass(slots=True)
class Roles:
    """The roles that were started. None: the schedule does not name it, or the configuration does not need it."""

    actor: Actor | None = None
    rollout: RolloutPool | None = None
    rewarder: Rewarder | None = None
    audit: Audit | None = None
    """The scorer of a part of each step's responses that nothing is trained on."""
    reference: Reference | None = None
    teacher: Teacher | None = None
    critic: Critic | None = None
    reward_model: TrainedRewardModel | None = None
    """The reward model of a schedule that trains it; that of others is a part of the rewarder."""
    recoveries: Callable[[], Metrics] = dict
    """A function that returns how often workers failed and came back since the last call."""
    instruments: StepInstruments | None = None
    """The instruments of the workers, which measure every step and trace chosen ones."""
    kept: list[Saved] = dataclasses.field(default_factory=list)
    """Parts of a checkpoint that are no role, and that the schedule adds when it is constructed."""

    def with_state(self) -> list[Saved]:
        """Return what a checkpoint holds: the roles that are trained, a reference that moves, what the schedule keeps."""
        trained = [role for role in (self.actor, self.critic, self.reward_model) if role is not None]
        moving = [self.reference] if isinstance(self.reference, MovingReference) else []
        return [*trained, *moving, *self.kept]


@dataclasses.dataclass(slots=True)
class Output:
    """The receivers of what a run shows and keeps."""

    run_dir: RunDir
    console: Console
    sinks: Sinks
    rollouts: RolloutLog
    status: Status = dataclasses.field(default_factory=Status)
    stop: Stop = dataclasses.field(default_factory=Stop)
    timeline: Timeline = dataclasses.field(default_factory=Timeline)
    """The record of which role was busy when, open to any thread. The default keeps nothing."""
    page: PageBeside = dataclasses.field(default_factory=PageBeside)
    """The process that writes the run's page. The default writes none."""


@dataclasses.dataclass(slots=True)
class Step:
    """One training step of a loop."""

    number: int
    """1 for the first step of the run."""
    metrics: Metrics = dataclasses.field(default_factory=dict)

    def log(self, metrics: Metrics) -> None:
        """Add these metrics to those of the step, which are logged when it ends."""
        self.metrics |= metrics


@dataclasses.dataclass(slots=True)
class Context:
    """The things that a run gives to its schedule."""

    config: Config
    roles: Roles
    train_data: PromptDataset | None
    """The training data; None where nothing is trained, or where the schedule reads its own."""
    val_data: PromptDataset | None
    output: Output
    total_steps: int
    progress: StepProgress = dataclasses.field(default_factory=StepProgress)
    """The phases of a step, which are shown, timed, and points at which a signal is answered."""
    collected: Metrics = dataclasses.field(default_factory=dict)
    """The metrics of the responses that were sampled before training, which are logged with those before the first step."""
    step: int = 0
    """The number of the step that is going on, or that was done last; the run counts it up before each `Schedule.step`."""
    objective: Objective = dataclasses.field(default_factory=Objective)
    """The function that the actor's updates minimise, as the plan has it."""
    rows: TrainingRows | None = None
    """The rows that are trained on as they stand; None where the trained responses are sampled."""
    code: str = ""
    """The digest of the sources that the run was started with."""
    steps: Callable[[], Iterator[Step]] = lambda: iter(())
    """A function that yields the steps to come, for a loop that drives the run (`trainer/session.py`); the run sets it."""

    @property
    def validates(self) -> bool:
        """True where there is anything to validate on."""
        return self.val_data is not None or (self.rows is not None and self.rows.val is not None)


class Schedule(Protocol):
    """One way to train. It is constructed once for a run, and keeps in `state_dict` whatever decides its next steps."""

    roles: ClassVar[frozenset[str]]
    """The names of the fields of `Roles` that it can drive. A reference or a critic among them is started
    only where the configuration needs one, engines and rewards only where it samples something; a `reward_model` among them
    is trained."""
    trained: Sequence[Rollout]
    """The rollouts that the last step trained on, which are kept for a look where its update was not finite; the run empties
    it afterwards. Always empty where a schedule trains on something else."""

    def __init__(self, context: Context) -> None: ...

    def step(self) -> Metrics:
        """Do step number `context.step`, and return its metrics. An update that was left out shows as `<role>/nonfinite`."""

    def evaluate(self) -> Metrics:
        """Return metrics of the present policy on the validation data, empty without any."""

    def ended(self) -> str | None:
        """Return why no further step can be done, and what to do about it; None while there is one."""

    def state_dict(self) -> dict[str, Any]:
        """Return what decides the steps to come, besides the weights; it becomes a part of the checkpoint's JSON."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from this state. Raises CheckpointError where that makes no sense, as with other training data."""


def required(role: Role | None, name: str) -> Role:
    """Return `role`, which the schedule names and which is there for that reason. Raises ValueError otherwise."""
    if role is None:
        raise ValueError(f"this schedule needs the role {name!r}, which was not started")
    return role


def is_due(step: int, frequency: int) -> bool:
    """Return whether what happens every `frequency` steps happens after this one; -1 is never."""
    return frequency > 0 and step % frequency == 0


def training_sampling(config: Config, step: int) -> Sampling:
    """Return the sampling parameters of one training step, or those that validation starts from (`step=VALIDATION`).

    The step is mixed into the seed; the rollout pool mixes in prompt and sample.
    """
    rollout = config.actor_rollout_ref.rollout
    return Sampling(
        max_tokens=config.data.max_response_length,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        keep_support=True,
        ignore_eos=rollout.ignore_eos,
        # Far from the seeds of other steps and runs.
        seed=((rollout.seed or 0) * 1_000_003 + step * 7_919 + 17) & 0x7FFF_FFFF_FFFF_FFFF,
    )
