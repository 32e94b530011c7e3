"""Reinforcement learning for language models: GRPO on Ray, vLLM and FSDP2.

From Python (docs/api.md):

    run = grpo_rl.train(["recipe=arithmetic/grpo"])      the main command, in a process of its own
    with grpo_rl.session("recipe=arithmetic/grpo") as s: the verbs of a run, for a loop of your own in this process
    run = grpo_rl.Run("runs/grpo_rl/my_run")             a run that is there: metrics, rollouts, model, pictures

Shape suffixes used throughout the package (one letter per dimension):

    N   rollouts (one response each)       T   trained tokens, all rollouts back to back
    S   all tokens, prompts included       D   hidden size
    V   vocabulary                         G   groups (the rollouts of one prompt)

A tensor `rewards_N` has one entry per rollout, `policy_logprobs_T` one per trained token.
Entry t always describes token t: the one shift between logits and tokens is in
`grpo_rl/models/packing.py`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_rl.api import session, train
    from grpo_rl.run_folder import Run

__version__ = "0.1.0"
__all__ = ["Run", "__version__", "session", "train"]

_PLACES = {"session": "grpo_rl.api", "train": "grpo_rl.api", "Run": "grpo_rl.run_folder"}
"""The modules of public names, imported on first use: `import grpo_rl` loads nothing (PEP 562)."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
