"""Functions of the algorithm run once on a small batch, to see that they keep to their interface and that options
matter.

So a user's own estimator, loss, average or KL is refused before a run starts, and not at its first step. All columns
are there in the small batch; recorders note which of them a function reads, and it may read only what it declared with
`@needs`.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from grpo_rl.algos.advantages import contract as advantages
from grpo_rl.algos.advantages.contract import RolloutAdvantages
from grpo_rl.algos.advantages.registered import ADVANTAGES, AdvantageInput, AdvantageOutput, token_rewards
from grpo_rl.algos.aggregate import AGGREGATIONS, count, group_tokens
from grpo_rl.algos.kl import KL_ESTIMATORS
from grpo_rl.algos.losses import contract as losses
from grpo_rl.algos.losses.registered import POLICY_LOSSES, LossInput, selection_of
from grpo_rl.algos.segments import Segments
from grpo_rl.errors import ConfigError, FunctionError
from grpo_rl.registry import Registry, needs_of, options_of, own_options

T = TypeVar("T")

Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The results of a function on the small batch, and the columns that it read."""

    values: tuple[Tensor, ...]
    """Its results, and their gradient with respect to the policy's log-probs where it has one."""
    read: frozenset[str]
    """The columns that it read."""

    def same(self, other: TrialResult, last: int) -> bool:
        """Return whether the last so many values are equal in both, up to the rounding of the last digits."""
        pairs = zip(self.values[-last:], other.values[-last:], strict=True)
        return all(torch.allclose(x, y, rtol=1e-12, atol=1e-15, equal_nan=True) for x, y in pairs)


@dataclass(frozen=True, slots=True)
class FunctionKind:
    """The functions of one registry: how they are tried, and what they can need."""

    registry: Registry[Any]
    arguments: tuple[str, ...]
    """The positional arguments, as they are called in the interface."""
    needs: Mapping[str, tuple[str, ...]]
    """Each need with the columns that it allows to read."""
    supplied: Mapping[str, str]
    """Needs that are supplied as a keyword."""
    run: Callable[[Any, Options], TrialResult]


LENGTHS_N = torch.tensor([30, 18, 0, 48, 36, 42, 12, 6])
GROUP_N = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
SHIFTS_N = torch.tensor([0.6, -0.6, 0.0, 0.9, 1.4, 0.5, -0.8, -0.4], dtype=torch.float64)
REWARDS_N = torch.tensor([1.0, 0.0, 0.25, 0.5, 0.0, 2.0, 0.0, 0.75])


def estimator_input(num_parts: int = 2) -> AdvantageInput:
    """Return two groups of four responses, one of them empty, with every optional column."""
    num_tokens = int(LENGTHS_N.sum())
    values_T = torch.sin(torch.arange(num_tokens) * 1.7)
    return AdvantageInput(
        token_rewards(REWARDS_N, LENGTHS_N, kl_T=values_T.abs(), kl_coef=0.1),
        lengths_N=LENGTHS_N,
        group_N=GROUP_N,
        rewards_N=REWARDS_N,
        values_T=values_T,
        baselines_N=REWARDS_N.flip(0),
        step_ends_K=torch.arange(0, num_tokens, 2),
        step_rewards_K=torch.cos(torch.arange(0, num_tokens, 2) * 0.9),
        reward_parts_NP=torch.stack([REWARDS_N.roll(part) for part in range(num_parts)], dim=1),
    )


