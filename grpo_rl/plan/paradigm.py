"""A run as the three components that all methods share: data source, reward function, gradient coefficient.

DeepSeekMath (arXiv 2402.03300), section 5.2.1, eq. 5:

    gradient = E_{(q, o) ~ D} [ 1/|o| Σ_t GC(q, o, t, π_rf) ∇log π(o_t | q, o_<t) ]

`docs/paradigm.md` has the components of each method with the keys that choose them.
"""

from __future__ import annotations

from collections.abc import Iterator

from grpo_rl.algos.kl import KL_ESTIMATORS
from grpo_rl.algos.losses.registered import POLICY_LOSSES
from grpo_rl.config import derived
from grpo_rl.config.schema.algorithm import TeacherConfig
from grpo_rl.config.schema.tree import Config
from grpo_rl.plan.decisions import Plan
from grpo_rl.registry import coefficient_of, shown
from grpo_rl.rewards.combined import describe_models


def components(config: Config, plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the name and the description of each component, and the gradient that they make."""
    yield "D", data_source(config, plan)
    yield "π_rf", reward_function(config, plan)
    for name, teacher in plan.teachers:
        yield "teacher", f"{name}: {_teacher(teacher, plan)}"
    yield "GC", f"= {gradient_coefficient(plan)}"
    average = (
        f"mean over {'rows' if plan.objective.needs_kl else 'pairs'} of Σ_tokens"
        if plan.objective.needs_pairs
        else f"{plan.objective.loss_agg_mode} of"
    )
    more = " - the entropy's own gradient" if plan.objective.entropy_coeff or plan.objective.adaptive_entropy else ""
    yield "gradient", f"= {average} GC ∇log π{more}"


def data_source(config: Config, plan: Plan) -> str:
    """Describe where the trained responses come from."""
    kind = plan.rows or ("pairs" if plan.objective.needs_pairs else "answers")
    if config.data.responses == "rows":
        return f"the {kind} that stand in the rows (data.responses=rows)"
    n = (plan.collection or plan).config.actor_rollout_ref.rollout.n
    sampled = f"{n} responses to each prompt, sampled by"
    if plan.objective.needs_pairs:
        sampled = f"the best and the worst of {sampled}"
    if plan.collection is not None:
        which = "" if plan.objective.needs_pairs else ", of which the good ones are kept"
        return f"{sampled} the initial policy{which} (data.responses=initial_policy)"
    if staleness := derived.oldest_sampler(config):
        return (
            f"{sampled} the policy of at most {staleness} training step{'s' * (staleness > 1)} before (data.responses=policy)"
        )
    return f"{sampled} the policy as it is (data.responses=policy)"


def reward_function(config: Config, plan: Plan) -> str:
    """Describe what says how good a response is."""
    if plan.objective.needs_kl:
        return "whether an answer is desirable, as its row says"
    if config.data.responses == "rows":
        return (
            "which answer of a pair is the better one, as its row says"
            if plan.objective.needs_pairs
            else "none: each row is right"
        )
    if plan.objective.distillation is not None and not plan.objective.distillation.task:
        return "none: the teacher's distribution is the goal, and rewards are measured only"
    rules, models = config.reward.functions, describe_models(config)
    if plan.reward.model_alone:
        trained = f", trained on samples of the policy that {' + '.join(rules)} labels" if plan.trains_reward_model else ""
        return f"{' + '.join(models)} alone{trained}"
    return " + ".join([*rules, *models]) or "the judge's scores"


def _teacher(teacher: TeacherConfig, plan: Plan) -> str:
    """Describe a teacher: its model, what it reads and whom it teaches."""
    role = plan.role("teacher")
    ranks = "" if role is None else f" ({role.num_workers} frozen rank{'s' * (role.num_workers > 1)} in the {role.pool}'s pool)"
    own = (
        "the policy as it is" if teacher.ema_decay is None else f"a moving average of the policy (decay {teacher.ema_decay:g})"
    )
    model = own if teacher.model_path is None else f"{teacher.model_path}{ranks}"
    reads = "" if teacher.context is None else ", with a context that the policy does not read"
    whom = "prompts of any other data_source" if teacher.key is None else f"prompts of data_source {teacher.key}"
    shares = [one.weight for _, one in plan.teachers if one.key == teacher.key]
    return f"{model}{reads}" + (f"; {teacher.weight / sum(shares):.0%} of the {whom}" if len(plan.teachers) > 1 else "")


def gradient_coefficient(plan: Plan) -> str:
    """Return the factor of ∇log π with its options as numbers: the loss's, and the KL term's where there is one."""
    objective = plan.objective
    taught = objective.distillation
    if taught is not None and not taught.task and not taught.as_advantage:
        return taught.coefficient()
    loss = POLICY_LOSSES.get(objective.loss_mode)
    coefficient = shown(loss, objective.loss_options, coefficient_of) or "-∂pg/∂log π"
    if coefficient.startswith("r ") and plan.sizes.updates_per_step == 1 and plan.passes.old_logprobs != "engine":
        coefficient = f"{coefficient}; r = 1, so it is A"
    if taught is not None:
        coefficient += f"; {'A' if taught.as_advantage else 'and'} {'= ' * taught.as_advantage}{taught.coefficient()}"
    if objective.kl_loss_type is None:
        return coefficient
    if objective.needs_full_kl:
        return f"{coefficient}; and - {objective.kl_loss_coef:g} ∇KL, over the whole vocabulary"
    of_kl = shown(KL_ESTIMATORS.get(objective.kl_loss_type), objective.kl_options, coefficient_of) or "∂KL/∂log π"
    return f"{coefficient}; and - {objective.kl_loss_coef:g} ({of_kl})"
