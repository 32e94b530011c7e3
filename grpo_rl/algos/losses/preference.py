"""Losses over preferences: a chosen and a rejected response, compared by the policy's log-probabilities.

A *pair* is two rollouts of one `group_N` in the same micro-batch. Its loss stands on every token of both, so
that `PAIR_AVERAGES` make the mean over pairs. The *margin* is how much more the policy prefers the chosen
response than the reference does,

    h = (log π(y_w|x) - log π_ref(y_w|x)) - (log π(y_l|x) - log π_ref(y_l|x)).

beta times a response's log-ratio is its *implicit reward* (DPO, arXiv 2305.18290, section 4, eq. 5).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from grpo_rl.algos.losses.contract import POLICY_LOSSES, LossInput, TokenLoss
from grpo_rl.config.schema.kinds import Beta, Coefficient, Positive, WrongShare
from grpo_rl.frozen import frozen
from grpo_rl.registry import formula_by, needs


@frozen
class Pairs:
    chosen_P: Tensor
    rejected_P: Tensor

    @classmethod
    def of(cls, group_N: Tensor, chosen_N: Tensor) -> Pairs:
        """By group. Raises ValueError if a group is not one chosen and one rejected rollout."""
        order_N = torch.argsort(2 * group_N + (~chosen_N).long(), stable=True)
        chosen_P, rejected_P = order_N[: len(order_N) // 2 * 2].view(-1, 2).unbind(1)
        paired = len(order_N) % 2 == 0 and torch.equal(group_N[chosen_P], group_N[rejected_P])
        if not paired or not bool(chosen_N[chosen_P].all()) or bool(chosen_N[rejected_P].any()):
            raise ValueError("these rollouts are not pairs: every group must have one chosen and one rejected response")
        return cls(chosen_P, rejected_P)

    def each_token(self, x_P: Tensor, inputs: LossInput) -> Tensor:
        x_N = x_P.new_zeros(inputs.segments.num_sequences)
        x_N = x_N.index_put((torch.cat([self.chosen_P, self.rejected_P]),), torch.cat([x_P, x_P]))
        return inputs.segments.broadcast(x_N)


def _loss_over_pairs(inputs: LossInput, loss_P: Tensor, rewards_N: Tensor, pairs: Pairs) -> TokenLoss:
    rewards_N = rewards_N.detach()
    chosen_P, rejected_P = rewards_N[pairs.chosen_P], rewards_N[pairs.rejected_P]
    logprobs_N = inputs.segments.sum(inputs.policy_logprobs_T.detach().double())
    stats = {
        "reward_chosen": chosen_P,
        "reward_rejected": rejected_P,
        "reward_margin": chosen_P - rejected_P,
        # A tie is no preference: half a point would be a guess.
        "reward_accuracy": (chosen_P > rejected_P).double(),
        "logprob_chosen": logprobs_N[pairs.chosen_P],
        "logprob_rejected": logprobs_N[pairs.rejected_P],
    }
    return TokenLoss(
        pairs.each_token(loss_P, inputs), {name: pairs.each_token(value_P, inputs) for name, value_P in stats.items()}
    )


def _log_ratio_N(inputs: LossInput, reference_free: bool, length_normalised: bool) -> Tensor:
    ratio_T = inputs.policy_logprobs_T.double()
    if not reference_free:
        ratio_T = ratio_T - inputs.column("ref_logprobs_T").double()
    return inputs.segments.mean(ratio_T) if length_normalised else inputs.segments.sum(ratio_T)


def _log_ratios(inputs: LossInput, reference_free: bool, length_normalised: bool) -> tuple[Tensor, Pairs]:
    ratio_N = _log_ratio_N(inputs, reference_free, length_normalised)
    return ratio_N, Pairs.of(inputs.column("group_N"), inputs.column("chosen_N"))


def _difference(x_N: Tensor, pairs: Pairs) -> Tensor:
    return x_N[pairs.chosen_P] - x_N[pairs.rejected_P]


_SMOOTHED = ("(1 - label_smoothing) ", " - label_smoothing log sigmoid(-beta h)", " - label_smoothing sigmoid(beta h)")


def _as_chosen(formula: str, options: Mapping[str, Any]) -> str:
    """Return the formula, or coefficient, as the options make it, without label smoothing of 0."""
    if not options.get("label_smoothing"):
        for term in _SMOOTHED:
            formula = formula.replace(term, "")
    if formula.startswith("±"):
        return formula.replace("; +", ", divided by |y|; +") if options.get("length_normalised") else formula
    ratio = "log π(y|x)" if options.get("reference_free") else "log π(y|x) - log π_ref(y|x)"
    ratio = f"({ratio})/|y|" if options.get("length_normalised") else ratio
    return formula.replace("l = log π(y|x) - log π_ref(y|x)", f"l = {ratio}")


@POLICY_LOSSES.register("dpo")
@formula_by(_as_chosen)
@needs("pairs")
@needs("ref_logprobs", unless="reference_free")
def dpo(
    inputs: LossInput,
    *,
    beta: Beta = 0.1,
    label_smoothing: WrongShare = 0.0,
    reference_free: bool = False,
    length_normalised: bool = False,
) -> TokenLoss:
    """The log-loss of a classifier whose logit is beta times the margin: direct preference optimisation.

    Formula: -(1 - label_smoothing) log sigmoid(beta h) - label_smoothing log sigmoid(-beta h); h = l(chosen) - l(rejected),
    l = log π(y|x) - log π_ref(y|x)

    Gradient: ± beta ((1 - label_smoothing) sigmoid(-beta h) - label_smoothing sigmoid(beta h)); + on chosen, - on rejected tokens

    DPO (arXiv 2305.18290), eq. 7. `label_smoothing` is the share of labels that are taken to be wrong:
    conservative DPO (Mitchell, "A note on DPO with noisy preferences & relationship to IPO", 2023).
    `length_normalised` divides each log-ratio by the length (Tülu 3, arXiv 2411.15124, section 5.1).
    `reference_free` takes a reference that finds all responses equally likely.
    """
    ratio_N, pairs = _log_ratios(inputs, reference_free, length_normalised)
    logit_P = beta * _difference(ratio_N, pairs)
    loss_P = -(1.0 - label_smoothing) * logsigmoid(logit_P) - label_smoothing * logsigmoid(-logit_P)
    return _loss_over_pairs(inputs, loss_P, beta * ratio_N, pairs)


@POLICY_LOSSES.register("ipo")
@formula_by(_as_chosen)
@needs("pairs")
@needs("ref_logprobs", unless="reference_free")
def ipo(inputs: LossInput, *, beta: Beta = 0.1, reference_free: bool = False, length_normalised: bool = False) -> TokenLoss:
    """The squared distance of the margin from 1/(2 beta): identity preference optimisation.

    Formula: (h - 1/(2·beta))²; h = l(chosen) - l(rejected), l = log π(y|x) - log π_ref(y|x)

    Gradient: ± 2 (1/(2·beta) - h); + on chosen, - on rejected tokens

    IPO (arXiv 2310.12036), eq. 17, whose tau is `beta`. TRL takes `length_normalised`.
    """
    ratio_N, pairs = _log_ratios(inputs, reference_free, length_normalised)
    loss_P = (_difference(ratio_N, pairs) - 0.5 / beta).square()
    return _loss_over_pairs(inputs, loss_P, beta * ratio_N, pairs)


@POLICY_LOSSES.register("dpo_hinge")
@formula_by(_as_chosen)
@needs("pairs")
@needs("ref_logprobs", unless="reference_free")
def dpo_hinge(
    inputs: LossInput, *, beta: Beta = 0.1, reference_free: bool = False, length_normalised: bool = False
) -> TokenLoss:
    """The hinge on the margin: a pair whose implicit rewards are 1 apart has no gradient.

    Formula: max(0, 1 - h·beta); h = l(chosen) - l(rejected), l = log π(y|x) - log π_ref(y|x)

    Gradient: ± beta where h·beta < 1, else 0; + on chosen, - on rejected tokens

    SLiC-HF (arXiv 2305.10425), eq. 2, with the margin to the reference as TRL and RSO (arXiv 2309.06657) have
    it; the paper's own loss is `reference_free`, with delta = 1/beta, times beta.
    """
    ratio_N, pairs = _log_ratios(inputs, reference_free, length_normalised)
    loss_P = (1.0 - beta * _difference(ratio_N, pairs)).clamp(min=0.0)
    return _loss_over_pairs(inputs, loss_P, beta * ratio_N, pairs)


@POLICY_LOSSES.register("simpo")
@needs("pairs")
def simpo(inputs: LossInput, *, beta: Beta = 2.0, gamma: Coefficient = 1.0) -> TokenLoss:
    """DPO's loss without a reference, on mean log-probs, with a margin that the rewards have to reach.

    Formula: -log sigmoid(beta (m(chosen) - m(rejected)) - gamma); m = log π(y|x)/|y|

    Gradient: ± beta/|y| sigmoid(gamma - beta (m(chosen) - m(rejected))); + on chosen, - on rejected tokens

    SimPO (arXiv 2405.14734), eq. 6; section 4: beta in 2.0 to 2.5, gamma (TRL's `simpo_gamma`) 0.3 to 1.6.
    """
    mean_N, pairs = _log_ratios(inputs, reference_free=True, length_normalised=True)
    loss_P = -logsigmoid(beta * _difference(mean_N, pairs) - gamma)
    return _loss_over_pairs(inputs, loss_P, beta * mean_N, pairs)


@POLICY_LOSSES.register("orpo")
@needs("pairs")
def orpo(inputs: LossInput, *, beta: Beta = 0.1) -> TokenLoss:
    """The chosen response's mean negative log-prob, and beta times the log-loss of the responses' odds.

    Formula: -m(chosen) - beta log sigmoid(o(chosen) - o(rejected)); o = m - log(1 - e^m), m = log π(y|x)/|y|

    Gradient: ± (c + beta sigmoid(o(rejected) - o(chosen))/(1 - e^m))/|y|, c = 1 on chosen and 0 on rejected tokens; + on chosen, - on rejected tokens

    ORPO (arXiv 2403.07691), eq. 4 to 7, whose lambda is `beta`, as in TRL. TRL averages the first term over
    all chosen tokens of a batch, the paper and this loss over responses.
    """
    mean_N, pairs = _log_ratios(inputs, reference_free=True, length_normalised=True)
    # A response that is certain has infinite odds: there the gradient stops.
    bounded_N = mean_N.clamp(max=-1e-9)
    odds_N = bounded_N - torch.log(-torch.expm1(bounded_N))
    loss_P = -mean_N[pairs.chosen_P] - beta * logsigmoid(_difference(odds_N, pairs))
    return _loss_over_pairs(inputs, loss_P, beta * mean_N, pairs)


@POLICY_LOSSES.register("kto")
@needs("pairs", "kl", "ref_logprobs")
def kto(
    inputs: LossInput, *, beta: Beta = 0.1, desirable_weight: Positive = 1.0, undesirable_weight: Positive = 1.0
) -> TokenLoss:
    """How far a response's value is from the best one: Kahneman-Tversky optimisation.

    Formula: desirable_weight (1 - sigmoid(beta (l - z))) where desirable, else undesirable_weight (1 - sigmoid(beta (z - l)));
    l = log π(y|x) - log π_ref(y|x), z = max(0, mean of l over mismatched rows)

    Gradient: ± w beta s (1 - s), s = sigmoid(beta (l - z)); w = desirable_weight and + on desirable tokens, else undesirable_weight and -

    KTO (arXiv 2402.01306), eq. 8, as in TRL: z is over the whole batch, of each prompt with the answer of the
    row after it. Section 4.2 keeps desirable_weight times the number of desirable rows in 1 to 4/3 of the
    others'.
    """
    ratio_N = _log_ratio_N(inputs, reference_free=False, length_normalised=False)
    desirable_N, kl_N = inputs.column("chosen_N"), inputs.column("kl_N").double()
    sign_N = torch.where(desirable_N, 1.0, -1.0).double()
    distance_N = beta * sign_N * (ratio_N - kl_N)
    weights_N = torch.full_like(ratio_N, undesirable_weight).masked_fill(desirable_N, desirable_weight)
    stats = {"reward_margin": distance_N.detach(), "reward_accuracy": (distance_N.detach() > 0).double(), "kl": kl_N}
    each_token = inputs.segments.broadcast
    return TokenLoss(
        each_token(weights_N * (-distance_N).sigmoid()), {name: each_token(value_N) for name, value_N in stats.items()}
    )