def loss_input(*, one_update: bool = False) -> LossInput:
    """Return the same responses with log-ratios and advantages of either sign; with `one_update` all ratios are 1."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = int(LENGTHS_N.sum())
    policy_T, ref_T, rollout_T = -0.02 - 3.0 * torch.rand(3, num_tokens, generator=generator, dtype=torch.float64)
    # Whole responses have become likelier or less likely, so that ratios of responses are far from 1 too.
    noise_T = 0.8 * torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    old_T = (policy_T - SHIFTS_N.repeat_interleave(LENGTHS_N) - noise_T).clamp(max=-0.01)
    advantages_T, entropy_T = 2.0 * torch.randn(2, num_tokens, generator=generator, dtype=torch.float64)
    return LossInput(
        policy_logprobs_T=policy_T.requires_grad_(),
        advantages_T=advantages_T,
        segments=Segments(LENGTHS_N),
        old_logprobs_T=policy_T.detach() if one_update else old_T,
        ref_logprobs_T=ref_T,
        rollout_logprobs_T=rollout_T,
        entropy_T=entropy_T.abs(),
        weights_T=torch.ones(num_tokens),
        group_N=GROUP_N,
        group_tokens_N=group_tokens(LENGTHS_N, GROUP_N),
    )


def pair_input() -> LossInput:
    """Return four pairs with every optional column, in which either response is the longer or the preferred one."""
    lengths_N, group_N = torch.tensor([30, 18, 24, 48, 36, 42, 12, 6]), torch.arange(4).repeat_interleave(2)
    generator = torch.Generator().manual_seed(0)
    policy_T, old_T, ref_T, rollout_T = -0.02 - 3.0 * torch.rand(
        4, int(lengths_N.sum()), generator=generator, dtype=torch.float64
    )
    chosen_N = torch.tensor([True, False, False, True, True, False, False, True])
    return replace(
        loss_input(),
        policy_logprobs_T=policy_T.requires_grad_(),
        advantages_T=(2.0 * chosen_N.double() - 1.0).repeat_interleave(lengths_N),
        segments=Segments(lengths_N),
        old_logprobs_T=old_T,
        ref_logprobs_T=ref_T,
        rollout_logprobs_T=rollout_T,
        entropy_T=(3.0 * old_T).abs(),
        weights_T=torch.ones(len(policy_T)),
        group_N=group_N,
        chosen_N=chosen_N,
        group_tokens_N=group_tokens(lengths_N, group_N),
    )


def recorder(inputs: T, read: set[str]) -> T:
    """Return a copy of a frozen dataclass that notes in `read` which of its fields are read."""
    names = {field.name for field in fields(inputs)}  # type: ignore[arg-type]

    class Recorder(type(inputs)):  # type: ignore[misc]
        __slots__ = ()

        def __getattribute__(self, name: str) -> Any:
            if name in names:
                read.add(name)
            return super().__getattribute__(name)

    Recorder.__name__ = type(inputs).__name__  # as messages call it
    return Recorder(**{name: getattr(inputs, name) for name in names})


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Keep off the screen what a function prints while it is tried, and what programs print that it starts.

    A trial's output has no meaning for a reader, and nothing hides the secrets of the environment in it, as the logs of
    workers do.
    """
    with contextlib.ExitStack() as stack:
        nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
            if stream is not None:
                stream.flush()
            with contextlib.suppress(OSError):  # closed: nothing can be printed to it
                copy = os.dup(descriptor)
                stack.callback(os.close, copy)
                stack.callback(os.dup2, copy, descriptor)
                os.dup2(nowhere.fileno(), descriptor)
        stack.enter_context(contextlib.redirect_stdout(nowhere))
        stack.enter_context(contextlib.redirect_stderr(nowhere))
        yield


@unheard()
def run_estimator(function: Callable[..., Any], options: Options, num_parts: int = 2) -> TrialResult:
    """Return the advantages and returns of the small batch."""
    read: set[str] = set()
    out = function(recorder(estimator_input(num_parts), read), **options)
    if not isinstance(out, AdvantageOutput | RolloutAdvantages):
        raise ConfigError(f"returns {_described(out)}, not an AdvantageOutput")
    _check_tokens("advantages_T", out.advantages_T)
    if "values" in needs_of(function) and out.returns_T is None:
        raise ConfigError("gives no returns_T for the critic to learn")
    if out.returns_T is not None:
        _check_tokens("returns_T", out.returns_T)
    return TrialResult((out.advantages_T,) if out.returns_T is None else (out.advantages_T, out.returns_T), frozenset(read))


