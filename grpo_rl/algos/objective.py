"""The training objective: policy loss, entropy bonus and KL term, averaged with global denominators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo_rl.algos.aggregate import AGGREGATIONS, Aggregation
from grpo_rl.algos.correction import RolloutCorrection, correct
from grpo_rl.algos.kl import KL_ESTIMATORS, full_kl, kl_estimate
from grpo_rl.algos.losses.contract import scales_with_advantage
from grpo_rl.algos.losses.distillation import Distillation
from grpo_rl.algos.losses.registered import POLICY_LOSSES, LossInput, PolicyLoss, selection_of
from grpo_rl.algos.trial import has_ratio
from grpo_rl.config.function_options import AVERAGE, LOSS, PAIR_AVERAGES, chosen_options
from grpo_rl.config.schema.tree import ActorConfig
from grpo_rl.errors import ConfigError
from grpo_rl.frozen import frozen
from grpo_rl.registry import check_options, needs_of, options_of, own_options, shown
from grpo_rl.types import Counts

Options = tuple[tuple[str, Any], ...]


@frozen
class Objective:
    """agg(policy loss) - entropy_coeff agg(entropy) + kl_loss_coef agg(KL), and perhaps a teacher's term.

    Unknown names and options raise ConfigError.
    """

    loss_mode: str = "vanilla"
    loss_agg_mode: str = "token-mean"
    entropy_coeff: float = 0.0
    adaptive_entropy: bool = False
    kl_loss_type: str | None = None
    kl_loss_coef: float = 0.0
    loss_options: Options = ()
    agg_options: Options = ()
    kl_options: Options = ()
    correction: RolloutCorrection | None = None
    """Of the policy against the engine, whose log-probs are the old ones (bypass_mode)."""
    router_aux_loss_coef: float = 0.0
    distillation: Distillation | None = None

    def __post_init__(self) -> None:
        check_options(f"policy loss {self.loss_mode!r}", self._loss, dict(self.loss_options))
        check_options(f"loss_agg_mode {self.loss_agg_mode!r}", self._aggregate, dict(self.agg_options))
        if "loss_scale_factor" in options_of(self._aggregate) and not dict(self.agg_options).get("loss_scale_factor"):
            raise ConfigError(f"loss_agg_mode {self.loss_agg_mode!r} needs loss_scale_factor, such as the longest response")
        if self.needs_pairs and self.loss_agg_mode in set(AGGREGATIONS) - set(PAIR_AVERAGES):
            raise ConfigError(
                f"policy loss {self.loss_mode!r} is a mean over pairs, which loss_agg_mode {self.loss_agg_mode!r} does not make; "
                f"loss_agg_mode={' or '.join(PAIR_AVERAGES)}"
            )
        if self.kl_loss_type is not None:
            estimator = full_kl if self.kl_loss_type == "full" else KL_ESTIMATORS.get(self.kl_loss_type)
            check_options(f"KL estimator {self.kl_loss_type!r}", estimator, dict(self.kl_options))

    @classmethod
    def from_config(
        cls, actor: ActorConfig, max_response_length: int | None = None, correction: RolloutCorrection | None = None
    ) -> Objective:
        """`max_response_length` is the default of `loss_scale_factor`."""
        loss, agg_options = POLICY_LOSSES.get(actor.policy_loss.loss_mode), average_options(actor, max_response_length)
        # A term with weight 0 is no term: nothing then asks for the reference.
        has_kl = actor.use_kl_loss and actor.kl_loss_coef > 0
        loss_options = chosen_options(LOSS, actor, options_of(loss))
        return cls(
            loss_mode=actor.policy_loss.loss_mode,
            loss_agg_mode=actor.loss_agg_mode,
            entropy_coeff=actor.entropy_coeff,
            adaptive_entropy=actor.adaptive_entropy.enable,
            kl_loss_type=actor.kl_loss_type if has_kl else None,
            kl_loss_coef=actor.kl_loss_coef if has_kl else 0.0,
            loss_options=tuple(loss_options.items()),
            agg_options=tuple(agg_options.items()),
            kl_options=tuple(actor.kl_loss_options.items()) if has_kl else (),
            correction=correction.in_the_loss(has_ratio(loss, loss_options)) if correction and correction.bypass_mode else None,
            router_aux_loss_coef=actor.router_aux_loss_coef,
        )

    @property
    def needs_entropy(self) -> bool:
        return self._has_entropy or "entropy" in self._loss_needs

    @property
    def needs_ref(self) -> bool:
        return self.kl_loss_type is not None or "ref_logprobs" in self._loss_needs

    @property
    def needs_full_kl(self) -> bool:
        """Whether the caller has to supply `full_kl_T`, in place of `ref_logprobs_T`."""
        return self.kl_loss_type == "full"

    @property
    def needs_selection(self) -> bool:
        """Whether the caller has to supply `selected_T`, which `select` makes for a whole mini-batch."""
        return selection_of(self._loss) is not None

    @property
    def needs_group_tokens(self) -> bool:
        return "group_tokens" in self._loss_needs | needs_of(self._aggregate)

    @property
    def needs_pairs(self) -> bool:
        return "pairs" in self._loss_needs

    @property
    def needs_kl(self) -> bool:
        """Whether a pair is an answer of a labelled row and a mismatched one, for `kl_N`."""
        return "kl" in self._loss_needs

    @property
    def skips_zero_advantage(self) -> bool:
        if self.kl_loss_type is not None or self._has_entropy or self.router_aux_loss_coef or self.distillation is not None:
            return False
        return scales_with_advantage(self._loss)

    @property
    def _has_entropy(self) -> bool:
        return self.entropy_coeff != 0.0 or self.adaptive_entropy

    @property
    def _loss(self) -> PolicyLoss:
        return POLICY_LOSSES.get(self.loss_mode)

    @property
    def _aggregate(self) -> Aggregation:
        return AGGREGATIONS.get(self.loss_agg_mode)

    @property
    def _loss_needs(self) -> frozenset[str]:
        return needs_of(self._loss, dict(self.loss_options))

    def select(self, advantages_T: Tensor, old_logprobs_T: Tensor, generator: torch.Generator) -> Tensor:
        selection = selection_of(self._loss)
        assert selection is not None, f"{self.loss_mode} chooses no tokens"
        return selection(advantages_T, old_logprobs_T, generator, **own_options(selection, dict(self.loss_options)))

    def __call__(
        self, inputs: LossInput, counts: Counts, *, entropy_coeff: float | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this micro-batch's share of the global loss, and its share of the statistics.

        Shares add up over micro-batches and ranks. `counts` are those of the trained tokens of the whole
        mini-batch. `entropy_coeff` comes with `adaptive_entropy`, and only then.

        Statistics are 0-d float64 tensors: `sum/x` is a sum over tokens (divide by the global number of
        tokens), `share/x` adds up by itself, of `max/x` take the largest.
        """
        taught = self.distillation
        if taught is not None and taught.as_advantage:
            inputs = replace(inputs, advantages_T=taught.advantages_T(inputs))
        loss_T, token_stats = self._loss(inputs, **own_options(self._loss, dict(self.loss_options)))
        weights_T = inputs.weights_T if self.correction is None else self._corrected(self.correction, inputs)
        loss = self._average(loss_T if weights_T is None else loss_T * weights_T.detach().double(), inputs, counts)
        stats = {"share/pg_loss": loss.detach()}
        if self.needs_pairs:
            # One value on all tokens of a pair, as its loss: averaged like that, it is a mean over pairs.
            stats |= {f"share/{name}": self._average(value_T, inputs, counts) for name, value_T in token_stats.items()}
        else:
            stats |= _combine(token_stats)

        if taught is not None:
            stats |= taught.stats(inputs)
            if not taught.as_advantage:
                distance = self._average(taught.distance_T(inputs), inputs, counts)
                loss = (loss if taught.task else 0.0) + taught.coef * distance
                stats["share/distillation_loss"] = distance.detach()
        if inputs.entropy_T is not None:
            stats["sum/entropy"] = inputs.entropy_T.detach().double().sum()
        if self._has_entropy:
            entropy = self._average(inputs.column("entropy_T"), inputs, counts)
            assert (entropy_coeff is not None) == self.adaptive_entropy, "entropy_coeff comes with adaptive_entropy only"
            loss = loss - (self.entropy_coeff if entropy_coeff is None else entropy_coeff) * entropy
            stats["share/entropy_loss"] = entropy.detach()
        if self.kl_loss_type is not None:
            kl = self._average(self._kl(inputs), inputs, counts)
            loss = loss + self.kl_loss_coef * kl
            stats["share/kl_loss"] = kl.detach()
        stats["share/loss"] = loss.detach()
        return loss, stats

    def _corrected(self, correction: RolloutCorrection, inputs: LossInput) -> Tensor:
        """Return each token's weight: 0 for what is rejected, which stays in the denominators, as in verl."""
        result = correct(correction, inputs.policy_logprobs_T.detach(), inputs.old_T(), inputs.segments)
        weights_T = torch.ones_like(inputs.policy_logprobs_T) if result.weights_T is None else result.weights_T
        return weights_T if result.trained_T is None else weights_T * result.trained_T

    def _average(self, x_T: Tensor, inputs: LossInput, counts: Counts) -> Tensor:
        keywords = dict(self.agg_options)
        if "group_tokens" in needs_of(self._aggregate):
            keywords["group_tokens_N"] = inputs.column("group_tokens_N")
        return self._aggregate(x_T, inputs.segments, counts, **keywords)

    def _kl(self, inputs: LossInput) -> Tensor:
        if self.needs_full_kl:
            return inputs.column("full_kl_T")
        assert self.kl_loss_type is not None
        ref_T, options = inputs.column("ref_logprobs_T"), dict(self.kl_options)
        return kl_estimate(inputs.policy_logprobs_T, ref_T, self.kl_loss_type, inputs.old_T(), options)

    def formula(self) -> str:
        total = "loss = avg(pg)"
        lines = [f"pg   = {shown(self._loss, self.loss_options)}"]
        if self.distillation is not None and self.distillation.as_advantage:
            lines.append(f"A    = {self.distillation.formula()}")
        elif self.distillation is not None:
            weight = f"{self.distillation.coef:g}·avg(D)"
            total = f"{total} + {weight}" if self.distillation.task else f"loss = {weight}"
            lines = [*(lines if self.distillation.task else ()), f"D    = {self.distillation.formula()}"]
        if self.adaptive_entropy:
            total += " - (adaptive entropy_coeff)·avg(H)"
        elif self._has_entropy:
            total += f" {'-' if self.entropy_coeff > 0 else '+'} {abs(self.entropy_coeff):g}·avg(H)"
        if self._has_entropy:
            lines.append("H    = -Σ_v π_v log π_v")
        if self.kl_loss_type is not None:
            total += f" + {self.kl_loss_coef:g}·avg(KL)"
            kl = full_kl if self.needs_full_kl else KL_ESTIMATORS.get(self.kl_loss_type)
            lines.append(f"KL   = {shown(kl, self.kl_options)}  [{self.kl_loss_type}]")
        if self.router_aux_loss_coef:
            total += f" + {self.router_aux_loss_coef:g}·balance"
            lines.append("balance = E Σ_e f_e P_e, averaged over the layers with experts, counted over the whole mini-batch")
        average = shown(self._aggregate, self.agg_options)
        lines.append(f"avg  = {average}, counted over the whole mini-batch  [{self.loss_agg_mode}]")
        return "\n".join([total, *lines])


def _combine(token_stats: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return statistics of tokens reduced over this micro-batch, each under its prefix."""
    combined = {}
    for name, value_T in token_stats.items():
        if name.endswith("_max"):
            combined[f"max/{name}"] = (value_T.max() if len(value_T) else value_T.new_zeros(())).double()
        else:
            combined[f"sum/{name}"] = value_T.double().sum()
    return combined


def average_options(actor: ActorConfig, max_response_length: int | None = None) -> dict[str, Any]:
    known = options_of(AGGREGATIONS.get(actor.loss_agg_mode))
    options = chosen_options(AVERAGE, actor, known)
    if "loss_scale_factor" in known and max_response_length is not None:
        options.setdefault("loss_scale_factor", float(max_response_length))
    return options
