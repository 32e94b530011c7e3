"""The training objective: policy loss, entropy bonus and KL term, averaged with global denominators."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from grpo_rl.algos.aggregate import AGGREGATIONS
from grpo_rl.algos.formula import formula_of
from grpo_rl.algos.kl import KL_ESTIMATORS, full_kl, kl_estimate
from grpo_rl.algos.policy_losses import POLICY_LOSSES
from grpo_rl.algos.segments import Segments
from grpo_rl.config.schema import ActorConfig
from grpo_rl.types import Counts

_DEFAULTS = ActorConfig()


@dataclass(frozen=True, slots=True)
class Objective:
    """What one optimizer step minimises: agg(policy loss) - entropy_coeff agg(entropy) + kl_loss_coef agg(KL).

    A plain value: it can be pickled, compared and printed. Built directly it has no entropy and no KL term
    unless they are asked for; the clip bounds default to the configuration's. Unknown names raise ConfigError.
    """

    loss_mode: str = "vanilla"
    loss_agg_mode: str = "token-mean"
    clip_low: float = _DEFAULTS.clip_ratio
    clip_high: float = _DEFAULTS.clip_ratio
    clip_c: float = _DEFAULTS.clip_ratio_c
    entropy_coeff: float = 0.0
    kl_loss_type: str | None = None
    """A registered KL estimator, `full`, or None for no KL term."""
    kl_loss_coef: float = 0.0

    def __post_init__(self) -> None:
        POLICY_LOSSES.get(self.loss_mode)
        AGGREGATIONS.get(self.loss_agg_mode)
        if self.kl_loss_type not in (None, "full"):
            KL_ESTIMATORS.get(self.kl_loss_type)

    @classmethod
    def from_config(cls, actor: ActorConfig) -> Objective:
        """The objective that `actor_rollout_ref.actor` describes."""
        return cls(
            loss_mode=actor.policy_loss.loss_mode,
            loss_agg_mode=actor.loss_agg_mode,
            clip_low=actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low,
            clip_high=actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high,
            clip_c=actor.clip_ratio_c,
            entropy_coeff=actor.entropy_coeff,
            # A term with weight 0 is no term: nothing then asks for the reference.
            kl_loss_type=actor.kl_loss_type if actor.use_kl_loss and actor.kl_loss_coef > 0 else None,
            kl_loss_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        )

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coeff != 0.0

    @property
    def needs_ref(self) -> bool:
        """Whether the reference policy has to run."""
        return self.kl_loss_type is not None

    @property
    def needs_full_kl(self) -> bool:
        """Whether the caller has to supply `full_kl_T`, in place of `ref_logprobs_T`."""
        return self.kl_loss_type == "full"

    def __call__(
        self,
        *,
        policy_logprobs_T: Tensor,
        advantages_T: Tensor,
        lengths_N: Tensor,
        counts: Counts,
        old_logprobs_T: Tensor | None = None,
        ref_logprobs_T: Tensor | None = None,
        entropy_T: Tensor | None = None,
        full_kl_T: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro-batch's share of the global loss, and its share of the statistics.

        The sum of the shares over all micro-batches and ranks is the loss; nobody divides again. Where ranks
        average their gradients, the loss has to be multiplied by their number first. Without
        `old_logprobs_T` the sampling policy is taken to be the current one: the ratio is exactly 1.

        Statistics are 0-d float64 tensors, named by how to combine them: `sum/x` is a sum over tokens (add,
        then divide by the global number of tokens), `share/x` adds up by itself, of `max/x` take the largest.
        """
        segments = Segments(lengths_N.to(policy_logprobs_T.device))
        aggregate = AGGREGATIONS.get(self.loss_agg_mode)
        old_T = policy_logprobs_T.detach() if old_logprobs_T is None else old_logprobs_T

        loss_T, token_stats = POLICY_LOSSES.get(self.loss_mode)(
            policy_logprobs_T,
            old_T,
            advantages_T,
            segments,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            clip_c=self.clip_c,
        )
        loss = aggregate(loss_T, segments, counts)
        stats = {"share/pg_loss": loss.detach(), **_combine(token_stats)}

        if entropy_T is not None:
            stats["sum/entropy"] = entropy_T.detach().double().sum()
        if self.needs_entropy:
            assert entropy_T is not None, "entropy_coeff is set: the objective needs entropy_T"
            entropy = aggregate(entropy_T, segments, counts)
            loss = loss - self.entropy_coeff * entropy
            stats["share/entropy_loss"] = entropy.detach()
        if self.needs_ref:
            kl = aggregate(self._kl(policy_logprobs_T, ref_logprobs_T, full_kl_T), segments, counts)
            loss = loss + self.kl_loss_coef * kl
            stats["share/kl_loss"] = kl.detach()
        stats["share/loss"] = loss.detach()
        return loss, stats

    def _kl(self, policy_logprobs_T: Tensor, ref_logprobs_T: Tensor | None, full_kl_T: Tensor | None) -> Tensor:
        if self.needs_full_kl:
            assert full_kl_T is not None, "kl_loss_type=full: the objective needs full_kl_T"
            return full_kl_T
        assert self.kl_loss_type is not None and ref_logprobs_T is not None, "the KL term needs ref_logprobs_T"
        return kl_estimate(policy_logprobs_T, ref_logprobs_T, self.kl_loss_type)

    def formula(self) -> str:
        """The objective as plain text with its denominators, one term per line."""
        policy_loss = formula_of(POLICY_LOSSES.get(self.loss_mode))
        total = "loss = avg(pg)"
        lines = [f"pg   = {_with_values(policy_loss, self)}"]
        if self.needs_entropy:
            total += f" {'-' if self.entropy_coeff > 0 else '+'} {abs(self.entropy_coeff):g}·avg(H)"
            lines.append("H    = -Σ_v π_v log π_v")
        if self.kl_loss_type is not None:
            total += f" + {self.kl_loss_coef:g}·avg(KL)"
            kl = full_kl if self.needs_full_kl else KL_ESTIMATORS.get(self.kl_loss_type)
            lines.append(f"KL   = {formula_of(kl)}  [{self.kl_loss_type}]")
        average = formula_of(AGGREGATIONS.get(self.loss_agg_mode))
        lines.append(f"avg  = {average}, counted over the whole mini-batch  [{self.loss_agg_mode}]")
        return "\n".join([total, *lines])


def _combine(token_stats: dict[str, Tensor]) -> dict[str, Tensor]:
    """Statistics per token reduced over this micro-batch, each under the prefix that says how to go on."""
    combined = {}
    for name, value_T in token_stats.items():
        if name.endswith("_max"):
            combined[f"max/{name}"] = (value_T.max() if len(value_T) else value_T.new_zeros(())).double()
        else:
            combined[f"sum/{name}"] = value_T.double().sum()
    return combined


def _with_values(formula: str, objective: Objective) -> str:
    """The formula with the clip bounds as numbers."""
    for name in ("clip_low", "clip_high", "clip_c"):
        value = getattr(objective, name)
        sides = {f"1 - {name}": 1 - value, f"1 + {name}": 1 + value, name: value}
        for text, number in sides.items():
            formula = formula.replace(text, f"{number:.6g}")
    return formula
