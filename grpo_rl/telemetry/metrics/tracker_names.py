"""The names under which trackers get the metrics: those of verl's dashboards, where verl measures the same thing.

metrics.jsonl, the screen and the reports keep the names of this program. What verl does not measure, or measures
differently (such as probabilities instead of log-probs), keeps its name in the trackers too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

STEP = "training/global_step"
"""The metric that trackers with a step axis of their own draw over."""
_EQUAL = {
    "reward/std": "critic/score/std",
    "advantage/abs_mean": "critic/advantages/abs_mean",
    "advantage/zero_group_fraction": "critic/advantages/zero_group_fraction",
    "trainer/epoch": "training/epoch",
}
_REWARDS = ("mean", "max", "min")
_OVER_RESPONSES = re.compile(r"(?P<kind>mean|best|maj)@\d+")


def tracker_metrics(step: int, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a step under the trackers' names.

    - `reward/mean`, `max`, `min` -> `critic/score/...`; and `critic/rewards/...`, which in verl is the score less the KL
      penalty, so it is left out where the reward has one;
    - `val/SOURCE/mean@n` -> `val-core/SOURCE/acc/mean@n`, `best@n` and `maj@n` -> `.../best@n/mean`, `.../maj@n/mean`;
    - all else of a source's validation -> `val-aux/SOURCE/...`; losses on rows stay `val/loss` and so on.
    """
    sources = _sources(metrics)
    named: dict[str, float] = {}
    for name, value in metrics.items():
        kind = name.removeprefix("reward/")
        if name.startswith("reward/") and kind in _REWARDS:
            named[f"critic/score/{kind}"] = value
            if "actor/reward_kl_penalty" not in metrics:
                named[f"critic/rewards/{kind}"] = value
        elif name.startswith("val/") and (source := _source_of(name, sources)):
            named[_validation_name(source, name.removeprefix(f"val/{source}/"))] = value
        else:
            named[_EQUAL.get(name, name)] = value
    return named | {STEP: float(step)}


def _sources(metrics: Mapping[str, float]) -> list[str]:
    """Return the data sources of a validation: each has a mean length of its responses. The longest come first."""
    found = [name.removeprefix("val/").removesuffix("/response_length") for name in metrics if _is_length(name)]
    return sorted(found, key=len, reverse=True)


def _is_length(name: str) -> bool:
    return name.startswith("val/") and name.endswith("/response_length")


def _source_of(name: str, sources: list[str]) -> str | None:
    return next((source for source in sources if name.startswith(f"val/{source}/")), None)


def _validation_name(source: str, rest: str) -> str:
    """Return the name of one measure of a source's validation."""
    match = _OVER_RESPONSES.fullmatch(rest)
    if match is None:
        return f"val-aux/{source}/{rest}"
    return f"val-core/{source}/acc/{rest}" + ("" if match["kind"] == "mean" else "/mean")
