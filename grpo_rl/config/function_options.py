"""The keys that name a function of the algorithm and those that set its options. Each kind has a mapping of
options (`algorithm.adv_options={std: batch}`); verl's fixed keys, such as `clip_ratio_c`, set options too. A
fixed key whose option the function lacks is refused, unless it has verl's default, which people paste."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import field
from typing import Any

from grpo_rl.config.schema.fields import value_of
from grpo_rl.config.schema.tree import ActorConfig, AlgorithmConfig, Config
from grpo_rl.frozen import frozen

ACTOR = "actor_rollout_ref.actor"
PAIR_AVERAGES = ("prompt-mean", "seq-mean-token-mean")
"""A loss over pairs has one value on all tokens of a pair; other averages multiply it with lengths."""


WITHOUT_DUAL_CLIP = ("gspo",)  # losses that do not read clip_ratio_c, which verl's commands set for them


@frozen
class Choice:
    """All keys are relative to `section`."""

    kind: str
    section: str
    key: str
    options_key: str
    fixed: Mapping[str, tuple[tuple[str, ...], Any]] = field(default_factory=dict)
    """verl's keys that set options: the options, and verl's default."""

    def name(self, config: Config) -> str:
        return str(value_of(self._root(config), self.key))

    def given(self, config: Config) -> dict[str, tuple[str, Any]]:
        """Return full key and value of each option that is set; later keys of the table win."""
        return {option: (f"{self.section}.{key}", value) for option, key, value in _settings(self, self._root(config))}

    def _root(self, config: Config) -> Any:
        return value_of(config, self.section)


def chosen_options(choice: Choice, section: ActorConfig | AlgorithmConfig, known: Collection[str]) -> dict[str, Any]:
    """Return the options that a section sets for a function whose options are `known`."""
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
