"""A table of the keys that name a function of the algorithm and of those that set its options, for all kinds.

Every kind has one key with a mapping of options, such as `algorithm.adv_options={std: batch}`. verl's fixed keys, such
as `clip_ratio_c`, are further ways to set one. A fixed key whose option the chosen function does not have is refused,
unless it has verl's default, which people paste by habit and which asks for nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_rl.config.schema.fields import value_of
from grpo_rl.config.schema.tree import ActorConfig, AlgorithmConfig, Config

ACTOR = "actor_rollout_ref.actor"
PAIR_AVERAGES = ("prompt-mean", "seq-mean-token-mean")
"""The averages that make a mean over pairs of a loss over pairs, which has one value on all tokens of a pair. The others
would multiply the loss of a pair with the lengths of its responses."""


WITHOUT_DUAL_CLIP = ("gspo",)
"""Losses to which verl's commands give clip_ratio_c, and that do not read it there either."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A place where the configuration names a function. All keys are relative to `section`."""

    kind: str
    section: str
    key: str
    options_key: str
    fixed: Mapping[str, tuple[tuple[str, ...], Any]] = field(default_factory=dict)
    """Keys of verl's that set options by themselves: these options, and verl's default."""

    def name(self, config: Config) -> str:
        return str(value_of(self._root(config), self.key))

    def given(self, config: Config) -> dict[str, tuple[str, Any]]:
        """Return the options that are set: the full key of each and the value. Later keys of the table win."""
        return {option: (f"{self.section}.{key}", value) for option, key, value in _settings(self, self._root(config))}

    def _root(self, config: Config) -> Any:
        return value_of(config, self.section)


def chosen_options(choice: Choice, section: ActorConfig | AlgorithmConfig, known: Collection[str]) -> dict[str, Any]:
    """Return the options that the keys of a section set for a function whose options are `known`."""
    return {option: value for option, key, value in _settings(choice, section) if option in known or key not in choice.fixed}


def _settings(choice: Choice, section: Any) -> Iterator[tuple[str, str, Any]]:
    for key, (options, _) in choice.fixed.items():
        value = value_of(section, key)
        if key == "norm_adv_by_std_in_grpo":
            value = None if value else "none"
        if value is not None:
            yield from ((option, key, value) for option in options)
    for option, value in value_of(section, choice.options_key).items():
        yield option, f"{choice.options_key}.{option}", value


ESTIMATOR = Choice(
    "advantage estimator",
    "algorithm",
    "adv_estimator",
    "adv_options",
    {
        "gamma": (("gamma",), 1.0),
        "lam": (("lam",), 1.0),
        "norm_adv_by_std_in_grpo": (("std",), True),
    },
)
LOSS = Choice(
    "policy loss",
    ACTOR,
    "policy_loss.loss_mode",
    "policy_loss.options",
    {
        "clip_ratio": (("clip_low", "clip_high"), 0.2),
        "clip_ratio_low": (("clip_low",), 0.2),
        "clip_ratio_high": (("clip_high",), 0.2),
        "clip_ratio_c": (("clip_c",), 3.0),
    },
)
AVERAGE = Choice(
    "loss_agg_mode",
    ACTOR,
    "loss_agg_mode",
    "loss_agg_options",
    {"loss_scale_factor": (("loss_scale_factor",), None)},
)
KL_IN_LOSS = Choice("KL estimator", ACTOR, "kl_loss_type", "kl_loss_options")
KL_IN_REWARD = Choice("KL estimator", "algorithm", "kl_penalty", "kl_penalty_options")
CHOICES = (ESTIMATOR, LOSS, AVERAGE, KL_IN_LOSS, KL_IN_REWARD)
