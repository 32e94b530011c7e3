"""What a run's rewards were made of: its components from first to last, and the failures by kind, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grpo_rl.telemetry.text import number, safe_text

OVERALL = ("mean", "max", "min", "std", "greedy_baseline_mean")
"""`reward/<key>` that are about the whole reward."""
FAILURES = {
    "timeouts": "past the deadline",
    "errors": "raised an error",
    "invalid": "gave no number",
    "dropped": "dropped from the step",
    "failed_baselines": "without a greedy response to compare with",
    "broken_groups": "groups that compare nothing any more",
}
"""`reward/<key>` that count scores that could not be had, by what happened."""


def component_keys(records: Sequence[Mapping[str, float]]) -> list[str]:
    """The keys `reward/<part>` of the records that are means of a component, those of a component's own dict after it."""
    known = {f"reward/{key}" for key in (*OVERALL, *FAILURES)}
    keys = dict.fromkeys(key for record in records for key in record if key.startswith("reward/") and key not in known)
    # `acc` and `answer` stand there twice: by themselves, for validation, and under the component that gave them.
    doubled = {key for key in keys if any(other != key and other.endswith(f"/{key.removeprefix('reward/')}") for other in keys)}
    spreads = {key for key in keys if key.endswith("/std") and key.removesuffix("/std") in keys}
    return [key for key in keys if key not in doubled | spreads]


def rewards_section(records: Sequence[dict[str, float]]) -> str:
    """The table of components and failures over the training steps; empty without a training step."""
    training = [record for record in records if "reward/mean" in record]
    if not training:
        return ""
    lines = [f"{'Rewards':<46}{'first':>10}{'last':>10}{'best':>10}{'at step':>10}"]
    for key in ("reward/mean", *component_keys(training)):
        points = [(record[key], int(record["step"])) for record in training if key in record]
        if not points:
            continue
        best, step = max(points, key=lambda point: point[0])
        name = "reward" if key == "reward/mean" else f"  {safe_text(key.removeprefix('reward/'), limit=40)}"
        values = "".join(number(value, 10) for value in (points[0][0], points[-1][0], best))
        lines.append(f"  {name:<44}{values}{step:>10}")
    failures = {kind: sum(record.get(f"reward/{kind}", 0.0) for record in training) for kind in FAILURES}
    told = [f"{count:g} {FAILURES[kind]}" for kind, count in failures.items() if count > 0]
    if told:
        lines.append(f"  scores that failed: {', '.join(told)}")
    elif any(f"reward/{kind}" in record for record in training for kind in FAILURES):
        lines.append("  no score failed")
    return "\n".join(lines)
