"""Functions of the algorithm, run once on a small batch before a run: do they keep to their interface?"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from grpo_rl.algos.advantages import contract as advantages
from grpo_rl.algos.advantages.contract import RolloutAdvantages
from grpo_rl.algos.advantages.registered import ADVANTAGES, AdvantageInput, AdvantageOutput, token_rewards
from grpo_rl.algos.aggregate import AGGREGATIONS, group_tokens
from grpo_rl.algos.kl import KL_ESTIMATORS
from grpo_rl.algos.losses import contract as losses
from grpo_rl.algos.losses.registered import POLICY_LOSSES, LossInput, selection_of
from grpo_rl.algos.segments import Segments
from grpo_rl.errors import ConfigError, FunctionError
from grpo_rl.frozen import frozen
from grpo_rl.registry import Registry, needs_of, own_options
from grpo_rl.types import Counts, LossColumns

T = TypeVar("T", AdvantageInput, LossInput)

Options = Mapping[str, Any]
Trial = Callable[[Any, Options], tuple[Tensor, ...]]
"""(function, its options) -> its results and, at the end, their gradient by the policy's log-probs."""


@frozen
class FunctionKind:
    registry: Registry[Any]
    arguments: tuple[str, ...]
    needs: Mapping[str, tuple[str, ...]]
    supplied: Mapping[str, str]
    run: Trial


LENGTHS_N = torch.tensor([30, 18, 0, 48, 36, 42, 12, 6])
GROUP_N = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
PAIR_LENGTHS_N = torch.tensor([30, 18, 24, 48, 36, 42, 12, 6])
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
        step_states_K=torch.arange(0, num_tokens, 2) % 7,
        reward_parts_NP=torch.stack([REWARDS_N.roll(part) for part in range(num_parts)], dim=1),
    )


def loss_input(*, one_update: bool = False, pairs: bool = False) -> LossInput:
    """With `one_update` all ratios are 1. With `pairs` they are four pairs."""
    lengths_N, group_N = (PAIR_LENGTHS_N, torch.arange(4).repeat_interleave(2)) if pairs else (LENGTHS_N, GROUP_N)
    generator = torch.Generator().manual_seed(0)
    num_tokens = int(lengths_N.sum())
    policy_T, ref_T, rollout_T = -0.02 - 3.0 * torch.rand(3, num_tokens, generator=generator, dtype=torch.float64)
    # Whole responses have become likelier or less likely, so that ratios of responses are far from 1 too.
    noise_T = 0.8 * torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    old_T = (policy_T - SHIFTS_N.repeat_interleave(lengths_N) - noise_T).clamp(max=-0.01)
    advantages_T, entropy_T = 2.0 * torch.randn(2, num_tokens, generator=generator, dtype=torch.float64)
    columns = {
        "old_logprobs_T": policy_T.detach() if one_update else old_T,
        "ref_logprobs_T": ref_T,
        "rollout_logprobs_T": rollout_T,
        "weights_T": torch.ones(num_tokens),
        "chosen_N": torch.tensor([True, False, False, True, True, False, False, True]) if pairs else None,
        "kl_N": torch.full((8,), 0.5) if pairs else None,
        "group_tokens_N": group_tokens(lengths_N, group_N),
    }
    # Of a column that a loss has to declare, and that has no values above, any numbers will do.
    sizes = {"T": (num_tokens,), "N": (len(lengths_N),), "TK": (num_tokens, 2)}
    for column in fields(LossColumns):
        if column.metadata["need"] and column.name not in columns:
            numbers = torch.rand(sizes[column.name.rpartition("_")[2]], generator=generator)
            columns[column.name] = (2.0 * numbers).to(column.metadata["dtype"])
    return LossInput(
        policy_logprobs_T=policy_T.requires_grad_(),
        advantages_T=advantages_T,
        segments=Segments(lengths_N),
        group_N=group_N,
        entropy_T=entropy_T.abs(),
        **columns,
    )


def undeclared(needs: Mapping[str, tuple[str, ...]], function: Callable[..., Any], options: Options) -> dict[str, str]:
    """Return the columns that a function is not given, each with the need to declare."""
    declared_needs = needs_of(function, options) | {"group"}
    return {column: need for need, columns in needs.items() if need not in declared_needs for column in columns}