@unheard()
def run_loss(function: Callable[..., Any], options: Options, inputs: LossInput | None = None) -> TrialResult:
    """Return the loss of each token of the small batch, its statistics and, as the last value, its gradient.

    A loss over pairs is tried on pairs, whatever the other `inputs` are.
    """
    if "pairs" in needs_of(function):
        inputs = pair_input()
    inputs, read = inputs or loss_input(), set[str]()
    if selection := selection_of(function):
        generator = torch.Generator().manual_seed(0)
        selected_T = selection(inputs.advantages_T, inputs.old_T(), generator, **own_options(selection, options))
        inputs = replace(inputs, selected_T=selected_T)
    out = function(recorder(inputs, read), **own_options(function, options))
    if not isinstance(out, tuple) or len(out) != 2:
        raise ConfigError(f"returns {_described(out)}, not TokenLoss(loss_T, stats)")
    loss_T, stats = out
    for name, value_T in {"loss_T": loss_T, **stats}.items():
        _check_tokens(name, value_T, inputs.segments.num_tokens)
    return TrialResult((loss_T.detach(), *stats.values(), _gradient(loss_T, inputs)), frozenset(read))


def has_ratio(function: Callable[..., Any], options: Options) -> bool:
    """Return whether a loss depends on the old log-probs; True for one that fails when it is tried, which is reported by itself."""
    try:
        outcomes = [run_loss(function, options, loss_input(one_update=one)) for one in (False, True)]
    except Exception:
        return True
    return not outcomes[0].same(outcomes[1], last=1)


@unheard()
def run_average(function: Callable[..., Any], options: Options) -> TrialResult:
    """Return the average of the small batch's log-probs."""
    inputs = loss_input()
    supplied = {"group_tokens_N": inputs.group_tokens_N} if "group_tokens" in needs_of(function) else {}
    counts = count(LENGTHS_N, GROUP_N)
    share = function(inputs.policy_logprobs_T.double(), inputs.segments, counts, **supplied, **options)
    if not isinstance(share, Tensor) or share.ndim:
        raise ConfigError(f"returns {_described(share)}, not a tensor without dimensions")
    return TrialResult((share.detach(),), frozenset())


@unheard()
def run_kl(function: Callable[..., Any], options: Options) -> TrialResult:
    """Return the KL of each token of the small batch and, as the last value, its gradient."""
    inputs = loss_input()
    supplied = {"old_logprobs_T": inputs.old_T()} if "old_logprobs" in needs_of(function) else {}
    kl_T = function(inputs.policy_logprobs_T, inputs.column("ref_logprobs_T"), **supplied, **options)
    _check_tokens("kl_T", kl_T)
    return TrialResult((kl_T.detach(), _gradient(kl_T, inputs)), frozenset())


KINDS: dict[str, FunctionKind] = {
    ADVANTAGES.kind: FunctionKind(ADVANTAGES, ("inp",), advantages.NEEDS, {}, run_estimator),
    POLICY_LOSSES.kind: FunctionKind(POLICY_LOSSES, ("inputs",), losses.NEEDS, {}, run_loss),
    AGGREGATIONS.kind: FunctionKind(
        AGGREGATIONS,
        ("values_T", "segments", "counts"),
        {"group_tokens": ()},
        {"group_tokens": "group_tokens_N"},
        run_average,
    ),
    KL_ESTIMATORS.kind: FunctionKind(
        KL_ESTIMATORS,
        ("policy_logprobs_T", "ref_logprobs_T"),
        {"old_logprobs": ()},
        {"old_logprobs": "old_logprobs_T"},
        run_kl,
    ),
}
"""Each kind of function by the name that its registry has for it."""


