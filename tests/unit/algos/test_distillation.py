"""Distances to a teacher: values by hand, a naive loop in float64, TRL's loss, micro-batches, and what is refused."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from grpo_rl.algos.losses.contract import LossInput
from grpo_rl.algos.losses.distillation import DIVERGENCES, Distillation, with_rest
from grpo_rl.algos.objective import Objective
from grpo_rl.algos.segments import Segments
from grpo_rl.config.derived import teachers_of
from grpo_rl.config.schema.algorithm import DistillationConfig, DistillationLossConfig
from grpo_rl.config.schema.tree import Config
from grpo_rl.errors import ConfigError
from grpo_rl.types import Counts

LENGTHS = [3, 1, 5, 4]
VOCABULARY = 7
COUNTS = Counts(num_tokens=sum(LENGTHS), num_sequences=4, num_groups=4)


class Tokens:
    """Logits of policy and teacher for the tokens of four responses, in float64."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        shape = 2, sum(LENGTHS), VOCABULARY
        policy_TV, self.teacher_TV = torch.randn(shape, generator=generator, dtype=torch.float64)
        self.policy_TV = policy_TV.requires_grad_()
        self.sampled_T = torch.randint(VOCABULARY, (sum(LENGTHS),), generator=generator)
        self.advantages_T = torch.randn(sum(LENGTHS), generator=generator, dtype=torch.float64)

    def inputs(self, topk: int, begin: int = 0, end: int = len(LENGTHS)) -> LossInput:
        """Return the responses from `begin` to `end` as one micro-batch."""
        start, stop = sum(LENGTHS[:begin]), sum(LENGTHS[:end])
        policy_TV = self.policy_TV[start:stop].log_softmax(-1)
        teacher_TV = self.teacher_TV[start:stop].log_softmax(-1)
        top_TK, ids_TK = teacher_TV.topk(topk or 1)
        sampled_T1 = self.sampled_T[start:stop, None]
        return LossInput(
            policy_logprobs_T=policy_TV.gather(1, sampled_T1)[:, 0],
            advantages_T=self.advantages_T[start:stop],
            segments=Segments(torch.tensor(LENGTHS[begin:end])),
            teacher_logprobs_T=teacher_TV.gather(1, sampled_T1)[:, 0],
            teacher_top_logprobs_TK=top_TK,
            policy_top_logprobs_TK=policy_TV.gather(1, ids_TK),
        )


def kl(p: list[float], q: list[float]) -> float:
    return math.fsum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True))


NAIVE = {
    "forward_kl": lambda p, t: kl(t, p),
    "forward_kl_topk_tail": lambda p, t: kl(t, p),
    "reverse_kl": kl,
    "jsd": lambda p, t: (
        0.3 * kl(t, [0.3 * b + 0.7 * a for a, b in zip(p, t, strict=True)])
        + 0.7 * kl(p, [0.3 * b + 0.7 * a for a, b in zip(p, t, strict=True)])
    ),
    "forward_kl_topk": lambda p, t: kl(t[:-1], p[:-1]),
}


def naive(tokens: Tokens, mode: str, topk: int) -> tuple[float, Tensor]:
    """Return the mean over tokens of a divergence, and its gradient by central differences."""

    def value(policy_TV: Tensor) -> float:
        total = []
        for own, other in zip(policy_TV.tolist(), tokens.teacher_TV.tolist(), strict=True):
            p, t = ([math.exp(x) for x in row] for row in (own, other))
            p, t = [x / math.fsum(p) for x in p], [x / math.fsum(t) for x in t]
            best = sorted(range(VOCABULARY), key=lambda v: -t[v])[:topk]
            rests = [1 - math.fsum(row[v] for v in best) for row in (p, t)]
            total.append(NAIVE[mode]([*(p[v] for v in best), rests[0]], [*(t[v] for v in best), rests[1]]))
        return math.fsum(total) / len(total)

    base, step = tokens.policy_TV.detach(), 1e-5
    gradient = torch.zeros_like(base)
    for place in [(0, 0), (4, 3), (12, 6)]:
        moved = [base.clone() for _ in range(2)]
        moved[0][place] += step
        moved[1][place] -= step
        gradient[place] = (value(moved[0]) - value(moved[1])) / (2 * step)
    return value(base), gradient