def as_declared(inputs: T, needs: Mapping[str, tuple[str, ...]], function: Callable[..., Any], options: Options) -> T:
    hidden: dict[str, Any] = dict.fromkeys(undeclared(needs, function, options))
    return replace(inputs, **hidden)


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Keep prints of a function, and of programs that it starts, off the screen: they may contain secrets."""
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
def run_estimator(function: Callable[..., Any], options: Options, num_parts: int = 2) -> tuple[Tensor, ...]:
    out = function(as_declared(estimator_input(num_parts), advantages.NEEDS, function, options), **options)
    if not isinstance(out, AdvantageOutput | RolloutAdvantages):
        raise ConfigError(f"returns {_described(out)}, not an AdvantageOutput")
    _check_tokens("advantages_T", out.advantages_T)
    if "values" in needs_of(function) and out.returns_T is None:
        raise ConfigError("gives no returns_T for the critic to learn")
    if out.returns_T is not None:
        _check_tokens("returns_T", out.returns_T)
    return (out.advantages_T,) if out.returns_T is None else (out.advantages_T, out.returns_T)


@unheard()
def run_loss(function: Callable[..., Any], options: Options, inputs: LossInput | None = None) -> tuple[Tensor, ...]:
    """The gradient comes last. A loss over pairs is tried on pairs."""
    inputs = loss_input(pairs=True) if "pairs" in needs_of(function) else inputs or loss_input()
    if selection := selection_of(function):
        generator = torch.Generator().manual_seed(0)
        selected_T = selection(inputs.advantages_T, inputs.old_T(), generator, **own_options(selection, options))
        inputs = replace(inputs, selected_T=selected_T)
    out = function(as_declared(inputs, losses.NEEDS, function, options), **own_options(function, options))
    if not isinstance(out, tuple) or len(out) != 2:
        raise ConfigError(f"returns {_described(out)}, not TokenLoss(loss_T, stats)")
    loss_T, stats = out
    for name, value_T in {"loss_T": loss_T, **stats}.items():
        _check_tokens(name, value_T, inputs.segments.num_tokens)
    return (loss_T.detach(), *stats.values(), _gradient(loss_T, inputs))


_HAVE_RATIO: dict[tuple[Callable[..., Any], str], bool] = {}
"""Answers of `has_ratio`, which a plan asks again for each division of a machine that it compares."""


def has_ratio(function: Callable[..., Any], options: Options) -> bool:
    """Return whether a loss's gradient depends on the old log-probs; True if the loss fails."""
    key = function, repr(sorted(options.items()))
    if key not in _HAVE_RATIO:
        try:
            gradient_T, other_T = (
                run_loss(function, options, loss_input(one_update=one_update))[-1] for one_update in (False, True)
            )
            _HAVE_RATIO[key] = not torch.allclose(gradient_T, other_T, rtol=1e-12, atol=1e-15, equal_nan=True)
        except Exception:
            _HAVE_RATIO[key] = True
    return _HAVE_RATIO[key]


@unheard()
def run_average(function: Callable[..., Any], options: Options) -> tuple[Tensor, ...]:
    inputs = loss_input()
    supplied = {"group_tokens_N": inputs.group_tokens_N} if "group_tokens" in needs_of(function) else {}
    counts = Counts.of(LENGTHS_N, GROUP_N)
    share = function(inputs.policy_logprobs_T.double(), inputs.segments, counts, **supplied, **options)
    if not isinstance(share, Tensor) or share.ndim:
        raise ConfigError(f"returns {_described(share)}, not a tensor without dimensions")
    return (share.detach(),)


@unheard()
def run_kl(function: Callable[..., Any], options: Options) -> tuple[Tensor, ...]:
    inputs = loss_input()
    supplied = {"old_logprobs_T": inputs.old_T()} if "old_logprobs" in needs_of(function) else {}
    kl_T = function(inputs.policy_logprobs_T, inputs.column("ref_logprobs_T"), **supplied, **options)
    _check_tokens("kl_T", kl_T)
    return kl_T.detach(), _gradient(kl_T, inputs)


KINDS: dict[str, FunctionKind] = {
    ADVANTAGES.kind: FunctionKind(ADVANTAGES, ("inp",), advantages.NEEDS, {}, run_estimator),
    POLICY_LOSSES.kind: FunctionKind(POLICY_LOSSES, ("inputs",), losses.NEEDS, {}, run_loss),
    AGGREGATIONS.kind: FunctionKind(
        AGGREGATIONS, ("values_T", "segments", "counts"), {"group_tokens": ()}, {"group_tokens": "group_tokens_N"}, run_average
    ),
    KL_ESTIMATORS.kind: FunctionKind(
        KL_ESTIMATORS, ("policy_logprobs_T", "ref_logprobs_T"), {"old_logprobs": ()}, {"old_logprobs": "old_logprobs_T"}, run_kl
    ),
}


def check(kind: FunctionKind, name: str, options: Options, run: Trial) -> None:
    """Raise ConfigError if a function breaks its interface, fails, or needs what nothing supplies."""
    function = kind.registry.get(name)
    declared_needs = needs_of(function)
    what = f"{kind.registry.kind} {name!r}"
    supplied = dict.fromkeys(keyword for need, keyword in kind.supplied.items() if need in declared_needs)
    kind.registry.check_call(name, *kind.arguments, **supplied)
    if unknown := declared_needs - set(kind.needs):
        known = ", ".join(kind.needs)
        raise ConfigError([f"{what} needs {need!r}, which nothing supplies; it can need {known}" for need in unknown])
    try:
        run(function, options)
    except FunctionError as error:
        absent = [
            f'{column} is None without @needs("{need}")' for column, need in undeclared(kind.needs, function, options).items()
        ]
        tried = "; ".join([f"tried on a batch of {len(LENGTHS_N)} responses", *absent])
        raise ConfigError(f"{error}\n  ({tried})") from error
    except ConfigError as error:
        raise ConfigError([f"{what} {problem}" for problem in error.problems]) from error
    except ValueError as error:
        raise ConfigError(f"{what}: {error}") from error


def _gradient(x_T: Tensor, inputs: LossInput) -> Tensor:
    """Return the gradient of a sum with another weight for every token; zeros if there is none."""
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
