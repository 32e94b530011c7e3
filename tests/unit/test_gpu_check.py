"""`scripts/gpu_check.py` on a CPU: every check that needs no GPU passes, and the others say so."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all checks share."""
    return tmp_path_factory.mktemp("models")


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
LONG = ("variants",)
"""They try on a CPU what tests/unit/models tries there too."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.campaign if name in LONG else ()) for name in NAMES])
def test_a_check_runs_on_a_cpu(gpu_check: Any, name: str, folder: Path) -> None:
    rows = list(gpu_check.rows_of(name, "cpu", folder))
    assert rows and not [row for row in rows if row.state == "failed"]
    assert sum(row.state == "not possible" for row in rows) == NEEDS_A_GPU.get(name, 0)
    assert all(row.figure for row in rows) and all(row.bound for row in rows if row.state == "passed")


def test_every_check_is_tried_here(gpu_check: Any) -> None:
    assert set(gpu_check.CHECKS) == set(NAMES)


def test_the_layers_compute_in_bfloat16_on_a_cpu_too(gpu_check: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from grpo_rl.models import attention

    seen = set()

    def noted(query: Any, *arguments: Any) -> Any:
        seen.add(query.dtype)
        return compute(query, *arguments)

    compute = attention._attention
    monkeypatch.setattr(attention, "_attention", noted)
    list(gpu_check.rows_of("actor", "cpu", folder))
    assert seen == {torch.bfloat16}


def test_the_model_is_written_once_for_all_checks(gpu_check: Any, folder: Path, tmp_path: Path) -> None:
    for name in ("actor", "offload"):
        list(gpu_check.rows_of(name, "cpu", tmp_path))
    (model,) = tmp_path.iterdir()
    (weights,) = model.glob("*.safetensors")
    written = weights.stat().st_mtime_ns
    list(gpu_check.rows_of("actor", "cpu", tmp_path))
    assert weights.stat().st_mtime_ns == written


def test_no_check_loads_ray_vllm_or_hydra(folder: Path) -> None:
    """None of them is on a new machine."""
    program = (
        "import sys; sys.modules |= dict.fromkeys(('ray', 'vllm', 'hydra', 'omegaconf', 'antlr4')); import gpu_check, pathlib\n"
        f"for name in ('memory', 'actor', 'checkpoint'): print(*gpu_check.rows_of(name, 'cpu', pathlib.Path({str(folder)!r})))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(SCRIPTS), str(SCRIPTS.parent)))}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert "memory runs out: recognised" in done.stdout and "state='failed'" not in done.stdout


def test_a_row_is_printed_and_saved_before_the_next_is_made(
    gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, row = tmp_path / "rows.jsonl", gpu_check.Row

    def rows(name: str, device: str, folder: Path) -> Iterator[Any]:
        yield row("first", "measured", "1")
        assert "first" in capsys.readouterr().out
        assert json.loads(file.read_text())["figure"] == "1"
        yield row("second", "failed", "2", "1")

    monkeypatch.setattr(gpu_check, "in_process", rows)
    assert gpu_check.main(["--device", "cpu", "--only", "head", "--json", str(file)]) == 1
    assert [json.loads(line)["name"] for line in file.read_text().splitlines()] == ["first", "second"]


def test_rows_of_a_process_that_ends_are_not_lost(gpu_check: Any, tmp_path: Path) -> None:
    first, *_ = gpu_check.in_process("head", "cpu", tmp_path)
    assert first.name == "LM head in float32"


def test_attention_that_returns_zeros_is_seen(gpu_check: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from grpo_rl.models import attention

    def zeros_in_half(query: Any, *arguments: Any) -> Any:
        out = compute(query, *arguments)
        return out * 0 if out.dtype == torch.bfloat16 else out

    compute = attention._attention
    monkeypatch.setattr(attention, "_attention", zeros_in_half)
    failed = {row.name for row in gpu_check.rows_of("policy", "cpu", folder) if row.state == "failed"}
    assert failed == {
        "policy: log-probs of FSDP's bfloat16 layers, mean",
        "policy: gradient of FSDP's bfloat16 layers, relative",
    }


def test_a_wrong_gradient_of_attention_is_seen(gpu_check: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from grpo_rl.models import attention

    compute = attention._padded_groups

    def detached(*arguments: Any) -> Any:
        return compute(*arguments).detach() + 0 * (arguments[0].transpose(1, 2)[0] + arguments[1].sum() + arguments[2].sum())

    monkeypatch.setattr(attention, "_padded_groups", detached)
    rows = {row.name: row for row in gpu_check.rows_of("attention", "cpu", folder)}
    assert rows["attention: blocks, float32, head size 16"].state == "failed"
    assert "dq 1.0e+00" in rows["attention: blocks, float32, head size 16"].figure
    assert rows["attention: blocks that continue, float32, head size 16"].state == "passed"


def test_a_buffer_is_opened_once_for_all_buckets_of_an_export() -> None:
    """The sender counts a release for each time that its buffer is opened, and gives it back only if they are as many as exports."""
    from gpu_checks import Importer

    opened = []

    def rebuild(*arguments: Any) -> torch.Tensor:
        opened.append(arguments)
        return torch.zeros(1)

    importer = Importer(rebuild)
    handles = [("buffer", 1, 2, 3, 4, 5, number, name) for number, name in ((7, "a"), (7, "a"), (3, "a"), (7, "b"))]
    buffers = [importer.rebuild(handle) for handle in handles]
    assert buffers[0] is buffers[1] is buffers[2] and buffers[3] is not buffers[0]
    assert [arguments[6:] for arguments in opened] == [(0, "a"), (0, "b")]
    importer.close()
    importer.rebuild(handles[-1])
    assert len(opened) == 3


def test_no_pass_of_an_optimizer_step_is_waited_for(gpu_check: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read of a tensor on a GPU waits for all that this was given: only the end of a step may."""
    from gpu_checks import TINY, actor_of, batch_of, model_folder

    from grpo_rl.types import Counts
    from grpo_rl.workers.specs import OptimizerStep, Update

    actor, batch = actor_of(model_folder(TINY, folder), "cpu"), batch_of(TINY)
    counts = Counts.of(batch.trained_lengths_N, batch.group_N)
    events: list[str] = []
    reads = {name: getattr(torch.Tensor, name) for name in ("__float__", "item", "cpu")}

    def note(name: str) -> None:
        monkeypatch.setattr(torch.Tensor, name, lambda tensor: (events.append(name), reads[name](tensor))[1])

    backward = torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: (events.append("backward"), backward(loss))[1])
    for name in reads:
        note(name)
    (stats,) = actor.update(batch, Update({}, None, (OptimizerStep(counts, ((0,), (1,), (2, 3))),)))
    last = len(events) - events[::-1].index("backward")
    assert events[:last] == ["backward"] * 3
    assert "__float__" in events[last:] and stats["sum/rollout/logprob_diff_mean"] > 0
