"""`scripts/gpu_check.py` on a CPU: every check that needs no GPU passes, and the others say so."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def gpu_check() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield importlib.import_module("gpu_check")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


NEEDS_A_GPU = {"attention": 1, "actor": 1, "offload": 1, "ipc": 1, "variants": 2}
NAMES = [
    "policy",
    "shared",
    "learns",
    "variants",
    "mixed",
    "head",
    "attention",
    "actor",
    "offload",
    "ipc",
    "checkpoint",
    "memory",
    "twice",
]
LONG = ("policy", "shared", "learns", "variants")
"""They try on a CPU what tests/unit/models tries there too."""


@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.campaign if one in LONG else ()) for one in NAMES])
def test_a_check_runs_on_a_cpu(gpu_check: Any, name: str) -> None:
    rows = gpu_check.rows_of(name, "cpu")
    assert rows and not [row for row in rows if row.state == "failed"]
    assert sum(row.state == "not possible" for row in rows) == NEEDS_A_GPU.get(name, 0)
    assert all(row.figure for row in rows)


def test_every_check_is_tried_here(gpu_check: Any) -> None:
    assert set(gpu_check.CHECKS) == set(NAMES)


def test_a_wrong_gradient_of_attention_is_seen(gpu_check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from grpo_rl.models import attention

    whole = attention._padded_groups

    def without_mask(*arguments: Any) -> Any:
        return whole(*arguments).detach() + 0 * (arguments[0].transpose(1, 2)[0] + arguments[1].sum() + arguments[2].sum())

    monkeypatch.setattr(attention, "_padded_groups", without_mask)
    states = {row.name: row.state for row in gpu_check.rows_of("attention", "cpu")}
    assert states["attention: values, relative"] == "passed"
    assert states["attention: gradient of queries, relative"] == "failed"
