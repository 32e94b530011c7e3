"""Kinds of values: numbers with bounds and their reason, and choices. Bounds lie far outside of what runs
need: they refuse slips (`rollout.n=1e12`) and what arithmetic cannot hold (`temperature=1e-320`)."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from grpo_rl.frozen import frozen

Options = dict[str, Any]
ON_GPUS, ON_CPUS = "trainer.device=cuda | it is for GPUs", "trainer.device=cpu | it is for CPUs"


def field(default: Any, *, part: str = "", needs: str | Sequence[str] = (), harmless: bool = False) -> Any:
    """Declare a key or section with what a run must have to read it; `config/effects.py` refuses or notes it
    otherwise.

    A callable `default` makes the value. `part`: the part of a run that reads the key. Each of `needs` is
    `CONDITION`, or `CONDITION | REASON`, with keys in it as `{KEY}`. A condition is `KEY=VALUE`, `KEY above
    0`, or `KEY` (set, neither false nor 0); ` or ` joins several, of which a lone VALUE belongs to the key
    before. KEYs are looked up in the section, then in those around it. `harmless` keys, set by habit, change
    speed, memory, processes or logs only.
    """
    needed = (needs,) if isinstance(needs, str) else tuple(needs)
    metadata = {"part": part, "needs": needed, "harmless": harmless}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@frozen
class Range:
    """Bounds of a number: `Annotated[float, Range(0, 1, "it is a share")]` has both ends. NaN is never inside."""

    ge: float | None = None
    le: float | None = None
    reason: str = ""  # part of the refusal
    gt: float | None = None
    lt: float | None = None
    zero: bool = False  # 0 is allowed below the lower bound

    def _bounds(self) -> list[tuple[str, Callable[[float, float], bool], float]]:
        signs = (
            (">=", operator.ge, self.ge),
            (">", operator.gt, self.gt),
            ("<=", operator.le, self.le),
            ("<", operator.lt, self.lt),
        )
        return [(sign, compare, bound) for sign, compare, bound in signs if bound is not None]

    def describe(self) -> str:
        """`>= 1 and < 2`."""
        parts = [f"{sign} {bound if isinstance(bound, int) else format(bound, 'g')}" for sign, _, bound in self._bounds()]
        return ("0, or " if self.zero else "") + " and ".join(parts)

    def problem(self, number: float) -> str | None:
        if all(compare(number, bound) for _, compare, bound in self._bounds()) or (self.zero and number == 0):
            return None
        return f"is out of range, it must be {self.describe()}" + (f" ({self.reason})" if self.reason else "")


_A_COUNT = "counts of steps, rows and tries stay below 10^12"
Count = Annotated[int, Range(1, 10**12, _A_COUNT)]
CountOrZero = Annotated[int, Range(0, 10**12, _A_COUNT)]
CountOrOff = Annotated[int, Range(-1, 10**12, _A_COUNT)]

Seed = Annotated[int, Range(0, 2**63 - 1, "torch, numpy and files hold a seed in 64 bits")]
Prompts = Annotated[int, Range(1, 2**20, "all prompts of a step are held at once")]
Responses = Annotated[int, Range(1, 2**16, "the responses to one prompt are held and compared together")]
Rollouts = Annotated[int, Range(1, 2**20, "the rollouts of one pass are in memory together")]
Turns = Annotated[int, Range(1, 10**5, "every turn is a request of its own, whose context holds all before it")]
Staleness = Annotated[int, Range(0, 1024, "the prompts of one more batch are held and sampled ahead")]
Updates = Annotated[int, Range(1, 1025, "weights that are sent more rarely are older than any bound on staleness")]
TableRows = Annotated[int, Range(0, 10_000, "a table is for reading; the files in <run>/val have every response")]
Pairs = Annotated[int, Range(1, 2**20, "they are held in memory, and written with every checkpoint")]
Length = Annotated[int, Range(1, 2**24, "no model reads more than some 10^7 tokens in one sequence")]
Tokens = Annotated[int, Range(1, 2**26, "the tokens of one pass are in one device's memory")]
TopK = Annotated[int, Range(-1, 2**24, "no vocabulary has more tokens")]
Devices = Annotated[int, Range(1, 1024, "no machine has more GPUs, or cores for as many processes")]
Nodes = Annotated[int, Range(1, 2**16, "no cluster has more machines")]
NodesOrNone = Annotated[int, Range(0, 2**16, "no cluster has more machines")]
Cores = Annotated[int, Range(1, 2**16, "no cluster on one machine has more cores")]
Processes = Annotated[int, Range(1, 4096, "each is a process of its own on every node")]
ThreadsOrAuto = Annotated[int, Range(0, 4096, "no machine has more hardware threads")]
Ranks = Annotated[int, Range(0, 2**20, "no worker group has more ranks")]
Tflops = Annotated[float, Range(1e-3, 1e6, "a core of a CPU does more, and no device does as much")]
Port = Annotated[int, Range(1024, 65_535, "TCP has no higher ports, and the lower ones are the system's")]
Requests = Annotated[int, Range(1, 10**4, "each open request holds a connection")]
AdapterRankOrOff = Annotated[int, Range(0, 2**14, "no adapter needs more than a layer's smaller side")]
AdapterAlpha = Annotated[int, Range(1, 2**20, "alpha / rank scales the adapter, whose effect float32 has to hold")]
Megabytes = Annotated[int, Range(1, 2**16, "a piece of weights is held twice in a device's memory")]
Tries = Annotated[int, Range(0, 10**4, "the waits between tries double, so more would never be made")]

_A_FACTOR = "beyond, float32 loses the smaller terms of the sum"
Positive = Annotated[float, Range(1e-12, 1e12, _A_FACTOR)]
Factor = Annotated[float, Range(-1e9, 1e9, _A_FACTOR)]
Beta = Annotated[float, Range(1e-6, 1e4, "0 learns nothing, below it the worse answer is preferred")]
WrongShare = Annotated[float, Range(ge=0, lt=0.5, reason="a share of wrong labels; at a half no answer is preferred")]
Coefficient = Annotated[float, Range(1e-12, 1e6, _A_FACTOR, zero=True)]
Fraction = Annotated[float, Range(0, 1, "it is a share")]
OpenFraction = Annotated[float, Range(gt=0, lt=1, reason="at 0 nothing is averaged, at 1 the average never moves")]
LogSpread = Annotated[float, Range(0, 5, "of the logarithm: at 5 one response in six is 148 times its median")]
MinorShare = Annotated[float, Range(0, 0.9, "it is a share of a batch whose rest must be new")]
PositiveFraction = Annotated[float, Range(1e-6, 1, "it is a share, and a smaller one is 0 after rounding")]
Ratio = Annotated[float, Range(1e-9, 1e9, "a probability ratio outside is float32's rounding; 1e9 never clips")]
Taper = Annotated[float, Range(0, 1e9, "a weight is not negative; 1e9 cuts none")]
RatioAboveOne = Annotated[float, Range(gt=1, le=1e9, reason="a bound of 1 or less would cut every token; 1e9 cuts none")]
LearningRate = Annotated[float, Range(1e-15, 10, "AdamW moves each weight by about lr, so 10 destroys any model")]
Decay = Annotated[float, Range(ge=0, lt=1, reason="it is the share of an average that is kept")]
Epsilon = Annotated[float, Range(1e-30, 1, "float32 holds no smaller one, and a larger one replaces the gradient")]
WeightDecay = Annotated[float, Range(1e-12, 100, "lr times it is the share of a weight taken off a step", zero=True)]
GradientNorm = Annotated[float, Range(1e-9, 1e12, "a smaller norm stops training; 1e12 never clips")]
Nats = Annotated[float, Range(1e-9, 100, "the entropy over any vocabulary is below 20 nats")]
# vLLM raises a temperature between 0 and 0.01 to 0.01 (vllm/sampling_params.py), unlike the trainer.
_TEMPERATURE = "engines raise smaller temperatures to 0.01; above 100 all tokens are alike"
Temperature = Annotated[float, Range(0.01, 100, _TEMPERATURE)]
TemperatureOrGreedy = Annotated[float, Range(0.01, 100, _TEMPERATURE, zero=True)]
MemoryShare = Annotated[float, Range(ge=0.01, lt=1, reason="an engine needs some of a device's memory, and never gets all")]
StoreBytes = Annotated[int, Range(75 * 2**20, 2**46, "Ray takes at least 75 MiB, and no machine has more than 64 TiB")]
CacheBytes = Annotated[int, Range(2**20, 2**43, "a cache below 1 MiB holds no block, and no device has more than 8 TiB")]
Gib = Annotated[float, Range(0.001, 2**16, "below 1 MiB nothing fits, and no machine has more than 64 TiB")]
ProcessGib = Annotated[float, Range(0.05, 2**16, "Python itself takes 0.05 GiB, and no machine has 64 TiB")]
Seconds = Annotated[float, Range(0.001, 366 * 86_400, "no process answers faster than 0.001 s; a year is no limit")]
ProcessMegabytes = Annotated[int, Range(32, 2**24, "Python itself takes 32 MiB, and no machine has 16 TiB")]
Operand = Annotated[int, Range(-(10**15), 10**15, "parts of a reward are floats, which hold such integers exactly")]
AnySeed = Annotated[int, Range(reason="no bounds: Python's generator takes any whole number as its seed")]

Dtype = Literal["auto", "bfloat16", "float32"]
RejectionMode = Literal[
    "token_k1", "token_k2", "token_k3",
    "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
    "seq_max_k2", "seq_max_k3",
]  # fmt: skip

Illness = Literal[
    "nonfinite", "learning_rate_zero", "prompts_cut", "reward_failures", "tool_fails", "nothing_trained", "entropy_explosion",
    "learning_rate_too_high", "truncation_grows", "truncation", "reward_never_seen", "reward_constant",
    "reward_exploited", "sampler_trainer_disagree", "memorised", "reward_model_hacked", "validation_falls", "kl_runaway", "off_policy",
    "ratio_out_of_range", "entropy_collapse", "format_without_answer", "length_without_reward", "repetition",
    "groups_too_hard", "groups_too_easy", "few_groups_with_signal",
]  # fmt: skip
"""What the doctor (`telemetry/diagnosis`) may find, causes before consequences."""

LABEL_LOSSES = ("kto",)  # losses over single answers that are desirable or not
PAIR_LOSSES = ("dpo", "dpo_hinge", "ipo", "simpo", "orpo", *LABEL_LOSSES)  # losses over preferences
VALUE_ESTIMATORS = ("gae",)  # advantage estimators that read a critic's values
ITERATE, REWARD_MODEL = "iterate", "reward_model"  # schedules
