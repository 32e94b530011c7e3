"""The inputs of a run that are read before any worker starts: tokenizer, data, rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from grpo_rl.cluster import warm_start
from grpo_rl.cluster.roles.function_host import EnvironmentSpec, FunctionSpec, ScorerSpec
from grpo_rl.cluster.roles.reward_model_role import RewardModelRole, prepare_reward_model
from grpo_rl.data.dataset import PromptDataset
from grpo_rl.data.draw_order import make_row_order
from grpo_rl.data.row_set import BadRows, RowSet, TrainingRows, TrainingSet
from grpo_rl.data.training_rows import rejection
from grpo_rl.data.training_rows.conversations import DemonstrationSet
from grpo_rl.data.training_rows.pairs import LabelledSet, PairSet
from grpo_rl.data.training_rows.rated_steps import RatedStepSet
from grpo_rl.envs.setup import EpisodeSetup
from grpo_rl.frozen import frozen
from grpo_rl.models.load import load_config, load_tokenizer
from grpo_rl.plan.decisions import Plan
from grpo_rl.rewards.audit import auditing
from grpo_rl.rewards.combined import CombinedRewarder, ModelReward
from grpo_rl.rewards.compose import JUDGE, RewardFunction, audit_of
from grpo_rl.rewards.models.judge_question import JudgeSpec
from grpo_rl.rewards.runtime.judge_process import JudgeProcess
from grpo_rl.rewards.runtime.processes import Broken, Done
from grpo_rl.rewards.runtime.runner import JobPool, JudgeRunner, RewardRunner
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.telemetry.terminal.console import Console

if TYPE_CHECKING:
    from grpo_rl.cluster.processes.worker_group import WorkerGroup

T = TypeVar("T", bound=RowSet[Any])


_ROWS: dict[str, Callable[..., TrainingSet[Any]]] = {
    "answers": DemonstrationSet,
    "pairs": PairSet,
    "labelled answers": LabelledSet,
    "rated steps": RatedStepSet,
}


@frozen
class Inputs:
    plan: Plan
    """The plan, with the number of rows that the training data turned out to have."""
    tokenizer: Any
    train_data: PromptDataset | None
    """The prompts that are trained on; None if nothing is trained, or given answers are."""
    val_data: PromptDataset | None
    rows: TrainingRows | None
    """The rows that are trained on as they stand; None if the trained responses are sampled."""
    reward: RewardFunction | None
    audit: RewardFunction | None
    make_reward_model: Callable[[WorkerGroup], RewardModelRole] | None
    """Makes the role of the reward model, if the plan has it, over its processes."""
    episodes: EpisodeSetup | None = None

    def start_rewards(
        self, scorers: WorkerGroup | None, start_of: Callable[[str], Callable[[Done, Broken], JobPool] | None]
    ) -> tuple[CombinedRewarder, RewardRunner | None]:
        """Return the reward of rules, of the reward model that `scorers` compute, and of a judge; then that of the rules alone.

        `start_of` returns what starts the processes of a service; None: they are on this machine.
        """
        plan, config = self.plan, self.plan.config.reward
        rules = None if self.reward is None else RewardRunner(self.reward, config, start_of("reward"))
        models: list[ModelReward] = []
        if self.make_reward_model is not None:
            assert scorers is not None, "the plan has processes for the reward model"
            models.append(self.make_reward_model(scorers))
        if plan.reward.judge:
            models.append(JudgeRunner(config.judge, start_of(JUDGE) or partial(JudgeProcess, JudgeSpec.of(config))))
        rewarder = CombinedRewarder(
            rules,
            models,
            config,
            models_alone=plan.config.is_iterated,
            episodes=plan.config.rollout.multi_turn if plan.plays_episodes else None,
            every_turn="states" in plan.advantage_needs,
        )
        return rewarder, rules

    def functions(self, plan: Plan, logs: Path) -> FunctionSpec | None:
        config = plan.config.reward
        parts = (part for part in (self.train_data, self.val_data) if part is not None)
        sources = tuple(sorted({source for part in parts for source in part.data_sources}))
        scorers = dict[str, ScorerSpec | JudgeSpec]()
        if plan.reward.scores and self.reward is not None:
            scorers["reward"] = ScorerSpec(config, sources)
        if plan.reward.scores and self.audit is not None:
            scorers["audit"] = ScorerSpec(audit_of(config), sources)
        if plan.reward.judge or (plan.reward.scores and JUDGE in config.audit and self.train_data is not None):
            scorers[JUDGE] = JudgeSpec.of(config)
        environments = None
        if self.episodes is not None:
            environments = EnvironmentSpec(self.episodes.host, plan.config.rollout.multi_turn.environment)
        if not scorers and environments is None:
            return None
        code_users = self.reward, self.audit, self.episodes
        needs_sandbox = any(user is not None and user.runs_code for user in code_users)
        return FunctionSpec(scorers, environments, needs_sandbox, logs)


def read_inputs(
    plan: Plan, run_dir: RunDir, console: Console, *, collected: Path | None = None, part: str = "validation"
) -> Inputs:
    """Read what the configuration names; training rows are those of `collected` if it is given.

    Raises ConfigError, DataError and RewardError for what cannot be used.
    """
    config = plan.config
    folder = warm_start.unstarted_folder(config.model.path)
    scorer = warm_start.unstarted_folder(config.reward.reward_model.model_path or "")
    with console.progress("reading the model's settings and its tokenizer"):
        model = config.model
        # The model's config first: a folder that cannot be used is refused before anything is read or started.
        settings = load_config(folder, trust_remote_code=model.trust_remote_code, override=model.override_config)
        tokenizer = load_tokenizer(model.tokenizer_path or folder, trust_remote_code=model.trust_remote_code)
    vocab_size, decode = int(settings.get_text_config().vocab_size), decoder(tokenizer)
    episodes = EpisodeSetup.of(config) if plan.plays_episodes else None
    if episodes is not None:
        for note in episodes.check(tokenizer):
            console.warn(note)
    data_plan = plan if episodes is None else plan.with_data(episodes.data(tokenizer))
    train, val, rows = _data(data_plan, tokenizer, vocab_size, console, run_dir.path, collected, part)
    has_model = plan.reward.scores and plan.role("reward_model") is not None
    reward_model = prepare_reward_model(plan, scorer, tokenizer, decode) if has_model else None
    reward = audit = None
    data_sources = {source for part in (train, val) if part is not None for source in part.data_sources}
    if plan.reward.rules:
        reward = RewardFunction.from_config(config.reward, decode=decode if plan.reward.steps_by_rules else None)
        reward.check_data_sources(data_sources)
    if train is not None:
        if config.data.curriculum is not None:
            make_row_order(config, train).next_batch()  # what the function does wrong shows before any worker starts
        audit = auditing(config.reward, data_sources)
    trained = train if rows is None else rows.train
    if trained is not None:
        plan = plan.with_rows(len(trained))
    return Inputs(plan, tokenizer, train, val, rows, reward, audit, reward_model, episodes)


def _data(
    plan: Plan, tokenizer: Any, vocab_size: int, console: Console, folder: Path, collected: Path | None, validation: str
) -> tuple[PromptDataset | None, PromptDataset | None, TrainingRows | None]:
    """Return prompts to train on, prompts of the validation, and rows; what is not named, or not used, is None.

    `validation` names the prompts of a plan that only samples.
    """
    config, data = plan.config, plan.config.data
    notes: list[str] = []

    def read(kind: Callable[..., T], part: str, name: str, files: Sequence[str], of: Any, most: int | None = None) -> T:
        """Read one set. Every validation uses all of its rows, so none can wait for its turn: they are checked as a whole."""
        bad_rows = BadRows(data.on_bad_row, folder / f"bad_rows_{name}.jsonl", console.warn)
        limit = data.val_max_samples if most is None else most
        opened = kind(files, of, tokenizer, max_samples=limit, bad_rows=bad_rows, vocab_size=vocab_size)
        dataset = opened.checked(most is None, lambda text: bar.advance(0, note=text))
        notes.append(f"{part}: {dataset.report}")
        bar.advance(note="; ".join(notes))
        return dataset

    with console.progress("reading the data") as bar:
        train_prompts = val_prompts = val = None
        if plan.rows is not None:
            kind, rows, max_samples = _ROWS[plan.rows], config, data.train_max_samples
            if collected is not None:
                rows, max_samples = rejection.reading(config, str(collected)), -1
            train = read(kind, "train", "train", rows.data.train_files, rows, max_samples)
            if data.val_files:
                val = read(kind, "validation", "val", data.val_files, config)
            if data.val_prompt_files:
                val_prompts = read(PromptDataset, "validation prompts", "val_prompts", data.val_prompt_files, data)
            return None, val_prompts, TrainingRows(train, val)
        if plan.trains:
            train_prompts = read(PromptDataset, "train", "train", data.train_files, data, data.train_max_samples)
        if data.val_files:
            val_prompts = read(PromptDataset, validation, "val", data.val_files, data)
        return train_prompts, val_prompts, None


def decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Return the function that turns response tokens into the text that a reward function sees."""
    return lambda token_ids: tokenizer.decode(list(token_ids), skip_special_tokens=True)