def check(kind: FunctionKind, name: str, options: Options, run: Callable[[Any, Options], TrialResult]) -> None:
    """Raise ConfigError, with all problems, when a function does not keep to its interface with these options.

    That is: it cannot be called as it will be, needs what nothing supplies, fails,
    returns something else, or reads a column that it does not declare.
    """
    function = kind.registry.get(name)
    wanted = needs_of(function)
    what = f"{kind.registry.kind} {name!r}"
    supplied = dict.fromkeys(keyword for need, keyword in kind.supplied.items() if need in wanted)
    kind.registry.check_call(name, *kind.arguments, **supplied)
    problems = [
        f"{what} needs {need!r}, which nothing supplies; it can need {', '.join(kind.needs)}"
        for need in wanted - set(kind.needs)
    ]
    if problems:
        raise ConfigError(problems)
    try:
        outcome = run(function, options)
    except FunctionError as error:
        raise ConfigError(f"{error}\n  (tried on a batch of {len(LENGTHS_N)} responses)") from error
    except ConfigError as error:
        raise ConfigError([f"{what} {problem}" for problem in error.problems]) from error
    except ValueError as error:
        raise ConfigError(f"{what}: {error}") from error
    for need, columns in kind.needs.items():
        undeclared = [column for column in columns if column in outcome.read]
        # All responses have a group; to need several of them per prompt is the function's own claim.
        if undeclared and need not in wanted and need != "group":
            problems.append(f'{what} reads {" and ".join(undeclared)}, which it is given only with @needs("{need}")')
    if problems:
        raise ConfigError(problems)


def without_effect(
    function: Callable[..., Any],
    options: Options,
    name: str,
    run: Callable[[Any, Options], TrialResult],
    others: Iterable[Any] | None = None,
    last: int = 0,
) -> bool:
    """Return whether other values of one option give the same results; `others` are such as a reader of it answers differently.

    Compared are the `last` so many of the results (0: all). False too where no other value can be tried: an option that
    is no number, no switch and no choice of words.
    """
    base, tried = run(function, options), False
    if others is None:
        others = _other_values(function, name, options.get(name, options_of(function)[name]))
    for value in others:
        try:
            other = run(function, {**options, name: value})
        except Exception:
            continue  # not a value of this option
        tried = True
        if len(other.values) != len(base.values) or not base.same(other, last or len(base.values)):
            return False
    return tried


def _other_values(function: Callable[..., Any], name: str, value: Any) -> Iterator[Any]:
    """Yield values of an option that a function which reads it should answer differently."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, (int, float)):
        yield from (2 * value + 1, type(value)(value / 4), type(value)(0.4 * value + 0.3), type(value)(value / 1000))
    elif isinstance(value, str):
        yield from (other for other in _words(function, name) if other != value)
    elif isinstance(value, (list, tuple)):
        yield [2 * entry + 1 if isinstance(entry, (int, float)) and not n else entry for n, entry in enumerate(value)]


def _words(function: Callable[..., Any], name: str) -> tuple[Any, ...]:
    """Return the words that a Literal annotation allows for an option."""
    for owner in (selection_of(function), inspect.unwrap(function)):
        if owner is not None and name in (hints := typing.get_type_hints(inspect.unwrap(owner))):
            return typing.get_args(hints[name])
    return ()


def _gradient(x_T: Tensor, inputs: LossInput) -> Tensor:
    """Return the gradient of a sum in which every token has another weight; zeros where there is none."""
    if not x_T.requires_grad:
        return torch.zeros_like(inputs.policy_logprobs_T)
    weights_T = 1.0 + torch.arange(len(x_T)) % 7
    (gradient_T,) = torch.autograd.grad((weights_T * x_T).sum(), inputs.policy_logprobs_T, allow_unused=True)
    return torch.zeros_like(inputs.policy_logprobs_T) if gradient_T is None else gradient_T


def _check_tokens(name: str, value_T: Any, num_tokens: int = int(LENGTHS_N.sum())) -> None:
    if not isinstance(value_T, Tensor) or value_T.shape != (num_tokens,):
        raise ConfigError(f"gives {_described(value_T)} as {name} of {num_tokens} trained tokens, not one number per token")


def _described(value: Any) -> str:
    return (
        f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"an object of type {type(value).__name__}"
    )