def objective(**settings: object) -> Objective:
    return Objective(distillation=Distillation(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", NAIVE)
@pytest.mark.parametrize("topk", [1, 3, 6])
def test_divergences_over_the_top_k_are_those_of_a_naive_loop(mode: str, topk: int) -> None:
    tokens = Tokens()
    options = (("jsd_beta", 0.3),) if mode == "jsd" else ()
    made = objective(loss_mode=mode, topk=topk, as_advantage=False, task=False, options=options)
    loss, stats = made(tokens.inputs(topk), COUNTS)
    loss.backward()
    value, gradient = naive(tokens, mode, topk)
    assert float(loss.detach()) == pytest.approx(value, abs=1e-10) == float(stats["share/distillation_loss"])
    for place in gradient.nonzero().tolist():
        assert float(tokens.policy_TV.grad[tuple(place)]) == pytest.approx(float(gradient[tuple(place)]), abs=1e-9)


def trl_generalized_jsd_loss(student_TV: Tensor, teacher_TV: Tensor, beta: float) -> Tensor:
    """The formula of TRL's `GKDTrainer.generalized_jsd_loss` per token (TRL is not installed here), written anew from its description.

    The mixture has the share beta of the teacher; beta = 0 is KL(teacher, student), beta = 1 is KL(student, teacher).
    """
    s_TV, t_TV = student_TV.log_softmax(-1), teacher_TV.log_softmax(-1)
    if beta in (0, 1):
        first, second = (t_TV, s_TV) if beta == 0 else (s_TV, t_TV)
        return (first.exp() * (first - second)).sum(-1)
    m_TV = (beta * t_TV.exp() + (1 - beta) * s_TV.exp()).log()
    return (beta * t_TV.exp() * (t_TV - m_TV) + (1 - beta) * s_TV.exp() * (s_TV - m_TV)).sum(-1)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_jsd_over_the_whole_vocabulary_is_the_gkd_loss_of_trl_in_value_and_gradient(beta: float) -> None:
    tokens = Tokens()
    made = objective(loss_mode="jsd", topk=-1, as_advantage=False, task=False, options=(("jsd_beta", beta),))
    loss, _ = made(tokens.inputs(VOCABULARY), COUNTS)
    theirs = trl_generalized_jsd_loss(tokens.policy_TV, tokens.teacher_TV, beta).mean()
    torch.testing.assert_close(loss, theirs, atol=1e-10, rtol=0)
    ours, other = (torch.autograd.grad(one, tokens.policy_TV)[0] for one in (loss, theirs))
    torch.testing.assert_close(ours, other, atol=1e-10, rtol=0)


def test_values_by_hand() -> None:
    """Policy (1/2, 1/4, 1/4), teacher (1/4, 1/2, 1/4); of the top 1, the second token, the rest has 3/4 and 1/2."""
    policy_TK, teacher_TK = torch.tensor([[0.5, 0.25, 0.25]]).double().log(), torch.tensor([[0.25, 0.5, 0.25]]).double().log()
    assert float(DIVERGENCES.get("forward_kl")(policy_TK, teacher_TK)) == pytest.approx(0.25 * math.log(2))
    assert float(DIVERGENCES.get("reverse_kl")(policy_TK, teacher_TK)) == pytest.approx(0.25 * math.log(2))
    assert float(DIVERGENCES.get("jsd")(policy_TK, teacher_TK)) == pytest.approx(0.5 * math.log(4 / 3) - 0.25 * math.log(1.5))
    top = with_rest(policy_TK[:, 1:2]), with_rest(teacher_TK[:, 1:2])
    assert top[0].exp().tolist() == [pytest.approx([0.25, 0.75])]
    assert float(DIVERGENCES.get("forward_kl")(*top)) == pytest.approx(0.5 * math.log(2) - 0.5 * math.log(1.5))
    assert float(DIVERGENCES.get("forward_kl_topk")(*top)) == pytest.approx(0.5 * math.log(2))


def test_a_token_that_could_not_be_sampled_has_no_part_in_value_and_gradient() -> None:
    tokens = Tokens()
    left_out_TV = torch.zeros(sum(LENGTHS), VOCABULARY, dtype=torch.bool)
    left_out_TV[:, 5:] = True
    tokens.sampled_T = tokens.sampled_T.clamp(max=4)
    whole, tokens.policy_TV = tokens.policy_TV, tokens.policy_TV.masked_fill(left_out_TV, -math.inf)
    tokens.teacher_TV = tokens.teacher_TV.masked_fill(left_out_TV, -math.inf)
    loss, _ = objective(loss_mode="reverse_kl", topk=-1, as_advantage=False, task=False)(tokens.inputs(VOCABULARY), COUNTS)
    (gradient,) = torch.autograd.grad(loss, whole)
    theirs = trl_generalized_jsd_loss(whole[:, :5], tokens.teacher_TV[:, :5], 1.0).mean()
    torch.testing.assert_close(loss, theirs, atol=1e-10, rtol=0)
    torch.testing.assert_close(gradient[:, :5], torch.autograd.grad(theirs, whole)[0][:, :5], atol=1e-10, rtol=0)
    assert not gradient[:, 5:].any()


@pytest.mark.parametrize("discount", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("task", [True, False])
def test_k1_as_advantage_is_the_discounted_log_ratio_of_a_naive_loop(discount: float, task: bool) -> None:
    tokens = Tokens()
    inputs = tokens.inputs(0)
    made = Distillation("k1", coef=0.3, task=task, discount=discount)
    policy, teacher = inputs.policy_logprobs_T.tolist(), inputs.column("teacher_logprobs_T").tolist()
    expected, start = [], 0
    for length in LENGTHS:
        for t in range(start, start + length):
            gain = math.fsum(discount ** (s - t) * -0.3 * (policy[s] - teacher[s]) for s in range(t, start + length))
            expected.append(gain + (float(tokens.advantages_T[t]) if task else 0.0))
        start += length
    advantages_T = made.advantages_T(inputs)
    assert advantages_T.tolist() == pytest.approx(expected, abs=1e-10) and not advantages_T.requires_grad
    # The gradient of the loss is that of REINFORCE with these advantages: the ratio is 1.
    loss, _ = Objective(distillation=made)(inputs, COUNTS)
    (gradient,) = torch.autograd.grad(loss, inputs.policy_logprobs_T)
    torch.testing.assert_close(gradient, -torch.tensor(expected, dtype=torch.float64) / sum(LENGTHS), atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    "distillation",
    [
        Distillation("k1", coef=0.5, discount=0.9),
        Distillation("k2", as_advantage=False),
        Distillation("jsd", topk=3, coef=2.0, as_advantage=False, options=(("jsd_beta", 0.2),)),
    ],
)
@pytest.mark.parametrize("average", ["token-mean", "seq-mean-token-mean"])
def test_any_cut_into_micro_batches_gives_the_same_loss_and_gradient(distillation: Distillation, average: str) -> None:
    made = Objective(loss_agg_mode=average, distillation=distillation, entropy_coeff=0.0)
    results = []
    for cuts in ([0, 4], [0, 1, 4], [0, 2, 3, 4]):
        tokens = Tokens()
        shares = [made(tokens.inputs(3, *cut), COUNTS)[0] for cut in itertools.pairwise(cuts)]
        loss = torch.stack(shares).sum()
        results.append((loss, torch.autograd.grad(loss, tokens.policy_TV)[0]))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], atol=1e-12, rtol=0)


def test_the_task_and_the_teacher_add_up() -> None:
    tokens = Tokens()
    inputs = tokens.inputs(3)
    alone = [
        one(inputs, COUNTS)[0]
        for one in (Objective(), objective(loss_mode="reverse_kl", topk=3, as_advantage=False, task=False))
    ]
    both, stats = objective(loss_mode="reverse_kl", topk=3, coef=0.7, as_advantage=False)(inputs, COUNTS)
    torch.testing.assert_close(both, alone[0] + 0.7 * alone[1], atol=1e-12, rtol=0)
    k1 = (inputs.policy_logprobs_T - inputs.column("teacher_logprobs_T")).sum()
    assert float(stats["sum/distillation_kl"]) == pytest.approx(float(k1.detach()), abs=1e-12)
    clamped = Distillation("k2", max_clamp=0.1, as_advantage=False).distance_T(inputs)
    assert float(clamped.detach().max()) == 0.1 and not replace(Objective(), distillation=Distillation()).skips_zero_advantage


REFUSED = {
    "names no teacher": {"teacher_models": {}},
    "t.path: unknown key. There are: model_path, key": {"teacher_models": {"t": {"path": "x"}}},
    "t=x: is a group of keys": {"teacher_models": {"t": "x"}},
    "t.weight=0: is out of range": {"teacher_models": {"t": {"weight": 0}}},
    "t.dtype=half: is not one of the choices": {"teacher_models": {"t": {"dtype": "half"}}},
    "t.model_path=[3]: is not text": {"teacher_models": {"t": {"model_path": [3]}}},
    "use_policy_gradient=true, or k2 or k3": {"distillation_loss": {"loss_mode": "k1"}},
    "loss_mode=k1, or use_policy_gradient=false": {"distillation_loss": {"use_policy_gradient": True}},
    "topk=0: loss_mode=jsd": {"distillation_loss": {"loss_mode": "jsd", "topk": 0}},
    "Did you mean reverse_kl": {"distillation_loss": {"loss_mode": "revers_kl"}},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_contradicts_itself_is_refused(message: str) -> None:
    settings = {"teacher_models": {"t": {"model_path": "x"}}, **REFUSED[message]}
    loss = DistillationLossConfig(**settings.pop("distillation_loss", {}))  # type: ignore[arg-type]
    config = DistillationConfig(enabled=True, distillation_loss=loss, **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as error:
        teachers_of(Config(distillation=config))
        Distillation.from_config(config)
    assert message in str(error.value)
    assert Distillation.from_config(replace(config, enabled=False)) is None and not teachers_of(Config())
