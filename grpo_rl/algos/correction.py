"""Rollout correction: the engine that sampled is another policy than the trainer's old one.

With d = old_logprobs - rollout_logprobs of the sampled token, e^d is the importance weight from the engine to
the trainer. Everything is computed in float64 and detached.

    truncated importance sampling   rollout_is="token", rollout_is_threshold=2
    IcePop                          rollout_is="token", rollout_rs=(Rejection("token_k1", 0.5, 5),)
    masked importance sampling      rollout_is="sequence", rollout_rs=(Rejection("seq_sum_k1", 0.5, 2),)
    sequence-geometric bounds       rollout_rs=(Rejection("seq_mean_k1", 0.999, 1.001),)
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch
from torch import Tensor

from grpo_rl.algos.segments import Segments
from grpo_rl.config.schema.tree import RejectionMode, RolloutCorrectionConfig
from grpo_rl.errors import ConfigError
from grpo_rl.frozen import frozen
from grpo_rl.types import Counts

MAX_LOG_WEIGHT = 20.0  # logs of weights and ratios are cut to +-20 before exp, as in verl


_BOUNDED_BY = {"token": "token_k1", "sequence": "seq_sum_k1"}


@frozen
class Rejection:
    """A bound; what lies outside is not trained: a token for `token_*`, the whole response for `seq_*`.

    k1 bounds the ratio e^(Σ d), e^(mean d) or e^d; k2 = d²/2 and k3 = e^d - 1 - d have only an upper bound.
    """

    mode: RejectionMode  # the quantity (each token, or a response's sum, mean or largest token) and its measure
    lower: float | None = None
    upper: float | None = None

    def problems(self) -> list[str]:
        if not self.mode.endswith("k1"):
            if self.lower is not None or self.upper is None or not self.upper > 0:
                return [f"rollout_rs={self.mode}: takes an upper bound > 0 and no lower one, not {self.lower} and {self.upper}"]
            return []
        if self.lower is None and self.upper is None:
            return [f"rollout_rs={self.mode}: rejects nothing without a bound"]
        if not (self.lower or 0.0) < 1.0 < (math.inf if self.upper is None else self.upper):
            return [f"rollout_rs={self.mode}: the bounds of the ratio, {self.lower} and {self.upper}, must have 1 between them"]
        return []


@frozen
class RolloutCorrection:
    """Without arguments it corrects nothing. Raises ConfigError with all problems."""

    rollout_is: Literal["token", "sequence"] | None = None
    rollout_is_threshold: float | None = None  # cut weights above; None needs a rejection that bounds them
    rollout_is_batch_normalize: bool = False
    rollout_rs: tuple[Rejection, ...] = ()
    bypass_mode: bool = False
    """Take the engine's log-probs as the old ones: weights and rejections are those of the present policy
    against the engine; a loss with a ratio has that weight already."""

    def __post_init__(self) -> None:
        problems = [problem for rejection in self.rollout_rs for problem in rejection.problems()]
        modes = [rejection.mode for rejection in self.rollout_rs]
        problems += [f"rollout_rs={mode}: given twice" for mode in sorted(set(modes)) if modes.count(mode) > 1]
        if self.bypass_mode and self.rollout_is_batch_normalize:
            problems.append(
                "rollout_is_batch_normalize=true: with bypass_mode=true weights are made in each micro-batch of the update, and their "
                "mean would depend on how the batch is cut; set it to false, or bypass_mode=false"
            )
        if self.rollout_is is not None and not self.bypass_mode:
            mode, limit = _BOUNDED_BY[self.rollout_is], self.rollout_is_threshold
            upper = next((r.upper for r in self.rollout_rs if r.mode == mode), None)
            if limit is None and upper is None:
                problems.append(
                    f"rollout_is={self.rollout_is}: nothing bounds the weights; rollout_is_threshold, or an upper bound for {mode}"
                )
            elif limit is not None and upper is not None and upper <= limit:
                problems.append(
                    f"rollout_is_threshold={limit}: has no effect, because {mode} rejects weights above {upper}; leave it out"
                )
        if problems:
            raise ConfigError(problems)

    @classmethod
    def from_config(cls, config: RolloutCorrectionConfig) -> RolloutCorrection:
        modes, uppers, lowers = config.rollout_rs, config.rollout_rs_threshold, config.rollout_rs_threshold_lower
        ratios = [mode for mode in modes if mode.endswith("k1")]
        problems = []
        if len(uppers) != len(modes):
            problems.append(f"rollout_rs_threshold has {len(uppers)} entries; one for each of the {len(modes)} of rollout_rs")
        if lowers and len(lowers) != len(ratios):
            problems.append(
                f"rollout_rs_threshold_lower has {len(lowers)} entries; one for each k1 entry of rollout_rs, or none"
            )
        if problems:
            raise ConfigError(problems)
        lower_bounds = iter(lowers)
        rejections = [
            Rejection(mode, None if mode not in ratios else next(lower_bounds) if lowers else 1.0 / upper, upper)
            for mode, upper in zip(modes, uppers, strict=True)
        ]
        threshold = config.rollout_is_threshold
        if config.rollout_is is not None and threshold is None:
            threshold = None if _BOUNDED_BY[config.rollout_is] in modes else 2.0
        return cls(config.rollout_is, threshold, config.rollout_is_batch_normalize, tuple(rejections), bool(config.bypass_mode))

    @property
    def active(self) -> bool:
        return not self.bypass_mode and (self.rollout_is is not None or bool(self.rollout_rs))

    def in_the_loss(self, has_ratio: bool) -> RolloutCorrection | None:
        """Return what the loss does in bypass mode (None: nothing); if it `has_ratio`, that is the weight."""
        if not self.rollout_rs and (has_ratio or not self.rollout_is):
            return None
        return dataclasses.replace(self, rollout_is=None, rollout_is_threshold=None) if has_ratio else self


@frozen
class Correction:
    weights_T: Tensor | None  # float32; None without `rollout_is`
    trained_T: Tensor | None
    """None without `rollout_rs`. Other tokens leave every denominator."""
    metrics: dict[str, float]


@torch.no_grad()
def correct(settings: RolloutCorrection, old_logprobs_T: Tensor, rollout_logprobs_T: Tensor, segments: Segments) -> Correction:
    """Batch normalisation is over what is passed in."""
    d_T = old_logprobs_T.double() - rollout_logprobs_T.double()
    metrics = mismatch_metrics(old_logprobs_T, rollout_logprobs_T, segments)
    trained_T = torch.ones(len(d_T), dtype=torch.bool, device=d_T.device)
    for rejection in settings.rollout_rs:
        inside_T = _inside(rejection, d_T, segments)
        metrics[f"rollout_rs_{rejection.mode}_fraction"] = _mean((~inside_T).double())
        trained_T &= inside_T
    if settings.rollout_rs:
        kept_N = segments.sum(trained_T.double())
        metrics["rollout_rs_masked_fraction"] = _mean((~trained_T).double())
        metrics["rollout_rs_seq_masked_fraction"] = _mean((kept_N == 0)[segments.nonempty_N].double())
    weights_T = _weights(settings, d_T, trained_T, segments, metrics) if settings.rollout_is else None
    return Correction(weights_T, trained_T if settings.rollout_rs else None, metrics)


@torch.no_grad()
def mismatch_metrics(old_logprobs_T: Tensor, rollout_logprobs_T: Tensor, segments: Segments) -> dict[str, float]:
    """Measure how far the engine's policy is from the trainer's. Log-ratios are cut to +-20 before exp.

    `kl` and `k3_kl` estimate KL(engine || trainer) per token: the mean of -d and of e^d - 1 - d.
    `log_ppl_diff` is the mean over responses of the mean of -d, `ppl_ratio` of its exponential. `chi2_token`
    and `chi2_seq` are mean of squared weights - 1.
    """
    d_T = old_logprobs_T.double() - rollout_logprobs_T.double()
    cut_T = d_T.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
    mean_N, sum_N = segments.mean(d_T)[segments.nonempty_N], segments.sum(d_T)[segments.nonempty_N]
    half = MAX_LOG_WEIGHT / 2
    return {
        "kl": _mean(-d_T),
        "k3_kl": _mean(torch.expm1(cut_T) - cut_T),
        "log_ppl_diff": _mean(-mean_N),
        "log_ppl_abs_diff": _mean(mean_N.abs()),
        "ppl_ratio": _mean((-mean_N).clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()),
        "chi2_token": _mean(torch.expm1(2.0 * d_T.clamp(-half, half))),
        "chi2_seq": _mean(torch.expm1(2.0 * sum_N.clamp(-half, half))),
        "logprob_diff_mean": _mean(d_T.abs()),
        "logprob_diff_max": float(d_T.abs().max()) if len(d_T) else 0.0,
    }


def mismatch_shares(
    policy_logprobs_T: Tensor, rollout_logprobs_T: Tensor, segments: Segments, counts: Counts
) -> dict[str, float]:
    metrics = mismatch_metrics(policy_logprobs_T, rollout_logprobs_T, segments)
    per_token = segments.num_tokens / max(1, counts.num_tokens)
    per_sequence = int(segments.nonempty_N.sum()) / max(1, counts.num_sequences)
    over_sequences = ("log_ppl_diff", "log_ppl_abs_diff", "ppl_ratio", "chi2_seq")
    return {
        name: value * (per_sequence if name in over_sequences else per_token)
        for name, value in metrics.items()
        if not name.startswith("logprob_diff")
    }


def _weights(
    settings: RolloutCorrection, d_T: Tensor, trained_T: Tensor, segments: Segments, metrics: dict[str, float]
) -> Tensor:
    log_T = d_T if settings.rollout_is == "token" else segments.broadcast(segments.sum(d_T))
    raw_T = log_T.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()
    limit = math.inf if settings.rollout_is_threshold is None else settings.rollout_is_threshold
    weights_T = raw_T.clamp(max=limit)
    metrics["rollout_is_truncated_fraction"] = _mean((raw_T > limit).double()[trained_T])
    if settings.rollout_is_batch_normalize:
        if settings.rollout_is == "token":
            mean = _mean(weights_T[trained_T])
        else:
            kept_N = segments.sum(trained_T.double())
            # All kept tokens of a response have its weight, so their mean is it.
            sums_N = segments.sum(torch.where(trained_T, weights_T, 0.0))
            mean = _mean((sums_N / kept_N.clamp(min=1))[kept_N > 0])
        metrics["rollout_is_batch_norm_factor"] = mean
        weights_T = weights_T / mean if mean > 0 else weights_T
    kept_weights = weights_T[trained_T]
    squares = float(kept_weights.square().sum())
    metrics |= {
        "rollout_is_mean": _mean(kept_weights),
        "rollout_is_std": float(kept_weights.std()) if len(kept_weights) > 1 else 0.0,
        "rollout_is_min": float(kept_weights.min()) if len(kept_weights) else 0.0,
        "rollout_is_max": float(kept_weights.max()) if len(kept_weights) else 0.0,
        # (Σ w)² / (n Σ w²): the share of tokens that an unweighted sample of equal variance would have.
        "rollout_is_eff_sample_size": float(kept_weights.sum()) ** 2 / (len(kept_weights) * squares) if squares else 0.0,
    }
    return weights_T.float()


def _inside(rejection: Rejection, d_T: Tensor, segments: Segments) -> Tensor:
    level, _, measure = rejection.mode.rpartition("_")
    if measure == "k1":
        x_T = d_T
    elif measure == "k2":
        x_T = 0.5 * d_T.square()
    else:
        cut_T = d_T.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
        x_T = torch.expm1(cut_T) - cut_T
    if level == "seq_sum":
        x_T = segments.broadcast(segments.sum(x_T))
    elif level == "seq_mean":
        x_T = segments.broadcast(segments.mean(x_T))
    elif level == "seq_max":
        highest_N = torch.segment_reduce(x_T, "max", lengths=segments.lengths_N, unsafe=True, initial=0)
        x_T = segments.broadcast(highest_N)
    lower = -math.inf if rejection.lower is None else rejection.lower
    upper = math.inf if rejection.upper is None else rejection.upper
    if measure == "k1":
        # Compared as logarithms: a ratio can overflow, its logarithm cannot.
        lower, upper = math.log(lower) if lower > 0 else -math.inf, math.log(upper)
    return (x_T >= lower) & (x_T <= upper)


def _mean(x: Tensor) -> float:
    return float(x.mean()) if len(x) else 0.0
